"""What the rewards built on CLIP promise apart from parity: pairing, order, strictness, and words for mistakes."""

import json
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from reward_server.rewards import _clip, aesthetic, base, clip, hpsv2, pickscore
from reward_server.rewards.base import RewardLoadError, Score

FIXTURES = Path(__file__).parent / "fixtures"
DRAW = runpy.run_path(str(FIXTURES / "make_clip_family.py"))["draw"]
EXPECTED = json.loads((FIXTURES / "clip_family" / "expected.json").read_text())
PROMPTS = ["cat with horn", "a red circle left of a blue square", "a dog", "a very long prompt " * 30, ""]
SIZES = [(40, 60), (60, 40), (40, 60), (224, 224), (1, 1)]


def state(part, seed):
    return {name: torch.from_numpy(array) for name, array in DRAW(EXPECTED[part]["shapes"], seed).items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Small weights for every reward of the family, in the layouts of the official checkpoints."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(FIXTURES / "clip_family" / name, folder)
    (folder / "preprocessor_config.json").write_text("{}")  # transformers' defaults are CLIP's
    save_file(state("pickscore", 4), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(EXPECTED["pickscore"]["config"]))
    torch.save({"state_dict": state("hpsv2", 1)}, folder / "HPS_v2.1_compressed.pt")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": EXPECTED["hpsv2"]["config"]}))
    head = {**EXPECTED["aesthetic"]["shapes"], "layers.0.weight": [1024, 16]}
    torch.save({k: torch.from_numpy(v) for k, v in DRAW(head, 3).items()}, folder / aesthetic.HEAD_FILE)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """A copy for the test to change."""
    return shutil.copytree(made, tmp_path / "weights")


def options(name, folder):
    return {"weights": str(folder)} | ({"head": str(folder)} if name == "aesthetic" else {})


@pytest.fixture
def load(folder):
    def make(name, **more):
        reward = base.load(name)
        base.prepare(reward, "cpu", options(name, folder) | more)
        return reward

    return make


@pytest.fixture
def images():
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (*size, 3), np.uint8) for size in SIZES]
    for image in images:
        image.setflags(write=False)  # as the worker's are
    return images


def values(reward, images, prompts):
    return np.array([score.value for score in reward.score(images, prompts, [{}] * len(images))])


every = pytest.mark.parametrize("name", ["clip", "hpsv2", "pickscore", "aesthetic"])
with_text = pytest.mark.parametrize("name", ["clip", "hpsv2", "pickscore"])


@every
def test_each_image_is_scored_against_its_own_prompt_in_any_order_and_batch(load, images, name):
    reward = load(name)
    together = values(reward, images, PROMPTS)
    alone = np.concatenate([values(reward, [image], [prompt]) for image, prompt in zip(images, PROMPTS, strict=True)])
    scale = np.abs(together).max()
    assert np.abs(together - alone).max() < 2e-6 * scale
    order = [3, 0, 4, 2, 1]
    shuffled = values(reward, [images[i] for i in order], [PROMPTS[i] for i in order])
    assert np.abs(shuffled - together[order]).max() < 2e-6 * scale
    assert np.ptp(together) > 0.05 * scale  # scores that could be told apart if they were swapped


@with_text
def test_a_wrong_pairing_gives_other_scores(load, images, name):
    reward = load(name)
    right, wrong = values(reward, images, PROMPTS), values(reward, images, PROMPTS[1:] + PROMPTS[:1])
    assert (np.abs(right - wrong) > 1e-4).all()


@with_text
def test_a_prompt_is_encoded_once_however_often_a_batch_has_it(load, images, name, monkeypatch):
    reward = load(name)
    seen = []
    encode = reward._clip.model.get_text_features
    monkeypatch.setattr(reward._clip.model, "get_text_features", lambda ids: seen.append(ids.shape[0]) or encode(ids))
    values(reward, images, ["a dog", "cat with horn", "a dog", "a dog", "cat with horn"])
    assert seen == [2]


@every
def test_on_a_cpu_images_go_through_in_parts_without_a_change_of_scores(load, images, name, monkeypatch):
    reward = load(name)
    together = values(reward, images, PROMPTS)
    model = reward._model if name == "aesthetic" else reward._clip.model
    seen = []
    encode = model.get_image_features
    monkeypatch.setattr(model, "get_image_features", lambda pixels: seen.append(len(pixels)) or encode(pixels))
    vision = model.config.vision_config
    tokens = (vision.image_size // vision.patch_size) ** 2 + 1
    monkeypatch.setattr(_clip, "CPU_BYTES", 2 * tokens * vision.intermediate_size * 4)
    assert np.abs(values(reward, images, PROMPTS) - together).max() < 2e-6 * np.abs(together).max()
    assert seen == [2, 2, 1]
    monkeypatch.setattr(_clip, "CPU_BYTES", 1)
    values(reward, images, PROMPTS)
    assert seen[3:] == [1] * 5


def test_parts_on_a_cpu_keep_activations_under_16_mib():
    with torch.device("meta"):
        model = _clip.CLIPModel(hpsv2.to_clip_config(hpsv2.VIT_H_14))
    assert _clip.images_at_once(model) == 3  # of 257 * 5120 * 4 bytes
    assert _clip.images_at_once(model.to(torch.bfloat16)) == 6


@with_text
def test_truncated_says_which_prompts_were_cut(load, images, name):
    scores = load(name).score(images, PROMPTS, [{}] * 5)
    assert [score.details["truncated"] for score in scores] == [0.0, 0.0, 0.0, 1.0, 0.0]


@with_text
def test_a_prompt_of_just_77_tokens_is_not_truncated(load, images, name):
    # one token a digit, with the start and the end of the text 77, then 78
    scores = load(name).score(images[:2], [" ".join("1" * 75), " ".join("1" * 76)], [{}] * 2)
    assert [score.details["truncated"] for score in scores] == [0.0, 1.0]
    assert scores[0].value != scores[1].value


@every
def test_an_image_that_cannot_be_resized_fails_alone(load, images, name):
    strip = np.zeros((1, 401, 3), np.uint8)
    scores = load(name).score([images[0], strip, images[1]], PROMPTS[:3], [{}] * 3)
    assert scores[0].value is not None
    assert scores[2].value is not None
    assert scores[1] == Score(None, reason="401 x 1 pixels: more than 400 times as long as wide")
    assert load(name).score([strip], ["a dog"], [{}]) == [scores[1]]


@pytest.mark.parametrize(
    ("name", "scale", "of_cosine"),
    [
        ("clip", "x100", lambda cosine: 100 * cosine),
        ("clip", "clipscore", lambda cosine: 2.5 * max(cosine, 0)),
        ("hpsv2", "x100", lambda cosine: 100 * cosine),
        ("pickscore", "raw/26", lambda cosine: np.exp(4.6) * cosine / 26),
        ("pickscore", "cosine", lambda cosine: cosine),
    ],
)
def test_scale_chooses_the_value_and_details_have_all(load, images, name, scale, of_cosine):
    raw, scaled = load(name), load(name, scale=scale)
    plain, chosen = raw.score(images, PROMPTS, [{}] * 5), scaled.score(images, PROMPTS, [{}] * 5)
    for before, after in zip(plain, chosen, strict=True):
        assert before.details == after.details
        assert before.value == before.details["raw"]
        assert after.value == after.details[scale]
        cosine = before.details.get("cosine", before.details["raw"])
        assert after.value == pytest.approx(of_cosine(cosine), rel=1e-6)
    assert scaled.revision == f"{raw.revision}-{scale}"


def test_prefix_is_put_before_the_prompt(load, images):
    plain, prefixed = load("clip"), load("clip", prefix="A photo depicts")
    assert (values(prefixed, images[:1], ["a dog"]) == values(plain, images[:1], ["A photo depicts a dog"])).all()
    assert prefixed.revision != plain.revision


@every
def test_revision_and_provenance_name_the_weights(load, folder, name):
    reward = load(name)
    digest = reward.provenance["weights"].removeprefix("sha256:")
    assert len(digest) == 64
    assert reward.revision == digest[:12] + ("-v2.1" if name == "hpsv2" else "")
    assert reward.provenance["dtype"] == "float32"
    assert reward.provenance["preprocessing"] == (
        "hpsv2-tensor-bicubic-224/1" if name == "hpsv2" else "clip-pillow-bicubic-224/1"
    )


@every
def test_no_gradient_and_no_dropout(load, images, name):
    reward = load(name)
    module = reward._model if name == "aesthetic" else reward._clip.model
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


@with_text
@pytest.mark.parametrize(("option", "choice"), [("scale", "raw/5"), ("dtype", "int8")])
def test_a_wrong_choice_names_the_right_ones(load, name, option, choice):
    with pytest.raises(RewardLoadError, match=f"{option} is '{choice}'; choose one of: .*(raw|float32)"):
        load(name, **{option: choice})


def test_an_unknown_version_names_those_there_are(load):
    with pytest.raises(RewardLoadError, match=r"version is '3'; choose one of: 2\.0, 2\.1"):
        load("hpsv2", version="3")


def change(folder, name, edit):
    """Edit the state dict of a reward's checkpoint."""
    if name == "hpsv2":
        held = state("hpsv2", 1)
        edit(held)
        torch.save({"state_dict": held}, folder / "HPS_v2.1_compressed.pt")
    else:
        held = state("pickscore", 4)
        edit(held)
        save_file(held, folder / "model.safetensors")


FIRST = {"hpsv2": "visual.ln_post.bias", "clip": "vision_model.post_layernorm.bias"}
FIRST |= {"pickscore": FIRST["clip"], "aesthetic": FIRST["clip"]}


@every
def test_a_missing_key_is_named(load, folder, name):
    change(folder, name, lambda held: held.pop(FIRST[name]))
    with pytest.raises(RewardLoadError, match=r"1 missing: vision_model\.post_layernorm\.bias$"):
        load(name)


@every
def test_an_unexpected_key_is_named(load, folder, name):
    change(folder, name, lambda held: held.update({"visual.extra": torch.zeros(1)}))
    with pytest.raises(RewardLoadError, match=r"1 unexpected: visual\.extra$"):
        load(name)


@every
def test_a_key_of_another_shape_is_named(load, folder, name):
    change(folder, name, lambda held: held.update({FIRST[name]: torch.zeros(3)}))
    with pytest.raises(RewardLoadError, match=r"1 of another shape: vision_model\.post_layernorm\.bias \[3\], not \["):
        load(name)


def test_a_head_of_another_width_is_named(load, folder):
    shapes = EXPECTED["aesthetic"]["shapes"]  # of 32, where this CLIP gives 16
    torch.save({k: torch.from_numpy(v) for k, v in DRAW(shapes, 3).items()}, folder / aesthetic.HEAD_FILE)
    with pytest.raises(RewardLoadError, match=r"layers\.0\.weight \[1024, 32\], not \[1024, 16\]"):
        load("aesthetic")


def test_another_head_is_another_revision(load, folder):
    before = load("aesthetic")
    head = torch.load(folder / aesthetic.HEAD_FILE, weights_only=True)
    torch.save({key: value + 1 for key, value in head.items()}, folder / aesthetic.HEAD_FILE)
    assert load("aesthetic").revision != before.revision


def test_a_head_may_be_a_file_of_any_name(load, folder):
    (folder / aesthetic.HEAD_FILE).rename(folder / "head.pth")
    assert load("aesthetic", head=str(folder / "head.pth")).revision


def test_positions_that_older_checkpoints_hold_are_no_unexpected_keys(load, folder):
    positions = {"text_model.embeddings.position_ids": torch.arange(77)[None]}
    change(folder, "clip", lambda held: held.update(positions))
    assert load("clip").revision


def test_code_in_a_checkpoint_is_refused(load, folder, tmp_path):
    torch.save({"state_dict": {"visual.proj": Unsafe(tmp_path / "ran")}}, folder / "HPS_v2.1_compressed.pt")
    with pytest.raises(RewardLoadError, match="not a plain file of weights, and is not run"):
        load("hpsv2")
    assert not (tmp_path / "ran").exists()


class Unsafe:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@every
def test_missing_weights_say_how_to_get_them(name, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    reward = base.load(name)
    with pytest.raises(RewardLoadError, match=f"Download them with: reward-server prefetch {name}"):
        base.prepare(reward, "cpu", {"weights": "nobody/nothing-of-this-name"})


def test_what_is_downloaded():
    assert [(s.repo, s.files[0]) for s in hpsv2.Model().sources()] == [
        ("xswu/HPSv2", "HPS_v2.1_compressed.pt"),
        (_clip.LAION_H, "tokenizer.json|vocab.json"),
    ]
    assert hpsv2.Model().sources(version="2.0")[0].files == ("HPS_v2_compressed.pt",)
    assert [s.repo for s in pickscore.Model().sources()] == ["yuvalkirstain/PickScore_v1", _clip.LAION_H]
    assert [s.repo for s in clip.Model().sources(scale="x100")] == ["openai/clip-vit-large-patch14"]
    assert aesthetic.Model().sources()[1].files == ("sac+logos+ava1-l14-linearMSE.pth",)


def test_another_architecture_is_refused(load, folder):
    (folder / "config.json").write_text('{"model_type": "siglip"}')
    with pytest.raises(RewardLoadError, match="model_type is 'siglip', not 'clip'"):
        load("clip")


@pytest.mark.parametrize("setting", [{"crop_size": 336}, {"do_resize": False}, {"do_normalize": False}])
def test_preprocessing_that_the_model_cannot_take_is_refused(load, folder, setting):
    (folder / "preprocessor_config.json").write_text(json.dumps(setting))
    with pytest.raises(RewardLoadError, match=r"expected a resize .* centre crop to 224 x 224"):
        load("clip")


def test_preprocessing_follows_its_file(load, folder, images):
    plain = values(load("clip"), images, PROMPTS)
    (folder / "preprocessor_config.json").write_text('{"resample": 2, "size": {"height": 224, "width": 224}}')
    reward = load("clip")
    assert reward.provenance["preprocessing"] == "clip-pillow-bilinear-224x224/1"
    assert (np.abs(values(reward, images, PROMPTS)[:2] - plain[:2]) > 1e-4).all()  # another filter, and no crop
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0, 0, 0], "image_std": [1, 1, 1]}')
    reward = load("clip")
    assert reward.provenance["preprocessing"] == "clip-pillow-bicubic-224-mean[0,0,0]-std[1,1,1]/1"
    assert reward._clip.preprocess([np.full((224, 224, 3), 51, np.uint8)]).unique().tolist() == [pytest.approx(0.2)]


def test_settings_of_open_clip_that_change_the_model_are_refused(load, folder):
    config = EXPECTED["hpsv2"]["config"]
    config = {**config, "vision_cfg": {**config["vision_cfg"], "global_average_pool": True}}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    with pytest.raises(RewardLoadError, match="not supported: global_average_pool"):
        load("hpsv2")


def test_the_official_hps_model_is_vit_h_14():
    """Widths, heads and the number of parameters that open_clip's ViT-H-14 has."""
    with torch.device("meta"):
        model = _clip.CLIPModel(hpsv2.to_clip_config(hpsv2.VIT_H_14))
    assert sum(parameter.numel() for parameter in model.parameters()) == 986_109_441
    assert model.vision_model.encoder.layers[0].self_attn.num_heads == 16
    assert model.text_model.encoder.layers[0].self_attn.num_heads == 16


def test_hps_pads_the_short_side_evenly_with_zeros():
    preprocess = hpsv2.TensorPreprocess(8, True, torch.device("cpu"))
    white = np.full((3, 8, 3), 255, np.uint8)  # 8 long already: no resize
    pixels = preprocess([white])[0, 0] * _clip.STD[0] + _clip.MEAN[0]
    assert pixels[:, 0].round(decimals=5).tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


def test_hpsv2_of_a_small_side_sees_a_long_image_as_a_line():
    preprocess = hpsv2.TensorPreprocess(8, True, torch.device("cpu"))
    pixels = preprocess([np.full((1, 399, 3), 255, np.uint8)])[0]
    assert torch.allclose(pixels[0, 3], torch.tensor((1 - 0.48145466) / 0.26862954))
    assert torch.allclose(pixels[0, [0, 2, 4, 7]], torch.tensor(-0.48145466 / 0.26862954))
