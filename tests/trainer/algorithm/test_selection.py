import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.selection import completion_mask, consistency_mask, uncertain_mask, uncertainty


def test_uncertainty_by_hand():
    # channel 1: 0, 2, 4 -> population std sqrt(8/3); channel 2: all 1 -> 0; their mean
    latents = torch.tensor([[[[0.0, 1.0]], [[2.0, 1.0]], [[4.0, 1.0]]]])
    assert uncertainty(latents).item() == pytest.approx((8 / 3) ** 0.5 / 2)
    with pytest.raises(ValueError, match="at least 2 trajectories, got 1"):
        uncertainty(latents[:, :1])


def test_uncertain_mask_by_hand():
    u = torch.tensor([[0.1, 0.9, 0.5, 0.3], [4.0, 3.0, 2.0, 1.0]])
    assert uncertain_mask(u, 0.5).tolist() == [[False, True, True, False], [True, True, False, False]]
    assert uncertain_mask(u, 0.5, "least").tolist() == [[True, False, False, True], [False, False, True, True]]
    assert uncertain_mask(u, 0.3).sum(dim=1).tolist() == [1, 1]  # floor(1.2)
    assert uncertain_mask(u, 0.01).sum(dim=1).tolist() == [1, 1]  # at least one
    assert uncertain_mask(u, 1.0).all()
    assert uncertain_mask(u, 1.0, "least").all()


def test_ties_go_to_the_lower_token():
    assert uncertain_mask(torch.ones(1, 4), 0.5).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, float("nan")])
def test_fraction_outside_its_range_is_refused(fraction):
    with pytest.raises(ValueError, match=r"must be in \(0, 1\]"):
        uncertain_mask(torch.ones(1, 4), fraction)


@given(st.integers(2, 200), st.integers(1, 99), st.integers(0, 2**31))
def test_most_and_least_split_the_tokens(tokens, percent, seed):
    u = torch.randn(2, tokens, generator=torch.Generator().manual_seed(seed))
    most = uncertain_mask(u, percent / 100)
    assert most.sum(dim=1).tolist() == [max(1, tokens * percent // 100)] * 2
    assert u[0][most[0]].min() >= u[0][~most[0]].max()
    if tokens * percent >= 100:
        assert torch.equal(uncertain_mask(u, (100 - percent) / 100, "least"), ~most)


def test_completion_mask_by_hand():
    at = torch.tensor([[0, 1, 2, 1]])
    assert completion_mask(at, 1, "unknown").tolist() == [[False, True, True, True]]
    assert completion_mask(at, 1, "predicted").tolist() == [[False, True, False, True]]
    assert completion_mask(at, 0, "unknown").all()


def test_consistency_by_hand():
    # cosines to (1, 0): token 0 rises 0 -> .6, token 1 falls 1 -> .8, token 2 rises .6 -> .8, token 3 stays
    final = torch.tensor([[[1.0, 0.0]] * 4])
    before = torch.tensor([[[0.0, 1.0], [2.0, 0.0], [3.0, 4.0], [0.0, 1.0]]])
    now = torch.tensor([[[3.0, 4.0], [4.0, 3.0], [8.0, 6.0], [0.0, 2.0]]])
    later = torch.tensor([[9, 9, 9, 9]])
    assert consistency_mask(now, before, final, later, 2).tolist() == [[True, False, True, False]]
    assert consistency_mask(now, before, final, later, 2, threshold=0.3).tolist() == [[True, False, False, False]]
    # predicted at this very step: kept whatever the cosine
    predicted = torch.tensor([[9, 2, 9, 9]])
    assert consistency_mask(now, before, final, predicted, 2).tolist() == [[True, True, True, False]]
    # off for the first two steps
    assert consistency_mask(now, before, final, later, 1).all()
