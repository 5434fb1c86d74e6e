import sys
from types import SimpleNamespace

import numpy as np
import pytest

from reward_server.payloads import Item
from reward_server.rewards.base import Score
from reward_server.scoring import Scorer


def items(*reds, metadata=None):
    return [Item(np.full((1, 1, 3), red, np.uint8), f"p{red}", metadata or {}) for red in reds]


def red(image):
    return float(image[0, 0, 0])


def values(scores):
    return [score.value for score in scores]


@pytest.mark.parametrize(
    ("returned", "value", "reason"),
    [
        (0.25, 0.25, None),
        (np.float32(0.5), 0.5, None),
        (Score(0.75, {"a": 1.0}), 0.75, None),
        (None, None, "the reward gave no score and no reason"),
        (Score(None, reason="no face"), None, "no face"),
        (float("nan"), None, "the reward returned nan, which is not a score"),
        (Score(float("-inf")), None, "the reward returned -inf, which is not a score"),
    ],
)
def test_a_score_is_finite_or_has_a_reason(make_reward, returned, value, reason):
    (score,) = Scorer(make_reward(lambda images, prompts, metadata: [returned]), 4).score(items(1))
    assert (score.value, score.reason) == (value, reason)


def test_sub_scores_that_are_not_finite_become_null(make_reward):
    reward = make_reward(lambda images, prompts, metadata: [Score(1.0, {"a": float("nan"), "b": 2.0, "c": None})])
    assert Scorer(reward, 4).score(items(1))[0].details == {"a": None, "b": 2.0, "c": None}


def test_one_bad_image_fails_alone(make_reward):
    def score(images, prompts, metadata):
        if "p3" in prompts:
            raise ValueError("cannot read p3")
        return [red(image) for image in images]

    reward = make_reward(score)
    scores = Scorer(reward, 8).score(items(*range(8)))
    assert values(scores) == [0, 1, 2, None, 4, 5, 6, 7]
    assert scores[3].reason == "ValueError: cannot read p3"
    assert len(reward.calls) == 7  # 8; 4, 4; 2, 2; 1, 1


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("CUDA out of memory"), type("OutOfMemoryError", (Exception,), {})()]
)
def test_out_of_memory_halves_the_batch_now_and_later(make_reward, error):
    def score(images, prompts, metadata):
        if len(images) > 2:
            raise error
        return [red(image) for image in images]

    reward = make_reward(score)
    scorer = Scorer(reward, 8)
    assert values(scorer.score(items(*range(8)))) == list(range(8))
    assert scorer.limit == 2
    reward.calls.clear()
    assert values(scorer.score(items(*range(5)))) == list(range(5))
    assert [len(call) for call in reward.calls] == [2, 2, 1]


def test_out_of_memory_on_one_image_is_its_reason(make_reward):
    def score(images, prompts, metadata):
        raise MemoryError("not enough")

    scorer = Scorer(make_reward(score), 1)
    assert scorer.score(items(1))[0].reason == "MemoryError: not enough"
    assert scorer.limit == 1


def test_memory_that_torch_caches_is_released(make_reward, monkeypatch):
    released = []
    cuda = SimpleNamespace(is_available=lambda: True, empty_cache=lambda: released.append(True))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))

    def score(images, prompts, metadata):
        if len(images) > 1:
            raise MemoryError
        return [1.0]

    Scorer(make_reward(score), 2).score(items(1, 2))
    assert released == [True]


def test_a_wrong_number_of_scores_is_a_failure(make_reward):
    scores = Scorer(make_reward(lambda images, prompts, metadata: [1.0, 2.0, 3.0]), 4).score(items(1, 2))
    assert [score.reason for score in scores] == ["ValueError: 3 scores for 1 images"] * 2


def test_images_without_needed_metadata_are_refused_alone(make_reward):
    reward = make_reward(needs=("tag", "count"))
    complete = items(1, 3, metadata={"tag": "x", "count": 1})
    scores = Scorer(reward, 4).score([complete[0], *items(2, metadata={"tag": "x"}), complete[1]])
    assert values(scores) == [1, None, 3]
    assert scores[1].reason == "metadata lacks count, which this reward needs"
    assert reward.calls == [["p1", "p3"]]
