"""Which tokens count at an AR step: uncertainty, consistency and completion masks. All are (B, N) bool."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

TokenScope = Literal["predicted", "unknown"]
Which = Literal["most", "least"]


def uncertainty(latents_BSNC: Tensor) -> Tensor:
    """(B, N) >= 0: how much the final latents of S trajectories from one condition differ.

    The population standard deviation over S, averaged over channels, as in MAR-GRPO's code (there per latent pixel,
    here per token). Raises ValueError for S < 2.
    """
    if latents_BSNC.shape[1] < 2:
        raise ValueError(f"uncertainty needs at least 2 trajectories, got {latents_BSNC.shape[1]}")
    return latents_BSNC.std(dim=1, correction=0).mean(dim=-1)


def uncertain_mask(uncertainty_BN: Tensor, fraction: float, which: Which = "most") -> Tensor:
    """The given fraction of each image's tokens that are most or least uncertain.

    ``most``: floor(fraction N) tokens, at least one, as published (whose extra random position per image is a fault
    and left out). ``least``: ceil(fraction N), so that ``least`` at 1 - f is the exact complement of ``most`` at f.
    Among equals the lower token index counts as the more uncertain. Raises ValueError outside 0 < fraction <= 1.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"the fraction of tokens must be in (0, 1], got {fraction}")
    tokens = uncertainty_BN.shape[1]
    slack = 1e-9  # 0.29 * 100 is 28.999999999999996
    if which == "least":
        top = tokens - max(1, math.ceil(tokens * fraction - slack))
    else:
        top = max(1, math.floor(tokens * fraction + slack))
    order_BN = uncertainty_BN.argsort(dim=1, descending=True, stable=True)
    most_BN = torch.zeros_like(uncertainty_BN, dtype=torch.bool).scatter_(1, order_BN[:, :top], True)
    return ~most_BN if which == "least" else most_BN


def completion_mask(predicted_at_BN: Tensor, ar_step: int, scope: TokenScope) -> Tensor:
    """``unknown`` (published): all tokens unknown at the step; ``predicted``: those that it predicts and keeps."""
    return predicted_at_BN >= ar_step if scope == "unknown" else predicted_at_BN == ar_step


def consistency_mask(
    latents_now_BNC: Tensor,
    latents_before_BNC: Tensor,
    final_BNC: Tensor,
    predicted_at_BN: Tensor,
    ar_step: int,
    threshold: float = 0.0,
) -> Tensor:
    """Tokens whose cosine similarity to the final latent rose by more than ``threshold`` at this AR step, and those
    predicted at this very step.

    ``latents_now``, ``latents_before``: the latent maps after AR steps k and k-1. For k < 2 the mask is off: all True.
    """
    if ar_step < 2:
        return torch.ones_like(predicted_at_BN, dtype=torch.bool)
    now_BN = cosine_similarity(latents_now_BNC, final_BNC, dim=-1)
    before_BN = cosine_similarity(latents_before_BNC, final_BNC, dim=-1)
    return (now_BN - before_BN > threshold) | (predicted_at_BN == ar_step)
