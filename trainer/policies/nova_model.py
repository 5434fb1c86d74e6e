"""NOVA's transformer and diffusion head (Deng et al., arXiv 2412.14169) for text-to-image, in plain PyTorch.

Module names are those of the official checkpoints (``transformer/`` of a pipeline's folder), so that their state
dicts are read strictly. A token is a square patch of the VAE's latent, its C numbers in the order (row, column,
channel). Three parts: ``video_encoder`` reads the text and a grid of begin-of-video tokens and makes the context,
once per image; ``image_encoder`` reads the context and the known tokens in its first half, the mask tokens too in its
second, and makes the condition z; ``image_decoder`` is the per-token diffusion head. Blocks are post-norm.
Shapes: see :mod:`trainer.algorithm.types`; M tokens of context, L text tokens of width E, R = H * B rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

TIME_FREQUENCIES = 128


@dataclass(frozen=True)
class NovaConfig:
    """``transformer/config.json`` of an official checkpoint; sizes are (height, width)."""

    image_dim: int
    """channels of the VAE's latent"""
    image_size: tuple[int, int]
    """pixels"""
    image_stride: int
    """pixels per latent cell"""
    text_token_dim: int
    """E: width of the text encoder"""
    text_token_len: int
    """L"""
    image_base_size: tuple[int, int]
    """the grid of the N tokens"""
    video_base_size: tuple[int, int, int]
    """(frames, height, width): the grid of the M context tokens"""
    arch: tuple[str, str, str]
    """video encoder, image encoder, head: vit_d16w1024, vit_d32w1024, mlp_d6w1024 (d: depth, w: width)"""
    rotary_pos_embed: bool = False
    video_mixer_rank: int | None = None

    @classmethod
    def read(cls, config: Mapping[str, object]) -> NovaConfig:
        """From the parsed JSON. Raises ValueError for what is missing, and for models that do not read text to draw
        a single image."""
        names = [f.name for f in fields(cls)]
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items() if k in names}
        missing = [n for n in names[:8] if values.get(n) is None]
        if missing:
            raise ValueError(f"not the configuration of a text-to-image NOVA: {', '.join(missing)} missing")
        size = values["image_size"]
        values["image_size"] = (size, size) if isinstance(size, int) else size
        read = cls(**values)  # type: ignore[arg-type]
        if read.video_base_size[0] != 1:
            raise ValueError(f"a NOVA for video (video_base_size {list(read.video_base_size)}); only images are drawn")
        cells = [s // read.image_stride // read.patch for s in read.image_size]
        if cells != list(read.image_base_size):
            raise ValueError(f"image_size {read.image_size} has {cells} tokens, image_base_size {read.image_base_size}")
        return read

    @property
    def patch(self) -> int:
        """Latent cells along a side of a token: 16 pixels, rounded up to whole cells."""
        return 15 // self.image_stride + 1

    @property
    def tokens(self) -> int:
        """N"""
        return math.prod(self.image_base_size)

    @property
    def channels(self) -> int:
        """C"""
        return self.image_dim * self.patch**2


def _arch(name: str, kind: str) -> tuple[int, int, int]:
    """Depth, width and heads. The official names imply the heads; ``h2`` after the width sets them (tests)."""
    match = re.fullmatch(rf"{kind}_d(\d+)w(\d+)(?:h(\d+))?", name)
    if match is None:
        raise ValueError(f"arch: {kind}_dDEPTHwWIDTH expected, got {name!r}")
    depth, width = int(match[1]), int(match[2])
    return depth, width, int(match[3] or min(16, max(1, width // 64)))


class PatchEmbed(nn.Module):
    """A convolution whose stride is its kernel, applied to tokens instead of images: (..., C) -> (..., D)."""

    def __init__(self, image_dim: int, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(image_dim, width, patch, patch)

    def forward(self, tokens: Tensor) -> Tensor:
        return linear(tokens, self.proj.weight.permute(0, 2, 3, 1).flatten(1), self.proj.bias)


def space_embedding(height: int, width: int, dim: int, device: torch.device) -> Tensor:
    """(height * width, dim): sines and cosines of the column, then of the row."""
    frequency = 10_000 ** -(torch.arange(dim // 4, device=device) / (dim // 4))
    row = torch.arange(height, device=device).repeat_interleave(width)[:, None] * frequency
    column = torch.arange(width, device=device).repeat(height)[:, None] * frequency
    return torch.cat([column.sin(), column.cos(), row.sin(), row.cos()], dim=-1)


def rotary_angles(height: int, width: int, head_dim: int, device: torch.device) -> Tensor:
    """(height * width, head_dim / 2) angles by which pairs of a head's channels turn: an eighth of the channels
    belong to the frame (0 here), the others in halves to the row and the column."""
    time, space = head_dim // 8, (head_dim - head_dim // 8) // 2
    frequency = 10_000 ** -(torch.arange(0, space, 2, device=device) / space)
    row = torch.arange(height, device=device).repeat_interleave(width)[:, None] * frequency
    column = torch.arange(width, device=device).repeat(height)[:, None] * frequency
    frame = torch.zeros(height * width, (time + 1) // 2, device=device)
    return torch.cat([frame, row, column], dim=-1)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """(R, heads, S, head_dim) turned by (R or 1, S, head_dim / 2), neighbouring channels in pairs."""
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


class Attention(nn.Module):
    """Multi-head self-attention, everything to everything."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_RSD: Tensor, angles: Tensor | None) -> Tensor:
        R, S, D = x_RSD.shape
        q, k, v = self.qkv(x_RSD).view(R, S, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        if angles is not None:
            q, k = _rotate(q, angles), _rotate(k, angles)
        out: Tensor = self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(R, S, D))
        return out


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.activation, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.activation(self.fc1(x)))
        return out


class Block(nn.Module):
    """A transformer block that normalises what it adds (post-norm)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x_RSD: Tensor, angles: Tensor | None) -> Tensor:
        x_RSD = x_RSD + self.norm1(self.attn(x_RSD, angles))
        out: Tensor = x_RSD + self.norm2(self.mlp(x_RSD))
        return out


class Mixer(nn.Module):
    """Joins frames of a video: never read for a single image, but part of some checkpoints."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.lora = nn.Linear(width, rank, bias=False) if rank > 0 else nn.Identity()
        self.proj = nn.Linear(rank if rank > 0 else width, 2 * width)


class VisionTransformer(nn.Module):
    """Blocks over a prefix and tokens; ``checkpointing`` recomputes each block in the backward pass."""

    def __init__(self, image_dim: int, patch: int, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim, self.checkpointing = width // heads, False
        self.patch_embed = PatchEmbed(image_dim, width, patch)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def run(self, x_RSD: Tensor, angles: Tensor | None, blocks: slice) -> Tensor:
        """The sequence through a range of blocks."""
        for block in self.blocks[blocks]:
            if self.checkpointing and torch.is_grad_enabled():
                x_RSD = checkpoint(block, x_RSD, angles, use_reentrant=False)
            else:
                x_RSD = block(x_RSD, angles)
        return x_RSD


class TextEmbed(nn.Module):
    """(R, L, E) outputs of the text encoder -> (R, L, D). ``weight`` stands where a prompt has no token."""

    weight: Tensor

    def __init__(self, text_dim: int, width: int) -> None:
        super().__init__()
        self.proj, self.norm = nn.Linear(text_dim, width), nn.LayerNorm(width)
        self.register_buffer("weight", torch.zeros(512, text_dim))

    def forward(self, text_RLE: Tensor) -> Tensor:
        out: Tensor = self.norm(self.proj(text_RLE))
        return out


class MaskEmbed(nn.Module):
    """What stands for a token that is not known, and for the frame before the first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bos_token, self.mask_token = nn.Parameter(torch.zeros(1, width)), nn.Parameter(torch.zeros(1, width))


class VideoPosEmbed(nn.Module):
    """The learnt embedding of the frame's number (always 0 for an image)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.time_proj = nn.Sequential(nn.Linear(2 * TIME_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self) -> Tensor:
        """(D,): of frame 0, whose sines are 0 and cosines 1."""
        waves = self.norm.weight.new_zeros(2 * TIME_FREQUENCIES)
        waves[TIME_FREQUENCIES:] = 1
        out: Tensor = self.norm(self.time_proj(waves))
        return out


class Projector(nn.Module):
    def __init__(self, in_dim: int, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(in_dim, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(silu(self.fc1(x)))
        return out


class TimeCondEmbed(nn.Module):
    """The two halves of the head's condition: of the diffusion time, and of z."""

    def __init__(self, condition_dim: int, width: int) -> None:
        super().__init__()
        self.timestep_proj = Projector(2 * TIME_FREQUENCIES, width)
        self.condition_proj = Projector(condition_dim, width)

    def time(self, time_Q: Tensor) -> Tensor:
        """(Q,) diffusion times in training units (0..1000) -> (Q, width). Each distinct one, at most T, is embedded
        once."""
        times, row_Q = (time_Q, None) if len(time_Q) == 1 else torch.unique(time_Q, return_inverse=True)
        rates = torch.exp(-math.log(10_000) / TIME_FREQUENCIES * torch.arange(TIME_FREQUENCIES, device=times.device))
        angles = times.float()[:, None] * rates
        out: Tensor = self.timestep_proj(torch.cat([angles.cos(), angles.sin()], dim=-1))
        return out if row_Q is None else out[row_Q]


class AdaLayerNorm(nn.Module):
    """LayerNorm scaled and shifted by the condition; gives the condition's remaining parts (gates), too."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.proj = nn.Linear(width, parts * width)
        self.norm = nn.LayerNorm(width, 1e-6, elementwise_affine=False)

    def forward(self, x: Tensor, activated: Tensor) -> tuple[Tensor, ...]:
        scale, shift, *gates = self.proj(activated).chunk(self.parts, dim=-1)
        return self.norm(x) * (1 + scale) + shift, *gates


class DiffusionBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = AdaLayerNorm(width, 3)
        self.proj, self.norm2 = Projector(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, activated: Tensor) -> Tensor:
        h, gate = self.norm1(x, activated)
        out: Tensor = x + gate * self.norm2(self.proj(h))
        return out


class DiffusionMLP(nn.Module):
    """The head: noisy tokens (Q, C), times (Q,) and :meth:`condition`'s (Q, width) -> prediction (Q, C)."""

    def __init__(self, image_dim: int, patch: int, depth: int, width: int, condition_dim: int) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(image_dim, width, patch)
        self.time_cond_embed = TimeCondEmbed(condition_dim, width)
        self.blocks = nn.ModuleList(DiffusionBlock(width) for _ in range(depth))
        self.norm = AdaLayerNorm(width, 2)
        self.head = nn.Linear(width, patch**2 * image_dim)

    def condition(self, z: Tensor) -> Tensor:
        """(..., D) -> (..., width): the part of the condition that all diffusion steps of a token share."""
        out: Tensor = self.time_cond_embed.condition_proj(z)
        return out

    def forward(self, x_QC: Tensor, time_Q: Tensor, condition_QW: Tensor) -> Tensor:
        x = self.patch_embed(x_QC)
        activated = silu(condition_QW + self.time_cond_embed.time(time_Q))
        for block in self.blocks:
            x = block(x, activated)
        out: Tensor = self.head(self.norm(x, activated)[0])
        return out


class NovaTransformer(nn.Module):
    """The three encoders and what joins them; see the module's docstring."""

    def __init__(self, config: NovaConfig) -> None:
        super().__init__()
        self.config = config
        video, image = _arch(config.arch[0], "vit"), _arch(config.arch[1], "vit")
        depth, width, _ = _arch(config.arch[2], "mlp")
        D = image[1]
        if video[1] != D:
            raise ValueError(f"arch: the encoders' widths differ: {config.arch[0]}, {config.arch[1]}")
        self.video_encoder = VisionTransformer(config.image_dim, 2 * config.patch, *video)
        if config.video_mixer_rank:
            self.video_encoder.mixer = Mixer(D, config.video_mixer_rank)
        self.image_encoder = VisionTransformer(config.image_dim, config.patch, *image)
        self.image_decoder = DiffusionMLP(config.image_dim, config.patch, depth, width, D)
        self.mask_embed = MaskEmbed(D)
        self.text_embed = TextEmbed(config.text_token_dim, D)
        if not config.rotary_pos_embed:
            self.video_pos_embed = VideoPosEmbed(D)

    def context(self, text_RLE: Tensor) -> Tensor:
        """(R, L, E) outputs of the text encoder -> (R, M, D): what the image encoder reads beside the tokens."""
        text_RLD = self.text_embed(text_RLE)
        R, L, D = text_RLD.shape
        height, width = self.config.video_base_size[1:]
        frame_MD, angles = self.mask_embed.bos_token.expand(height * width, D), None
        if self.config.rotary_pos_embed:
            angles = _angles(height, width, self.video_encoder.head_dim, L, text_RLD.device)
        else:
            frame_MD = frame_MD + self.video_pos_embed() + space_embedding(height, width, D, text_RLD.device)
        x = torch.cat([text_RLD, frame_MD.expand(R, -1, -1)], dim=1)
        out: Tensor = self.video_encoder.norm(self.video_encoder.run(x, angles, slice(None))[:, L:])
        return out

    def condition(self, context_RMD: Tensor, tokens_BNC: Tensor, known_BN: Tensor) -> Tensor:
        """z (R, N, D) for R = H * B rows of context. Latents of unknown tokens are not read; every image must have
        the same number of known tokens. Raises ValueError if not."""
        encoder, (R, M, D), B = self.image_encoder, context_RMD.shape, len(tokens_BNC)
        count_B = known_BN.sum(dim=1)
        if not bool((count_B == count_B[0]).all()):
            raise ValueError(f"images of one AR step must have equally many known tokens, not {count_B.tolist()}")
        height, width = self.config.image_base_size
        # the first half of the blocks reads the known tokens alone
        known_BK = known_BN.nonzero()[:, 1].reshape(B, -1)
        angles = known_angles = None
        x_BND = torch.where(known_BN[..., None], encoder.patch_embed(tokens_BNC), self.mask_embed.mask_token)
        if self.config.rotary_pos_embed:
            angles = _angles(height, width, encoder.head_dim, M, x_BND.device)
            prefix_RM = torch.arange(M, device=x_BND.device).expand(B, M)
            known_angles = angles[0, torch.cat([prefix_RM, known_BK + M], dim=1)].repeat(R // B, 1, 1)
        else:
            x_BND = x_BND + space_embedding(height, width, D, x_BND.device)
        x_RND = x_BND.repeat(R // B, 1, 1)
        index_RKD = known_BK.repeat(R // B, 1)[..., None].expand(-1, -1, D)
        half = len(encoder.blocks) // 2
        x = encoder.run(torch.cat([context_RMD, x_RND.gather(1, index_RKD)], dim=1), known_angles, slice(half))
        context_RMD, known_RKD = x[:, :M], x[:, M:]
        x_RND = x_RND.to(x.dtype).scatter(1, index_RKD, known_RKD)
        x = encoder.run(torch.cat([context_RMD, x_RND], dim=1), angles, slice(half, None))
        out: Tensor = encoder.norm(x[:, M:])
        return out


def _angles(height: int, width: int, head_dim: int, prefix: int, device: torch.device) -> Tensor:
    """(1, prefix + height * width, head_dim / 2): :func:`rotary_angles` behind a prefix that does not turn."""
    grid = rotary_angles(height, width, head_dim, device)
    return torch.cat([grid.new_zeros(prefix, grid.shape[1]), grid])[None]
