import logging

import pytest

from reward_server.rewards.base import RewardLoadError, Score, example, is_relative, loaded_libraries, warm_up


def test_one_image_with_the_rewards_own_example_is_scored(make_reward):
    reward = make_reward(example=("two cats", {"tag": "counting"}), needs=("tag",))
    seen = []
    reward.score = lambda images, prompts, metadata: seen.append((images, prompts, metadata)) or [1.0]
    warm_up(reward)
    ((images, prompts, metadata),) = seen
    assert [image.shape for image in images] == [(64, 64, 3)]
    assert (prompts, metadata) == (["two cats"], [{"tag": "counting"}])


def test_a_relative_reward_gets_two(make_reward):
    reward = make_reward(relative=True)
    assert is_relative(reward)
    warm_up(reward)
    assert [len(call) for call in reward.calls] == [2]


def test_a_reward_that_needs_more_than_its_example_has_is_not_warmed_up(make_reward, caplog):
    caplog.set_level(logging.INFO)
    reward = make_reward(needs=("tag",))
    warm_up(reward)
    assert reward.calls == []
    assert "lacks the metadata tag" in caplog.text
    assert example(reward) == ("a red circle", {})


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (lambda *_: [float("nan")], "scores a first image nan"),
        (lambda *_: [Score(float("inf"))], "scores a first image inf"),
        (lambda *_: [1.0, 2.0], "2 scores for 1 images"),
        (lambda *_: 1 / 0, "failed to score a first image: ZeroDivisionError"),
    ],
)
def test_a_reward_that_cannot_score_is_not_served(make_reward, scores, message):
    with pytest.raises(RewardLoadError, match=message):
        warm_up(make_reward(scores))


def test_a_reason_is_no_failure(make_reward, caplog):
    warm_up(make_reward(lambda *_: [Score(None, reason="no text in the prompt")]))
    assert "gave no score: no text in the prompt" in caplog.text


def test_versions_of_what_is_loaded_are_told():
    import numpy

    assert f"numpy {numpy.__version__}" in loaded_libraries().split(", ")
