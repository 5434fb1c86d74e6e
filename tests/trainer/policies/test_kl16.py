"""The KL-16 autoencoder: the official layout. Its numbers are compared in test_mar.py, against the official code's."""

import pytest
import torch

from trainer.policies.kl16 import KL16, LATENT_SCALE, KL16Config
from trainer.policies.mar_parts import load_strictly

TINY = KL16Config(width=32, multipliers=(1, 2), blocks=1, channels=4)


def test_the_published_size():
    with torch.device("meta"):
        model = KL16()
    assert model.stride == 16
    assert sum(p.numel() for p in model.parameters()) == 66_456_019
    names = dict(model.named_parameters())
    assert names["encoder.down.4.attn.1.q.weight"].shape == (512, 512, 1, 1)
    assert names["decoder.up.1.block.0.conv1.weight"].shape == (128, 256, 3, 3)
    assert names["decoder.up.4.upsample.conv.weight"].shape == (512, 512, 3, 3)
    assert "decoder.up.0.upsample.conv.weight" not in names


def test_shapes_and_scale():
    torch.manual_seed(0)
    model = KL16(TINY)
    images = torch.rand(2, 3, 8, 12) * 2 - 1
    mean, std = model.encode(images)
    assert mean.shape == std.shape == (2, 4, 4, 6)
    assert (std > 0).all()
    tokens = mean.flatten(2).transpose(1, 2) * LATENT_SCALE
    torch.testing.assert_close(model.decode_tokens(tokens, (4, 6)), model.decode(mean))


def test_keys_are_read_strictly():
    state = KL16(TINY).state_dict()
    load_strictly(KL16(TINY), state, "a file")
    state["decoder.more"] = state.pop("decoder.conv_in.bias")
    state["quant_conv.bias"] = torch.zeros(3)
    with pytest.raises(
        ValueError,
        match=r"a file does not fit KL16: 1 missing: decoder\.conv_in\.bias; 1 not expected: "
        r"decoder\.more; 1 of another shape: quant_conv\.bias \(3,\) instead of \(8,\)",
    ):
        load_strictly(KL16(TINY), state, "a file")
