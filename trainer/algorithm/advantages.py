"""Group-relative advantages (GRPO, Shao et al. 2024), from one reward or several, where scores may be missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-4
"""Added to the standard deviation, as published."""
EQUAL = 1e-6
"""A group whose standard deviation is at most this is one of equal rewards: it carries no signal."""


@dataclass(frozen=True)
class Advantages:
    values: Tensor
    """(B,) float32; 0 where there is no signal."""
    signal: Tensor
    """(B,) bool: the images that the policy term counts."""


def group_advantages(
    scores_BR: Tensor,
    valid_BR: Tensor,
    group_size: int,
    weights: Sequence[float],
    mix: Literal["sum", "gdpo"] = "sum",
) -> Advantages:
    """Advantage of each image within its group of ``group_size`` consecutive images.

    ``scores_BR``: R rewards per image; ``valid_BR``: False where a score is missing (its number is then ignored).
    An image with any score missing is left out: of the statistics and of the signal.

    ``sum``: A = (r - mean) / (std + 1e-4) of the weighted sum r, with the sample standard deviation (n - 1), as in
    MAR-GRPO's code. ``gdpo`` (Liu et al. 2026): each reward is normalised so within the group, the weighted sum of
    the results is normalised once more over the whole batch, so that its size does not grow with R. Departure from
    GDPO: that last step looks at the images with signal only, so that dead groups do not change the scale.

    Groups with fewer than two valid images, or whose rewards are all equal, carry no signal.
    Call it with the global batch: GDPO's last step needs all of it.

    Raises ValueError for shapes that do not fit and for valid scores that are not finite.
    """
    _check(scores_BR, valid_BR, group_size, weights)
    images = scores_BR.shape[0]
    valid_B = valid_BR.all(dim=1)
    scores_BR = torch.where(valid_B[:, None], scores_BR.double(), 0.0)
    weights_R = torch.tensor(list(weights), dtype=torch.float64, device=scores_BR.device)
    if mix == "sum":
        scores_BR, weights_R = (scores_BR @ weights_R)[:, None], torch.ones_like(weights_R[:1])

    scores_BGR = scores_BR.view(-1, group_size, scores_BR.shape[1])
    valid_BG1 = valid_B.view(-1, group_size, 1)
    count = valid_BG1.sum(dim=1, keepdim=True)
    mean = scores_BGR.sum(dim=1, keepdim=True) / count.clamp(min=1)
    centred_BGR = torch.where(valid_BG1, scores_BGR - mean, 0.0)
    std = (centred_BGR.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    differs = std > EQUAL
    normalised_BGR = torch.where(differs, centred_BGR / (std + EPSILON), 0.0)
    # a reward of weight 0 must not make a dead group count
    counts_BG = (valid_BG1 & differs & (weights_R != 0)).any(dim=2)
    values_B, signal_B = (normalised_BGR @ weights_R).view(images), counts_BG.reshape(images)

    if mix == "gdpo" and int(signal_B.sum()) > 1:
        seen = values_B[signal_B]
        values_B = (values_B - seen.mean()) / (seen.std() + EPSILON)
    return Advantages(torch.where(signal_B, values_B, 0.0).float(), signal_B)


def _check(scores_BR: Tensor, valid_BR: Tensor, group_size: int, weights: Sequence[float]) -> None:
    if scores_BR.ndim != 2 or valid_BR.shape != scores_BR.shape or valid_BR.dtype != torch.bool:
        raise ValueError(
            "scores and their boolean validity must both be (images, rewards), "
            f"got {tuple(scores_BR.shape)} and {tuple(valid_BR.shape)} {valid_BR.dtype}"
        )
    if len(weights) != scores_BR.shape[1]:
        raise ValueError(f"{scores_BR.shape[1]} rewards need as many weights, got {len(weights)}")
    if group_size < 2 or scores_BR.shape[0] % group_size:
        raise ValueError(f"{scores_BR.shape[0]} images do not divide into groups of {group_size} (at least 2)")
    if not bool(torch.isfinite(scores_BR[valid_BR]).all()):
        raise ValueError("a score is not finite; mark failures as not valid, they must not be numbers")
