import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.advantages import group_advantages


def advantages(scores, group_size, weights=(1.0,), mix="sum", missing=()):
    scores = torch.tensor(scores, dtype=torch.float64)
    scores = scores[:, None] if scores.ndim == 1 else scores
    valid = torch.ones_like(scores, dtype=torch.bool)
    for image, reward in missing:
        valid[image, reward] = False
    return group_advantages(scores, valid, group_size, weights, mix)


def test_one_group_by_hand():
    # mean 2.5, sample standard deviation sqrt(5/3) = 1.2909944
    a = advantages([1.0, 2.0, 3.0, 4.0], 4)
    expected = [x / (1.2909944 + 1e-4) for x in (-1.5, -0.5, 0.5, 1.5)]
    assert a.values.tolist() == pytest.approx(expected, abs=1e-6)
    assert a.signal.tolist() == [True] * 4
    assert a.values.dtype == torch.float32


def test_groups_are_independent_and_equal_rewards_carry_no_signal():
    a = advantages([0.1, 0.1, 5.0, 7.0], 2)
    assert a.signal.tolist() == [False, False, True, True]
    assert a.values.tolist() == pytest.approx([0, 0, -1 / (math.sqrt(2) + 1e-4), 1 / (math.sqrt(2) + 1e-4)])


def test_equal_up_to_rounding_is_equal():
    assert not advantages([0.1, 0.1 + 1e-8, 0.1], 3).signal.any()


def test_a_missing_score_is_left_out_of_the_group():
    # 2 and 4 remain: mean 3, standard deviation sqrt(2); the number in the gap does not matter, not even NaN
    for gap in (100.0, math.nan):
        a = advantages([2.0, gap, 4.0], 3, missing=[(1, 0)])
        assert a.signal.tolist() == [True, False, True]
        assert a.values.tolist() == pytest.approx([-1 / (math.sqrt(2) + 1e-4), 0, 1 / (math.sqrt(2) + 1e-4)])


def test_a_group_with_one_score_or_none_carries_no_signal():
    a = advantages([1.0, 2.0, 3.0, 4.0], 2, missing=[(0, 0), (2, 0), (3, 0)])
    assert not a.signal.any()
    assert a.values.tolist() == [0, 0, 0, 0]


def test_weighted_sum_by_hand():
    # 2 r1 - r2 = 2, 0, 7
    a = advantages([[1.0, 0.0], [2.0, 4.0], [4.0, 1.0]], 3, weights=(2.0, -1.0))
    std = math.sqrt((1 + 9 + 16) / 2)
    assert a.values.tolist() == pytest.approx([x / (std + 1e-4) for x in (-1, -3, 4)])


def test_an_image_with_any_reward_missing_is_dropped_from_all_of_them():
    a = advantages([[1.0, 9.0], [3.0, 9.0], [50.0, 0.0]], 3, weights=(1.0, 1.0), missing=[(2, 1)])
    assert a.signal.tolist() == [True, True, False]
    assert a.values[0].item() == pytest.approx(-1 / (math.sqrt(2) + 1e-4))


def test_gdpo_by_hand():
    # each reward is +-.70710678 within its group of two (std sqrt(2)/2 times the gap), whatever its scale;
    # weights 3, 1: sums +-(3 +- 1) * .7071; then divided by their standard deviation over the batch
    scores = [[0.0, 0.0], [1.0, 100.0], [0.0, 100.0], [1.0, 0.0]]
    a = advantages(scores, 2, weights=(3.0, 1.0), mix="gdpo")
    first = 0.5 / (math.sqrt(0.5) + 1e-4)
    second = 50 / (math.sqrt(5000) + 1e-4)
    sums = [-3 * first - second, 3 * first + second, -3 * first + second, 3 * first - second]
    std = math.sqrt(sum(s * s for s in sums) / 3)
    assert a.values.tolist() == pytest.approx([s / (std + 1e-4) for s in sums], rel=1e-6)


def test_gdpo_keeps_apart_what_the_sum_confuses():
    # two groups: one reward earned, or both. The sum normalises both to the same advantages
    scores = [[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    total = advantages(scores, 2, weights=(1.0, 1.0)).values
    gdpo = advantages(scores, 2, weights=(1.0, 1.0), mix="gdpo").values
    assert total[1].item() == pytest.approx(total[3].item(), abs=1e-3)
    assert gdpo[3].item() == pytest.approx(2 * gdpo[1].item(), rel=1e-3)


def test_gdpo_ignores_dead_groups_and_rewards_of_weight_zero():
    alive = [[0.0, 0.0], [1.0, 5.0]]
    dead = [[2.0, 7.0], [2.0, 9.0]]
    a = advantages(alive + dead, 2, weights=(1.0, 0.0), mix="gdpo")
    assert a.signal.tolist() == [True, True, False, False]
    assert a.values[:2].tolist() == pytest.approx(advantages(alive, 2, weights=(1.0, 0.0), mix="gdpo").values.tolist())
    assert a.values[2:].tolist() == [0, 0]


@given(st.lists(st.floats(-100, 100), min_size=4, max_size=4), st.floats(-50, 50))
def test_advantages_sum_to_zero_and_ignore_a_shift(rewards, shift):
    a = advantages(rewards, 4).values
    assert a.sum().item() == pytest.approx(0, abs=1e-4)
    assert advantages([r + shift for r in rewards], 4).values.tolist() == pytest.approx(a.tolist(), abs=0.02)
    assert a.abs().max() <= 1.5 + 1e-6  # (n-1)/sqrt(n)


@pytest.mark.parametrize(
    ("scores", "group", "weights", "message"),
    [
        ([1.0, math.nan], 2, (1.0,), "not finite"),
        ([1.0, math.inf], 2, (1.0,), "not finite"),
        ([1.0, 2.0, 3.0], 2, (1.0,), "3 images do not divide into groups of 2"),
        ([1.0, 2.0], 1, (1.0,), "at least 2"),
        ([1.0, 2.0], 2, (1.0, 1.0), "1 rewards need as many weights, got 2"),
    ],
)
def test_bad_input_is_refused(scores, group, weights, message):
    with pytest.raises(ValueError, match=message):
        advantages(scores, group, weights)


def test_validity_must_be_boolean_and_of_the_same_shape():
    with pytest.raises(ValueError, match="boolean validity"):
        group_advantages(torch.ones(2, 1), torch.ones(2, 1), 2, [1.0])
    with pytest.raises(ValueError, match="boolean validity"):
        group_advantages(torch.ones(2, 1), torch.ones(2, 2, dtype=torch.bool), 2, [1.0])
