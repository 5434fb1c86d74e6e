"""The CLIP rewards against the models' own packages, whose numbers fixtures/make_clip_family.py stored.

The weights are random: this proves that the same numbers come out, not that they are good ones.
"""

import io
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from reward_server.images import decode_image
from reward_server.rewards import _clip, aesthetic, clip, hpsv2, pickscore

FIXTURES = Path(__file__).parent / "fixtures"
MAKER = runpy.run_path(str(FIXTURES / "make_clip_family.py"))
EXPECTED = json.loads((FIXTURES / "clip_family" / "expected.json").read_text())
PAIRS = MAKER["pairs"]()
# OpenAI's package repairs text with ftfy, transformers' tokenizer does not
OPENAI_ALONE = {prompt for prompt in MAKER["PROMPTS"] if hpsv2.clean(prompt) != prompt}


def drawn(part, seed):
    return {name: torch.from_numpy(array) for name, array in MAKER["draw"](EXPECTED[part]["shapes"], seed).items()}


def pixels(name):
    """As a client sends it: a PNG file, read by the server's rule."""
    file = io.BytesIO()
    MAKER["picture"](name).save(file, "PNG")
    return decode_image(file.getvalue(), 10**7)


@pytest.fixture(scope="module")
def images():
    return [pixels(name) for name, _ in PAIRS]


@pytest.fixture
def folder(tmp_path):
    """A checkpoint's folder with tokenizer and preprocessing, still without weights."""
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text((FIXTURES / "clip_family" / name).read_text())
    settings = {"size": 224, "crop_size": 224, "do_center_crop": True, "do_normalize": True, "do_resize": True}
    mean_std = {"image_mean": _clip.MEAN, "image_std": _clip.STD, "resample": 3, "feature_extractor_type": "x"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | mean_std))
    return tmp_path


@pytest.fixture
def hps_folder(folder):
    torch.save({"state_dict": drawn("hpsv2", 1)}, folder / "HPS_v2.1_compressed.pt")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": EXPECTED["hpsv2"]["config"]}))
    return folder


@pytest.fixture
def openai_folder(folder):
    """The weights that OpenAI's package had, in transformers' layout, with the head of ``aesthetic``."""
    config = hpsv2.to_clip_config(EXPECTED["openai"]["config"])
    save_file(
        {k: v.contiguous() for k, v in hpsv2.from_open_clip(drawn("openai", 2)).items()}, folder / "model.safetensors"
    )
    config.save_pretrained(folder)
    torch.save(drawn("aesthetic", 3), folder / "sac+logos+ava1-l14-linearMSE.pth")
    return folder


@pytest.fixture
def pick_folder(folder):
    save_file(drawn("pickscore", 4), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(EXPECTED["pickscore"]["config"]))
    return folder


def scored(reward, images):
    return reward.score(images, [prompt for _, prompt in PAIRS], [{}] * len(PAIRS))


def largest_difference(scores, expected, skip=frozenset()):
    compared = [
        abs(score.value - value)
        for score, value, pair in zip(scores, expected, PAIRS, strict=True)
        if value is not None and skip.isdisjoint(pair)
    ]
    assert len(compared) >= 13
    return max(compared)


def test_hpsv2_is_the_packages_score(hps_folder, images):
    reward = hpsv2.Model()
    reward.setup("cpu", weights=str(hps_folder))
    assert largest_difference(scored(reward, images), EXPECTED["hpsv2"]["scores"]) < 1e-6


def test_hpsv2_without_antialias_is_the_score_with_an_older_torchvision(hps_folder, images):
    reward = hpsv2.Model()
    reward.setup("cpu", weights=str(hps_folder), antialias=False)
    scores = scored(reward, images)
    assert largest_difference(scores, EXPECTED["hpsv2"]["scores_without_antialias"]) < 1e-6
    assert largest_difference(scores, EXPECTED["hpsv2"]["scores"]) > 1e-3  # and that is another number
    assert reward.revision.endswith("-v2.1-noaa")


def test_pickscore_is_the_model_cards_score(pick_folder, images):
    reward = pickscore.Model()
    reward.setup("cpu", weights=str(pick_folder))
    scores = scored(reward, images)
    assert largest_difference(scores, EXPECTED["pickscore"]["scores"]) < 3e-5  # of numbers up to 100
    cosines = [_clip.Score(score.details["cosine"]) for score in scores]
    assert largest_difference(cosines, EXPECTED["pickscore"]["cosines"]) < 1e-6
    assert scores[0].details["raw/26"] == pytest.approx(scores[0].value / 26)


def test_clip_is_the_cosine_of_transformers(pick_folder, images):
    reward = clip.Model()
    reward.setup("cpu", weights=str(pick_folder))
    assert largest_difference(scored(reward, images), EXPECTED["pickscore"]["cosines"]) < 1e-6


def test_clip_is_the_cosine_of_openais_package(openai_folder, images):
    reward = clip.Model()
    reward.setup("cpu", weights=str(openai_folder))
    assert largest_difference(scored(reward, images), EXPECTED["openai"]["cosines"], OPENAI_ALONE) < 1e-6


def test_aesthetic_is_the_score_of_its_own_script(openai_folder, images):
    reward = aesthetic.Model()
    reward.setup("cpu", weights=str(openai_folder), head=str(openai_folder))
    scores = scored(reward, images)
    assert largest_difference(scores, EXPECTED["aesthetic"]["scores"]) < 1e-6
    assert scores[0].details == {"raw": scores[0].value}


@pytest.mark.parametrize("prompt", MAKER["PROMPTS"])
def test_tokens_are_those_of_the_hpsv2_package(folder, prompt):
    tokenizer = _clip.tokenizer_of(folder)
    ids = tokenizer(hpsv2.clean(prompt), verbose=False)["input_ids"]
    assert [*ids[:76], 49407] if len(ids) > 77 else ids == EXPECTED["tokens"][prompt]


def test_half_precision_is_near_and_says_so(hps_folder, images):
    reward = hpsv2.Model()
    reward.setup("cpu", weights=str(hps_folder), dtype="bfloat16")
    difference = largest_difference(scored(reward, images), EXPECTED["hpsv2"]["scores"])
    assert 1e-6 < difference < 2e-2
    assert reward.provenance["dtype"] == "bfloat16"


def test_float16_weights_are_widened(hps_folder, images):
    half = {name: tensor.half() for name, tensor in drawn("hpsv2", 1).items()}
    torch.save({"state_dict": half}, hps_folder / "HPS_v2.1_compressed.pt")
    reward = hpsv2.Model()
    reward.setup("cpu", weights=str(hps_folder))
    assert reward.provenance["dtype"] == "float32"
    assert largest_difference(scored(reward, images), EXPECTED["hpsv2"]["scores"]) < 2e-3


def test_pillow_pixels_on_the_device_are_the_processors(pick_folder):
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    model, _ = _clip.read_model(pick_folder)
    ours = _clip.PillowPreprocess.of(pick_folder, model)
    theirs = CLIPImageProcessorPil.from_pretrained(pick_folder)
    pictures = [pixels(name) for name in MAKER["PICTURES"]]
    expected = np.stack(theirs(images=[Image.fromarray(picture) for picture in pictures])["pixel_values"])
    assert np.abs(ours(pictures).numpy() - expected).max() < 1e-6
