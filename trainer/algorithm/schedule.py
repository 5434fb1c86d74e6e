"""Which tokens are predicted when, and which AR and diffusion steps are trained with what weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from trainer.algorithm.transitions import Schedule

StepChoice = int | Literal["all"] | Sequence[int]


def tokens_per_ar_step(tokens: int, steps: int, *, rounding: Literal["floor", "round"] = "floor") -> list[int]:
    """How many of N tokens each of K AR steps predicts and keeps: the cosine schedule; sums to N.

    After step k (from 0), N cos(pi/2 (k+1)/K) tokens stay masked. ``floor``: rounded down, with at least one token a
    step (LTH14's MAR); needs K <= N. ``round``: to the nearest (half to even), steps without a token left out (NOVA),
    so the list may be shorter than K. Raises ValueError for numbers that allow no schedule.
    """
    if tokens < 1 or steps < 1:
        raise ValueError(f"tokens and AR steps must be positive, got {tokens} and {steps}")
    if rounding == "round":
        masked = [round(tokens * math.cos(math.pi / 2 * k / steps)) for k in range(steps + 1)]
        return [n for n in (a - b for a, b in pairwise(masked)) if n > 0]
    if steps > tokens:
        raise ValueError(f"{steps} AR steps cannot each predict at least one of {tokens} tokens; use at most {tokens}")
    counts, masked_before = [], tokens
    for k in range(1, steps):
        wanted = math.floor(tokens * math.cos(math.pi / 2 * k / steps))
        masked_now = min(masked_before - 1, wanted)  # never below K - k, since cos is concave and K <= N
        counts.append(masked_before - masked_now)
        masked_before = masked_now
    return [*counts, masked_before]


def predicted_at(order_BN: Tensor, counts: Sequence[int]) -> Tensor:
    """(B, N) int64: the AR step of each token, given the order in which tokens are predicted.

    ``order_BN[b, i]`` is the token that comes i-th; ``counts`` is :func:`tokens_per_ar_step`'s.
    """
    if sum(counts) != order_BN.shape[1]:
        raise ValueError(f"the AR steps predict {sum(counts)} tokens, the order holds {order_BN.shape[1]}")
    step_of_rank_N = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(list(counts)))
    step_of_rank_BN = step_of_rank_N.to(order_BN.device).expand_as(order_BN)
    return torch.empty_like(order_BN).scatter_(1, order_BN, step_of_rank_BN)


def choose_ar_steps(total: int, choice: StepChoice, generator: torch.Generator) -> list[int]:
    """The AR steps of [0, K) to train: a random subset of that size (published: 12), ``"all"``, or those listed."""
    return _choose(range(total), choice, generator, "AR step")


def choose_diffusion_steps(schedule: Schedule, choice: StepChoice, generator: torch.Generator) -> list[int]:
    """The diffusion steps to train, of those with noise: a random subset of that size (published: 10 of 25),
    ``"all"``, or those listed. A number above what there is takes all."""
    return _choose(schedule.stochastic_steps, choice, generator, "diffusion step with noise")


def subset(steps: Sequence[int], count: int, generator: torch.Generator) -> list[int]:
    """``count`` of the steps (all, when there are fewer) drawn without replacement, in increasing order."""
    if count < 1:
        raise ValueError(f"at least one step must be chosen, got {count}")
    drawn = torch.randperm(len(steps), generator=generator)[:count].tolist()
    return sorted(steps[i] for i in drawn)


def _choose(steps: Sequence[int], choice: StepChoice, generator: torch.Generator, what: str) -> list[int]:
    if choice == "all":
        return list(steps)
    if isinstance(choice, int):
        return subset(steps, choice, generator)
    listed = sorted(set(choice))
    wrong = [s for s in listed if s not in steps]
    if wrong or not listed:
        raise ValueError(f"no {what}: {wrong or 'empty list'}; there are {list(steps)}")
    return listed


def diffusion_step_weights(
    schedule: Schedule, weights: Literal["uniform", "variance"] | Sequence[float], steps: Sequence[int]
) -> Tensor:
    """(T,) float32: the weight of each diffusion step, 0 outside ``steps``, mean 1 over them.

    With mean 1 over the steps that *may* be chosen, averaging over a random subset of them estimates the weighted
    mean over all without bias. ``variance`` weighs a step by its std^2, which cancels the 1/var of the score.
    A list gives T weights, for instance from :func:`trainer.algorithm.signal.snr_weights`.
    """
    if isinstance(weights, str):
        if weights not in ("uniform", "variance"):
            raise ValueError(f"diffusion step weights: 'uniform', 'variance' or a list expected, got {weights!r}")
        raw_T = torch.ones(schedule.steps, dtype=torch.float64) if weights == "uniform" else schedule.std**2
    else:
        raw_T = torch.tensor(list(weights), dtype=torch.float64)
        if len(raw_T) != schedule.steps:
            raise ValueError(f"one weight for each of the {schedule.steps} diffusion steps expected, got {len(raw_T)}")
    chosen = torch.zeros(schedule.steps, dtype=torch.bool)
    chosen[list(steps)] = True
    weight_T = torch.where(chosen, raw_T, 0.0)
    if not bool(torch.isfinite(weight_T).all()) or bool((weight_T < 0).any()) or not float(weight_T.sum()) > 0:
        raise ValueError(f"diffusion step weights must be finite, not negative and not all 0: {raw_T.tolist()}")
    return (weight_T * len(set(steps)) / weight_T.sum()).float()
