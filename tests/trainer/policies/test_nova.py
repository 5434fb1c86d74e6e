"""NOVA against numbers of the official code (``fixtures/nova``), and as a policy that can be trained.

Random-weight models prove plumbing and parity, not quality.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.policies import tiny_nova as tiny
from trainer.algorithm.schedule import tokens_per_ar_step
from trainer.algorithm.seeds import normal
from trainer.algorithm.transitions import DDPM, FlowSDE, gaussian_log_prob
from trainer.algorithm.types import Queries
from trainer.policies.base import Policy
from trainer.policies.nova import NovaPolicy
from trainer.policies.nova_model import NovaConfig, NovaTransformer

FIXTURES = Path(__file__).parent / "fixtures" / "nova"
SEEDS = [11, 12]


@pytest.fixture(scope="module")
def expected():
    return load_file(FIXTURES / "expected.safetensors")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("nova")
    return {
        kind: tiny.write_pipeline(root / kind, tiny.our_shapes(transformer), transformer, scheduler)
        for kind, (transformer, scheduler) in tiny.KINDS.items()
    }


@pytest.fixture
def load(folders):
    return lambda kind="abs", **settings: NovaPolicy.load(folders[kind], **tiny.SETTINGS | settings)


def patchify(latents):
    """(..., C, H, W) latent maps to (..., N, 4 C) tokens: row and column of the cell, then the channel."""
    *lead, C, H, W = latents.shape
    cells = latents.reshape(-1, C, H // 2, 2, W // 2, 2).permute(0, 2, 4, 3, 5, 1)
    return cells.reshape(*lead, H // 2 * (W // 2), 4 * C)


def close(found, wanted, tolerance=1e-5):
    """Within the tolerance of the numbers' own scale, their largest magnitude (at least 1)."""
    difference = float((found - wanted).abs().max())
    assert difference <= tolerance * max(1.0, float(wanted.abs().max())), difference


def all_queries(trajectory, ar_step, steps):
    image, token = (trajectory.predicted_at == ar_step).nonzero(as_tuple=True)
    chain = trajectory.chain
    return Queries.cat(
        [Queries(image, token, torch.full_like(image, t), chain[image, token, t], chain[image, token, t + 1])
         for t in steps]
    )  # fmt: skip


def recorded_noise(kind, counts, order):
    """(B, N, T+1, C): what the official run drew for each token at the AR step that kept it."""
    noise = None
    for step, first in enumerate(torch.tensor([0, *counts]).cumsum(0)[:-1].tolist()):
        drawn = torch.stack([patchify(tiny.seeded(f"{kind}/{step}/{t}", 2, 4, 8, 12)) for t in range(6)], dim=2)
        noise = torch.zeros_like(drawn) if noise is None else noise
        kept = order[:, first : first + counts[step]]
        noise[torch.arange(2)[:, None], kept] = drawn[torch.arange(2)[:, None], kept]
    return noise


# ---- parity with the official code ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tiny.KINDS)
@torch.no_grad()
def test_text_context_conditions_and_head_are_the_official_ones(kind, load, expected):
    policy, out = load(kind), {k.removeprefix(f"{kind}."): v for k, v in expected.items()}
    ids = policy.encode_prompts([*tiny.PROMPTS, ""])
    assert [(row >= 0).sum() for row in ids] == [8, 12, 0]  # the second is cut
    close(policy._text(ids), out["text"][:3])
    context = policy.context(ids[:2], guided=True)
    close(context.rows[context.row.flatten()], out["context"])
    tokens = patchify(out["latents"])
    for step, z in enumerate(out["z"]):
        unknown = (out["predicted_at"] >= step)[..., None]
        unread = torch.where(unknown, torch.nan, tokens)  # latents of unknown tokens are not read
        found = policy.conditions(context, unread, ~unknown[..., 0], guided=True)
        close(found.flatten(0, 1), z)
    z = out["z"][2][:2].flatten(0, 1)
    noisy = patchify(tiny.seeded("head", 2, 4, 8, 12)).flatten(0, 1)
    times = torch.tensor([37.0, 512.0]).repeat_interleave(24)
    close(policy.head_output(noisy, times, policy.head_condition(z)), out["head"].flatten(0, 1))


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_rollout_of_the_same_noise_gives_the_official_latents_and_pixels(kind, load, expected):
    policy = load(kind, flow_noise=0.0)  # the official flow-matching sampler is deterministic
    latents = expected[f"{kind}.latents"]
    order = tiny.seeded(f"{kind}/order", 2, 24, 1).argsort(dim=1)[..., 0]
    ids = policy.encode_prompts(tiny.PROMPTS)
    noise = recorded_noise(kind, policy.tokens_per_step(), order)
    trajectory = policy.sample_from(ids, order, noise, lambda _: torch.zeros_like(noise))
    assert torch.equal(trajectory.predicted_at, expected[f"{kind}.predicted_at"])
    close(trajectory.tokens, patchify(latents))
    pixels = torch.from_numpy(policy.decode(patchify(latents))).int() - expected[f"{kind}.pixels"].int()
    assert policy.decode(trajectory.tokens).shape == (2, 64, 96, 3)
    assert pixels.abs().max() <= 1  # rounded down: a last bit may cross a whole number
    assert pixels.ne(0).float().mean() < 1e-3


@pytest.mark.parametrize("kind", tiny.KINDS)
@torch.no_grad()
def test_log_probabilities_are_those_of_the_published_rl_code(kind, load, expected):
    policy, out = load(kind), {k.removeprefix(f"{kind}.published."): v for k, v in expected.items()}
    condition = policy.head_condition(expected[f"{kind}.z"][2].reshape(2, 48, 32))
    for step in range(4):  # at the last, the published flow step has noise where ours has none
        before, after, log_probs = (patchify(out[n][step]).flatten(0, 1) for n in ("before", "after", "log_probs"))
        gaussian = policy.transition(condition, before, torch.tensor([step]))
        close(gaussian_log_prob(after, gaussian), log_probs)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_schedule_is_the_schedulers_own(kind, load, expected):
    schedule = load(kind).schedule
    assert isinstance(schedule, {"abs": DDPM, "rotary": FlowSDE}[kind])
    assert torch.allclose(schedule.timesteps, expected[f"{kind}.timesteps"], atol=1e-3)
    if kind == "abs":
        assert torch.equal(schedule.alphas_cumprod[::50].float(), expected["abs.alphas_cumprod"])


def test_names_and_shapes_at_the_official_sizes():
    sizes = json.loads((FIXTURES / "sizes.json").read_text())
    assert sizes["nova-d48w1024-sd512"]["numbers"] == 647_004_176
    for name, config in tiny.OFFICIAL.items():
        with torch.device("meta"):
            model = NovaTransformer(NovaConfig.read(config))
        assert tiny.summary(tiny.shapes_of(model)) == sizes[name]


def test_published_steps_leave_63_with_a_token():
    counts = tokens_per_ar_step(1024, 64, rounding="round")
    assert (len(counts), sum(counts), min(counts), max(counts)) == (63, 1024, 1, 25)


# ---- a policy that can be trained ----------------------------------------------------------------------------


def test_it_is_a_policy(load):
    policy = load()
    assert isinstance(policy, Policy)
    assert (policy.tokens, policy.channels, policy.ar_steps, policy.schedule.steps) == (24, 16, 6, 5)


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_scoring_recovers_the_noise_that_sampling_drew(kind, guidance, load):
    policy = load(kind, guidance=guidance)
    trajectory = policy.rollout(tiny.PROMPTS, SEEDS)
    noise = normal(SEEDS, (24, 6, 16), "kept")
    for step in range(policy.ar_steps):
        queries = all_queries(trajectory, step, policy.schedule.stochastic_steps)
        with torch.no_grad():
            gaussian = policy(trajectory, step, queries, guided=True)
        drawn = (queries.target - gaussian.mean) / gaussian.std
        assert torch.allclose(drawn, noise[queries.image, queries.token, queries.step + 1], atol=1e-3)


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_trainable_parameter_gets_a_gradient_and_no_other(kind, checkpointing, load):
    policy = load(kind, activation_checkpointing=checkpointing)
    policy.requires_grad_(False)
    backbone = [p.requires_grad_(True) for p in policy.backbone_parameters()]
    trajectory = policy.rollout(tiny.PROMPTS, SEEDS)
    policy(trajectory, 3, all_queries(trajectory, 3, [1, 2]), guided=True).mean.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in backbone)
    frozen = {name for name, p in policy.named_parameters() if p.grad is None}
    head = {name for name in frozen if name.startswith("transformer.image_decoder.")}
    assert len(head) == len(list(policy.head_parameters()))
    assert frozen - head == {f"transformer.video_encoder.patch_embed.proj.{n}" for n in ("weight", "bias")}


def test_checkpointing_changes_no_gradient(load):
    grads = []
    for checkpointing in (False, True):
        policy = load(activation_checkpointing=checkpointing)
        trajectory = policy.rollout(tiny.PROMPTS, SEEDS)
        policy(trajectory, 2, all_queries(trajectory, 2, [1]), guided=True).mean.square().mean().backward()
        grads.append([p.grad for p in policy.backbone_parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_distinct_prompts_pass_the_video_encoder_once(load):
    policy = load()
    rows = []
    policy.transformer.video_encoder.norm.register_forward_hook(lambda _m, inputs, _o: rows.append(len(inputs[0])))
    first = policy.rollout([tiny.PROMPTS[0]] * 3 + [tiny.PROMPTS[1]], [1, 2, 3, 4])
    assert rows == [3]  # two prompts and the empty one, for four images with both halves, once per rollout
    alone = policy.rollout([tiny.PROMPTS[1]], [4])
    close(alone.tokens[0], first.tokens[3], 1e-4)


# ---- the frozen parts ----------------------------------------------------------------------------------------


def test_prepared_prompts_need_no_encoder_and_others_bring_it_back(load):
    policy, loads = load(), []
    encode = policy.prompts._encode
    policy.prompts._encode = lambda keys, device: (loads.append(len(keys)), encode(keys, device))
    policy.prepare_prompts([*tiny.PROMPTS, tiny.PROMPTS[0]])
    assert (loads, policy.prompts.encoder) == ([2], None)
    before = policy._text(policy.encode_prompts(tiny.PROMPTS))
    assert loads == [2]
    policy.rollout(["a blue dog"], [1])
    assert (loads, policy.prompts.encoder) == ([2, 1], None)
    assert torch.equal(policy._text(policy.encode_prompts(tiny.PROMPTS)), before)
    keeping = load(text_encoder="keep")
    keeping.prepare_prompts(tiny.PROMPTS)
    assert keeping.prompts.encoder is not None


def test_frozen_parts_are_no_parameters_and_are_shared_by_copies(load):
    policy = load(frozen_dtype="bfloat16")
    assert {name.split(".")[0] for name in policy.state_dict()} == {"transformer"}
    twin = copy.deepcopy(policy)
    assert twin.images is policy.images
    assert twin.prompts is policy.prompts
    assert twin.transformer is not policy.transformer
    assert next(policy.images.vae.parameters()).dtype == torch.bfloat16
    policy.prepare_prompts(tiny.PROMPTS)
    assert {states.dtype for states in policy.prompts.known.values()} == {torch.bfloat16}
    assert policy.decode(policy.rollout(tiny.PROMPTS, SEEDS).tokens).dtype == "uint8"
