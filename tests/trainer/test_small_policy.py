"""The small MAR: sampling and scoring agree, samples do not depend on their batch, gradients go where they belong."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from reward_server.rewards.shapes import parse, verify
from trainer.algorithm.seeds import derive_seed, normal
from trainer.algorithm.transitions import gaussian_log_prob
from trainer.algorithm.types import Queries, Trajectory
from trainer.policies.base import Policy
from trainer.policies.small import MAX_WORDS, SmallConfig, SmallPolicy, encode_prompts
from trainer.pretrain import denoising_loss, pretrain
from trainer.shapes import render, split_scenes

TINY = SmallConfig(width=32, depth=2, heads=2, head_width=32, head_depth=1)
PROMPTS = ["three red circles", "a blue square left of a green triangle", "one cyan square", "two purple triangles"]
SEEDS = [11, 12, 13, 14]


def tiny(guidance=1.0, config=TINY):
    torch.manual_seed(0)
    policy = SmallPolicy(config, ar_steps=6, diffusion_steps=5, guidance=guidance)
    policy.fit_codec(render(split_scenes()[0][:300], np.random.default_rng(0)))
    for block in policy.head.blocks:  # adaLN-zero would hide the condition from an untrained head
        torch.nn.init.normal_(block.modulation.weight, std=0.2)
    return policy.eval()


def all_queries(chain_BNTC, mask_BN, steps):
    image, token = mask_BN.nonzero(as_tuple=True)
    parts = [
        Queries(image, token, torch.full_like(image, t), chain_BNTC[image, token, t], chain_BNTC[image, token, t + 1])
        for t in steps
    ]
    return Queries.cat(parts)


def test_it_is_a_policy():
    assert isinstance(tiny(), Policy)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_scoring_recovers_the_noise_that_sampling_drew(guidance):
    policy = tiny(guidance)
    trajectory = policy.rollout(PROMPTS, SEEDS)
    noise = normal(SEEDS, (16, 6, 24), "kept")
    seen = 0
    for step in range(policy.ar_steps):
        queries = all_queries(trajectory.chain, trajectory.predicted_at == step, policy.schedule.stochastic_steps)
        with torch.no_grad():
            gaussian = policy(trajectory, step, queries, guided=True)
        drawn = (queries.target - gaussian.mean) / gaussian.std
        assert torch.allclose(drawn, noise[queries.image, queries.token, queries.step + 1], atol=2e-3)
        expected = (-0.5 * (drawn**2 + np.log(2 * np.pi)) - gaussian.std.log()).sum()
        assert torch.allclose(gaussian_log_prob(queries.target, gaussian).sum(), expected, rtol=1e-5)
        seen += len(queries)
    assert seen == 4 * 16 * len(policy.schedule.stochastic_steps)


def test_same_seed_same_image_in_any_batch():
    policy = tiny()
    together = policy.rollout(PROMPTS, SEEDS, full_chains_at=[2])
    together_extra = policy.extra_trajectories(together, 2, SEEDS)
    for i, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        alone = policy.rollout([prompt], [seed], full_chains_at=[2])
        assert torch.equal(alone.predicted_at[0], together.predicted_at[i])
        assert torch.allclose(alone.tokens[0], together.tokens[i], atol=1e-4)
        assert torch.allclose(alone.full_chains[2][0], together.full_chains[2][i], atol=1e-4)
        extra = policy.extra_trajectories(alone, 2, [seed])
        assert torch.allclose(extra[0], together_extra[i], atol=1e-4)
    other = policy.rollout(PROMPTS[:1], [99])
    assert not torch.allclose(other.tokens[0], together.tokens[0], atol=0.1)


def test_trajectory_holds_what_it_says():
    policy = tiny()
    plain = policy.rollout(PROMPTS, SEEDS)
    full = policy.rollout(PROMPTS, SEEDS, full_chains_at=[1, 4], full_latents_at=[0, 1])
    assert torch.allclose(plain.tokens, full.tokens, atol=1e-5)  # recording more changes no image
    assert torch.equal(full.chain[:, :, -1], full.tokens)
    counts = torch.bincount(full.predicted_at[0], minlength=6)
    assert counts.sum() == 16
    assert (counts > 0).all()
    assert set(full.full_chains) == {1, 4}
    assert set(full.full_latents) == {0, 1}
    known, kept = full.predicted_at < 4, full.predicted_at == 4
    assert (full.full_chains[4][known] == 0).all()
    assert torch.equal(full.full_chains[4][kept], full.chain[kept])
    assert torch.equal(full.full_latents[1][full.predicted_at < 1], full.tokens[full.predicted_at < 1])
    assert not torch.allclose(full.full_latents[0], full.full_latents[1])


def test_split_and_join_of_a_trajectory():
    policy = tiny()
    whole = policy.rollout(PROMPTS, SEEDS, full_chains_at=[1])
    parts = Trajectory.cat([whole.select(slice(0, 1)), whole.select(torch.tensor([1, 2, 3]))])
    for name, tensor in whole.tensors().items():
        assert torch.equal(parts.tensors()[name], tensor), name
    again = Trajectory.from_tensors(whole.tensors())
    assert torch.equal(again.full_chains[1], whole.full_chains[1])


def test_stitched_condition_is_that_of_the_step_of_prediction():
    policy = tiny(guidance=2.0)
    trajectory = policy.rollout(PROMPTS, SEEDS)
    for step in range(policy.ar_steps):
        with torch.no_grad():
            context = policy.context(trajectory.prompt_ids, True)
            z = policy.conditions(context, trajectory.tokens, trajectory.predicted_at < step, True)
        kept = trajectory.predicted_at == step
        assert torch.allclose(trajectory.stitched.transpose(0, 1)[:, kept], z[:, kept], atol=1e-5)


def test_unknown_tokens_and_padding_are_not_read():
    policy = tiny()
    trajectory = policy.rollout(PROMPTS, SEEDS)
    known = trajectory.predicted_at < 3
    noisy = torch.where(known[..., None], trajectory.tokens, torch.randn_like(trajectory.tokens))
    with torch.no_grad():
        a = policy.backbone(trajectory.prompt_ids, trajectory.tokens, known)
        b = policy.backbone(trajectory.prompt_ids, noisy, known)
        policy.backbone.words.weight[0] += 1.0  # <pad>
        c = policy.backbone(trajectory.prompt_ids, trajectory.tokens, known)
    assert torch.equal(a, b)
    assert torch.allclose(a, c, atol=1e-6)


def test_frozen_head_passes_the_gradient_through_to_every_backbone_parameter():
    policy = tiny()
    for parameter in policy.head_parameters():
        parameter.requires_grad_(False)
    trajectory = policy.rollout(PROMPTS, SEEDS)
    queries = all_queries(trajectory.chain, trajectory.predicted_at == 2, policy.schedule.stochastic_steps)
    gaussian_log_prob(queries.target, policy(trajectory, 2, queries, guided=False)).mean().backward()
    assert all(p.grad is None for p in policy.head_parameters())
    for name, parameter in policy.backbone.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    split = [*policy.head_parameters(), *policy.backbone_parameters()]
    assert {id(p) for p in split} == {id(p) for p in policy.parameters()}


def test_one_step_along_the_gradient_raises_the_log_probability():
    policy = tiny()
    trajectory = policy.rollout(PROMPTS, SEEDS)
    queries = all_queries(trajectory.chain, trajectory.predicted_at == 2, (1, 2, 3))

    def score():
        return gaussian_log_prob(queries.target, policy(trajectory, 2, queries, guided=False)).mean()

    before = score()
    before.backward()
    with torch.no_grad():
        for parameter in policy.backbone_parameters():
            parameter += 1e-3 * parameter.grad
        assert score() > before


def test_guidance_one_equals_the_conditional_half_and_guidance_moves_the_mean():
    trajectory = tiny(1.0).rollout(PROMPTS, SEEDS)
    queries = all_queries(trajectory.chain, trajectory.predicted_at == 0, (1,))
    with torch.no_grad():
        plain = tiny(1.0)(trajectory, 0, queries, guided=True).mean
        guided_policy = tiny(3.0)
        unguided = guided_policy(trajectory, 0, queries, guided=False).mean
        guided = guided_policy(trajectory, 0, queries, guided=True).mean
        null = replace(trajectory, prompt_ids=encode_prompts([""] * len(PROMPTS)))
        unconditional = guided_policy(null, 0, queries, guided=False).mean
    assert torch.allclose(plain, unguided, atol=1e-6)
    assert not torch.allclose(guided, unguided, atol=1e-3)
    # a transition's mean is affine in the prediction, so guidance extrapolates the means just as the predictions
    assert torch.allclose(guided, unconditional + 3.0 * (unguided - unconditional), atol=1e-4)


def test_codec_keeps_ground_truth_recognisable():
    policy = SmallPolicy(SmallConfig())
    scenes = split_scenes()[0]
    rng = np.random.default_rng(0)
    assert policy.fit_codec(render(scenes, rng)) > 0.97
    shown = scenes[::5]
    decoded = policy.decode(policy.encode(render(shown, rng)))
    passed = [verify(i, parse(s.prompt)).details["strict"] for i, s in zip(decoded, shown, strict=True)]
    assert np.mean(passed) > 0.95


def test_prompt_encoding():
    ids = encode_prompts(["a red circle to the left of a blue square", "a red circle left of a blue square", ""])
    assert ids.shape == (3, MAX_WORDS)
    assert torch.equal(ids[0], ids[1])
    assert ids[2].tolist() == [1] + [0] * (MAX_WORDS - 1)
    with pytest.raises(ValueError, match="does not know cat, fluffy"):
        encode_prompts(["a fluffy cat"])
    with pytest.raises(ValueError, match="at most 9 words"):
        encode_prompts(["red " * 10])


def test_settings_out_of_range_are_errors():
    with pytest.raises(ValueError, match=r"ar_steps must lie in 1\.\.16"):
        SmallPolicy(TINY, ar_steps=17)
    with pytest.raises(ValueError, match="images must be"):
        SmallPolicy(TINY).encode(np.zeros((1, 32, 32, 3), np.uint8))


def test_check_prompts_names_the_first_that_cannot_be_read():
    tiny().check_prompts(["one red circle", "", "a red circle to the left of a blue square"])
    with pytest.raises(ValueError, match=r"does not know cat, fluffy \(prompt: 'a fluffy cat'\)"):
        tiny().check_prompts(["one red circle", "a fluffy cat", "a dog"])
    with pytest.raises(ValueError, match="at most 9 words, not 10"):
        tiny().check_prompts(["red " * 10])


def test_save_and_load(tmp_path):
    policy = tiny()
    policy.save(tmp_path / "p.safetensors", {"note": "x"})
    again = SmallPolicy.load(tmp_path / "p.safetensors", ar_steps=6, diffusion_steps=5)
    a, b = policy.rollout(PROMPTS, SEEDS), again.rollout(PROMPTS, SEEDS)
    assert np.array_equal(policy.decode(a.tokens), again.decode(b.tokens))
    assert list(tmp_path.iterdir()) == [tmp_path / "p.safetensors"]
    again.save(tmp_path / "q.safetensors", {"note": "x"})
    assert SmallPolicy.revision(tmp_path / "p.safetensors") == SmallPolicy.revision(tmp_path / "q.safetensors")


def test_load_says_what_is_wrong(tmp_path):
    path = tmp_path / "p.safetensors"
    with pytest.raises(FileNotFoundError, match=r"pretrain\.py"):
        SmallPolicy.load(path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="not a safetensors file"):
        SmallPolicy.load(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="not a checkpoint of the small policy"):
        SmallPolicy.load(path)
    save_file({"a": torch.zeros(1)}, path, {"small": json.dumps({"config": {}})})
    with pytest.raises(ValueError, match=r"does not fit SmallPolicy: \d+ missing.*1 not expected: a$"):
        SmallPolicy.load(path)


def test_seeds_depend_on_every_part_and_on_nothing_else():
    assert derive_seed(1, 2) != derive_seed(2, 1) != derive_seed(12)
    assert derive_seed("a", 1) == derive_seed("a", 1)
    assert 0 <= derive_seed(5) < 2**63
    assert torch.equal(normal([1, 2], (3,), "x")[1], normal([2], (3,), "x")[0])
    assert not torch.equal(normal([1], (3,), "x"), normal([1], (3,), "y"))


def test_the_shipped_base_is_imperfect_and_small_enough():
    path = Path("trainer/policies/weights/small.safetensors")
    assert path.stat().st_size <= 10_000_000
    policy = SmallPolicy.load(path)
    assert 1_000_000 <= sum(p.numel() for p in policy.parameters()) <= 3_000_000
    prompts = [s.prompt for s in split_scenes()[1]][:128]
    images = policy.decode(policy.rollout(prompts, range(128)).tokens)
    passed = [verify(i, parse(p)).details["strict"] for i, p in zip(images, prompts, strict=True)]
    assert 0.25 <= np.mean(passed) <= 0.60


def test_pretraining_is_reproducible_and_learns(tmp_path):
    config = SmallConfig(width=32, depth=1, heads=2, head_width=32, head_depth=1)
    first, kept = pretrain(steps=8, batch=8, learning_rate=1e-3, seed=3, config=config)
    second, _ = pretrain(steps=8, batch=8, learning_rate=1e-3, seed=3, config=config)
    other, _ = pretrain(steps=8, batch=8, learning_rate=1e-3, seed=4, config=config)
    assert kept > 0.95
    weights = [p.state_dict()["backbone.words.weight"] for p in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    rng = torch.Generator().manual_seed(0)
    scenes = split_scenes()[0][:64]
    batch = encode_prompts([s.prompt for s in scenes]), first.encode(render(scenes, np.random.default_rng(1)))
    untrained = SmallPolicy(config)
    untrained.load_state_dict({k: v for k, v in first.state_dict().items() if "codec" in k}, strict=False)
    with torch.no_grad():
        assert denoising_loss(first, *batch, rng) < denoising_loss(untrained, *batch, rng)
