"""The MAR transformer and head: the official layout and what the parts promise. Numbers: see test_mar.py."""

import pytest
import torch

from trainer.policies.mar_parts import MAR_SIZES, Mar, MarConfig, known_index

TINY = MarConfig(width=16, depth=2, heads=2, grid=4, channels=4, buffer=3, classes=5, head_width=24, head_depth=2)


@pytest.fixture
def mar():
    torch.manual_seed(0)
    return Mar(TINY)


@pytest.mark.parametrize(
    ("size", "total", "head"),
    [("base", 207_924_768, 35_749_920), ("large", 478_326_304, 72_230_432), ("huge", 942_403_104, 151_206_944)],
)
def test_the_published_sizes(size, total, head):
    with torch.device("meta"):
        model = Mar(MAR_SIZES[size])
    assert sum(p.numel() for p in model.parameters()) == total
    assert sum(p.numel() for p in model.head.parameters()) == head


def test_known_index():
    known = torch.tensor([[False, True, False, True], [True, True, False, False]])
    assert known_index(known).tolist() == [[1, 3], [0, 1]]
    assert known_index(torch.zeros(2, 4, dtype=torch.bool)).shape == (2, 0)
    with pytest.raises(ValueError, match=r"same number of known tokens, got \[1, 0\]"):
        known_index(torch.tensor([[True, False], [False, False]]))


def test_unknown_tokens_are_not_read_and_known_ones_are(mar):
    tokens = torch.randn(1, 16, 4)
    known = torch.zeros(1, 16, dtype=torch.bool)
    known[0, [3, 7]] = True
    index = known_index(known)
    buffer = mar.fake_latent.expand(1, -1)
    z = mar.decode(mar.encode(tokens, index, buffer), index)
    assert z.shape == (1, 16, 16)
    other = torch.where(known[..., None], tokens, torch.randn(1, 16, 4))
    assert torch.equal(z, mar.decode(mar.encode(other, index, buffer), index))
    other[0, 3] += 1
    assert (z - mar.decode(mar.encode(other, index, buffer), index)).abs().min() > 0


def test_another_grid_interpolates_the_positions(mar):
    index = known_index(torch.ones(1, 64, dtype=torch.bool))
    tokens, buffer = torch.randn(1, 64, 4), mar.fake_latent.expand(1, -1)
    z = mar.decode(mar.encode(tokens, index, buffer, (8, 8)), index, (8, 8))
    assert z.shape == (1, 64, 16)
    z.square().sum().backward()
    assert mar.encoder_pos_embed_learned.grad.abs().min() > 0
    with torch.no_grad():  # a plane stays a plane inside the border
        row = torch.arange(4.0)
        mar.diffusion_pos_embed_learned.copy_((row[:, None] + 10 * row).reshape(1, 16, 1).expand(1, 16, 16))
        inside = mar._positions(mar.diffusion_pos_embed_learned, (8, 8), buffer=0).reshape(8, 8, 16)[1:7, 1:7, 0]
    at = torch.arange(6) / 2 + 0.25
    torch.testing.assert_close(inside, at[:, None] + 10 * at)


def test_activation_checkpointing_changes_no_gradient(mar):
    known = torch.arange(16)[None] < 5
    index, tokens = known_index(known), torch.randn(1, 16, 4)
    grads = []
    for mar.activation_checkpointing in (False, True):
        mar.eval().zero_grad()
        mar.decode(mar.encode(tokens, index, mar.class_emb(torch.tensor([2]))), index).square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in mar.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_one_time_serves_all_rows(mar):
    x, z = torch.randn(5, 4), torch.randn(5, 16)
    one = mar.head(x, torch.tensor([7.0]), mar.head.condition(z))
    assert one.shape == (5, 8)
    torch.testing.assert_close(one, mar.head(x, torch.full((5,), 7.0), mar.head.condition(z)))
