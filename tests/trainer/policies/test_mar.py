"""LTH14's MAR: the numbers of the official code, classes as prompts, and files. Random weights: parity, not quality."""

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from reward_server import options
from tests.trainer.policies import tiny_mar as tiny
from trainer.algorithm.transitions import gaussian_log_prob
from trainer.algorithm.types import Queries
from trainer.config import ALIASES, ENV_PREFIX, Config
from trainer.families import load_arguments
from trainer.policies import mar_files
from trainer.policies.kl16 import KL16
from trainer.policies.mar import MarPolicy, class_index, imagenet_classes
from trainer.policies.mar_parts import MAR_SIZES, Mar, MarConfig, known_index, mar_schedule
from trainer.prompts import load_prompts

FIXTURES = Path(__file__).parent / "fixtures" / "mar"
CLASSES = torch.tensor([[4], [1]])
N, C = 16, 4


@pytest.fixture(scope="module")
def expected():
    return load_file(FIXTURES / "expected.safetensors")


@pytest.fixture
def policy():
    return tiny.tiny_mar()


# ---- the official numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["base", "large", "huge", "kl16"])
def test_names_and_shapes_at_the_official_sizes(name):
    with torch.device("meta"):
        model = KL16() if name == "kl16" else Mar(MAR_SIZES[name])
    lines = sorted(f"{key} {'x'.join(map(str, value.shape))}" for key, value in model.state_dict().items())
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert f"{len(lines)} sha256:{digest}" == (FIXTURES / f"parameters-{name}.txt").read_text().splitlines()[0]


def test_diffusion_tables():
    wanted = json.loads((FIXTURES / "schedules.json").read_text())
    every = [mar_schedule(steps).timesteps.long().flip(0).tolist() for steps in range(2, 1001)]
    assert hashlib.sha256(json.dumps(every).encode()).hexdigest() == wanted["timesteps"]
    for steps, table in wanted["tables"].items():
        schedule = mar_schedule(int(steps))
        assert schedule.timesteps.tolist() == table["timesteps"]
        at = schedule.timesteps.long()
        close = {"rtol": 1e-7, "atol": 1e-12}
        np.testing.assert_allclose(schedule.alphas_cumprod[at].numpy(), table["alphas_cumprod"], **close)
        np.testing.assert_allclose(schedule.std.square().numpy(), table["posterior_variance"], **close)
    with pytest.raises(ValueError, match=r"between 2 and 1000, got 1$"):
        mar_schedule(1)


@pytest.mark.parametrize("known", [0, 5, 15])
def test_backbone_and_head(policy, expected, known):
    mask = tiny.seeded("mask", 2, N).argsort(1) < known
    with torch.no_grad():
        z = policy.conditions(policy.context(CLASSES, True), tiny.seeded("tokens", 2, N, C), mask, True)
        torch.testing.assert_close(z[0], expected[f"z.class.{known}"], rtol=0, atol=1e-5)
        torch.testing.assert_close(z[1], expected[f"z.null.{known}"], rtol=0, atol=1e-5)
        assert (z[0] - z[1]).abs().max() > 0.1
        time = torch.tensor([0, 250, 500, 999]).repeat_interleave(8)
        found = policy.head_output(tiny.seeded("noisy", 2 * N, C), time, policy.head_condition(z[1].flatten(0, 1)))
    torch.testing.assert_close(found, expected[f"head.{known}"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("schedule", "guidance"), [("linear", 3.0), ("constant", 3.0), ("constant", 1.0)])
def test_a_whole_rollout_and_its_log_probabilities(expected, schedule, guidance):
    """In float64: the random head does not cancel the noise, so that chains grow to 1e4 (see make.py)."""
    policy = tiny.tiny_mar(guidance_schedule=schedule, guidance=guidance).double()
    wanted = {
        key: expected[f"rollout.{schedule}.{guidance:g}.{key}"] for key in ("chain", "tokens", "log_prob", "scales")
    }
    noise = tiny.seeded("rollout", 2, N, 7, C).double()
    order = tiny.seeded("order", 2, N).argsort(1).flip(1)  # the official order is read from its end
    found = policy.sample_from(CLASSES, order, noise, lambda step: torch.zeros_like(noise))
    torch.testing.assert_close(found.chain, wanted["chain"], rtol=1e-8, atol=1e-6)
    torch.testing.assert_close(found.tokens, wanted["tokens"], rtol=1e-8, atol=1e-6)
    assert [policy.guidance_at(k) for k in range(5)] == pytest.approx(wanted["scales"].tolist(), abs=1e-6)
    for step in range(5):
        image, token, at = _every_transition(found, step, policy)
        rows = found.chain[image, token]
        queries = Queries(image, token, at, rows[range(len(at)), at], rows[range(len(at)), at + 1])
        with torch.no_grad():
            scored = gaussian_log_prob(queries.target, policy(found, step, queries, guided=True))
        torch.testing.assert_close(scored, wanted["log_prob"][image, token, at], rtol=0, atol=1e-5)


def _every_transition(trajectory, ar_step, policy):
    """(Q,) image, token and diffusion step of all transitions with noise that an AR step kept."""
    image, token = (trajectory.predicted_at == ar_step).nonzero(as_tuple=True)
    steps = torch.tensor(policy.schedule.stochastic_steps)
    return image.repeat_interleave(len(steps)), token.repeat_interleave(len(steps)), steps.repeat(len(image))


def test_the_autoencoder(policy, expected):
    images = tiny.seeded("images", 2, 3, 16, 24).clamp(-1, 1)
    with torch.no_grad():
        mean, std = policy.vae.encode(images)
        decoded = policy.vae.decode(expected["vae.mean"])
    torch.testing.assert_close(mean, expected["vae.mean"], rtol=0, atol=1e-5)
    torch.testing.assert_close(std, expected["vae.std"], rtol=0, atol=1e-5)
    torch.testing.assert_close(decoded, expected["vae.decoded"], rtol=0, atol=1e-5)


# ---- prompts, images, gradients ------------------------------------------------------------------------------


def test_prompts_are_classes():
    assert len(set(imagenet_classes())) == 1000
    named = [
        "tench",
        "goldfish",
        "golden retriever",
        " Golden Retriever ",
        "207",
        "toilet tissue",
        "Cardigan",
        "cardigan",
    ]
    assert [class_index(name, 1000) for name in named] == [0, 1, 207, 207, 207, 999, 264, 474]
    with pytest.raises(ValueError, match=r"'gold fish' is none; the closest: goldfish"):
        class_index("gold fish", 1000)
    with pytest.raises(
        ValueError, match=r"by name or index 0\.\.999; 'CARDIGAN' is none; the closest: Cardigan, cardigan"
    ):
        class_index("CARDIGAN", 1000)
    with pytest.raises(ValueError, match=r"there is no class 1000: MAR's classes are 0\.\.999"):
        class_index("1000", 1000)
    with pytest.raises(ValueError, match=r"6 classes without names; prompts are 0\.\.5, not 'goldfish'"):
        class_index("goldfish", 6)


def test_images(policy):
    tokens = tiny.seeded("latents", 9, N, C)  # more than are decoded at once
    images = policy.decode(tokens)
    assert images.shape == (9, 16, 16, 3)
    assert images.dtype == np.uint8
    with torch.no_grad():
        floats = policy.vae.decode(tokens[8].T.reshape(1, C, 4, 4) / 0.2325)[0].permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(images[8], np.round(np.clip((floats + 1) / 2 * 255, 0, 255)))


def test_an_image_does_not_depend_on_its_batch():
    policy = tiny.calm(tiny.tiny_mar())
    both = policy.rollout(["4", "1"], [7, 8])
    alone = policy.rollout(["1"], [8])
    torch.testing.assert_close(both.tokens[1:], alone.tokens, rtol=0, atol=1e-4)
    assert torch.equal(both.predicted_at[1:], alone.predicted_at)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_gradients_reach_the_backbone_and_nothing_else(guidance):
    policy = tiny.tiny_mar(guidance=guidance).requires_grad_(False)
    trained = list(policy.backbone_parameters())
    for parameter in trained:
        parameter.requires_grad_(True)
    trajectory = policy.rollout(["4", "1"], [7, 8])
    image, token, at = _every_transition(trajectory, 2, policy)
    rows = trajectory.chain[image, token]
    queries = Queries(image, token, at, rows[range(len(at)), at], rows[range(len(at)), at + 1])
    gaussian_log_prob(queries.target, policy(trajectory, 2, queries, guided=True)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in trained)
    idle = {
        name
        for name, p in policy.named_parameters()
        if p.grad is None and not name.startswith(("vae.", "mar.diffloss."))
    }
    assert idle == ({"mar.fake_latent"} if guidance == 1.0 else set())
    assert all(p.grad is None for p in [*policy.head_parameters(), *policy.vae.parameters()])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"ar_steps": 17}, r"ar_steps must lie in 1\.\.16 for this MAR, not 17"),
        ({"guidance_schedule": "cosine"}, "linear or constant, not 'cosine'"),
        ({"diffusion_steps": 0}, "between 2 and 1000, got 0"),
    ],
)
def test_settings_that_do_not_fit(setting, message):
    with pytest.raises(ValueError, match=message):
        tiny.tiny_mar(**setting)


# ---- files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def official(tmp_path, policy, monkeypatch):
    """The folder that the official download makes, with the tiny weights in the official checkpoint's form."""
    monkeypatch.setitem(mar_files.MAR_SIZES, "base", MarConfig(**tiny.MAR))
    root = tmp_path / "pretrained_models"
    (root / "mar" / "mar_base").mkdir(parents=True)
    (root / "vae").mkdir()
    raw = {name: value + 1 for name, value in policy.mar.state_dict().items()}
    optimizer = torch.optim.AdamW(policy.mar.parameters(), betas=(0.9, 0.95)).state_dict()
    content = {"model": raw, "model_ema": policy.mar.state_dict(), "optimizer": optimizer, "epoch": 799}
    content |= {"scaler": {"scale": 1024.0}, "args": argparse.Namespace(model="mar_base", lr=1e-4, blr=None)}
    torch.save(content, root / "mar" / "mar_base" / "checkpoint-last.pth")
    torch.save({"model": policy.vae.state_dict()}, root / "vae" / "kl16.ckpt")
    return root


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("below", [".", "mar/mar_base", "mar/mar_base/checkpoint-last.pth"])
def test_the_official_files_are_read_and_the_moving_average_taken(official, policy, below):
    loaded = MarPolicy.load(official / below, ar_steps=5, diffusion_steps=6)
    assert same(loaded, policy)
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.vae.parameters())
    assert loaded.mar.config == MarConfig(**tiny.MAR)


def test_what_is_saved_is_loaded(official, policy, tmp_path):
    loaded = MarPolicy.load(official, ar_steps=5, diffusion_steps=6)
    with torch.no_grad():
        loaded.mar.class_emb.weight.add_(1)
    run = tmp_path / "run" / "policy.safetensors"
    run.parent.mkdir()
    loaded.save(run, {"step": "3"})
    again = MarPolicy.load(run, ar_steps=5, diffusion_steps=6)
    assert same(again, loaded)
    again.save(tmp_path / "again.safetensors", {"step": "3"})
    assert (tmp_path / "again.safetensors").read_bytes() == run.read_bytes()
    assert not any(name.startswith("vae") for name in load_file(run))
    (official / "vae" / "kl16.ckpt").rename(tmp_path / "kl16.ckpt")
    with pytest.raises(FileNotFoundError, match=r"say where it is by the option vae|MAR weights at"):
        MarPolicy.load(run)
    assert same(MarPolicy.load(run, ar_steps=5, vae=tmp_path / "kl16.ckpt"), loaded)


def test_what_is_exported_is_in_the_official_form_and_loads(policy, tmp_path):
    policy.export(tmp_path / "out")
    assert same(MarPolicy.load(tmp_path / "out", ar_steps=5, diffusion_steps=6), policy)
    content = torch.load(tmp_path / "out" / "checkpoint-last.pth", weights_only=True)
    assert content["model"].keys() == content["model_ema"].keys() == policy.mar.state_dict().keys()
    with pytest.raises(ValueError, match="out is not empty"):
        policy.export(tmp_path / "out")


def test_the_conversion_to_safetensors_is_read(policy, tmp_path, monkeypatch):
    monkeypatch.setitem(mar_files.MAR_SIZES, "base", MarConfig(**tiny.MAR))
    save_file(policy.mar.state_dict(), tmp_path / "mar-base.safetensors")
    save_file(policy.vae.state_dict(), tmp_path / "kl16.safetensors")
    assert same(MarPolicy.load(tmp_path, ar_steps=5), policy)
    save_file(policy.mar.state_dict(), tmp_path / "mar-huge.safetensors")
    with pytest.raises(ValueError, match="in the sizes base, huge; choose one by the option size"):
        MarPolicy.load(tmp_path)
    assert same(MarPolicy.load(tmp_path, ar_steps=5, size="base"), policy)
    with pytest.raises(FileNotFoundError, match=r"no MAR-large weights in .*util/download\.py"):
        MarPolicy.load(tmp_path, size="large")
    with pytest.raises(ValueError, match="there is no MAR 'tiny'; there are base, large, huge"):
        MarPolicy.load(tmp_path, size="tiny")


class Dangerous:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_broken_files_are_told(official, tmp_path, capsys):
    checkpoint = official / "mar" / "mar_base" / "checkpoint-last.pth"
    content = torch.load(checkpoint, weights_only=False)
    del content["model_ema"]["encoder_norm.bias"]
    torch.save(content, checkpoint)
    with pytest.raises(ValueError, match=r"checkpoint-last\.pth does not fit Mar: 1 missing: encoder_norm\.bias"):
        MarPolicy.load(official)
    del content["model_ema"]["z_proj.weight"]
    torch.save(content, checkpoint)
    with pytest.raises(ValueError, match=r"is not a checkpoint of MAR: 'z_proj\.weight' is missing"):
        MarPolicy.load(official)
    torch.save({"model": Dangerous()}, checkpoint)
    with pytest.raises(
        ValueError, match=r"is not a checkpoint that can be read safely: Weights only load failed[^\n]*$"
    ):
        MarPolicy.load(official)
    assert "must not run" not in capsys.readouterr().out
    torch.save({"weights": {}}, checkpoint)
    with pytest.raises(ValueError, match="it has neither model_ema nor model"):
        MarPolicy.load(official)
    checkpoint.write_bytes(b"junk")  # a pickle's instruction whose argument is cut off
    with pytest.raises(ValueError, match="is not a checkpoint that can be read safely"):
        MarPolicy.load(official)
    checkpoint.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="is not a checkpoint that can be read safely"):
        MarPolicy.load(official)
    (tmp_path / "x.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        MarPolicy.load(tmp_path / "x.safetensors")


def test_a_width_without_a_published_model_is_told(policy, tmp_path):
    save_file(policy.mar.state_dict(), tmp_path / "mar-base.safetensors")
    with pytest.raises(ValueError, match="no published MAR has the width 32"):
        MarPolicy.load(tmp_path)


def test_absent_weights_are_told_with_the_command_that_gets_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"licence.* hf download someone/mar; .*`python util/download\.py`"):
        MarPolicy.load("someone/mar")
    with pytest.raises(FileNotFoundError, match=r"no MAR weights at /nowhere/at/all: a file, a folder or a hub id"):
        MarPolicy.load("/nowhere/at/all")
    with pytest.raises(FileNotFoundError, match=r"no MAR weights in .*\(MIT\)"):
        MarPolicy.load(tmp_path)


def test_one_known_token_more_is_another_condition(policy):
    """Guards the index arithmetic: z changes where a token becomes known, and images do not mix."""
    tokens = tiny.seeded("tokens", 2, N, C)
    known = torch.arange(N).expand(2, N) < 5
    with torch.no_grad():
        z = policy.conditions(policy.context(CLASSES, True), tokens, known, True)
        changed = tokens.clone()
        changed[0, 2] += 1
        other = policy.conditions(policy.context(CLASSES, True), changed, known, True)
    assert known_index(known).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert torch.equal(z[:, 1], other[:, 1])
    assert (z[:, 0] - other[:, 0]).abs().amax(-1).min() > 0


def test_the_configuration_fits_the_family():
    arguments = ["--config", "configs/train/mar.yaml"]
    config = options.load(Config, arguments, prog="run", description="", env_prefix=ENV_PREFIX, aliases=ALIASES)
    arguments = load_arguments(config.policy)
    assert arguments == {"ar_steps": 64, "diffusion_steps": 25, "guidance": 2.9, "size": "base"} | {
        "guidance_schedule": "linear",
        "activation_checkpointing": False,
    }
    names = [prompt.text for prompt in load_prompts(config.prompts.train)]
    assert [class_index(name, 1000) for name in names] == list(range(1000))
