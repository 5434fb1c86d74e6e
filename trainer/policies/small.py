"""A small genuine MAR (Li et al., arXiv 2406.11838): continuous tokens, random orders, a per-token diffusion head.

It draws the shapes of :mod:`trainer.shapes`. A token is a 12 x 12-pixel patch under a linear code (principal
components of patches that hold an object), so that a token is a thing; a bidirectional transformer reads
the words of the prompt, the known tokens and the mask tokens; an adaLN MLP denoises each token given its condition z.

Departures from LTH14's MAR: one transformer instead of a masked-autoencoder pair, words instead of a class,
velocity (v) prediction instead of epsilon, which keeps the first sampling steps from exploding (see
``docs/decisions.md``), and a linear code instead of a KL autoencoder. Shapes: see :mod:`trainer.algorithm.types`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from trainer.algorithm.transitions import DDPM
from trainer.policies.base import Policy
from trainer.policies.mar_parts import load_strictly
from trainer.policies.masked import MaskedPolicy

WORDS = tuple(
    "<pad> <null> a one two three four left right of above below red yellow green cyan blue purple "
    "circle circles square squares triangle triangles".split()
)
PAD, NULL = 0, 1
SYNONYMS = {"an": "a", "the": "", "to": "", "is": "", "on": ""}
MAX_WORDS = 9


@dataclass(frozen=True)
class SmallConfig:
    """Sizes of the model; stored in the checkpoint."""

    grid: int = 4
    patch: int = 12
    channels: int = 24
    width: int = 128
    depth: int = 6
    heads: int = 4
    head_width: int = 160
    head_depth: int = 3
    train_timesteps: int = 1000


def encode_prompts(prompts: Sequence[str]) -> Tensor:
    """(B, MAX_WORDS) int64 word ids, padded. The empty prompt is the null prompt of guidance.

    Raises ValueError naming the words that the model does not know, or a prompt that is too long.
    """
    rows = []
    for prompt in prompts:
        words = [SYNONYMS.get(w, w) for w in re.findall(r"[a-z]+", prompt.lower())]
        words = [w for w in words if w]
        unknown = sorted(set(words) - set(WORDS))
        if unknown:
            raise ValueError(
                f"the small policy does not know {', '.join(unknown)} (prompt: {prompt!r}); "
                f"its words are: {' '.join(WORDS[2:])}"
            )
        if len(words) > MAX_WORDS:
            raise ValueError(f"the small policy reads at most {MAX_WORDS} words, not {len(words)}: {prompt!r}")
        ids = [WORDS.index(w) for w in words] or [NULL]
        rows.append(ids + [PAD] * (MAX_WORDS - len(ids)))
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), MAX_WORDS)


class Block(nn.Module):
    """A pre-norm transformer block with full attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, attend: Tensor) -> Tensor:
        B, L, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(B, L, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=attend)  # (B, heads, L, D / heads)
        x = x + self.proj(mixed.transpose(1, 2).reshape(B, L, D))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Backbone(nn.Module):
    """Words, known tokens and mask tokens in; the condition z of every image token out."""

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        N, D = config.grid**2, config.width
        self.words = nn.Embedding(len(WORDS), D)
        self.word_position = nn.Parameter(torch.randn(MAX_WORDS, D) * 0.02)
        self.token_in = nn.Linear(config.channels, D)
        self.mask_token = nn.Parameter(torch.randn(D) * 0.02)
        self.position = nn.Parameter(torch.randn(N, D) * 0.02)
        self.blocks = nn.ModuleList(Block(D, config.heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(D)
        self.position_out = nn.Parameter(torch.randn(N, D) * 0.02)

    def forward(self, prompt_ids: Tensor, tokens: Tensor, known: Tensor) -> Tensor:
        """(B, L) ids, (B, N, C) latents, (B, N) bool -> z (B, N, D). Latents of unknown tokens are not read."""
        text = self.words(prompt_ids) + self.word_position  # (B, L, D)
        image = torch.where(known[..., None], self.token_in(tokens), self.mask_token) + self.position  # (B, N, D)
        x = torch.cat([text, image], dim=1)
        attend = torch.cat([prompt_ids != PAD, torch.ones_like(known)], dim=1)[:, None, None, :]
        for block in self.blocks:
            x = block(x, attend)
        z: Tensor = self.norm(x[:, -tokens.shape[1] :]) + self.position_out
        return z


class HeadBlock(nn.Module):
    """A residual MLP block modulated by the condition (adaLN-zero)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.modulation = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(condition).chunk(3, dim=-1)
        out: Tensor = x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)
        return out


class DiffusionHead(nn.Module):
    """The per-token denoising MLP: (Q, C) noisy latents, (Q,) train timesteps, (Q, D) conditions -> v (Q, C)."""

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        width = config.head_width
        self.frequencies = 32
        self.time = nn.Sequential(nn.Linear(2 * self.frequencies, width), nn.SiLU(), nn.Linear(width, width))
        self.condition = nn.Linear(config.width, width)
        self.x_in = nn.Linear(config.channels, width)
        self.blocks = nn.ModuleList(HeadBlock(width) for _ in range(config.head_depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, config.channels)

    def forward(self, x: Tensor, timestep: Tensor, z: Tensor) -> Tensor:
        """``timestep`` is in training units, 0..999."""
        rates = torch.exp(-math.log(10_000) * torch.arange(self.frequencies, device=x.device) / self.frequencies)
        angles = timestep[:, None].float() * rates
        time = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1))
        condition = silu(time + self.condition(z))
        x = self.x_in(x)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition).chunk(2, dim=-1)
        out: Tensor = self.out(self.norm(x) * (1 + scale) + shift)
        return out


class SmallPolicy(MaskedPolicy):
    """The small MAR as a policy (:class:`trainer.policies.base.Policy`).

    ``ar_steps`` (K, 1..16), ``diffusion_steps`` (T, at least 2) and ``guidance`` (1 = none) are sampling settings:
    one checkpoint serves any of them.
    """

    schedule: DDPM
    head_precision = "autocast"  # its prediction, v, is multiplied by 1 at most
    codec_mean: Tensor
    codec_basis: Tensor
    codec_scale: Tensor

    def __init__(
        self, config: SmallConfig, *, ar_steps: int = 8, diffusion_steps: int = 16, guidance: float = 1.0
    ) -> None:
        super().__init__()
        self.config = config
        self.tokens, self.channels = config.grid**2, config.channels
        if not 1 <= ar_steps <= self.tokens:
            raise ValueError(f"ar_steps must lie in 1..{self.tokens} for the small policy, not {ar_steps}")
        self.ar_steps, self.guidance = ar_steps, guidance
        self.schedule = DDPM.cosine(train_steps=config.train_timesteps, steps=diffusion_steps, prediction="v")
        self.backbone, self.head = Backbone(config), DiffusionHead(config)
        self.apply(_initialise)
        pixels = config.patch**2 * 3
        self.register_buffer("codec_mean", torch.zeros(pixels))
        self.register_buffer("codec_basis", torch.zeros(config.channels, pixels))
        self.register_buffer("codec_scale", torch.ones(config.channels))

    # ---- the codec: patches of pixels <-> latents ------------------------------------------------------------

    def fit_codec(self, images: NDArray[np.uint8]) -> float:
        """Fit the linear code on (B, H, W, 3) images: principal components of the patches that hold an object.

        Latents are scaled by the square root of each component's deviation: a compromise between keeping the
        components' natural weight and giving each the same. Returns the part of the variance that is kept.
        """
        patches = self._patches(images)
        self.codec_mean = patches.median(dim=0).values
        centred = patches - self.codec_mean
        centred = centred[centred.abs().amax(dim=1) > 0.05].double()
        _, singular, basis = torch.linalg.svd(centred, full_matrices=False)
        self.codec_basis = basis[: self.channels].float()
        deviation = (singular[: self.channels] / math.sqrt(len(centred))).float()
        self.codec_scale = (deviation * deviation[:8].mean()).sqrt()
        return float((singular[: self.channels] ** 2).sum() / (singular**2).sum())

    def _patches(self, images: NDArray[np.uint8]) -> Tensor:
        g, p = self.config.grid, self.config.patch
        if images.shape[1:] != (g * p, g * p, 3):
            raise ValueError(f"images must be (B, {g * p}, {g * p}, 3), not {images.shape}")
        pixels = torch.from_numpy(np.ascontiguousarray(images)).float() / 127.5 - 1
        return pixels.reshape(-1, g, p, g, p, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, p * p * 3)

    def encode(self, images: NDArray[np.uint8]) -> Tensor:
        """(B, H, W, 3) uint8 -> (B, N, C) float32 latents on the CPU."""
        centred = self._patches(images) - self.codec_mean.cpu()
        return (centred @ self.codec_basis.cpu().T / self.codec_scale.cpu()).reshape(len(images), self.tokens, -1)

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> NDArray[np.uint8]:
        """(B, N, C) latents -> (B, H, W, 3) uint8 images."""
        g, p = self.config.grid, self.config.patch
        pixels = (tokens.float() * self.codec_scale) @ self.codec_basis + self.codec_mean
        pixels = pixels.reshape(-1, g, g, p, p, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, g * p, g * p, 3)
        images: NDArray[np.uint8] = ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu().numpy()
        return images

    # ---- the model -------------------------------------------------------------------------------------------

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        """(B, MAX_WORDS) int64: see :func:`encode_prompts`."""
        return encode_prompts(prompts)

    def context(self, prompt_ids: Tensor, guided: bool) -> Tensor:
        """(H * B, MAX_WORDS): the words, and the null prompt for the unconditional half; the backbone embeds them."""
        if self.halves(guided) == 1:
            return prompt_ids
        null = torch.full_like(prompt_ids, PAD)
        null[:, 0] = NULL
        return torch.cat([prompt_ids, null])

    def conditions(self, context: Tensor, tokens_BNC: Tensor, known_BN: Tensor, guided: bool) -> Tensor:
        """z (H, B, N, D): one backbone pass; with guidance the unconditional half rides in the same batch."""
        H = self.halves(guided)
        z: Tensor = self.backbone(context, tokens_BNC.repeat(H, 1, 1), known_BN.repeat(H, 1))
        return z.reshape(H, *tokens_BNC.shape[:2], -1)

    def head_output(self, x_QC: Tensor, time_Q: Tensor, condition_QW: Tensor) -> Tensor:
        """(Q, C): the predicted velocity."""
        velocity: Tensor = self.head(x_QC, time_Q.expand(len(x_QC)), condition_QW)
        return velocity

    # ---- parameters and files --------------------------------------------------------------------------------

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """The diffusion head's parameters."""
        return self.head.parameters()

    def backbone_parameters(self) -> Iterator[nn.Parameter]:
        """The transformer's parameters."""
        return self.backbone.parameters()

    def save(self, path: Path, note: dict[str, str] | None = None) -> None:
        """Write a safetensors checkpoint (weights, codec, sizes, and a note of how it was made).

        Equal weights give an equal file: there is one metadata entry, because safetensors does not order them.
        """
        metadata = {"small": json.dumps({"config": asdict(self.config), "note": note or {}})}
        temporary = path.with_suffix(".partial")
        temporary.write_bytes(save({k: v.cpu().contiguous() for k, v in self.state_dict().items()}, metadata))
        temporary.replace(path)

    def export(self, folder: Path) -> None:
        """The family's own layout is the file of :meth:`save`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save(folder / "policy.safetensors")

    @classmethod
    def load(
        cls, source: str | Path, *, ar_steps: int = 8, diffusion_steps: int = 16, guidance: float = 1.0
    ) -> SmallPolicy:
        """Read a checkpoint's file. Raises FileNotFoundError, or ValueError if it is not one of this model."""
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"no checkpoint at {path}; make one with `python trainer/pretrain.py`")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error
        if "small" not in metadata:
            raise ValueError(f"{path} is not a checkpoint of the small policy")
        config = SmallConfig(**json.loads(metadata["small"])["config"])
        policy = cls(config, ar_steps=ar_steps, diffusion_steps=diffusion_steps, guidance=guidance)
        load_strictly(policy, state, str(path))
        return policy.eval()

    @staticmethod
    def revision(path: Path) -> str:
        """sha256 of a checkpoint file."""
        return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


_: type[Policy] = SmallPolicy  # the type checker compares the two


def _initialise(module: nn.Module) -> None:
    if isinstance(module, HeadBlock):
        nn.init.zeros_(module.modulation.weight)  # adaLN-zero: its own Linear was initialised before it
    elif isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
