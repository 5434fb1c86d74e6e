"""The KL-16 autoencoder of LTH14's MAR and Harmon: images <-> maps of 16 channels at a sixteenth of the side.

The architecture is that of latent diffusion (Rombach et al., arXiv 2112.10752); modules are named as in the official
checkpoint. Images are (B, 3, h, w) in [-1, 1]. The models see latents times :data:`LATENT_SCALE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad, scaled_dot_product_attention, silu

LATENT_SCALE = 0.2325
"""What the official models multiply the autoencoder's latents by, to give them unit variance."""


@dataclass(frozen=True)
class KL16Config:
    """Sizes; the defaults are the published checkpoint's."""

    width: int = 128
    multipliers: Sequence[int] = (1, 1, 2, 2, 4)
    """channels of each resolution, times ``width`` (a multiple of 32); the side halves from one to the next"""
    blocks: int = 2
    """residual blocks of a resolution of the encoder; the decoder has one more"""
    channels: int = 16
    """of the latents"""

    @staticmethod
    def of(state: Mapping[str, Tensor]) -> KL16Config:
        """The sizes of a state dict. Raises KeyError naming a key that every autoencoder of this kind has."""
        width = len(state["encoder.conv_in.bias"])
        levels = 1 + max(int(key.split(".")[2]) for key in state if key.startswith("encoder.down."))
        blocks = 1 + max(int(key.split(".")[4]) for key in state if key.startswith("encoder.down.0.block."))
        outs = [len(state[f"encoder.down.{level}.block.0.conv1.bias"]) for level in range(levels)]
        multipliers = tuple(out // width for out in outs)
        return KL16Config(width, multipliers, blocks, len(state["post_quant_conv.bias"]))


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


class ResnetBlock(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(into), nn.Conv2d(into, out, 3, padding=1)
        self.norm2, self.conv2 = _norm(out), nn.Conv2d(out, out, 3, padding=1)
        self.nin_shortcut: nn.Module | None = nn.Conv2d(into, out, 1) if into != out else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(silu(self.norm1(x)))
        h = self.conv2(silu(self.norm2(h)))
        out: Tensor = (x if self.nin_shortcut is None else self.nin_shortcut(x)) + h
        return out


class AttnBlock(nn.Module):
    """Single-head attention over all positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).flatten(2).transpose(1, 2) for layer in (self.q, self.k, self.v))  # (B, h w, channels)
        mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        out: Tensor = x + self.proj_out(mixed)
        return out


class Downsample(nn.Module):
    """Half the side; the border is padded on the right and below only."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(pad(x, (0, 1, 0, 1)))
        return out


class Upsample(nn.Module):
    """Twice the side."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(interpolate(x, scale_factor=2.0, mode="nearest"))
        return out


class Level(nn.Module):
    """The blocks of one resolution, each with attention behind it if ``attention``, and the way to the next."""

    def __init__(self, into: int, out: int, blocks: int, attention: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResnetBlock(into if i == 0 else out, out) for i in range(blocks))
        self.attn = nn.ModuleList(AttnBlock(out) for _ in range(blocks if attention else 0))
        self.downsample: nn.Module | None = None
        self.upsample: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.block):
            x = block(x)
            if len(self.attn) > 0:
                x = self.attn[i](x)
        for resample in (self.downsample, self.upsample):
            if resample is not None:
                x = resample(x)
        return x


class Middle(nn.Module):
    """Two residual blocks around attention, at the lowest resolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1, self.attn_1 = ResnetBlock(channels, channels), AttnBlock(channels)
        self.block_2 = ResnetBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block_2(self.attn_1(self.block_1(x)))
        return out


class Encoder(nn.Module):
    """Image -> mean and log-variance of the latents (2 x channels). The lowest resolution has attention."""

    def __init__(self, config: KL16Config) -> None:
        super().__init__()
        widths = [config.width * m for m in config.multipliers]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(3, config.width, 3, padding=1)
        self.down = nn.ModuleList()
        for i, (into, out) in enumerate(zip([config.width, *widths], widths, strict=False)):
            level = Level(into, out, config.blocks, attention=i == last)
            level.downsample = Downsample(out) if i < last else None
            self.down.append(level)
        self.mid = Middle(widths[-1])
        self.norm_out = _norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 2 * config.channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        out: Tensor = self.conv_out(silu(self.norm_out(self.mid(x))))
        return out


class Decoder(nn.Module):
    """Latents -> image; levels are numbered from the highest resolution and used from the lowest."""

    def __init__(self, config: KL16Config) -> None:
        super().__init__()
        widths = [config.width * m for m in config.multipliers]
        self.conv_in = nn.Conv2d(config.channels, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1])
        self.up = nn.ModuleList()
        for i, (into, out) in enumerate(zip([*widths[1:], widths[-1]], widths, strict=True)):
            level = Level(into, out, config.blocks + 1, attention=False)
            level.upsample = Upsample(out) if i > 0 else None
            self.up.append(level)
        self.norm_out = _norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            x = level(x)
        out: Tensor = self.conv_out(silu(self.norm_out(x)))
        return out


class KL16(nn.Module):
    """The autoencoder, under the official names."""

    def __init__(self, config: KL16Config | None = None) -> None:
        super().__init__()
        self.config = config or KL16Config()
        channels = self.config.channels
        self.encoder, self.decoder = Encoder(self.config), Decoder(self.config)
        self.quant_conv = nn.Conv2d(2 * channels, 2 * channels, 1)
        self.post_quant_conv = nn.Conv2d(channels, channels, 1)

    @property
    def stride(self) -> int:
        """Pixels per latent, along a side."""
        return int(2 ** (len(self.config.multipliers) - 1))

    def encode(self, images_B3hw: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the latents, each (B, channels, h / stride, w / stride), not scaled."""
        mean, log_variance = self.quant_conv(self.encoder(images_B3hw)).chunk(2, dim=1)
        return mean, torch.exp(0.5 * log_variance.clamp(-30, 20))

    def decode(self, latents_BChw: Tensor) -> Tensor:
        """(B, 3, h stride, w stride), about [-1, 1] but not clipped, of latents that are not scaled."""
        out: Tensor = self.decoder(self.post_quant_conv(latents_BChw))
        return out

    def decode_tokens(self, tokens_BNC: Tensor, grid: tuple[int, int]) -> Tensor:
        """Images, as of :meth:`decode`, of a model's own tokens: scaled latents in rows, one a token."""
        latents = tokens_BNC.transpose(1, 2).reshape(len(tokens_BNC), -1, *grid) / LATENT_SCALE
        return self.decode(latents.to(self.post_quant_conv.weight.dtype))
