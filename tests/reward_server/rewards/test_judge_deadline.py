"""A judge that stalls holds a batch no longer than ``deadline_s``: what has no answer by then is null."""

import time

import numpy as np
import pytest

from reward_server.rewards.base import RewardLoadError

STALL_S = 1.5


def score(reward, *values):
    """Scores of grey images of one prompt."""
    images = [np.full((4, 6, 3), value, np.uint8) for value in values]
    return reward.score(images, ["a"] * len(values), [{}] * len(values))


@pytest.mark.parametrize("template", ["rating", "pairwise"])
def test_a_stalled_judge_gives_null_in_time_however_many_images_wait(chat, make_judge, template):
    reward = make_judge(template=template, concurrency=2, timeout_s=60, retries=9, deadline_s=0.4)
    chat.answer = lambda body: time.sleep(STALL_S) or chat.completion("2")
    started = time.monotonic()
    scores = score(reward, *range(6))
    assert 0.4 <= time.monotonic() - started < 1.2
    assert [score.value for score in scores] == [None] * 6
    assert "no complete answer in time (tried 1 times)" in scores[0].reason
    assert "not asked: the time for the images of this batch (deadline_s) was over" in scores[5].reason
    assert len(chat.bodies) == 2  # as many as are asked at once


def test_what_was_answered_before_the_deadline_counts(chat, make_judge):
    reward = make_judge(concurrency=1, deadline_s=0.6)
    chat.answer = lambda body: time.sleep(STALL_S * (chat.pictures(body)[0][0, 0, 0] == 66)) or chat.completion("2")
    scores = score(reward, 1, 66, 2)
    assert [score.value for score in scores] == [2.0, None, None]
    assert [score.details["asks"] for score in scores] == [1.0, 1.0, 0.0]


def test_answers_that_cannot_be_read_are_asked_for_until_the_deadline_alone(chat, make_judge):
    reward = make_judge(deadline_s=0.9, asks=100)
    chat.answer = lambda body: time.sleep(0.6) or chat.completion("prose")
    (null,) = score(reward, 1)
    assert null.value is None
    assert (null.details["asks"], null.details["unparsed"]) == (2.0, 1.0)
    assert "no complete answer in time" in null.reason


def test_a_start_that_stalls_ends_in_time(chat, make_judge):
    chat.answer = lambda body: time.sleep(STALL_S) or chat.completion("4")
    started = time.monotonic()
    with pytest.raises(RewardLoadError, match=r"does not answer: .* no complete answer in time"):
        make_judge(deadline_s=0.3, timeout_s=60, retries=9)
    assert time.monotonic() - started < 1.2


def test_a_deadline_must_be_a_time(make_judge):
    with pytest.raises(RewardLoadError, match=r"deadline_s is 0, and must be at least 0\.001"):
        make_judge(deadline_s=0)
