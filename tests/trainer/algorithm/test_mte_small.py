"""MTE on the small policy: the variance of the backbone's gradient over redrawn trajectories of one image."""

from dataclasses import replace

import pytest
import torch

from trainer.algorithm.objective import Objective, counts, loss, plan, queries
from trainer.algorithm.signal import gradient_signal
from trainer.policies.small import SmallConfig, SmallPolicy

REDRAWS, AR_STEP, STEPS = 64, 1, [1, 2, 3]


@pytest.fixture(scope="module")
def redrawn():
    """The policy (random weights), and one image's rollout with REDRAWS x 8 independent extra trajectories."""
    torch.manual_seed(0)
    policy = SmallPolicy(
        SmallConfig(grid=2, channels=8, width=32, depth=2, heads=2, head_width=32), ar_steps=3, diffusion_steps=6
    )
    for parameter in policy.parameters():  # the head starts with closed gates: open them
        torch.nn.init.normal_(parameter, std=0.2)
    one = policy.rollout(["a red circle"], [7])
    copies = one.select(torch.zeros(REDRAWS, dtype=torch.int64))
    return policy, replace(copies, extra_chains=policy.extra_trajectories(copies, 8, range(REDRAWS)))


def variance(policy, trajectory, objective):
    """Trace of the covariance of the backbone's gradient over the redraws."""
    gradients = []
    for redraw in range(REDRAWS):
        part = trajectory.select([redraw])
        step = queries(
            part,
            AR_STEP,
            STEPS,
            plan(part, objective),
            objective,
            schedule=policy.schedule,
            step_weights_T=torch.ones(6),
            seeds=[redraw],
        )
        denominators = counts(part, AR_STEP, objective, torch.ones(1, dtype=torch.bool))
        new = policy(part, AR_STEP, step.rows, guided=False)
        result = loss(step, new, torch.ones(1), denominators, 1, objective)
        parameters = list(policy.backbone_parameters())
        gradient = torch.autograd.grad(result.loss, parameters, allow_unused=True)
        gradients.append(torch.cat([g.flatten() for g in gradient if g is not None]))
    return gradient_signal(torch.stack(gradients)).noise2


@pytest.mark.parametrize("source", ["fresh", "bridged"])
def test_gradient_variance_falls_as_one_over_s(redrawn, source):
    policy, trajectory = redrawn
    noise2 = {}
    for s in (1, 2, 4, 8):
        objective = Objective(mte_trajectories=s, mte_source=source, top_fraction=1, kl_beta=0, consistency=False)
        part = replace(trajectory, extra_chains=trajectory.extra_chains[:, :s])
        noise2[s] = variance(policy, part, objective)
    for s in (2, 4, 8):
        assert noise2[1] / noise2[s] == pytest.approx(s, rel=0.35)
