"""Harmon against numbers of the official code (``fixtures/harmon``), and its files.

Random-weight models prove plumbing and parity, not quality.
"""

import hashlib
import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.policies.tiny_harmon import FIXTURES, tiny_harmon, write_checkpoint
from trainer.algorithm.transitions import gaussian_log_prob
from trainer.algorithm.types import Queries
from trainer.policies.harmon import HarmonPolicy
from trainer.policies.harmon_model import PAD, HarmonConfig
from trainer.policies.mar_parts import mar_schedule

PROMPTS = ["a red cube", "two small dogs on a sofa, 3 cats behind"]
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("harmon") / "base")


@pytest.fixture(scope="module")
def expected():
    return load_file(FIXTURES / "expected.safetensors")


@pytest.fixture(scope="module")
def policy(folder):
    return tiny_harmon(folder)


@pytest.fixture(scope="module")
def official_rollout(policy, expected):
    """Our rollout from the official run's order and noise."""
    return policy.sample_from(
        policy.encode_prompts(PROMPTS),
        expected["rollout_order"],
        expected["rollout_noise"],
        lambda step: torch.zeros_like(expected["rollout_noise"]),
    )


def queries_of(trajectory, ar_step, steps):
    """All kept transitions of an AR step at the given diffusion steps."""
    image, token = (trajectory.predicted_at == ar_step).nonzero(as_tuple=True)
    parts = [
        Queries(image, token, torch.full_like(image, s), *(trajectory.chain[image, token, s + i] for i in (0, 1)))
        for s in steps
    ]
    return Queries.cat(parts)


# ---- parity with the official code -----------------------------------------------------------------------------------


def test_prompts_are_encoded_as_by_the_official_tokenizer(policy, expected):
    prompts, rows = json.loads((FIXTURES / "prompts.json").read_text())
    for ours, theirs in zip(policy.encode_prompts(prompts).tolist(), rows, strict=True):
        assert [i for i in ours if i != PAD] == theirs
    ids = policy.prompts.with_null(policy.encode_prompts(PROMPTS))[:, : expected["input_ids"].shape[1]]
    valid = expected["attention_mask"].bool()
    assert torch.equal(ids[valid], expected["input_ids"][valid])
    assert bool((ids[~valid] == PAD).all())


def test_the_text_is_read_as_by_the_official_prefill(policy, expected):
    context = policy.context(policy.encode_prompts(PROMPTS), guided=True)
    valid = expected["attention_mask"].bool()
    assert torch.equal(context.valid, valid)
    for i, (key, value) in enumerate(zip(context.keys, context.values, strict=True)):
        for ours, theirs in ((key, expected[f"text_key_{i}"]), (value, expected[f"text_value_{i}"])):
            torch.testing.assert_close(ours.transpose(1, 2)[valid], theirs.transpose(1, 2)[valid], **CLOSE)


@pytest.mark.parametrize(("side", "count"), [(s, c) for s in (4, 6) for c in (0, 1, s * s // 2, s * s - 1)])
def test_z_equals_the_official_backbones(folder, expected, side, count):
    policy = tiny_harmon(folder, image_size=16 * side)
    context = policy.context(policy.encode_prompts(PROMPTS), guided=True)
    with torch.no_grad():
        z = policy.conditions(context, expected["tokens"][:, : side * side], expected[f"known_{side}_{count}"], True)
    torch.testing.assert_close(z, expected[f"z_{side}_{count}"], **CLOSE)


def test_the_heads_output_equals_the_official_one(policy, expected):
    with torch.no_grad():
        condition = policy.head_condition(expected["head_z"])
        output = policy.head_output(expected["head_x"], expected["head_time"], condition)
    torch.testing.assert_close(output, expected["head_out"], **CLOSE)


@pytest.mark.parametrize("steps", [5, 25, 100])
def test_the_schedule_is_the_official_respacing(steps):
    theirs = json.loads((FIXTURES / "schedules.json").read_text())[str(steps)]
    schedule = mar_schedule(steps)
    assert schedule.timesteps.tolist() == theirs["timesteps"]
    step, x = torch.arange(steps - 1), torch.zeros(steps - 1, 1, dtype=torch.float64)
    for end, name in ((-1.0, "log_smallest_variance"), (1.0, "log_largest_variance")):
        output = torch.tensor([[0.0, end]], dtype=torch.float64).expand(steps - 1, 2)
        std = schedule.transition(output, x, step).std[:, 0]
        torch.testing.assert_close(2 * std.log(), torch.tensor(theirs[name], dtype=torch.float64), atol=1e-9, rtol=1e-9)


def test_a_rollout_from_the_official_noise_is_the_official_rollout(policy, official_rollout, expected):
    """The first step multiplies the head's prediction by 7,707, whatever the head: errors are told in its units."""
    assert torch.equal(official_rollout.predicted_at, expected["rollout_predicted_at"])
    growth = float(policy.schedule.tables.prediction_coef[0].abs())
    assert float((official_rollout.chain[:, :, :-1] - expected["rollout_x"]).abs().max()) / growth < 1e-5
    torch.testing.assert_close(official_rollout.stitched, expected["rollout_stitched"], atol=2e-5, rtol=1e-5)
    latents = expected["rollout_images"].permute(0, 2, 3, 1).reshape(2, 36, 3) * 0.2325
    assert float((official_rollout.tokens[..., :3] - latents).abs().max()) / growth < 1e-5


@pytest.mark.parametrize("guided", [True, False])
def test_means_stds_and_log_probabilities_are_the_official_ones(policy, official_rollout, expected, guided):
    """Of the official states. A mean is a difference of multiples of state and prediction, up to 7,707 times each;
    ``size`` is their sum: what float32 can resolve is in proportion to it."""
    mean_name = "rollout_mean" if guided else "rollout_mean_unguided"
    tables = policy.schedule.tables
    for ar_step in range(policy.ar_steps):
        rows = queries_of(official_rollout, ar_step, policy.schedule.stochastic_steps)
        at = (rows.image, rows.token, rows.step)
        rows = replace(rows, x=expected["rollout_x"][at])
        with torch.no_grad():
            gaussian = policy(official_rollout, ar_step, rows, guided)
        mean, std = expected[mean_name][at], expected["rollout_std"][at]
        step = rows.step[:, None]
        size = 1 + tables.x_coef[step].abs() * rows.x.abs() + tables.prediction_coef[step].abs()
        assert float((gaussian.mean - mean).abs().div(size).max()) < 2e-6
        torch.testing.assert_close(gaussian.std, std, **CLOSE)
        distance = (rows.target - mean) / std
        log_prob = -0.5 * distance**2 - std.log() - 0.5 * math.log(2 * math.pi)
        error = (gaussian_log_prob(rows.target, gaussian) - log_prob).abs()
        assert float((error / (1 + distance**2 + distance.abs() * size / std)).max()) < 1e-5


def test_pixels_are_scaled_and_rounded_as_by_the_official_script(folder, official_rollout, expected, monkeypatch):
    policy = tiny_harmon(folder)
    monkeypatch.setattr(policy.frozen.vae, "decode", lambda latents: latents[:, :3])
    assert (policy.decode(official_rollout.tokens) == expected["pixels"].permute(0, 2, 3, 1).numpy()).mean() > 0.99


@pytest.mark.parametrize(
    ("name", "llm", "mar"),
    [("0_5b", (896, 4864, 24, 14), ("mar_base", 6, 1024)), ("1_5b", (1536, 8960, 28, 12), ("mar_huge", 12, 1536))],
)
def test_names_and_shapes_at_the_official_sizes(name, llm, mar):
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    llm = dict(zip(names, llm, strict=True)) | {"num_key_value_heads": 2, "vocab_size": 151936}
    mar = dict(zip(("type", "diffloss_d", "diffloss_w"), mar, strict=True))
    with torch.device("meta"):
        policy = HarmonPolicy(HarmonConfig.from_json({"llm": llm, "mar": mar}, "here"))
    state = policy.state_dict() | policy.frozen.state_dict()
    lines = sorted(f"{key} {'x'.join(map(str, value.shape))}" for key, value in state.items())
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert f"{len(lines)} sha256:{digest}" == (FIXTURES / f"parameters-{name}.txt").read_text().splitlines()[0]
    assert (policy.tokens, policy.schedule.steps, policy.schedule.stochastic_steps[-1]) == (1024, 25, 23)
