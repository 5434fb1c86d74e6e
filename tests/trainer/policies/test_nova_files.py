"""NOVA's files: what is saved and exported loads again; what does not fit is told."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reward_server import options
from tests.trainer.policies import tiny_nova as tiny
from trainer.algorithm.transitions import FlowSDE
from trainer.config import ALIASES, ENV_PREFIX, Config, PolicyConfig, UserError
from trainer.families import load_arguments, load_policy, prepare_prompts
from trainer.policies.nova import NovaPolicy

SEEDS = [11, 12]
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("nova")
    return {
        kind: tiny.write_pipeline(root / kind, tiny.our_shapes(transformer), transformer, scheduler)
        for kind, (transformer, scheduler) in tiny.KINDS.items()
    }


@pytest.fixture
def load(folders):
    return lambda: NovaPolicy.load(folders["abs"], **tiny.SETTINGS)


def test_saved_weights_load_again_and_give_the_same_file(load, folders, tmp_path):
    policy = load()
    with torch.no_grad():
        for parameter in policy.backbone_parameters():
            parameter.add_(0.01)
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    policy.save(first, {"step": "1"})
    again = NovaPolicy.load(first, **tiny.SETTINGS)
    for name, value in policy.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    again.save(second, {"step": "1"})
    assert first.read_bytes() == second.read_bytes()
    a, b = (p.rollout(tiny.PROMPTS, SEEDS) for p in (policy, again))
    assert torch.equal(a.tokens, b.tokens)
    moved = NovaPolicy.load(first, base=str(folders["rotary"]), **tiny.SETTINGS)
    assert isinstance(moved.schedule, FlowSDE)


def test_an_exported_pipeline_holds_the_trained_weights_under_the_official_names(load, folders, tmp_path):
    base = shutil.copytree(folders["abs"], tmp_path / "base")
    (base / "transformer" / "transformer_nova.py").write_text("# code that trust_remote_code reads\n")
    (base / "transformer" / f"{WEIGHTS}.index.json").write_text("{}")
    policy = load()
    policy.base = str(base)
    with torch.no_grad():
        policy.transformer.mask_embed.mask_token.add_(1.0)
    policy.export(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out" / "transformer").iterdir()) == [
        "config.json",
        WEIGHTS,
        "transformer_nova.py",
    ]
    again = NovaPolicy.load(tmp_path / "out", **tiny.SETTINGS)
    for name, value in policy.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    for part in ("vae/config.json", "tokenizer/vocab.json", "model_index.json"):
        assert (tmp_path / "out" / part).read_bytes() == (folders["abs"] / part).read_bytes()
    with pytest.raises(ValueError, match="not empty"):
        policy.export(tmp_path / "out")


def broken(folders, tmp_path, change):
    folder = tmp_path / "broken"
    folder.mkdir()
    for part in folders["abs"].iterdir():
        (folder / part.name).symlink_to(part)
    change(folder)
    return folder


def replace_part(folder, part, file, content):
    source = (folder / part).resolve()
    (folder / part).unlink()
    (folder / part).mkdir()
    for other in source.iterdir():
        if other.name != file:
            (folder / part / other.name).symlink_to(other)
    if isinstance(content, dict) and content and isinstance(next(iter(content.values())), torch.Tensor):
        save_file(content, folder / part / file)
    elif content is not None:
        (folder / part / file).write_text(json.dumps(content))


@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_a_key_that_is_missing_or_not_known_is_named(part, folders, tmp_path):
    def change(folder):
        state = load_file(folders["abs"] / part / WEIGHTS)
        name = sorted(state)[0]
        state["surprise"] = state.pop(name)
        replace_part(folder, part, WEIGHTS, state)

    with pytest.raises(ValueError, match=r"(?s)" + sorted(load_file(folders["abs"] / part / WEIGHTS))[0]) as told:
        NovaPolicy.load(broken(folders, tmp_path, change), **tiny.SETTINGS)
    assert "surprise" in str(told.value)


def test_a_text_encoder_that_does_not_fit_is_told_when_it_is_read(folders, tmp_path):
    def change(folder):
        state = load_file(folders["abs"] / "text_encoder" / "model.safetensors")
        del state["model.final_layernorm.weight"]
        replace_part(folder, "text_encoder", "model.safetensors", state)

    policy = NovaPolicy.load(broken(folders, tmp_path, change), **tiny.SETTINGS)
    with pytest.raises(ValueError, match=r"missing: final_layernorm\.weight"):
        policy.prepare_prompts(tiny.PROMPTS)


@pytest.mark.parametrize(
    ("part", "file", "content", "message"),
    [
        ("transformer", "config.json", tiny.TRANSFORMER | {"video_base_size": [9, 2, 3]}, "for video"),
        ("transformer", "config.json", {"arch": ["a", "b", "c"]}, "image_dim, image_size"),
        ("transformer", "config.json", tiny.TRANSFORMER | {"arch": ["big", "vit_d4w32", "mlp_d2w48"]}, "'big'"),
        ("transformer", "config.json", tiny.TRANSFORMER | {"image_base_size": [4, 4]}, "image_base_size"),
        ("scheduler", "scheduler_config.json", tiny.DDPM | {"beta_schedule": "odd"}, "beta_schedule 'odd'"),
        ("scheduler", "scheduler_config.json", tiny.DDPM | {"variance_type": "learned_range"}, "learned_range"),
        ("scheduler", "scheduler_config.json", tiny.DDPM | {"rescale_betas_zero_snr": True}, "zero_snr"),
        ("scheduler", "scheduler_config.json", None, "cannot read .*scheduler_config.json"),
    ],
)
def test_a_configuration_that_cannot_be_followed_is_told(part, file, content, message, folders, tmp_path):
    folder = broken(folders, tmp_path, lambda folder: replace_part(folder, part, file, content))
    with pytest.raises(ValueError, match=message):
        NovaPolicy.load(folder, **tiny.SETTINGS)


@pytest.mark.parametrize(
    ("file", "left"),
    [
        ("transformer/diffusion_pytorch_model.safetensors", 0.5),
        ("vae/diffusion_pytorch_model.safetensors", 0.5),
        ("vae/diffusion_pytorch_model.safetensors", 0),
        ("vae/config.json", 0),
        ("tokenizer/vocab.json", 0.5),
        ("text_encoder/model.safetensors", 0.5),
        ("text_encoder/config.json", 0),
    ],
)
def test_a_file_that_is_cut_off_or_missing_is_told_in_one_line(file, left, folders, tmp_path):
    folder = Path(shutil.copytree(folders["abs"], tmp_path / "damaged"))
    content = (folder / file).read_bytes()
    (folder / file).unlink()
    if left:
        (folder / file).write_bytes(content[: int(left * len(content))])
    settings = PolicyConfig(
        name="nova", checkpoint=str(folder), ar_steps=6, diffusion_steps=5, options={"frozen_dtype": "float32"}
    )
    with pytest.raises(UserError, match=rf"^policy: .*{re.escape(file.split('/')[0])}") as told:
        prepare_prompts(load_policy(Config(policy=settings))[0], ["a red cat"])
    assert "\n" not in str(told.value)


def test_more_steps_than_tokens_are_refused(folders):
    with pytest.raises(ValueError, match="at most 24"):
        NovaPolicy.load(folders["abs"], **tiny.SETTINGS | {"ar_steps": 25})


def test_the_configuration_names_what_the_policy_takes():
    file = Path(__file__).parents[3] / "configs" / "train" / "nova.yaml"
    config = options.load(
        Config, ("--config", str(file)), prog="run", description="", env_prefix=ENV_PREFIX, aliases=ALIASES
    )
    assert load_arguments(config.policy) == {
        "ar_steps": 64,
        "diffusion_steps": 25,
        "guidance": 5.0,
        "text_encoder": "unload",
        "frozen_dtype": "bfloat16",
        "activation_checkpointing": True,
    }


@pytest.mark.parametrize("form", ["shards", "pickle"])
def test_weights_in_other_official_forms_are_read(form, load, folders, tmp_path):
    state = load_file(folders["abs"] / "transformer" / WEIGHTS)

    def change(folder):
        replace_part(folder, "transformer", WEIGHTS, None)
        part = folder / "transformer"
        if form == "pickle":
            torch.save(state, part / "diffusion_pytorch_model.bin")
            return
        for number in (1, 2):
            names = sorted(state)[number - 1 :: 2]
            shard = {name: state[name] for name in names}
            save_file(shard, part / f"diffusion_pytorch_model-0000{number}-of-00002.safetensors")

    again, policy = NovaPolicy.load(broken(folders, tmp_path, change), **tiny.SETTINGS), load()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in policy.state_dict().items())


def test_clipping_is_refused_where_the_official_sampler_would_clip(folders, tmp_path):
    index = json.loads((folders["abs"] / "model_index.json").read_text())
    index["scheduler"][0] = "diffusers"

    def change(folder):
        (folder / "model_index.json").unlink()
        (folder / "model_index.json").write_text(json.dumps(index))

    folder = broken(folders, tmp_path, change)
    NovaPolicy.load(folder, **tiny.SETTINGS)  # clip_sample is false
    replace_part(folder, "scheduler", "scheduler_config.json", tiny.DDPM | {"clip_sample": True})
    with pytest.raises(ValueError, match="clip_sample"):
        NovaPolicy.load(folder, **tiny.SETTINGS)


def test_missing_weights_are_told_with_the_command_that_gets_them(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"Apache-2\.0.*hf download BAAI/nova-d48w1024-sd512"):
        NovaPolicy.load("BAAI/nova-d48w1024-sd512")
    policy = NovaPolicy.load(folders["abs"], **tiny.SETTINGS)
    policy.base = "gone"
    policy.save(tmp_path / "saved.safetensors")
    with pytest.raises(FileNotFoundError, match=r"no NOVA pipeline at gone.*policy\.options\.base"):
        NovaPolicy.load(tmp_path / "saved.safetensors", **tiny.SETTINGS)
    with pytest.raises(FileNotFoundError, match=r"model_index\.json or a hub id"):
        NovaPolicy.load(tmp_path)
    (tmp_path / "x.safetensors").write_text("nothing")
    with pytest.raises(ValueError, match="not a safetensors file"):
        NovaPolicy.load(tmp_path / "x.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="not a checkpoint of the nova policy"):
        NovaPolicy.load(tmp_path / "x.safetensors")
    no_weights = broken(folders, tmp_path, lambda folder: replace_part(folder, "transformer", WEIGHTS, None))
    with pytest.raises(FileNotFoundError, match=r"no weights in .*transformer"):
        NovaPolicy.load(no_weights)
