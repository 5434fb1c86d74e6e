"""The data that rollout, selection, scoring and loss hand to each other.

Shape suffixes used throughout ``trainer``::

    B  images of a batch (groups of G consecutive images share a prompt)
    N  tokens per image            C  latent channels per token
    D  width of the condition z    K  autoregressive (AR) steps
    T  diffusion sampling steps    S  extra diffusion trajectories (MTE)
    H  guidance halves: 1 (conditional only) or 2 (conditional, unconditional)
    Q  single transitions picked for scoring, flattened over images, tokens and diffusion steps

Diffusion steps are counted in sampling order: step 0 goes from pure noise x_T (``chain[..., 0, :]``)
to ``chain[..., 1, :]``; the last step, T-1, produces the clean token ``chain[..., T, :]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gaussian:
    """A diagonal normal distribution over the next diffusion state: what one head step predicts.

    ``mean`` is (Q, C); ``std`` broadcasts against it, (Q, 1) or (Q, C). A deterministic step has std 0.
    """

    mean: Tensor
    std: Tensor


@dataclass(frozen=True)
class Trajectory:
    """Everything that training needs of a rollout; every AR state can be rebuilt from it.

    Tokens never change once written, so ``tokens`` and ``predicted_at`` give the backbone's input at any AR
    step: token n of image b is known at step k if and only if ``predicted_at[b, n] < k``.
    All tensors have the image as their first dimension, so that a trajectory can be split and joined by image.
    """

    prompt_ids: Tensor
    """(B, L) int64: the policy's own encoding of the prompts."""
    tokens: Tensor
    """(B, N, C) float32: the final latents x_0."""
    predicted_at: Tensor
    """(B, N) int64 in [0, K): the AR step at which each token was predicted and kept."""
    chain: Tensor
    """(B, N, T+1, C) float32: the kept diffusion chain of each token, from noise to x_0."""
    stitched: Tensor
    """(B, H, N, D): the condition z of the step at which each token was predicted (z* in the paper)."""
    full_chains: dict[int, Tensor] = field(default_factory=dict)
    """AR step -> (B, N, T+1, C): chains of *all* tokens that were unknown at that step (token scope
    ``unknown``); rows of known tokens are zero, rows of tokens kept at that step equal ``chain``."""
    full_latents: dict[int, Tensor] = field(default_factory=dict)
    """AR step -> (B, N, C): the latent map after that step (consistency): known tokens as they are, unknown
    tokens as predicted at that step."""
    extra_chains: Tensor | None = None
    """(B, S, N, T+1, C): extra trajectories drawn from ``stitched``, or None when S = 0."""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def select(self, images: Tensor | slice) -> Trajectory:
        """The same trajectory for a subset of images (an index tensor, a boolean mask or a slice)."""
        changes: dict[str, object] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                changes[f.name] = value[images]
            elif isinstance(value, dict):
                changes[f.name] = {k: v[images] for k, v in value.items()}
        return replace(self, **changes)  # type: ignore[arg-type]

    def at(self, ar_step: int) -> Trajectory:
        """Without what scoring an AR step does not read: maps of other steps, and z*."""
        maps = self.full_chains, self.full_latents
        chains, latents = ({k: v for k, v in recorded.items() if 0 <= ar_step - k <= 1} for recorded in maps)
        return replace(self, stitched=self.stitched[..., :0], full_chains=chains, full_latents=latents)

    def to(self, device: torch.device) -> Trajectory:
        """On a device; from pinned memory without waiting for the copy."""
        return Trajectory.from_tensors({k: v.to(device, non_blocking=v.is_pinned()) for k, v in self.tensors().items()})

    def pinned(self) -> Trajectory:
        """In page-locked memory of the CPU, from which a GPU can fetch while the program goes on."""
        return Trajectory.from_tensors({k: v.pin_memory() for k, v in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """Flat names to tensors, for checkpoints of rollouts that wait for their scores."""
        flat: dict[str, Tensor] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                flat[f.name] = value
            elif isinstance(value, dict):
                flat.update({f"{f.name}.{k}": v for k, v in value.items()})
        return flat

    @staticmethod
    def from_tensors(flat: dict[str, Tensor]) -> Trajectory:
        """The inverse of :meth:`tensors`."""
        plain = {k: v for k, v in flat.items() if "." not in k}
        nested: dict[str, dict[int, Tensor]] = {"full_chains": {}, "full_latents": {}}
        for name, value in flat.items():
            if "." in name:
                group, step = name.split(".")
                nested[group][int(step)] = value
        return Trajectory(**plain, **nested)  # type: ignore[arg-type]

    @staticmethod
    def cat(parts: Sequence[Trajectory]) -> Trajectory:
        """Join trajectories along the image dimension."""
        flats = [p.tensors() for p in parts]
        return Trajectory.from_tensors({k: torch.cat([f[k] for f in flats]) for k in flats[0]})


@dataclass(frozen=True)
class Queries:
    """Transitions of one AR step to be scored by the policy, flattened: only what the masks keep.

    The head sees ``x`` at diffusion step ``step`` under the condition of token ``token`` of image ``image``;
    ``target`` is the next state, whose log-probability is wanted.
    """

    image: Tensor
    """(Q,) int64 in [0, B)"""
    token: Tensor
    """(Q,) int64 in [0, N)"""
    step: Tensor
    """(Q,) int64 in [0, T): the diffusion step, in sampling order"""
    x: Tensor
    """(Q, C) float32: the state before the step"""
    target: Tensor
    """(Q, C) float32: the state after the step"""

    def __len__(self) -> int:
        return self.image.shape[0]

    def select(self, rows: Tensor | slice) -> Queries:
        return Queries(self.image[rows], self.token[rows], self.step[rows], self.x[rows], self.target[rows])

    @staticmethod
    def cat(parts: Sequence[Queries]) -> Queries:
        return Queries(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Queries)))
