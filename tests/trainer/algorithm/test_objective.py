"""The objective against a naive reference (score everything, then multiply by masks), and by hand."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.algorithm.objective import (
    Counts,
    Objective,
    StepQueries,
    counts,
    divergence,
    loss,
    plan,
    queries,
    token_masks,
)
from trainer.algorithm.schedule import diffusion_step_weights
from trainer.algorithm.seeds import generator
from trainer.algorithm.transitions import gaussian_log_prob
from trainer.algorithm.types import Gaussian, Queries

AR_STEPS, DIFFUSION_STEPS = [1, 2, 3], [0, 2, 3]
ADVANTAGES = torch.tensor([1.2, -0.7, 0.0, 0.4])
SIGNAL = ADVANTAGES != 0
UNIFORM = [1.0, 1.0, 1.0, 1.0, 0.0]

VARIANTS = {
    "mar-grpo": Objective(),
    "no kl": Objective(kl_beta=0),
    "grpo": Objective(mte_trajectories=0, consistency=False),
    "mte on all": Objective(top_fraction=1, consistency=False),
    "mte on all, no kl": Objective(top_fraction=1, kl_beta=0),
    "mte on the least": Objective(top_fraction=0.7, which="least", consistency=False),
    "bridged mean": Objective(mte_source="bridged", top_fraction=0.5),
    "bridged sample": Objective(mte_source="bridged", top_fraction=0.5, bridge_target="sample"),
    "predicted only": Objective(token_scope="predicted"),
    "threshold": Objective(consistency_threshold=0.2, kl_form="gaussian", kl_beta=0.5),
    "clipped": Objective(clip_range=(0.2, 0.1)),
    "token ratio": Objective(ratio="token", clip_range=(0.2, 0.1), kl_beta=0),
}


def step_queries(toy, trajectory, k, objective, weights=UNIFORM, steps=DIFFUSION_STEPS, seeds=None, uncertain=None):
    return queries(
        trajectory,
        k,
        steps,
        plan(trajectory, objective) if uncertain is None else uncertain,
        objective,
        schedule=toy.schedule,
        step_weights_T=torch.tensor(weights),
        seeds=toy.seeds if seeds is None else seeds,
    )


def masked_first(toy, z, trajectory, objective, weights=UNIFORM, old_z=None, ref_z=None):
    total = 0
    for k in AR_STEPS:
        step = step_queries(toy, trajectory, k, objective, weights)
        old = None if old_z is None else gaussian_log_prob(step.rows.target, toy.forward(old_z, k, step.rows))
        step, index = step.with_signal(SIGNAL)
        total += loss(
            step,
            toy.forward(z, k, step.rows),
            ADVANTAGES,
            counts(trajectory, k, objective, SIGNAL),
            len(AR_STEPS),
            objective,
            old_log_prob=None if old is None else old[index],
            reference=toy.forward(ref_z, k, step.kl_queries()) if objective.kl_beta else None,
        ).loss
    return total


def dense_gaussian(toy, z_BNC, x_BSNDC):
    """Mean, std of every token at the diffusion steps: (B, S, N, D, C)."""
    step_BSND = torch.tensor(DIFFUSION_STEPS).expand(x_BSNDC.shape[:-1])
    z_BSNDC = z_BNC[:, None, :, None].expand_as(x_BSNDC)
    c = x_BSNDC.shape[-1]
    g = toy.transition(x_BSNDC.reshape(-1, c), z_BSNDC.reshape(-1, c), step_BSND.flatten())
    return Gaussian(g.mean.view_as(x_BSNDC), g.std.view(*x_BSNDC.shape[:-1], 1))


def naive(toy, z, trajectory, objective, weights=UNIFORM, old_z=None, ref_z=None):
    """The formulas of the module's docstring on dense tensors, masks multiplied in at the end."""
    images, tokens, channels = toy.shape
    steps = torch.tensor(DIFFUSION_STEPS)
    weight_D1 = torch.tensor(weights, dtype=torch.float64)[steps][:, None]
    a = ADVANTAGES.double().view(-1, 1, 1, 1, 1)

    uncertain = torch.zeros(images, tokens, dtype=torch.bool)
    if objective.mte_trajectories:
        final = trajectory.extra_chains[:, :, :, -1]
        spread = ((final - final.mean(1, keepdim=True)) ** 2).mean(1).sqrt().mean(-1)
        for b in range(images):
            ranked = sorted(range(tokens), key=lambda n, b=b: spread[b, n], reverse=objective.which == "most")
            for n in ranked[
                : math.ceil(0.7 * tokens) if objective.which == "least" else int(objective.top_fraction * tokens)
            ]:
                uncertain[b, n] = True

    def surrogate(z_BNC, old_BNC, x, target):
        new = gaussian_log_prob(target, dense_gaussian(toy, z_BNC, x))
        old = new.detach() if old_BNC is None else gaussian_log_prob(target, dense_gaussian(toy, old_BNC, x))
        log_ratio = new - old
        if objective.ratio == "token":
            log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(new)
        r = log_ratio.exp()
        if objective.clip_range is None:
            return r * a
        low, high = objective.clip_range
        return -torch.maximum(-a * r, -a * r.clamp(1 - low, 1 + high))

    total = 0
    for k in AR_STEPS:
        old_k = None if old_z is None else old_z[k]
        completion = (
            (trajectory.predicted_at >= k) if objective.token_scope == "unknown" else trajectory.predicted_at == k
        )
        kept = completion.clone()
        if objective.consistency and k > 1:
            for b in range(images):
                for n in range(tokens):
                    x0 = trajectory.tokens[b, n]
                    now, before = trajectory.full_latents[k][b, n], trajectory.full_latents[k - 1][b, n]
                    rise = now @ x0 / now.norm() / x0.norm() - before @ x0 / before.norm() / x0.norm()
                    at_this_step = trajectory.predicted_at[b, n] == k
                    kept[b, n] &= bool(rise > objective.consistency_threshold) or bool(at_this_step)
        mask = kept & SIGNAL[:, None]

        chain = trajectory.full_chains[k] if objective.token_scope == "unknown" else trajectory.chain
        x, target = chain[:, None, :, steps], chain[:, None, :, steps + 1]
        j = surrogate(z[k], old_k, x, target)[:, 0]
        if objective.mte_trajectories:
            if objective.mte_source == "fresh":
                extra = trajectory.extra_chains
                mte_x, mte_target = extra[:, :, :, steps], extra[:, :, :, steps + 1]
            else:
                mte_x, mte_target = dense_bridges(toy, trajectory, kept & uncertain, k, objective, weights)
            j_mte = surrogate(z[k], old_k, mte_x, mte_target).mean(1)
            m = uncertain[:, :, None, None].double()
            j = (1 - m) * j + m * j_mte
        total -= (j * weight_D1 * mask[:, :, None, None]).sum() / (mask.sum() * len(steps) * channels)

        if objective.kl_beta:
            new, ref = dense_gaussian(toy, z[k], x), dense_gaussian(toy, ref_z[k], x)
            d = ref.mean - new.mean
            kl = d.exp() - d - 1 if objective.kl_form == "means" else d**2 / (2 * new.std**2)
            kl = (kl[:, 0] * weight_D1 * completion[:, :, None, None]).sum()
            total += objective.kl_beta * kl / (completion.sum() * len(steps) * channels)
    return total / len(AR_STEPS)


def dense_bridges(toy, trajectory, mask, k, objective, weights):
    images, tokens, channels = toy.shape
    drawn_D = torch.tensor(weights)[DIFFUSION_STEPS] > 0  # steps of weight 0 draw no noise
    noise = torch.zeros(images, objective.mte_trajectories, tokens, len(DIFFUSION_STEPS), 2, channels).double()
    for b in range(images):
        shape = (int(mask[b].sum()), objective.mte_trajectories, int(drawn_D.sum()), 2, channels)
        drawn = torch.randn(shape, generator=generator(toy.seeds[b], "bridge", k)).double()
        for i, n in enumerate(mask[b].nonzero().flatten().tolist()):
            noise[b, :, n, drawn_D] = drawn[i]
    a, b = noise.unbind(-2)
    x0 = trajectory.tokens[:, None, :, None].expand_as(a)
    step = torch.tensor(DIFFUSION_STEPS).expand(x0.shape[:-1]).flatten()
    b = b if objective.bridge_target == "sample" else torch.zeros_like(b)
    flat_x0, flat_a, flat_b = (t.reshape(-1, channels) for t in (x0, a, b))
    x, target = toy.schedule.bridge(flat_x0, step, flat_a, flat_b)
    return x.view_as(x0), target.view_as(x0)


@pytest.mark.parametrize("off_policy", [False, True], ids=["on policy", "off policy"])
@pytest.mark.parametrize("weights", [UNIFORM, [0.5, 3.0, 0.0, 1.5, 0.0]], ids=["uniform", "weighted"])
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_equal_the_naive_formulation(toy, name, weights, off_policy):
    objective, policy = VARIANTS[name], toy()
    trajectory = policy.rollout()
    shift = 0.05 * policy.normal(*policy.z_KBNC.shape)
    old_z = policy.z_KBNC if off_policy else None
    ref_z = policy.z_KBNC + 0.1
    results = []
    for function in (masked_first, naive):
        z = (policy.z_KBNC + shift * off_policy).requires_grad_()
        value = function(policy, z, trajectory, objective, weights, old_z, ref_z)
        value.backward()
        results.append((value.detach(), z.grad))
    (value, gradient), (naive_value, naive_gradient) = results
    torch.testing.assert_close(value, naive_value, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient, naive_gradient, rtol=1e-5, atol=1e-8)
    assert gradient.abs().sum() > 0
    assert gradient[0].abs().sum() == 0  # AR step 0 is not trained


def test_gradient_agrees_with_finite_differences(toy):
    policy = toy(images=4, tokens=3, ar_steps=4)
    objective = Objective(clip_range=None, kl_beta=0.3, kl_form="gaussian", top_fraction=0.5)
    trajectory = policy.rollout()

    def value(z):
        return masked_first(policy, z, trajectory, objective, old_z=policy.z_KBNC, ref_z=policy.z_KBNC + 0.1)

    start = policy.z_KBNC + 0.02 * policy.normal(*policy.z_KBNC.shape)
    assert torch.autograd.gradcheck(value, (start.requires_grad_(),))


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(5)), st.integers(1, 4), st.sampled_from(["mar-grpo", "bridged sample", "predicted only"]))
def test_any_split_of_the_images_gives_the_same_gradient(toy, order, cut, name):
    objective, policy = VARIANTS[name], toy(images=5, extra=3)
    trajectory = policy.rollout()
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.5, -0.5])
    signal = advantages != 0
    parts = [torch.tensor(order[:cut]), torch.tensor(order[cut:])]

    def gradient(splits):
        z = policy.z_KBNC.clone().requires_grad_()
        for k in AR_STEPS:
            held = [trajectory.select(images) for images in splits]
            denominators = Counts(0, 0)
            for part, images in zip(held, splits, strict=True):
                denominators += counts(part, k, objective, signal[images])
            for part, images in zip(held, splits, strict=True):
                seeds = [policy.seeds[i] for i in images.tolist()]
                step, _ = step_queries(policy, part, k, objective, seeds=seeds).with_signal(signal[images])
                result = loss(
                    step,
                    policy.forward(z[:, images], k, step.rows),
                    advantages[images],
                    denominators,
                    len(AR_STEPS),
                    objective,
                    reference=policy.forward(policy.z_KBNC[:, images] + 0.1, k, step.kl_queries()),
                )
                result.loss.backward()
        return z.grad

    torch.testing.assert_close(gradient(parts), gradient([torch.arange(5)]), rtol=1e-6, atol=1e-10)


def one_row(mean, target=0.0, std=1.0, policy_weight=1.0, kl_weight=0.0):
    zero = torch.zeros(1, dtype=torch.int64)
    rows = Queries(zero, zero, zero, torch.zeros(1, 1), torch.full((1, 1), target))
    step = StepQueries(rows, torch.tensor([policy_weight]), torch.tensor([kl_weight]))
    return step, Gaussian(torch.full((1, 1), mean, requires_grad=True), torch.full((1, 1), std))


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected", "clipped", "flows"),
    [
        (2.0, 1.1, 2.2, 0, True),
        (2.0, 1.5, 2.4, 1, False),  # min(3.0, 2 * 1.2)
        (2.0, 0.5, 1.0, 0, True),  # below the range, but the bound would flatter
        (-2.0, 0.5, -1.6, 1, False),  # min(-1.0, -2 * .8)
        (-2.0, 1.5, -3.0, 0, True),
    ],
)
def test_clipping_by_hand(advantage, ratio, expected, clipped, flows):
    step, new = one_row(mean=0.5)
    objective = Objective(kl_beta=0, clip_range=(0.2, 0.2))
    log_prob = -0.125 - 0.5 * math.log(2 * math.pi)
    old = torch.tensor([[log_prob - math.log(ratio)]])
    result = loss(step, new, torch.tensor([advantage]), Counts(1, 0), 1, objective, old_log_prob=old)
    assert result.policy.item() == pytest.approx(expected, rel=1e-5)
    assert result.loss.item() == pytest.approx(-expected, rel=1e-5)
    assert result.ratio_mean.item() == result.ratio_max.item() == pytest.approx(ratio, rel=1e-5)
    assert result.clip_fraction.item() == clipped
    result.loss.backward()
    # d logp / d mean = target - mean = -.5
    assert new.mean.grad.item() == pytest.approx(-advantage * ratio * -0.5 if flows else 0, rel=1e-5)


def test_loss_weights_denominators_and_kl_by_hand():
    # policy 3 * .5 / 4 tokens / 2 AR steps = .1875; kl: d = 0 - .5, e^-.5 + .5 - 1 = .1065307, * .8 / 5 / 2
    step, new = one_row(mean=0.5, policy_weight=0.5, kl_weight=0.8)
    reference = Gaussian(torch.zeros(1, 1), torch.ones(1, 1))
    result = loss(step, new, torch.tensor([3.0]), Counts(4, 5), 2, Objective(kl_beta=0.1), reference=reference)
    assert result.policy.item() == pytest.approx(0.1875)
    assert result.kl.item() == pytest.approx(0.1065307 * 0.08, rel=1e-5)
    assert result.loss.item() == pytest.approx(-0.1875 + 0.1 * 0.1065307 * 0.08, rel=1e-5)
    assert result.policy_rows == 1


def test_divergences_by_hand():
    new = Gaussian(torch.tensor([[1.0]]), torch.tensor([[2.0]]))
    same = Gaussian(torch.tensor([[0.0]]), torch.tensor([[2.0]]))
    wide = Gaussian(torch.tensor([[0.0]]), torch.tensor([[4.0]]))
    assert divergence(new, same, "means").item() == pytest.approx(math.exp(-1))
    assert divergence(new, same, "gaussian").item() == pytest.approx(1 / 8)
    # log(4/2) + (4 + 1) / 32 - 1/2
    assert divergence(new, wide, "gaussian").item() == pytest.approx(math.log(2) + 5 / 32 - 0.5)
    assert divergence(new, new, "gaussian").item() == 0


def test_gaussian_divergence_is_torchs():
    means, stds = torch.randn(2, 7, 3).double(), torch.rand(2, 7, 3).double() + 0.1
    ours = divergence(Gaussian(means[0], stds[0]), Gaussian(means[1], stds[1]), "gaussian")
    normal = torch.distributions.Normal
    theirs = torch.distributions.kl_divergence(normal(means[0], stds[0]), normal(means[1], stds[1]))
    torch.testing.assert_close(ours, theirs)


def test_token_ratio_is_the_product_over_channels():
    zero = torch.zeros(1, dtype=torch.int64)
    rows = Queries(zero, zero, zero, torch.zeros(1, 2), torch.zeros(1, 2))
    step = StepQueries(rows, torch.ones(1), torch.zeros(1))
    new = Gaussian(torch.zeros(1, 2), torch.ones(1, 1))
    old = gaussian_log_prob(rows.target, new) - torch.tensor([[math.log(2.0), math.log(3.0)]])
    for ratio, expected in (("element", 2.5), ("token", 6.0)):
        objective = Objective(kl_beta=0, ratio=ratio)
        result = loss(step, new, torch.ones(1), Counts(1, 0), 1, objective, old_log_prob=old)
        assert result.policy.item() == pytest.approx(expected, rel=1e-5)


def test_rows_are_only_those_with_a_weight(toy):
    policy = toy(images=2, tokens=10, extra=3)
    trajectory = policy.rollout()
    objective = Objective(kl_beta=0, consistency=False)
    step = step_queries(policy, trajectory, 2, objective)
    unknown = trajectory.predicted_at >= 2
    uncertain = plan(trajectory, objective)
    assert uncertain.sum(dim=1).tolist() == [3, 3]
    expected = int((unknown & ~uncertain).sum()) * 3 + int((unknown & uncertain).sum()) * 3 * 3
    assert len(step) == expected
    assert (step.policy_weight > 0).all()
    assert step.policy_weight.sum().item() == pytest.approx(int(unknown.sum()), rel=1e-6)  # P_k times weight 1
    assert unknown[step.rows.image, step.rows.token].all()
    with_kl = step_queries(policy, trajectory, 2, replace(objective, kl_beta=0.1))
    assert len(with_kl) == expected + int((unknown & uncertain).sum()) * 3
    assert with_kl.kl_weight.sum().item() == pytest.approx(int(unknown.sum()), rel=1e-6)
    assert len(with_kl.kl_queries()) == int(unknown.sum()) * 3


def test_images_without_signal_keep_their_kl_rows_only(toy):
    policy = toy()
    trajectory = policy.rollout()
    signal = torch.tensor([True, False, False, True])
    without, index = step_queries(policy, trajectory, 1, Objective(kl_beta=0)).with_signal(signal)
    assert set(without.rows.image.tolist()) == {0, 3}
    full = step_queries(policy, trajectory, 1, Objective(kl_beta=0))
    assert torch.equal(full.rows.x[index], without.rows.x)
    with_kl, _ = step_queries(policy, trajectory, 1, Objective()).with_signal(signal)
    silent = with_kl.rows.image == 1
    assert silent.any()
    assert (with_kl.policy_weight[silent] == 0).all()
    assert (with_kl.kl_weight[silent] > 0).all()


def test_a_step_without_any_signal_has_loss_zero(toy):
    policy = toy()
    trajectory = policy.rollout()
    nobody = torch.zeros(4, dtype=torch.bool)
    objective = Objective(kl_beta=0)
    step, _ = step_queries(policy, trajectory, 1, objective).with_signal(nobody)
    assert len(step) == 0
    z = policy.z_KBNC.clone().requires_grad_()
    denominators = counts(trajectory, 1, objective, nobody)
    assert denominators.policy == 0
    result = loss(step, policy.forward(z, 1, step.rows), torch.zeros(4), denominators, 1, objective)
    result.loss.backward()
    assert result.loss.item() == 0
    assert z.grad.abs().sum() == 0
    assert (result.ratio_mean.item(), result.clip_fraction.item(), result.policy_rows) == (1, 0, 0)


def test_bridges_depend_on_seed_and_ar_step_alone(toy):
    policy = toy()
    trajectory = policy.rollout()
    objective = Objective(mte_source="bridged", top_fraction=1, kl_beta=0, consistency=False)
    whole = step_queries(policy, trajectory, 1, objective)
    alone = step_queries(policy, trajectory.select([2]), 1, objective, seeds=[policy.seeds[2]])
    assert torch.equal(whole.rows.x[whole.rows.image == 2], alone.rows.x)
    other = step_queries(policy, trajectory.select([2]), 1, objective, seeds=[99])
    assert not torch.equal(other.rows.x, alone.rows.x)


def test_what_the_rollout_must_record():
    assert Objective().full_chains_at([5, 1]) == [1, 5]
    assert Objective().full_latents_at([5, 1, 2]) == [1, 2, 4, 5]
    assert Objective(consistency=False).full_latents_at([5]) == []
    predicted = Objective(token_scope="predicted")
    assert (predicted.full_chains_at([5]), predicted.full_latents_at([5])) == ([], [])
    assert Objective(top_fraction=1, kl_beta=0).full_chains_at([5]) == []
    assert Objective().fresh_trajectories == 3
    assert Objective(mte_trajectories=0).fresh_trajectories == 0
    assert Objective(mte_source="bridged").fresh_trajectories == 3
    assert Objective(mte_source="bridged", top_fraction=1).fresh_trajectories == 0


def test_plan_and_masks_by_setting(toy):
    policy = toy()
    trajectory = policy.rollout()
    assert not plan(trajectory, Objective(mte_trajectories=0)).any()
    assert plan(replace(trajectory, extra_chains=None), Objective(top_fraction=1)).all()
    completion, kept = token_masks(trajectory, 3, Objective(consistency_threshold=5.0))
    assert torch.equal(completion, trajectory.predicted_at >= 3)
    assert torch.equal(kept, trajectory.predicted_at == 3)


def test_missing_recordings_are_named(toy):
    policy = toy()
    trajectory = policy.rollout()
    bare = replace(trajectory, full_chains={}, full_latents={}, extra_chains=None)
    nothing = torch.zeros_like(trajectory.predicted_at, dtype=torch.bool)
    with pytest.raises(ValueError, match="needs extra trajectories"):
        plan(bare, Objective())
    with pytest.raises(ValueError, match="AR step 2; name it in the rollout's full_latents_at"):
        token_masks(bare, 2, Objective())
    with pytest.raises(ValueError, match="AR step 1; name it in the rollout's full_chains_at"):
        step_queries(policy, bare, 1, Objective(), uncertain=nothing)
    step, new = one_row(mean=0.0, kl_weight=1.0)
    with pytest.raises(ValueError, match="needs the reference policy"):
        loss(step, new, torch.ones(1), Counts(1, 1), 1, Objective())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mte_trajectories": -1}, "must not be negative"),
        ({"mte_trajectories": 1}, "mte_trajectories >= 2"),
        ({"top_fraction": 0}, "mte_trajectories=0 is MTE off"),
        ({"clip_range": (0.0, 0.2)}, "clip_range"),
        ({"clip_range": (0.2, -0.2)}, "clip_range"),
        ({"kl_beta": -0.1}, "kl_beta"),
        ({"kl_beta": float("nan")}, "kl_beta"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Objective(**change)


def test_weights_of_a_random_subset_average_to_the_whole(toy):
    # over all subsets of 2 of 4 steps, the mean weight of a step is w_s / 4 of the pairs' total
    policy = toy()
    trajectory = policy.rollout()
    objective = Objective(mte_trajectories=0, kl_beta=0, consistency=False)
    weights = diffusion_step_weights(policy.schedule, "variance", [0, 1, 2, 3])
    total = torch.zeros(5)
    subsets = [[a, b] for a in range(4) for b in range(a)]
    for subset in subsets:
        step = step_queries(policy, trajectory, 1, objective, weights.tolist(), subset)
        total.index_add_(0, step.rows.step, step.policy_weight / len(subsets))
    pairs = int((trajectory.predicted_at >= 1).sum())
    torch.testing.assert_close(total, weights / 4 * pairs)
