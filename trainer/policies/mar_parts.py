"""The masked autoregressive transformer and its diffusion head (Li et al., arXiv 2406.11838), as LTH14's MAR and Harmon
share them.

Modules are named as in the official checkpoints, so a state dict is read by its own keys (:func:`load_strictly`).
A masked autoencoder: the encoder reads a buffer of condition tokens and the *known* image tokens; the decoder
adds a mask token for every unknown one and gives each image token its condition z; the head, an MLP modulated by z and
the diffusion time (adaLN), denoises each token by itself. Shapes: see :mod:`trainer.algorithm.types`; P is the number
of buffer tokens, M that of known image tokens, W the head's width.

The official modules have dropout, which training by log-probability must not use (sampling and scoring have to agree).
There is none here; it has no parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from trainer.algorithm.transitions import DDPM

TIME_FREQUENCIES = 128


@dataclass(frozen=True)
class MarConfig:
    """Sizes of the transformer and its head. The defaults are MAR-B's at 256 px over a stride-16 autoencoder."""

    width: int = 768
    depth: int = 12
    """blocks of the encoder; as many in the decoder"""
    heads: int = 12
    mlp_ratio: float = 4.0
    grid: int = 16
    """side of the token grid that the position embeddings were trained at"""
    channels: int = 16
    buffer: int = 64
    classes: int = 1000
    head_width: int = 1024
    head_depth: int = 6


MAR_SIZES: dict[str, MarConfig] = {
    "base": MarConfig(),
    "large": MarConfig(width=1024, depth=16, heads=16, head_width=1280, head_depth=8),
    "huge": MarConfig(width=1280, depth=20, heads=16, head_width=1536, head_depth=12),
}
"""MAR-B, MAR-L and MAR-H as published (README of LTH14/mar); Harmon-0.5B has the first, Harmon-1.5B the last."""


def mar_schedule(steps: int) -> DDPM:
    """The head's diffusion: epsilon and a learned range of variances, on ``steps`` of 1000 cosine timesteps.

    The timesteps are those that the official code picks: a running sum of 999 / (steps - 1), rounded, whose float error
    decides between neighbours (499 or 500 in the middle of 21 steps). Raises ValueError unless 2 <= steps <= 1000.
    """
    if not 2 <= steps <= 1000:
        raise ValueError(f"diffusion steps must be between 2 and 1000, got {steps}")
    position, timesteps = 0.0, []
    for _ in range(steps):
        timesteps.append(round(position))
        position += 999 / (steps - 1)
    return DDPM(DDPM.cosine(1000).alphas_cumprod, timesteps[::-1], "epsilon", "learned_range")


def load_strictly(module: nn.Module, state: Mapping[str, Tensor], source: str, *, assign: bool = False) -> None:
    """Copy ``state`` into ``module``; every key must be there, and no other. ``source`` says where the state is from.
    ``assign``: the tensors themselves become the parameters, for a module on the meta device.

    Raises ValueError naming keys that are missing, not expected or of another shape.
    """
    own = module.state_dict()
    wrong = {
        "missing": sorted(own.keys() - state.keys()),
        "not expected": sorted(state.keys() - own.keys()),
        "of another shape": [
            f"{key} {tuple(state[key].shape)} instead of {tuple(own[key].shape)}"
            for key in own
            if key in state and state[key].shape != own[key].shape
        ],
    }
    told = [
        f"{len(keys)} {what}: {', '.join(keys[:5])}{', ...' * (len(keys) > 5)}" for what, keys in wrong.items() if keys
    ]
    if told:
        raise ValueError(f"{source} does not fit {type(module).__name__}: {'; '.join(told)}")
    module.load_state_dict(dict(state), assign=assign)


class Attention(nn.Module):
    """Full self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        B, L, D = x_BLD.shape
        q, k, v = self.qkv(x_BLD).reshape(B, L, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v)  # (B, heads, L, D / heads)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(B, L, D))
        return out


class MLP(nn.Module):
    """Two linear layers with an (exact) GELU between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Block(nn.Module):
    """A pre-norm transformer block, (B, L, D) -> (B, L, D)."""

    def __init__(self, width: int, heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn, self.mlp = Attention(width, heads), MLP(width, int(width * mlp_ratio))

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attn(self.norm1(x_BLD))
        out: Tensor = x_BLD + self.mlp(self.norm2(x_BLD))
        return out


class TimeEmbedding(nn.Module):
    """Sinusoids of the training timestep, then an MLP: (Q,) in 0..999 -> (Q, W)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * TIME_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, time_Q: Tensor) -> Tensor:
        exponents = torch.arange(TIME_FREQUENCIES, dtype=torch.float32, device=time_Q.device) / TIME_FREQUENCIES
        angles = time_Q.float()[:, None] * torch.exp(-math.log(10_000) * exponents)
        dtype = next(self.mlp.parameters()).dtype
        out: Tensor = self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype))
        return out


def _modulation(width: int, parts: int) -> nn.Sequential:
    """The SiLU is applied once for all blocks by :meth:`DiffusionHead.forward`; here it holds its place in the keys."""
    return nn.Sequential(nn.SiLU(), nn.Linear(width, parts * width))


class HeadBlock(nn.Module):
    """A residual MLP block; shift, scale and gate come from the condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = _modulation(width, 3)

    def forward(self, x_QW: Tensor, condition_QW: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation[1](condition_QW).chunk(3, dim=-1)
        out: Tensor = x_QW + gate * self.mlp(self.in_ln(x_QW) * (1 + scale) + shift)
        return out


class HeadOutput(nn.Module):
    """The head's last layer, modulated as well."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(width, channels)
        self.adaLN_modulation = _modulation(width, 2)

    def forward(self, x_QW: Tensor, condition_QW: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation[1](condition_QW).chunk(2, dim=-1)
        out: Tensor = self.linear(self.norm_final(x_QW) * (1 + scale) + shift)
        return out


class DiffusionHead(nn.Module):
    """Noise prediction and variance of each token by itself: x (Q, C), time (Q,), condition (Q, W) -> (Q, 2C).

    The first C numbers are epsilon, the others place the log-variance in its range (-1: smallest, 1: largest).
    """

    def __init__(self, channels: int, condition_width: int, width: int, depth: int) -> None:
        super().__init__()
        self.time_embed = TimeEmbedding(width)
        self.cond_embed = nn.Linear(condition_width, width)
        self.input_proj = nn.Linear(channels, width)
        self.res_blocks = nn.ModuleList(HeadBlock(width) for _ in range(depth))
        self.final_layer = HeadOutput(width, 2 * channels)

    def condition(self, z: Tensor) -> Tensor:
        """(..., D) -> (..., W): the part of the condition that stays the same at every diffusion step."""
        out: Tensor = self.cond_embed(z)
        return out

    def forward(self, x_QC: Tensor, time_Q: Tensor, condition_QW: Tensor) -> Tensor:
        """``time_Q``: training timesteps, 0..999; one of shape (1,) serves all rows. ``condition_QW``: of
        :meth:`condition`."""
        modulator = silu(self.time_embed(time_Q) + condition_QW)
        x = self.input_proj(x_QC.to(self.input_proj.weight.dtype))
        for block in self.res_blocks:
            x = block(x, modulator)
        out: Tensor = self.final_layer(x, modulator)
        return out


class HeadHolder(nn.Module):
    """Gives the head its official name, ``diffloss.net``."""

    def __init__(self, config: MarConfig) -> None:
        super().__init__()
        self.net = DiffusionHead(config.channels, config.width, config.head_width, config.head_depth)


class Mar(nn.Module):
    """Encoder, decoder and head under the official names. ``grid`` (h, w) of a call may differ from the trained one:
    the position embeddings of the image tokens are interpolated then (Harmon at 512 px).

    ``activation_checkpointing``: recompute each block in the backward pass instead of keeping its activations.
    """

    def __init__(self, config: MarConfig) -> None:
        super().__init__()
        N, P, D = config.grid**2, config.buffer, config.width
        self.config = config
        self.activation_checkpointing = False
        self.class_emb = nn.Embedding(config.classes, D)
        self.fake_latent = nn.Parameter(torch.randn(1, D) * 0.02)
        self.z_proj = nn.Linear(config.channels, D)
        self.z_proj_ln = nn.LayerNorm(D, eps=1e-6)
        self.encoder_pos_embed_learned = nn.Parameter(torch.randn(1, P + N, D) * 0.02)
        self.encoder_blocks = self._blocks()
        self.encoder_norm = nn.LayerNorm(D, eps=1e-6)
        self.decoder_embed = nn.Linear(D, D)
        self.mask_token = nn.Parameter(torch.randn(1, 1, D) * 0.02)
        self.decoder_pos_embed_learned = nn.Parameter(torch.randn(1, P + N, D) * 0.02)
        self.decoder_blocks = self._blocks()
        self.decoder_norm = nn.LayerNorm(D, eps=1e-6)
        self.diffusion_pos_embed_learned = nn.Parameter(torch.randn(1, N, D) * 0.02)
        self.diffloss = HeadHolder(config)

    def _blocks(self) -> nn.ModuleList:
        c = self.config
        return nn.ModuleList(Block(c.width, c.heads, c.mlp_ratio) for _ in range(c.depth))

    @property
    def head(self) -> DiffusionHead:
        return self.diffloss.net

    def encode(
        self, tokens_BNC: Tensor, index_BM: Tensor, buffer_BD: Tensor, grid: tuple[int, int] | None = None
    ) -> Tensor:
        """(B, P + M, D): buffer tokens, then the known tokens. Tokens outside ``index_BM`` (:func:`known_index`) are
        not read; each buffer token is ``buffer_BD`` (the class, or the null condition) plus its position."""
        B, C, D = len(tokens_BNC), tokens_BNC.shape[-1], self.config.width
        position = self._positions(self.encoder_pos_embed_learned, grid).expand(B, -1, -1)
        buffer_position, image_position = position[:, : self.config.buffer], position[:, self.config.buffer :]
        known_BMC = tokens_BNC.gather(1, index_BM[..., None].expand(-1, -1, C)).to(self.z_proj.weight.dtype)
        known = self.z_proj(known_BMC) + image_position.gather(1, index_BM[..., None].expand(-1, -1, D))
        buffer = buffer_BD[:, None, :] + buffer_position
        x = self.z_proj_ln(torch.cat([buffer, known.to(buffer.dtype)], dim=1))
        out: Tensor = self.encoder_norm(self._run(self.encoder_blocks, x))
        return out

    def decode(self, x_BLD: Tensor, index_BM: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """z (B, N, D) of every image token, from :meth:`encode`'s (B, P + M, D) (L = P + M), changed or not."""
        P, D = self.config.buffer, self.config.width
        position = self._positions(self.decoder_pos_embed_learned, grid)
        x = self.decoder_embed(x_BLD)
        masked = self.mask_token.to(x.dtype).expand(len(x), position.shape[1] - P, D)
        image = masked.scatter(1, index_BM[..., None].expand(-1, -1, D), x[:, P:])
        x = torch.cat([x[:, :P], image], dim=1) + position
        x = self.decoder_norm(self._run(self.decoder_blocks, x))
        z: Tensor = x[:, P:] + self._positions(self.diffusion_pos_embed_learned, grid, buffer=0)
        return z

    def _run(self, blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x

    def _positions(self, embedding: Tensor, grid: tuple[int, int] | None, buffer: int | None = None) -> Tensor:
        """(1, P + h w, D): the embedding with its image part interpolated to ``grid``."""
        side, D = self.config.grid, self.config.width
        if grid is None or grid == (side, side):
            return embedding
        P = self.config.buffer if buffer is None else buffer
        image = embedding[:, P:].transpose(1, 2).reshape(1, D, side, side)
        image = interpolate(image, size=grid, mode="bilinear").flatten(2).transpose(1, 2)
        return torch.cat([embedding[:, :P], image], dim=1)


def known_index(known_BN: Tensor) -> Tensor:
    """(B, M) int64: the known tokens of each image, in increasing order. Raises ValueError unless all images have the
    same number of them, as all have at one AR step."""
    counts = known_BN.sum(1)
    if bool((counts != counts[0]).any()):
        raise ValueError(f"all images must have the same number of known tokens, got {counts.tolist()}")
    return known_BN.nonzero()[:, 1].reshape(len(known_BN), -1)
