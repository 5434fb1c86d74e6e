"""Harmon against numbers of the official code (``fixtures/harmon``), and its files.

Random-weight models prove plumbing and parity, not quality.
"""

import copy
import hashlib
import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from reward_server import options
from tests.trainer.policies.tiny_harmon import FIXTURES, tiny_harmon, tiny_state, write_checkpoint
from trainer.algorithm.transitions import gaussian_log_prob
from trainer.algorithm.types import Queries
from trainer.config import ALIASES, ENV_PREFIX, Config
from trainer.families import freeze, load_arguments
from trainer.policies import harmon_model, mar_parts
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


def test_pixels_are_scaled_and_rounded_as_by_the_official_script(folder, expected, monkeypatch):
    policy = tiny_harmon(folder)
    monkeypatch.setattr(policy.frozen.vae, "decode", lambda latents: latents[:, :3])  # as the fixture's stand-in
    ours, theirs = policy.decode(expected["tokens"] * 0.1), expected["pixels"].permute(0, 2, 3, 1).numpy()
    assert (ours == theirs).all()
    assert 0.9 < ((ours > 0) & (ours < 255)).mean() < 1


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


# ---- gradients -------------------------------------------------------------------------------------------------------


def loss_gradients(policy, trajectory, *, ar_step=2):
    """name -> gradient of the summed log-probability of what AR step ``ar_step`` kept, with guidance."""
    freeze(policy, "frozen")
    policy.zero_grad()
    rows = queries_of(trajectory, ar_step, (1, 2))
    gaussian_log_prob(rows.target, policy(trajectory, ar_step, rows, True)).sum().backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.requires_grad}


def test_gradients_reach_mars_encoder_through_the_frozen_language_model(folder, official_rollout):
    policy = tiny_harmon(folder)
    gradients = loss_gradients(policy, official_rollout)
    assert all(g is not None and bool((g != 0).any()) for g in gradients.values())
    assert "mar.class_emb.weight" not in gradients
    assert not any(name.startswith("mar.diffloss.") for name in gradients)
    assert not any(p.requires_grad or p.grad is not None for p in policy.frozen.parameters())

    encoder = "mar.encoder_blocks.0.mlp.fc1.weight"
    for p in policy.frozen.proj_out.parameters():
        p.zero_()  # the way through the language model is closed; the residual around it is open
    assert not torch.allclose(loss_gradients(policy, official_rollout)[encoder], gradients[encoder], rtol=0.1)


def test_activation_checkpointing_changes_no_gradient(folder, official_rollout, monkeypatch):
    plain = loss_gradients(tiny_harmon(folder), official_rollout)
    policy = tiny_harmon(folder, activation_checkpointing=True)
    calls = []
    for module in (harmon_model, mar_parts):
        monkeypatch.setattr(
            module, "checkpoint", lambda *a, real=module.checkpoint, **k: calls.append(a[0]) or real(*a, **k)
        )
    saved = loss_gradients(policy, official_rollout)
    assert len(calls) == 2 + 2 + 2  # encoder blocks, language model's layers, decoder blocks
    assert not policy.training
    for name, gradient in plain.items():
        torch.testing.assert_close(saved[name], gradient, atol=1e-6, rtol=1e-5)


def test_copies_share_the_frozen_parts(folder):
    policy = tiny_harmon(folder)
    copied = copy.deepcopy(policy)
    assert copied.frozen is policy.frozen
    assert copied.mar.mask_token is not policy.mar.mask_token
    assert sorted(policy.state_dict()) == sorted(k for k in tiny_state() if k.startswith("mar."))


def test_frozen_parts_may_be_half_precision(folder, official_rollout):
    policy = tiny_harmon(folder, frozen_dtype="bfloat16")
    assert {p.dtype for p in policy.frozen.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert policy.frozen.llm.model.rotary_emb.inv_freq.dtype == torch.float32
    rows = queries_of(official_rollout, 2, (1, 2))
    with torch.no_grad():
        exact, rough = (p(official_rollout, 2, rows, False).mean for p in (tiny_harmon(folder), policy))
    assert 0 < float((exact - rough).abs().max()) < 0.05
    assert policy.decode(official_rollout.tokens).shape == (2, 96, 96, 3)


# ---- prompts and files -----------------------------------------------------------------------------------------------


def test_padding_and_company_do_not_change_what_is_said_of_an_image(policy, expected):
    known = expected["known_6_18"][1:]
    zs = []
    for prompts in (PROMPTS[1:], [PROMPTS[1], "a much longer prompt " * 4]):
        count = len(prompts)
        context = policy.context(policy.encode_prompts(prompts), guided=True)
        with torch.no_grad():
            z = policy.conditions(context, expected["tokens"][1:].expand(count, -1, -1), known.expand(count, -1), True)
        zs.append(z[:, 0])
    torch.testing.assert_close(zs[0], zs[1], **CLOSE)


def test_a_prompt_that_is_too_long_is_told(folder):
    policy = tiny_harmon(folder, prompt_tokens=60)
    policy.check_prompts(["a red cube"])
    with pytest.raises(ValueError, match=r"takes \d+ tokens with its template, and policy.options.prompt_tokens is 60"):
        policy.check_prompts(["a red cube", "a very long story " * 9])


def test_loading_tells_the_licence(folder, caplog):
    with caplog.at_level(logging.WARNING):
        tiny_harmon(folder)
    assert [r.message for r in caplog.records if "S-Lab License 1.0: no commercial use" in r.message]


def shards(folder, state, suffix):
    """The checkpoint's weights in two files and their index."""
    (folder / "model.safetensors").unlink()
    names, stem = sorted(state), {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    weight_map = {name: f"{stem}-0000{1 + i % 2}-of-00002.{suffix}" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        part = {name: state[name] for name in names if weight_map[name] == file}
        save_file(part, folder / file) if suffix == "safetensors" else torch.save(part, folder / file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_and_torch_files_are_read(tmp_path, policy, suffix):
    state = tiny_state()
    state["llm.lm_head.weight"] = state.pop("llm.model.embed_tokens.weight")  # tied: either name may be in the file
    folder = write_checkpoint(tmp_path / "base")
    shards(folder, state, suffix)
    read = tiny_harmon(folder)
    whole = policy.state_dict() | policy.frozen.state_dict()
    for name, value in (read.state_dict() | read.frozen.state_dict()).items():
        assert torch.equal(value, whole[name]), name
    next(folder.glob(f"*-00002-of-*.{suffix}")).unlink()
    with pytest.raises(FileNotFoundError, match=r"index.json names files that are not there: .*-00002-of-00002"):
        tiny_harmon(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("mar.mask_token"), "1 missing: mar.mask_token"),
        (lambda s: s.pop("llm.model.norm.weight"), "1 missing: llm.model.norm.weight"),
        (lambda s: s.update({"mar.extra": torch.zeros(1)}), "1 not expected: mar.extra"),
        (lambda s: s.update({"vision.extra": torch.zeros(1)}), "1 not expected: vision.extra"),
        (lambda s: s.update({"mar.mask_token": torch.zeros(1, 1, 2)}), r"mar.mask_token \(1, 1, 2\) instead of"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path, change, words):
    state = tiny_state()
    change(state)
    with pytest.raises(ValueError, match=words):
        tiny_harmon(write_checkpoint(tmp_path / "base", state))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"image_size": 100}, "image_size must be a multiple of 16, not 100"),
        ({"frozen_dtype": "int8"}, "frozen_dtype must be bfloat16, float16 or float32, not 'int8'"),
        ({"head_precision": "half"}, "head_precision must be float32 or autocast, not 'half'"),
        ({"ar_steps": 37}, "37 AR steps cannot each predict at least one of 36 tokens"),
        ({"diffusion_steps": 1}, "diffusion steps must be between 2 and 1000, got 1"),
    ],
)
def test_settings_that_do_not_fit_are_told(folder, settings, words):
    with pytest.raises(ValueError, match=words):
        tiny_harmon(folder, **settings)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "config.json is not JSON"),
        ("[]", "does not hold an object"),
        ("{}", "it has no objects `mar` and `llm`"),
        ('{"llm": {}, "mar": {"type": "mar_giant"}}', "mar.type must be one of mar_base, mar_large, mar_huge"),
        ('{"llm": {}, "mar": {"patch_size": 2}}', "only patch_size 1"),
    ],
)
def test_a_configuration_that_does_not_fit_is_told(tmp_path, content, words):
    folder = write_checkpoint(tmp_path / "base")
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        tiny_harmon(folder)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", "{}", "the tokenizer in .* cannot be read"),
        ("tokenizer.json", "[]", "the tokenizer in .* cannot be read"),
        ("model.safetensors.index.json", "{}", "is not an index of shards"),
        ("model.safetensors.index.json", "[", "is not an index of shards"),
    ],
)
def test_a_damaged_file_is_told(tmp_path, file, content, words):
    folder = write_checkpoint(tmp_path / "base")
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=words):
        tiny_harmon(folder)


def test_what_is_not_there_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        FileNotFoundError, match=r"S-Lab License 1.0: no commercial use\) with: hf download wusize/Harm"
    ):
        HarmonPolicy.load("wusize/Harmon-0_5B")
    with pytest.raises(FileNotFoundError, match="no checkpoint of Harmon at /nowhere"):
        HarmonPolicy.load("/nowhere")
    with pytest.raises(FileNotFoundError, match=r"there is no .*config.json"):
        HarmonPolicy.load(tmp_path)
    folder = write_checkpoint(tmp_path / "base")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        tiny_harmon(folder)
    tokens = json.loads((folder / "tokenizer.json").read_text())
    tokens["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "added_tokens.json").write_text("{}")
    with pytest.raises(ValueError, match="is not Qwen's: it does not know the marks of a turn"):
        tiny_harmon(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").unlink()
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        tiny_harmon(folder)


def test_a_run_s_file_holds_what_is_trained_and_names_its_base(folder, tmp_path):
    policy = tiny_harmon(folder)
    with torch.no_grad():
        policy.mar.mask_token.add_(1)
    policy.save(tmp_path / "policy.safetensors", {"step": "3"})
    with safe_open(tmp_path / "policy.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["harmon"])
        assert all(name.startswith("mar.") for name in file.keys())  # noqa: SIM118
    assert about["base"] == str(folder)
    assert about["note"] == {"step": "3"}
    assert about["config"]["mar"]["buffer_size"] == 8
    again = tiny_harmon(tmp_path / "policy.safetensors")
    assert torch.equal(again.mar.mask_token, policy.mar.mask_token)
    moved = folder.rename(tmp_path / "moved")
    try:
        with pytest.raises(FileNotFoundError, match="no checkpoint of Harmon at"):
            tiny_harmon(tmp_path / "policy.safetensors")
        assert torch.equal(
            tiny_harmon(tmp_path / "policy.safetensors", base=str(moved)).mar.mask_token, again.mar.mask_token
        )
    finally:
        moved.rename(folder)
    with pytest.raises(ValueError, match="is not a checkpoint of the harmon policy"):
        tiny_harmon(folder / "model.safetensors")


def test_export_writes_the_official_layout_and_reads_back(folder, tmp_path):
    policy = tiny_harmon(folder)
    with torch.no_grad():
        policy.mar.mask_token.add_(1)
    policy.export(tmp_path / "out")
    base, out = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "out"))
    assert base.keys() == out.keys()
    assert [k for k in base if not torch.equal(base[k], out[k])] == ["mar.mask_token"]
    assert sorted(f.name for f in folder.iterdir()) == sorted(f.name for f in (tmp_path / "out").iterdir())
    again = tiny_harmon(tmp_path / "out")
    assert all(torch.equal(v, policy.state_dict()[k]) for k, v in again.state_dict().items())


def test_the_configuration_names_what_the_policy_takes():
    file = Path(__file__).parents[3] / "configs" / "train" / "harmon.yaml"
    config = options.load(
        Config, ("--config", str(file)), prog="run", description="", env_prefix=ENV_PREFIX, aliases=ALIASES
    )
    assert load_arguments(config.policy) == {
        "ar_steps": 64,
        "diffusion_steps": 25,
        "guidance": 3.0,
        "image_size": 512,
        "frozen_dtype": "bfloat16",
        "activation_checkpointing": True,
    }
