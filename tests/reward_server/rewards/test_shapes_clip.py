"""The kept CLIP model of the drawn shapes, read by each reward of its family: real weights, real answers."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import CLIPModel, CLIPTokenizer

from reward_server import options
from reward_server.embedded import EmbeddedServer
from reward_server.rewards import clip, hpsv2, pickscore
from reward_server.rewards.base import RewardLoadError
from reward_server.settings import ENV_PREFIX, ServerSettings
from trainer import parts, pretrain_clip
from trainer.config import ENV_PREFIX as TRAINER_PREFIX
from trainer.config import Config
from trainer.rewards import RewardClient
from trainer.shapes import all_scenes, render, split_scenes

ROOT = Path(__file__).resolve().parents[3]
WEIGHTS = ROOT / "reward_server/rewards/weights/shapes_clip"
BY_PROMPT = {scene.prompt: scene for scene in all_scenes()}
HELD_OUT = split_scenes()[1]


@pytest.fixture(scope="module")
def reward():
    model = clip.Model()
    model.setup("cpu", weights=str(WEIGHTS))
    return model


@pytest.fixture(scope="module")
def pictures():
    """Images of held-out prompts: 24 counts and pairs, and the prompts."""
    scenes = HELD_OUT[::11]
    return list(render(scenes, np.random.default_rng(5))), [scene.prompt for scene in scenes]


def values(reward, images, prompts):
    return np.array([score.value for score in reward.score(images, prompts, [{}] * len(images))])


def test_what_is_kept_is_small_and_safe():
    files = {path.name: path.stat() for path in WEIGHTS.iterdir()}
    assert files.keys() == {
        "config.json",
        "merges.txt",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer_config.json",
        "vocab.json",
    }
    assert sum(stat.st_size for stat in files.values()) < 8e6
    state = load_file(WEIGHTS / "model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}
    assert sum(tensor.numel() for tensor in state.values()) <= 3.6e6


def test_the_kept_tokenizer_and_preprocessing_are_what_training_writes(tmp_path):
    pretrain_clip.write_tokenizer(tmp_path)
    pretrain_clip.write_preprocessor(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_text() == (WEIGHTS / path.name).read_text()


def test_it_tells_a_red_circle_from_a_blue_square(reward):
    rng = np.random.default_rng(0)
    prompts = ["one red circle", "one blue square"]
    images = [render([BY_PROMPT[prompt]] * 20, rng) for prompt in prompts]
    for right, wrong in ((0, 1), (1, 0)):
        own = values(reward, list(images[right]), [prompts[right]] * 20)
        other = values(reward, list(images[wrong]), [prompts[right]] * 20)
        assert own.min() > other.max() + 0.2


@pytest.mark.parametrize("attribute", ["colour", "shape", "count"])  # relations it does not know: docs/shapes-clip.md
def test_held_out_prompts_beat_those_with_one_attribute_changed(reward, attribute):
    rng = np.random.default_rng(1)
    scenes = [scene for scene in HELD_OUT if attribute in pretrain_clip.changed_captions(scene)][::4]
    wins = []
    for scene, image in zip(scenes, render(scenes, rng), strict=True):
        prompts = [scene.prompt, *(c.prompt for c in pretrain_clip.changed_captions(scene)[attribute])]
        own, *others = values(reward, [image] * len(prompts), prompts)
        wins += [own > other for other in others]
    assert np.mean(wins) > 0.98  # chance is 0.5


@pytest.mark.parametrize("fault", ["missing", "extra", "colour", "shape"])
def test_a_prompt_scores_a_spoilt_image_lower(reward, fault):
    rng = np.random.default_rng(2)
    scenes = [scene for scene in HELD_OUT if scene.relation is not None][::6]
    right = values(reward, list(render(scenes, rng)), [scene.prompt for scene in scenes])
    spoilt = render([pretrain_clip.spoilt(scene, fault, rng) for scene in scenes], rng)
    wrong = values(reward, list(spoilt), [scene.prompt for scene in scenes])
    assert np.mean(right > wrong) > 0.95


def test_the_score_is_transformers_own_cosine(reward, pictures):
    images, prompts = pictures
    model = CLIPModel.from_pretrained(WEIGHTS, dtype=torch.float32)
    with torch.inference_mode():
        image = pretrain_clip.embed_images(model, np.stack(images))
        text = pretrain_clip.embed_texts(model, CLIPTokenizer.from_pretrained(WEIGHTS), prompts)
    expected = (image * text).sum(dim=1).numpy()
    np.testing.assert_allclose(values(reward, images, prompts), expected, atol=1e-6)


def test_image_i_is_scored_with_prompt_i(reward, pictures):
    images, prompts = pictures
    scores = values(reward, images, prompts)
    order = np.random.default_rng(0).permutation(len(images))
    shuffled = values(reward, [images[i] for i in order], [prompts[i] for i in order])
    np.testing.assert_allclose(shuffled, scores[order], atol=1e-6)
    mismatched = values(reward, images, prompts[1:] + prompts[:1])
    assert np.abs(mismatched - scores).min() > 0.01


def test_other_words_and_long_prompts_are_scored_too(reward, pictures):
    image = pictures[0][0]
    prompts = ["ein roter Kreis, 猫 🎈", "a red circle " * 30]
    foreign, long = reward.score([image] * 2, prompts, [{}] * 2)
    assert np.isfinite(foreign.value)
    assert foreign.details["truncated"] == 0.0
    assert long.details["truncated"] == 1.0


def test_pickscore_reads_it_too(reward, pictures):
    model = pickscore.Model()
    model.setup("cpu", weights=str(WEIGHTS))
    scores = model.score(*pictures, [{}] * len(pictures[0]))
    cosines = values(reward, *pictures)
    np.testing.assert_allclose([score.details["cosine"] for score in scores], cosines, atol=1e-6)
    scale = float(load_file(WEIGHTS / "model.safetensors")["logit_scale"].float().exp())
    np.testing.assert_allclose([score.value for score in scores], scale * cosines, rtol=1e-5, atol=1e-4)


def to_open_clip(state):
    """The kept weights under open_clip's names, as HPS's checkpoints have them."""
    names = {
        r"^text_model\.embeddings\.token_embedding": "token_embedding",
        r"^text_model\.embeddings\.position_embedding\.weight": "positional_embedding",
        r"^text_model\.final_layer_norm": "ln_final",
        r"^text_model\.encoder\.layers": "transformer.resblocks",
        r"^vision_model\.embeddings\.class_embedding": "visual.class_embedding",
        r"^vision_model\.embeddings\.position_embedding\.weight": "visual.positional_embedding",
        r"^vision_model\.embeddings\.patch_embedding": "visual.conv1",
        r"^vision_model\.pre_layrnorm": "visual.ln_pre",
        r"^vision_model\.post_layernorm": "visual.ln_post",
        r"^vision_model\.encoder\.layers": "visual.transformer.resblocks",
        r"^visual_projection\.weight": "visual.proj",
        r"layer_norm(\d)": r"ln_\1",
        r"self_attn": "attn",
        r"mlp\.fc1": "mlp.c_fc",
        r"mlp\.fc2": "mlp.c_proj",
        r"text_projection\.weight": "text_projection",
    }
    converted = {}
    for name, value in state.items():
        if re.search(r"\.[kv]_proj\.", name):
            continue
        if ".q_proj." in name:
            value = torch.cat([state[name.replace("q_proj", f"{x}_proj")] for x in "qkv"])
            name = name.replace("q_proj.", "in_proj_")
        if name.endswith("_projection.weight"):
            value = value.T.contiguous()
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        converted[name] = value
    return converted


def write_hps(folder, state):
    """A folder as ``xswu/HPSv2`` is laid out, with the model's sizes and tokenizer beside it."""
    torch.save({"state_dict": to_open_clip(state)}, folder / "HPS_v2.1_compressed.pt")
    sizes = {
        "embed_dim": 128,
        "vision_cfg": {"image_size": 48, "layers": 4, "width": 192, "patch_size": 12},
        "text_cfg": {"context_length": 77, "vocab_size": 578, "width": 128, "heads": 2, "layers": 3},
    }
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": sizes}))
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (folder / name).write_text((WEIGHTS / name).read_text())


def test_hpsv2_reads_it_in_open_clips_layout(reward, pictures, tmp_path):
    write_hps(tmp_path, load_file(WEIGHTS / "model.safetensors"))
    model = hpsv2.Model()
    model.setup("cpu", weights=str(tmp_path))
    np.testing.assert_allclose(values(model, *pictures), values(reward, *pictures), atol=1e-6)


def test_hpsv2_names_a_key_that_is_missing(tmp_path):
    state = load_file(WEIGHTS / "model.safetensors")
    del state["text_model.final_layer_norm.bias"]
    write_hps(tmp_path, state)
    with pytest.raises(RewardLoadError, match=r"1 missing: text_model\.final_layer_norm\.bias"):
        hpsv2.Model().setup("cpu", weights=str(tmp_path))


def test_it_is_served_under_its_own_name_by_its_configuration(monkeypatch, reward, pictures):
    monkeypatch.chdir(ROOT)
    arguments = ["--config", "configs/rewards/shapes_clip.yaml", "--port", "0"]
    settings = options.load(ServerSettings, arguments, prog="up", description="", env_prefix=ENV_PREFIX)
    with (
        EmbeddedServer(settings) as server,
        RewardClient(server.url, server.token, {"shapes_clip": 1.0}) as client,
    ):
        answer = client.submit(np.stack(pictures[0]), pictures[1], [{}] * len(pictures[1])).result()
    np.testing.assert_allclose(answer.scores["shapes_clip"], values(reward, *pictures), atol=1e-6)


def test_the_trainers_overlay_embeds_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = ["--config", "configs/train/small.yaml", "--config", "configs/train/variants/learned_reward.yaml"]
    arguments += ["--reward", "shapes_clip=1,shapes=0"]
    config = options.load(
        Config, arguments, prog="run", description="", env_prefix=TRAINER_PREFIX, aliases={"reward": "reward.names"}
    )
    settings = parts._embedded_settings(config)
    assert config.reward.names == {"shapes_clip": 1.0, "shapes": 0.0}
    assert settings.rewards["shapes_clip"].reward == "clip"
    assert Path(settings.rewards["shapes_clip"].options["weights"]).samefile(WEIGHTS)
    assert settings.rewards["shapes"].options == {}
