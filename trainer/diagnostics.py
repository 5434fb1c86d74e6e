"""Which diffusion steps teach: the gradient's signal-to-noise ratio per step, from per-group gradients.

Each group of images (one prompt) gives one gradient of the policy term per diffusion step, all else as in training but
for the weights of the steps. Where noise^2 dwarfs signal^2, a step drowns the others: leave it out or weigh it down.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.algorithm.advantages import Advantages
from trainer.algorithm.objective import Objective, counts, loss, queries
from trainer.algorithm.signal import gradient_signal_from_sums
from trainer.algorithm.types import Trajectory
from trainer.evaluate import share
from trainer.rollout import Rollout, Sampler

AR_STEPS = 3
"""AR steps that a measurement looks at: of those that the rollout trains, evenly spaced."""


def measure_signal(
    sampler: Sampler, rollout: Rollout, advantages: Advantages, parameters: list[nn.Parameter]
) -> dict[str, Any] | None:
    """Signal^2 and noise^2 per diffusion step over up to ``report.snr_groups`` groups of each process.

    None where fewer than two groups carry a signal. Every process calls it; ``advantages`` is of the global batch.
    """
    accelerator, objective = sampler.accelerator, replace(sampler.objective, kl_beta=0.0)
    images = share(len(advantages.values), accelerator)
    values_B = advantages.values[images.start : images.stop].to(accelerator.device)
    signal_B = advantages.signal[images.start : images.stop].to(accelerator.device)
    size = sampler.config.train.group_size
    starts = [start for start in range(0, len(values_B), size) if signal_B[start : start + size].any()]
    groups = [slice(start, start + size) for start in starts[: sampler.config.report.snr_groups]]
    ar_steps = rollout.ar_steps[:: max(1, len(rollout.ar_steps) // AR_STEPS)][:AR_STEPS]

    steps: list[dict[str, Any]] = []
    total_groups = int(accelerator.reduce(torch.tensor([len(groups)], device=accelerator.device), "sum"))
    if total_groups < 2:
        return None
    for diffusion_step in sampler.policy.schedule.stochastic_steps:
        total = torch.zeros(sum(p.numel() for p in parameters), device=accelerator.device)
        squares = torch.zeros(1, device=accelerator.device)
        for group in groups:
            gradient = torch.zeros_like(total)
            for ar_step in ar_steps:
                part, uncertain = sampler.part(rollout, group, ar_step)
                gradient += group_gradient(
                    sampler, objective, part, ar_step, diffusion_step, uncertain,
                    rollout.seeds[group], values_B[group], signal_B[group], parameters,
                ) / len(ar_steps)  # fmt: skip
            total += gradient
            squares += gradient.square().sum()
        summed, squared = accelerator.reduce(total, "sum"), float(accelerator.reduce(squares, "sum"))
        measured = gradient_signal_from_sums(summed, squared, total_groups)
        steps.append(
            {
                "diffusion_step": diffusion_step,
                "signal2": measured.signal2,
                "noise2": measured.noise2,
                "snr": measured.snr,
            }
        )
    return {"groups": total_groups, "ar_steps": ar_steps, "steps": steps}


def group_gradient(
    sampler: Sampler,
    objective: Objective,
    part: Trajectory,
    ar_step: int,
    diffusion_step: int,
    uncertain_BN: Tensor,
    seeds: list[int],
    values_B: Tensor,
    signal_B: Tensor,
    parameters: list[nn.Parameter],
) -> Tensor:
    """(P,) gradient of one group's loss at one AR and one diffusion step, as a mean over the group's tokens."""
    schedule = sampler.policy.schedule
    rows = queries(
        part, ar_step, [diffusion_step], uncertain_BN, objective,
        schedule=schedule, step_weights_T=torch.ones(schedule.steps), seeds=seeds,
    )  # fmt: skip
    step, _ = rows.with_signal(signal_B)
    if len(step) == 0:
        return torch.zeros(sum(p.numel() for p in parameters), device=values_B.device)
    with torch.enable_grad(), sampler.accelerator.autocast():
        new = sampler.policy.forward(part, ar_step, step.rows, sampler.guided)
    result = loss(step, sampler.scored(new), values_B, counts(part, ar_step, objective, signal_B), 1, objective)
    gradients = torch.autograd.grad(result.loss, parameters, allow_unused=True)
    flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    return torch.cat([g.flatten().float() for g in flat])
