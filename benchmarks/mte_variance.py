"""The MTE gradient's variance against S, and its signal, on the shipped base of the small policy.

For one AR step of a fixed set of rollouts with real advantages (the shapes reward, scored in this process), the
backbone's gradient of the policy term is computed again and again with redrawn trajectories. ``noise^2``: the trace of
its variance over redraws, as a multiple of S = 1; ``signal^2``: the squared norm of its mean, unbiased.

    python benchmarks/mte_variance.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from reward_server.rewards.shapes import parse, verify
from trainer.algorithm.advantages import group_advantages
from trainer.algorithm.objective import Counts, Objective, counts, loss, plan, queries
from trainer.algorithm.schedule import diffusion_step_weights
from trainer.algorithm.seeds import derive_seed
from trainer.algorithm.signal import gradient_signal
from trainer.algorithm.types import Trajectory
from trainer.policies.small import SmallPolicy
from trainer.shapes import split_scenes

REDRAWS, AR_STEP, GROUPS, GROUP_SIZE, STEPS = 24, 3, 6, 8, list(range(8))

SOURCES: list[tuple[Literal["fresh", "bridged"], Literal["mean", "sample"]]] = [
    ("fresh", "mean"),
    ("bridged", "sample"),
    ("bridged", "mean"),
]


def gradient(
    policy: SmallPolicy,
    trajectory: Trajectory,
    advantages_B: Tensor,
    signal_B: Tensor,
    objective: Objective,
    redraw: int,
) -> Tensor:
    """(P,) backbone gradient with the trajectories of one redraw."""
    seeds = [derive_seed("redraw", redraw, i) for i in range(len(trajectory))]
    if objective.fresh_trajectories:
        extra = policy.extra_trajectories(trajectory, objective.fresh_trajectories, seeds)
        trajectory = replace(trajectory, extra_chains=extra)
    weights = diffusion_step_weights(policy.schedule, "variance", STEPS)
    rows = queries(
        trajectory, AR_STEP, STEPS, plan(trajectory, objective), objective,
        schedule=policy.schedule, step_weights_T=weights, seeds=seeds,
    )  # fmt: skip
    step, _ = rows.with_signal(signal_B)
    denominators: Counts = counts(trajectory, AR_STEP, objective, signal_B)
    new = policy(trajectory, AR_STEP, step.rows, guided=True)
    result = loss(step, new, advantages_B, denominators, 1, objective)
    parameters = list(policy.backbone_parameters())
    parts = torch.autograd.grad(result.loss, parameters)
    return torch.cat([g.flatten() for g in parts])


def main() -> None:
    """The command."""
    policy = SmallPolicy.load(Path(__file__).parent.parent / "trainer/policies/weights/small.safetensors")
    scenes = split_scenes()[0][72 :: len(split_scenes()[0]) // GROUPS][:GROUPS]
    prompts = [scene.prompt for scene in scenes for _ in range(GROUP_SIZE)]
    trajectory = policy.rollout(prompts, range(len(prompts)))
    claims = [claim for prompt in prompts if (claim := parse(prompt)) is not None]
    scores = [verify(i, claim).value for i, claim in zip(policy.decode(trajectory.tokens), claims, strict=True)]
    table = torch.tensor([[score or 0.0] for score in scores], dtype=torch.float64)  # verify always gives a number
    advantages = group_advantages(table, torch.ones_like(table, dtype=torch.bool), GROUP_SIZE, [1.0])
    print(f"{GROUPS} groups of {GROUP_SIZE}, AR step {AR_STEP}, diffusion steps 0-7, {REDRAWS} redraws\n")
    print("| trajectories | S | noise^2, of S = 1 | signal^2 / noise^2 |\n|---|---|---|---|")
    for source, target in SOURCES:
        first = 0.0
        for s in (1, 2, 4, 8):
            objective = Objective(
                mte_trajectories=s, mte_source=source, bridge_target=target, top_fraction=1.0,
                consistency=False, token_scope="predicted", kl_beta=0.0,
            )  # fmt: skip
            drawn = [
                gradient(policy, trajectory, advantages.values, advantages.signal, objective, r) for r in range(REDRAWS)
            ]
            measured = gradient_signal(torch.stack(drawn))
            first = first or measured.noise2
            name = source if source == "fresh" else f"{source}, target: {target}"
            print(f"| {name} | {s} | {measured.noise2 / first:.3f} | {measured.snr:.3f} |", flush=True)


if __name__ == "__main__":
    main()
