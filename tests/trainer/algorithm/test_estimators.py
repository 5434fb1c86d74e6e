"""What the objective's gradient estimates, on Gaussian policies whose exact gradient is known."""

import math
from dataclasses import replace

import pytest
import torch

from trainer.algorithm.objective import Counts, Objective, StepQueries, counts, loss, plan, queries
from trainer.algorithm.transitions import DDPM, FlowSDE, gaussian_log_prob, sample
from trainer.algorithm.types import Queries


def monte_carlo(samples):
    """Mean and its standard error."""
    return samples.mean().item(), samples.std().item() / math.sqrt(len(samples))


def test_policy_gradient_of_one_gaussian_step_is_unbiased(generator):
    # x' ~ N(a x + b z, s^2), reward -(x' - 2)^2: d E[r] / dz = -2 b (a E[x] + b z - 2)
    schedule, images, z0 = DDPM.cosine(steps=4, prediction="sample"), 40_000, 0.3
    t = schedule.tables
    a, b = t.x_coef[1].item(), t.prediction_coef[1].item()
    x = 0.5 + 0.2 * torch.randn(images, 1, generator=generator).double()
    step = torch.ones(images, dtype=torch.int64)
    z = torch.full((images, 1), z0, dtype=torch.float64, requires_grad=True)
    new = schedule.transition(z, x, step)
    target = sample(new, torch.randn(images, 1, generator=generator).double()).detach()
    reward = -((target - 2) ** 2).squeeze(1)
    image = torch.arange(images)
    rows = Queries(image, torch.zeros_like(image), step, x, target)
    scored = StepQueries(rows, torch.ones(images), torch.zeros(images))
    result = loss(scored, new, reward - reward.mean(), Counts(images, 0), 1, Objective(kl_beta=0))
    result.loss.backward()
    estimate, error = monte_carlo(-z.grad * images)
    exact = -2 * b * (a * 0.5 + b * z0 - 2)
    assert estimate == pytest.approx(exact, abs=4 * error)
    assert error < 0.03 * abs(exact)


@pytest.mark.parametrize("target", ["mean", "sample"])
@pytest.mark.parametrize("kind", ["ddpm", "flow"])
def test_bridges_estimate_the_gradient_of_the_elbo(toy, kind, target):
    # head z + x/2, clean token x_0: log p(x_s+1 | x_s) has mean q - b (truth - head), so on average over the bridge
    # d/dz = b^2 / var (E[truth - x/2] - z), E[truth] and E[x] from the marginal of x_s
    schedule = DDPM.cosine(steps=6, prediction="sample") if kind == "ddpm" else FlowSDE(torch.linspace(0.9, 0, 7))
    x0, z0, images = 0.8, 0.3, 20_000

    class Linear(toy):
        def transition(self, x_QC, z_QC, step_Q):
            return self.schedule.transition(z_QC + 0.5 * x_QC, x_QC, step_Q)

    policy = Linear(images=images, tokens=1, channels=1, ar_steps=1, extra=0, schedule=schedule)
    trajectory = policy.rollout()
    trajectory.tokens.fill_(x0)
    objective = Objective(mte_source="bridged", mte_trajectories=1, top_fraction=1, kl_beta=0, bridge_target=target)
    t = schedule.tables
    for s in (1, 3):
        weights = torch.ones(6)
        rows = queries(
            trajectory,
            0,
            [s],
            plan(trajectory, objective),
            objective,
            schedule=schedule,
            step_weights_T=weights,
            seeds=range(images),
        )
        z = torch.full((1, images, 1, 1), z0, dtype=torch.float64, requires_grad=True)
        result = loss(rows, policy.forward(z, 0, rows.rows), torch.ones(images), Counts(images, 0), 1, objective)
        result.loss.backward()
        estimate, error = monte_carlo(-z.grad.flatten() * images)
        mean_x = t.signal[s].item() * x0
        mean_truth = x0 if kind == "ddpm" else -x0  # E[noise - x_0]
        factor = t.prediction_coef[s].item() ** 2 / schedule.std[s].item() ** 2
        exact = factor * (mean_truth - 0.5 * mean_x - z0)
        assert estimate == pytest.approx(exact, abs=4 * error)
        assert error < 0.05 * abs(exact)


def image_gradients(policy, trajectory, objective, ar_step=1, steps=(1, 2, 3)):
    """(B,) each image's own gradient with respect to its condition, one number: the sum over tokens and channels."""
    everyone = torch.ones(len(trajectory), dtype=torch.bool)
    rows = queries(
        trajectory,
        ar_step,
        steps,
        plan(trajectory, objective),
        objective,
        schedule=policy.schedule,
        step_weights_T=torch.ones(policy.schedule.steps),
        seeds=policy.seeds,
    )
    z = policy.z_KBNC.clone().requires_grad_()
    denominators = counts(trajectory, ar_step, objective, everyone)
    new = policy.forward(z, ar_step, rows.rows)
    loss(rows, new, torch.ones(len(trajectory)), denominators, 1, objective).loss.backward()
    return -z.grad[ar_step].sum(dim=(1, 2)) * len(trajectory)


@pytest.fixture(scope="module")
def many(toy):
    """3,000 images from the same conditions, with 8 extra trajectories each."""
    policy = toy(images=3000, tokens=4, ar_steps=2, extra=8)
    policy.z_KBNC = policy.z_KBNC[:, :1].expand_as(policy.z_KBNC).contiguous()
    trajectory = policy.rollout()
    trajectory.predicted_at.fill_(1)
    trajectory.tokens.copy_(trajectory.tokens[:1].clone().expand_as(trajectory.tokens))
    fresh = [policy.chains(policy.z_KBNC[1]) for _ in range(8)]
    trajectory.extra_chains.copy_(torch.stack(fresh, dim=1))
    return policy, trajectory


@pytest.mark.parametrize("source", ["fresh", "bridged"])
def test_mte_variance_falls_as_one_over_s(many, source):
    policy, trajectory = many
    variance = {}
    for s in (1, 2, 4, 8):
        objective = Objective(mte_trajectories=s, mte_source=source, top_fraction=1, kl_beta=0, consistency=False)
        part = replace(trajectory, extra_chains=trajectory.extra_chains[:, :s])
        variance[s] = image_gradients(policy, part, objective).var().item()
    for s in (2, 4, 8):
        # the standard error of a ratio of two variances of 3,000 is about 4 %
        assert variance[1] / variance[s] == pytest.approx(s, rel=0.2)


def test_fresh_trajectories_of_the_same_policy_carry_no_signal_of_their_own(many):
    # the score of what was just sampled has mean zero, whatever the advantage it is given
    policy, trajectory = many
    objective = Objective(mte_trajectories=8, top_fraction=1, kl_beta=0, consistency=False)
    mean, error = monte_carlo(image_gradients(policy, trajectory, objective))
    bridged, bridged_error = monte_carlo(
        image_gradients(
            policy, trajectory, Objective(mte_trajectories=8, mte_source="bridged", top_fraction=1, kl_beta=0)
        )
    )
    assert abs(mean) < 4 * error
    assert abs(bridged) > 10 * bridged_error  # whereas the kept token pulls its condition


def test_the_posterior_mean_as_target_lowers_the_bridges_variance(many):
    policy, trajectory = many
    objective = Objective(mte_trajectories=2, mte_source="bridged", top_fraction=1, kl_beta=0, consistency=False)
    mean, sampled = (
        image_gradients(policy, trajectory, replace(objective, bridge_target=target)) for target in ("mean", "sample")
    )
    difference, error = monte_carlo(mean - sampled)
    assert abs(difference) < 4 * error
    assert mean.var() < 0.5 * sampled.var()


def test_scores_of_sampled_transitions_are_consistent(many):
    # E[log p] of what a Gaussian made is minus its entropy: -log s - log(2 pi e) / 2
    policy, trajectory = many
    x, target = trajectory.full_chains[1][:, 0, 1], trajectory.full_chains[1][:, 0, 2]
    step = torch.ones(len(x), dtype=torch.int64)
    g = policy.transition(x, policy.z_KBNC[1, :, 0], step)
    mean, error = monte_carlo(gaussian_log_prob(target, g).mean(dim=1))
    entropy = math.log(policy.schedule.std[1].item()) + 0.5 * math.log(2 * math.pi * math.e)
    assert mean == pytest.approx(-entropy, abs=4 * error)
    assert error < 0.02
