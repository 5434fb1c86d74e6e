"""What a model family must offer to be trained: the policy protocol.

The family NAME is the class NamePolicy of ``trainer/policies/name.py``. A policy is a ``torch.nn.Module`` whose
``forward`` scores transitions, so that DDP and FSDP wrap it as they wrap any module. Sampling and scoring go through
the same head function, so that the log-probability of what was sampled cannot drift from what is trained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

from trainer.algorithm.transitions import Schedule
from trainer.algorithm.types import Gaussian, Queries, Trajectory


class Reference(Protocol):
    """The frozen policy that KL is measured against: all that is asked of it."""

    def forward(self, trajectory: Trajectory, ar_step: int, queries: Queries, guided: bool) -> Gaussian:
        """As :meth:`Policy.forward`."""
        ...


@runtime_checkable
class Policy(Protocol):
    """A masked autoregressive image model with a diffusion head (see :mod:`trainer.algorithm.types` for shapes)."""

    tokens: int
    """N"""
    channels: int
    """C"""
    ar_steps: int
    """K"""
    head_rows: int
    """Transitions that the head scores at once with gradient, which bounds what it keeps for the backward pass."""

    @property
    def schedule(self) -> Schedule:
        """The head's diffusion: T steps, their transitions and bridges."""
        ...

    @classmethod
    def load(
        cls, source: str | Path, *, ar_steps: int = ..., diffusion_steps: int = ..., guidance: float = ...
    ) -> Policy:
        """Read weights, in evaluation mode on the CPU: a folder in the family's official layout, a hub id (from the
        local cache), or a file of :meth:`save`. ``ar_steps`` (K), ``diffusion_steps`` (T) and ``guidance`` (1 = none)
        have defaults of the family's own; further keyword arguments are its ``policy.options``. Raises
        FileNotFoundError that says how to get what is missing, or ValueError if the weights are not of this family or
        a setting does not fit them."""
        ...

    def save(self, path: Path, note: dict[str, str] | None = None) -> None:
        """Write weights that :meth:`load` reads, with a note of where they come from."""
        ...

    def restore(self, path: Path) -> None:
        """Read in place the weights that :meth:`save` of the same model wrote. Raises RuntimeError if they do not
        fit, OSError or SafetensorError if the file cannot be read."""
        ...

    def export(self, folder: Path) -> None:
        """Write the checkpoint in the family's official layout, which :meth:`load` reads, too. Raises
        FileNotFoundError or ValueError if the frozen parts cannot be had."""
        ...

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Raises ValueError naming the first prompt that the model cannot read, and why."""
        ...

    def rollout(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        full_chains_at: Collection[int] = (),
        full_latents_at: Collection[int] = (),
    ) -> Trajectory:
        """Sample one image per prompt without gradient, given prompts that :meth:`check_prompts` accepts. Image i
        depends on prompt i and seed i alone, not on the rest of the batch. ``full_chains_at`` and
        ``full_latents_at`` name the AR steps at which the head runs on all unknown tokens and the maps are
        recorded; elsewhere it runs on the kept tokens only."""
        ...

    def extra_trajectories(self, trajectory: Trajectory, count: int, seeds: Sequence[int]) -> Tensor:
        """(B, S, N, T+1, C): S = ``count`` fresh diffusion chains for every token from ``trajectory.stitched``,
        without gradient; trajectory s of image i depends on seed i and s alone."""
        ...

    def forward(self, trajectory: Trajectory, ar_step: int, queries: Queries, guided: bool) -> Gaussian:
        """Mean and std of the queried transitions, with gradient. One backbone pass at AR step ``ar_step`` over
        all images of the trajectory, then the head on the queries alone. ``guided``: apply classifier-free
        guidance as in sampling; otherwise the conditional half alone."""
        ...

    def decode(self, tokens: Tensor) -> np.ndarray:
        """(B, N, C) latents -> (B, height, width, 3) uint8 images."""
        ...

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the diffusion head (frozen by MAR-GRPO)."""
        ...

    def backbone_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the backbone: those, and only those, that a gradient reaches through z."""
        ...
