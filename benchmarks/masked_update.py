"""Time of the head's part of an update: masks before the head (what the trainer does) against masks after it.

The naive way scores every token on the rollout's trajectory and on all S extra ones, then multiplies by the masks, as
MAR-GRPO's code does. Both ways are timed in turn, in one thread, and must give the same gradient.

    python benchmarks/masked_update.py
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from trainer.algorithm.objective import Counts, Objective, StepQueries, counts, loss, plan, queries
from trainer.algorithm.schedule import diffusion_step_weights, predicted_at, subset, tokens_per_ar_step
from trainer.algorithm.selection import completion_mask
from trainer.algorithm.transitions import DDPM
from trainer.algorithm.types import Gaussian, Queries, Trajectory

IMAGES, TOKENS, CHANNELS, AR_STEPS, DIFFUSION_STEPS, EXTRA, WIDTH = 1, 256, 16, 64, 25, 3, 256
AR_STEPS_TRAINED, DIFFUSION_STEPS_TRAINED, ROUNDS = 6, 5, 3


class Head(nn.Module):
    """Per-token MLP on (x, z, time): three residual blocks, as wide as the condition; frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(CHANNELS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(3)
        )
        self.outward = nn.Linear(WIDTH, CHANNELS)
        self.requires_grad_(False)

    def forward(self, x_QC: Tensor, z_QD: Tensor, time_Q: Tensor) -> Tensor:
        h = self.inward(x_QC) + z_QD + time_Q.unsqueeze(-1) / 1000
        for block in self.blocks:
            h = h + block(h)
        return cast(Tensor, self.outward(h))


def rollout(generator: torch.Generator) -> Trajectory:
    """Random numbers of a rollout's shapes: the time does not depend on what they are."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    order_BN = torch.rand(IMAGES, TOKENS, generator=generator).argsort(dim=1)
    chains_BNTC = normal(IMAGES, TOKENS, DIFFUSION_STEPS + 1, CHANNELS)
    return Trajectory(
        prompt_ids=torch.zeros(IMAGES, 1, dtype=torch.int64),
        tokens=chains_BNTC[:, :, -1],
        predicted_at=predicted_at(order_BN, tokens_per_ar_step(TOKENS, AR_STEPS)),
        chain=chains_BNTC,
        stitched=normal(IMAGES, 1, TOKENS, WIDTH),
        full_chains=dict.fromkeys(range(AR_STEPS), chains_BNTC),
        extra_chains=normal(IMAGES, EXTRA, TOKENS, DIFFUSION_STEPS + 1, CHANNELS),
    )


def naive_rows(trajectory: Trajectory, ar_step: int, steps: list[int], objective: Objective) -> StepQueries:
    """All tokens on all 1 + S trajectories; the masks are zeros among the weights."""
    uncertain_BN, unknown_BN = plan(trajectory, objective), completion_mask(trajectory.predicted_at, ar_step, "unknown")
    assert trajectory.extra_chains is not None
    parts, weights = [], []
    for s in range(1 + EXTRA):
        chain_BNTC = trajectory.full_chains[ar_step] if s == 0 else trajectory.extra_chains[:, s - 1]
        mask_BN = unknown_BN & (~uncertain_BN if s == 0 else uncertain_BN)
        for t in steps:
            image_Q, token_Q = torch.ones_like(mask_BN).nonzero(as_tuple=True)
            x_QC, target_QC = chain_BNTC[:, :, t].flatten(0, 1), chain_BNTC[:, :, t + 1].flatten(0, 1)
            parts.append(Queries(image_Q, token_Q, torch.full_like(image_Q, t), x_QC, target_QC))
            weights.append(mask_BN.flatten() / len(steps) / (1 if s == 0 else EXTRA))
    rows = Queries.cat(parts)
    return StepQueries(rows, torch.cat(weights), torch.zeros(len(rows)))


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    head, schedule = Head(), DDPM.cosine(steps=DIFFUSION_STEPS)
    trajectory = rollout(generator)
    objective = Objective(kl_beta=0, consistency=False, mte_trajectories=EXTRA)
    everyone = torch.ones(IMAGES, dtype=torch.bool)
    ar_steps = [round(AR_STEPS * (i + 0.5) / AR_STEPS_TRAINED) for i in range(AR_STEPS_TRAINED)]
    steps = subset(schedule.stochastic_steps[2:], DIFFUSION_STEPS_TRAINED, generator)
    weights_T = diffusion_step_weights(schedule, "uniform", steps)

    def masked_first(k: int) -> StepQueries:
        uncertain_BN = plan(trajectory, objective)
        return queries(
            trajectory,
            k,
            steps,
            uncertain_BN,
            objective,
            schedule=schedule,
            step_weights_T=weights_T,
            seeds=[0] * IMAGES,
        )

    def update(build: Callable[[int], StepQueries]) -> tuple[Tensor, int, float]:
        """Gradient of the condition, rows scored, seconds."""
        z_BND = trajectory.stitched[:, 0].clone().requires_grad_()
        rows, start = 0, time.perf_counter()
        for k in ar_steps:
            step = build(k)
            q = step.rows
            prediction_QC = head(q.x, z_BND[q.image, q.token], schedule.timesteps[q.step])
            new: Gaussian = schedule.transition(prediction_QC, q.x, q.step)
            denominators: Counts = counts(trajectory, k, objective, everyone)
            result = loss(step, new, torch.ones(IMAGES), denominators, len(ar_steps), objective)
            torch.autograd.backward(result.loss)
            rows += len(step)
        assert z_BND.grad is not None
        return z_BND.grad, rows, time.perf_counter() - start

    ways = {"naive": lambda k: naive_rows(trajectory, k, steps, objective), "masked first": masked_first}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gradients, rows = {}, {}
    for turn in range(1 + ROUNDS):
        for name, build in ways.items():
            gradients[name], rows[name], spent = update(build)
            if turn > 0:  # the first turn warms up
                seconds[name].append(spent)
    torch.testing.assert_close(gradients["masked first"], gradients["naive"], rtol=1e-4, atol=1e-6)

    unknown = statistics.mean(int((trajectory.predicted_at >= k).sum()) / IMAGES / TOKENS for k in ar_steps)
    top = math.floor(objective.top_fraction * TOKENS) / TOKENS
    print(f"{TOKENS} tokens, S = {EXTRA}, top {top:.0%}, {unknown:.0%} of the tokens unknown on average, 1 thread")
    for name in ways:
        print(f"{name:>13}: {rows[name]:7d} rows, {statistics.median(seconds[name]):.3f} s (median of {ROUNDS})")
    time_ratio = statistics.median(seconds["naive"]) / statistics.median(seconds["masked first"])
    print(f"naive / masked first: rows {rows['naive'] / rows['masked first']:.2f}, time {time_ratio:.2f}")


if __name__ == "__main__":
    main()
