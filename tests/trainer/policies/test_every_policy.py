"""What must hold for every family (:mod:`tests.trainer.policies.families`), on tiny random weights."""

import copy
import inspect
import math
from dataclasses import replace

import pytest
import torch

from tests.trainer.policies.families import FAMILIES, K, T
from trainer.algorithm.objective import Objective, counts, loss, plan, queries
from trainer.algorithm.schedule import diffusion_step_weights
from trainer.algorithm.seeds import normal
from trainer.algorithm.transitions import gaussian_log_prob
from trainer.algorithm.types import Gaussian, Queries, Trajectory
from trainer.families import family_of, freeze, reference_of
from trainer.policies import masked
from trainer.policies.base import Policy

SEEDS = [3, 1, 4, 15]
HEADS = ("frozen", "trained", "only")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def policy(family):
    """Shared: a test that trains takes a copy."""
    return family.load()


@pytest.fixture(scope="module")
def rolled(policy, family):
    steps = range(policy.ar_steps)
    return policy.rollout(family.prompts, SEEDS, full_chains_at=steps, full_latents_at=steps)


@pytest.fixture(scope="module")
def trajectory(policy, rolled):
    return replace(rolled, extra_chains=policy.extra_trajectories(rolled, 3, SEEDS))


def close(found, expected, tolerance=2e-5):
    """Within the tolerance of the numbers' scale: random epsilon heads make latents of a thousand."""
    difference = float((found - expected).abs().max())
    assert difference <= tolerance * max(1.0, float(expected.abs().max())), difference


def kept_rows(trajectory, ar_step, diffusion_step):
    """The transitions that made the tokens of an AR step."""
    image, token = (trajectory.predicted_at == ar_step).nonzero(as_tuple=True)
    step = torch.full_like(image, diffusion_step)
    x, target = (trajectory.chain[image, token, diffusion_step + i] for i in range(2))
    return Queries(image, token, step, x, target)


def whole_loss(policy, trajectory, advantages, head="frozen", **changes):
    """The loss of all AR steps and diffusion steps, with gradient."""
    objective = Objective(kl_beta=0.0, **changes)
    schedule = policy.schedule
    weights = diffusion_step_weights(schedule, "variance", schedule.stochastic_steps)
    uncertain = plan(trajectory, objective)
    signal = advantages != 0
    total = 0.0
    for ar_step in range(policy.ar_steps):
        rows = queries(
            trajectory, ar_step, schedule.stochastic_steps, uncertain, objective,
            schedule=schedule, step_weights_T=weights, seeds=SEEDS,
        )  # fmt: skip
        step, _ = rows.with_signal(signal)
        gaussian = policy(trajectory, ar_step, step.rows, True)
        denominators = counts(trajectory, ar_step, objective, signal)
        total = total + loss(step, gaussian, advantages, denominators, policy.ar_steps, objective).loss
    return total


def test_it_is_a_policy_with_a_schedule_of_its_size(policy):
    assert isinstance(policy, Policy)
    assert not policy.training
    assert policy.schedule.steps == T
    assert policy.ar_steps <= K
    assert sum(policy.tokens_per_step()) == policy.tokens
    assert len(policy.tokens_per_step()) == policy.ar_steps


def test_scoring_gives_the_noise_that_sampling_drew(policy, trajectory):
    """So the log-probability of what was sampled is -(noise^2 + log 2 pi) / 2 - log std, element by element."""
    noise_BNTC = normal(SEEDS, (policy.tokens, T + 1, policy.channels), "kept")
    with torch.no_grad():
        for ar_step in range(policy.ar_steps):
            for step in policy.schedule.stochastic_steps:
                rows = kept_rows(trajectory, ar_step, step)
                gaussian = policy(trajectory, ar_step, rows, True)
                drawn = noise_BNTC[rows.image, rows.token, step + 1]
                close(rows.target, gaussian.mean + gaussian.std * drawn)
                rounding = 2e-5 * max(1.0, float(rows.target.abs().max())) / float(gaussian.std.min())
                expected = -0.5 * (drawn**2 + math.log(2 * math.pi)) - gaussian.std.log()
                recomputed = gaussian_log_prob(rows.target, gaussian)
                assert torch.allclose(recomputed, expected, atol=5 * rounding + 1e-5)


def test_an_image_depends_on_its_prompt_and_seed_alone(policy, family, trajectory):
    order = [2, 0, 3, 1]
    shuffled = policy.rollout([family.prompts[i] for i in order], [SEEDS[i] for i in order])
    close(shuffled.tokens, trajectory.tokens[order])
    alone = policy.rollout(family.prompts[1:2], SEEDS[1:2])
    close(alone.tokens, trajectory.tokens[1:2])
    assert torch.equal(alone.predicted_at, trajectory.predicted_at[1:2])
    other = policy.rollout(family.prompts[1:2], [99])
    assert not torch.allclose(other.tokens, alone.tokens, atol=0.1)
    images = policy.decode(trajectory.tokens)
    assert images.dtype == "uint8"
    assert images.shape[0] == 4
    assert images.shape[3] == 3
    assert abs(policy.decode(alone.tokens).astype(int) - images[1:2]).max() <= 1


def test_order_and_chains_rebuild_every_state(policy, trajectory):
    assert torch.equal(trajectory.chain[:, :, -1], trajectory.tokens)
    sizes = torch.stack([(trajectory.predicted_at == k).sum(dim=1) for k in range(policy.ar_steps)], dim=1)
    assert sizes.tolist() == [policy.tokens_per_step()] * 4
    for k in range(policy.ar_steps):
        known, kept = trajectory.predicted_at < k, trajectory.predicted_at == k
        with torch.no_grad():
            noisy = torch.where(known[..., None], trajectory.tokens, torch.randn_like(trajectory.tokens))
            z = policy.conditions(policy.context(trajectory.prompt_ids, True), noisy, known, True)
        stitched = trajectory.stitched.transpose(0, 1)[:, kept]
        assert torch.allclose(stitched, z[:, kept], atol=1e-4), "unknown latents were read, or the state is another"
        full = trajectory.full_chains[k]
        assert torch.equal(full[kept], trajectory.chain[kept])
        assert float(full[known].abs().sum()) == 0
        assert torch.equal(trajectory.full_latents[k][known | kept], trajectory.tokens[known | kept])
        assert torch.equal(trajectory.full_latents[k][~known], full[~known][:, -1])


@pytest.mark.parametrize("head", HEADS)
def test_gradients_reach_what_is_trained_and_nothing_else(policy, trajectory, head):
    policy = copy.deepcopy(policy)
    trained = freeze(policy, head)
    assert len({id(p) for p in trained}) == len(trained) > 0
    advantages = torch.tensor([1.0, -0.5, 0.25, -1.0])
    whole_loss(policy, trajectory, advantages).backward()
    chosen = {id(p) for p in trained}
    without, extra = [], []
    for name, parameter in policy.named_parameters():
        reached = parameter.grad is not None and bool((parameter.grad != 0).any())
        if id(parameter) in chosen and not reached:
            without.append(name)
        if id(parameter) not in chosen and parameter.grad is not None:
            extra.append(name)
    assert (without, extra) == ([], [])
    in_head = {id(p) for p in policy.head_parameters()}
    assert {"frozen": not chosen & in_head, "trained": in_head < chosen, "only": chosen == in_head}[head]


def test_multi_trajectory_expectation_and_selection_run(policy, trajectory):
    objective = Objective(top_fraction=0.3)
    uncertain = plan(trajectory, objective)
    assert 0 < int(uncertain.sum()) < uncertain.numel()
    assert trajectory.extra_chains.shape == (4, 3, policy.tokens, T + 1, policy.channels)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    whole = [
        float(whole_loss(policy, trajectory, advantages, **changes).detach())
        for changes in ({}, {"mte_source": "bridged", "token_scope": "predicted"}, {"mte_trajectories": 0})
    ]
    assert all(abs(value) < 10 for value in whole)


def test_an_extra_trajectory_of_the_rollouts_noise_is_the_rollouts(policy, trajectory, monkeypatch):
    """So z*, and the guidance of each token's own AR step, are those that the token was sampled with."""
    monkeypatch.setattr(masked, "normal", lambda seeds, shape, *purpose: normal(seeds, shape, "kept"))
    (again,) = policy.extra_trajectories(trajectory, 1, SEEDS).unbind(dim=1)
    close(again, trajectory.chain)
    assert not torch.allclose(again, trajectory.extra_chains[:, 0], atol=0.1)


def test_one_step_along_a_positive_advantage_raises_the_log_probability(policy, trajectory):
    policy = copy.deepcopy(policy)
    trained = freeze(policy, "frozen")
    image = trajectory.select(slice(2, 3))
    rows = kept_rows(image, 1, policy.schedule.stochastic_steps[1])
    before = gaussian_log_prob(rows.target, policy(image, 1, rows, True)).sum()
    gradients = torch.autograd.grad(before, trained, allow_unused=True)
    norm2 = sum(float(g.square().sum()) for g in gradients if g is not None)
    step = 0.02 / norm2  # to first order, the sum rises by 0.02
    with torch.no_grad():
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                parameter += step * gradient
        after = gaussian_log_prob(rows.target, policy(image, 1, rows, True)).sum()
    assert float(after - before.detach()) == pytest.approx(0.02, rel=0.3)


def test_a_learned_std_has_its_gradient_or_is_as_recorded(policy, trajectory):
    """What ``policy.variance`` chooses between: only heads that predict their std can tell."""
    rows = kept_rows(trajectory, 0, policy.schedule.stochastic_steps[-1])
    gaussian = policy(trajectory, 0, rows, True)
    learned = gaussian.std.shape[-1] > 1
    assert learned == (getattr(policy.schedule, "variance", None) == "learned_range")
    assert gaussian.std.requires_grad == learned
    log_prob = gaussian_log_prob(rows.target, Gaussian(gaussian.mean, gaussian.std.detach())).sum()
    parameters = list(policy.backbone_parameters())  # some of them reach the unconditional half alone
    recorded = torch.autograd.grad(log_prob, parameters, retain_graph=True)
    current = torch.autograd.grad(gaussian_log_prob(rows.target, gaussian).sum(), parameters)
    assert all(map(torch.equal, recorded, current)) != learned


def test_guidance_of_one_leaves_the_unconditional_half_out(family):
    plain = family.load(guidance=1.0)
    trajectory = plain.rollout(family.prompts[:2], SEEDS[:2])
    assert trajectory.stitched.shape[1] == 1
    guided = family.load(guidance=2.0)
    trajectory = guided.rollout(family.prompts[:2], SEEDS[:2])
    assert trajectory.stitched.shape[1] == 2
    rows = kept_rows(trajectory, 1, 0)
    with torch.no_grad():
        off = guided(trajectory, 1, rows, False).mean
        assert torch.allclose(off, plain(trajectory, 1, rows, True).mean, atol=1e-5)
        assert not torch.allclose(off, guided(trajectory, 1, rows, True).mean, atol=1e-5)


def test_saving_and_loading_is_the_identity(policy, family, trajectory, tmp_path):
    policy = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in policy.backbone_parameters():
            parameter += 0.01
    policy.save(tmp_path / "policy.safetensors", {"step": "3"})
    policy.save(tmp_path / "again.safetensors", {"step": "3"})
    assert (tmp_path / "policy.safetensors").read_bytes() == (tmp_path / "again.safetensors").read_bytes()
    loaded = family.load(tmp_path / "policy.safetensors")
    assert loaded.state_dict().keys() == policy.state_dict().keys()
    for name, value in policy.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    one, two = (p.rollout(family.prompts, SEEDS) for p in (policy, loaded))
    assert torch.equal(one.tokens, two.tokens)
    assert not torch.allclose(one.tokens, trajectory.tokens, atol=1e-3)
    assert (policy.decode(one.tokens) == loaded.decode(two.tokens)).all()


def test_a_rollout_can_be_split_and_joined_by_image(rolled):
    parts = Trajectory.cat([rolled.select(slice(0, 1)), rolled.select(torch.tensor([1, 2, 3]))])
    for name, tensor in rolled.tensors().items():
        assert torch.equal(parts.tensors()[name], tensor), name


def test_chains_and_transitions_stay_in_float32_under_autocast(policy, family, trajectory):
    """The backbone computes in bfloat16; sampling and scoring still agree as they do without, near t = 0, too."""
    noise_BNTC = normal(SEEDS, (policy.tokens, T + 1, policy.channels), "kept")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        sampled = policy.rollout(family.prompts, SEEDS)
        assert {sampled.tokens.dtype, sampled.chain.dtype} == {torch.float32}
        assert not torch.equal(sampled.tokens, trajectory.tokens)  # autocast does reach the model
        for ar_step in range(policy.ar_steps):
            for step in policy.schedule.stochastic_steps:
                rows = kept_rows(sampled, ar_step, step)
                gaussian = policy(sampled, ar_step, rows, True)
                assert {gaussian.mean.dtype, gaussian.std.dtype} == {torch.float32}
                found = (rows.target - gaussian.mean) / gaussian.std
                assert float((found - noise_BNTC[rows.image, rows.token, step + 1]).abs().max()) < 1e-3


@pytest.mark.parametrize("precision", ["float32", "autocast"])
def test_the_head_computes_in_its_own_precision_under_autocast(policy, trajectory, precision):
    policy = copy.copy(policy)
    policy.head_precision = precision
    z, rows = trajectory.stitched.transpose(0, 1), kept_rows(trajectory, 0, 1)

    def scored(z):
        return policy.transition(policy._condition(z)[:, rows.image, rows.token], rows.x, rows.step)

    with torch.no_grad():
        exact = scored(z.bfloat16().float())
        with torch.autocast("cpu", torch.bfloat16):
            found = scored(z.bfloat16())
    assert torch.equal(found.mean, exact.mean) == (precision == "float32")
    assert torch.equal(found.std, exact.std) == (precision == "float32" or len(exact.std[0]) == 1)


def test_three_updates_with_the_published_kl_stay_finite_in_bfloat16(family):
    """The published KL is an exponential of how far means move. The schedule is the family's own: its first of five
    steps multiplies a learned-range head's epsilon by 7,707, and so what bfloat16 rounds. Where there is hardly any
    signal a trained head's epsilon hardly depends on z; so does this one's, or z's own rounding would be too much."""
    policy = family_of(family.name).load(family.source, ar_steps=K, diffusion_steps=T, guidance=2.5, **family.options)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("cond_embed.weight"):
                parameter *= 0.01
    trained, reference = freeze(policy, "frozen"), reference_of(policy)
    optimizer = torch.optim.AdamW(trained, lr=1e-6)
    objective, schedule = Objective(mte_trajectories=0, kl_beta=0.01), policy.schedule
    weights = diffusion_step_weights(schedule, "variance", schedule.stochastic_steps)
    advantages, signal = torch.tensor([1.0, -0.5, 0.25, -1.0]), torch.ones(4, dtype=torch.bool)
    kls = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            found = policy.rollout(family.prompts, SEEDS, full_chains_at=[1], full_latents_at=[1])
            step = queries(
                found, 1, schedule.stochastic_steps, plan(found, objective), objective,
                schedule=schedule, step_weights_T=weights, seeds=SEEDS,
            )  # fmt: skip
            with torch.no_grad():
                before = reference.forward(found, 1, step.kl_queries(), True)
            gaussian = policy(found, 1, step.rows, True)
        part = loss(step, gaussian, advantages, counts(found, 1, objective, signal), 1, objective, reference=before)
        part.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        assert math.isfinite(float(norm)), kls
        optimizer.step()
        optimizer.zero_grad()
        kls.append(float(part.kl))
    assert kls[0] == 0
    assert max(kls) < 0.01, kls


def test_recomputed_activations_give_the_same_gradient(family, policy, trajectory):
    if "activation_checkpointing" not in inspect.signature(type(policy).load).parameters:
        assert family.name == "small"  # too small to need it
        return
    gradients, kept = [], [0, 0]

    def note(tensor):
        kept[recompute] += tensor.nbytes
        return tensor

    for recompute in (False, True):
        trained = freeze(found := family.load(activation_checkpointing=recompute), "frozen")
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            total = whole_loss(found, trajectory, torch.tensor([1.0, -0.5, 0.25, -1.0]), mte_trajectories=0)
        total.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in trained]))
        assert not found.training
    assert kept[True] < 0.9 * kept[False]
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-6 * float(gradients[0].abs().max()))


def test_a_head_that_scores_part_by_part_gives_the_same_gradient(policy, trajectory):
    advantages = torch.tensor([1.0, -0.5, 0.25, -1.0])
    losses, gradients = [], []
    for rows in (10**6, 7):
        found = copy.deepcopy(policy)
        found.head_rows = rows
        trained = freeze(found, "trained")
        loss_ = whole_loss(found, trajectory, advantages, head="trained", mte_trajectories=0)
        loss_.backward()
        losses.append(float(loss_.detach()))
        gradients.append(torch.cat([p.grad.flatten() for p in trained]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6)
    assert torch.allclose(*gradients, rtol=1e-3, atol=1e-5 * float(gradients[0].abs().max()))
