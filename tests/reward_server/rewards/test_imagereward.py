"""ImageReward against its package's own numbers, on a small checkpoint of random weights (they know no preferences)."""

import hashlib
import io
import json
import os
import pickle
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from reward_server.images import decode_image
from reward_server.rewards.base import RewardLoadError, prepare
from reward_server.rewards.imagereward import Model, crop, network_name

FIXTURES = Path(__file__).parent / "fixtures" / "imagereward"
TOLERANCE = 3e-6  # of scores that deviate by 0.27: two orders of float32 summation

tiny = runpy.run_path(str(FIXTURES / "tiny.py"))
expected = json.loads((FIXTURES / "expected.json").read_text())  # by fixtures/make_imagereward.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny["write"](tmp_path_factory.mktemp("imagereward"))


@pytest.fixture(scope="module")
def reward(folder):
    return loaded(folder)


def loaded(folder, **options):
    model = Model()
    prepare(model, "cpu", {"weights": str(folder), "tokenizer": str(folder), **options})
    return model


def served(picture):
    """As the server's door makes it RGB."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return decode_image(file.getvalue(), 10**6)


@pytest.fixture(scope="module")
def images():
    return {name: served(picture) for name, picture in tiny["pictures"]().items()}


def values(reward, images, prompts):
    return np.array([score.value for score in reward.score(images, prompts, [{}] * len(images))])


@pytest.mark.parametrize("name", expected["scores"])
def test_scores_are_the_package_s(reward, images, name):
    prompts = tiny["PROMPTS"]
    got = values(reward, [images[name]] * len(prompts), prompts)
    assert got == pytest.approx(expected["scores"][name], abs=TOLERANCE)


def test_the_numbers_compared_differ_far_more_than_the_tolerance():
    matrix = np.array(list(expected["scores"].values()))
    assert matrix.std(axis=0).min() > 0.05  # between images
    assert matrix.std(axis=1).min() > 0.1  # between prompts


def test_transparency_is_gone_before_the_resize_unlike_in_the_package(reward, images):
    (ours,) = values(reward, [images["alpha"]], tiny["PROMPTS"][:1])
    assert abs(ours - expected["alpha without conversion"]) > 0.05


def test_image_i_is_scored_with_prompt_i(reward, images):
    names, prompts = list(images), tiny["PROMPTS"]
    pairs = [(names[i % len(names)], (i * i + 1) % len(prompts)) for i in np.random.RandomState(3).permutation(14)]
    got = values(reward, [images[name] for name, _ in pairs], [prompts[p] for _, p in pairs])
    assert got == pytest.approx([expected["scores"][name][p] for name, p in pairs], abs=TOLERANCE)


def test_a_batch_scores_as_its_images_alone(reward, images):
    batch, prompts = list(images.values())[:4], tiny["PROMPTS"][:4]
    alone = [values(reward, [image], [prompt])[0] for image, prompt in zip(batch, prompts, strict=True)]
    assert values(reward, batch, prompts) == pytest.approx(alone, abs=TOLERANCE)


def test_truncated_tells_prompts_beyond_35_tokens(reward, images):
    prompts = ["red " * 33, "red " * 34]  # with [CLS] and [SEP]: 35 and 36
    scores = reward.score([images["small"]] * 2, prompts, [{}] * 2)
    assert [score.details["truncated"] for score in scores] == [0.0, 1.0]
    assert scores[0].value == pytest.approx(scores[1].value, abs=2e-6)  # the 34th word is not read
    assert [score.details["raw"] for score in scores] == [score.value for score in scores]


def test_a_line_of_pixels_fails_alone(reward, images):
    line = np.zeros((1, 401, 3), np.uint8)
    scores = reward.score([line, images["small"]], tiny["PROMPTS"][:2], [{}] * 2)
    assert scores[0].value is None
    assert "401 x 1" in scores[0].reason
    assert scores[1].value == pytest.approx(expected["scores"]["small"][1], abs=TOLERANCE)
    assert [score.value for score in reward.score([line], ["a"], [{}])] == [None]


def test_the_score_is_the_mlp_s_output_in_standard_deviations(tmp_path, images):
    state = tiny["state_dict"]()
    state["mlp.layers.7.weight"].zero_()
    state["mlp.layers.7.bias"].fill_(2.0)
    folder = tiny["write"](tmp_path)
    torch.save(state, folder / "ImageReward.pt")
    (value,) = values(loaded(folder), [images["small"]], ["a"])
    assert value == pytest.approx((2 - 0.16717362830052426) / 1.0333394966054072, abs=1e-6)


def test_crop_takes_the_middle():
    ramp = np.zeros((224, 449, 3), np.uint8)
    ramp[..., 0] = np.arange(449) % 256
    # (449 - 224) / 2 = 112.5, which torchvision rounds to the even 112
    assert crop(ramp, 224)[0, :, 0].tolist() == (np.arange(112, 336) % 256).tolist()
    assert crop(ramp.transpose(1, 0, 2), 224)[:, 0, 0].tolist() == (np.arange(112, 336) % 256).tolist()


def test_revision_and_provenance(reward, folder):
    digest = hashlib.sha256((folder / "ImageReward.pt").read_bytes()).hexdigest()
    assert reward.revision == digest[:12]
    assert reward.provenance["weights"] == "sha256:" + digest
    assert reward.provenance["preprocessing"] == "imagereward-pil-bicubic-crop-224/1"
    assert reward.provenance["dtype"] == "float32"


def test_half_precision(folder, reward, images):
    half = loaded(folder, dtype="bfloat16")
    assert half.provenance["dtype"] == "bfloat16"
    names = list(images)[:4]
    got = values(half, [images[name] for name in names], tiny["PROMPTS"][:4])
    difference = np.abs(got - [expected["scores"][name][i] for i, name in enumerate(names)])
    assert 1e-5 < difference.max() < 0.05


def test_every_key_of_the_checkpoint_has_one_place():
    names = [network_name(key) for key in tiny["shapes"]()]
    used = [name for name in names if name is not None]
    assert len(set(used)) == len(used)
    assert len(names) - len(used) == 5  # two contrastive heads' weight and bias, and position_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("blip.visual_encoder.blocks.1.attn.proj.bias"), r"1 missing: .*projection\.bias"),
        (lambda state: state.update({"blip.extra": torch.zeros(1)}), r"1 unexpected: blip\.extra"),
        (lambda state: state.update({"mlp.layers.0.bias": torch.zeros(7)}), r"another shape: mlp\.0\.bias \[7\]"),
        (lambda state: state.pop("blip.visual_encoder.pos_embed"), r"no checkpoint of ImageReward.*pos_embed"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_an_error_that_names_the_key(tmp_path, change, message):
    folder, state = tiny["write"](tmp_path), tiny["state_dict"]()
    change(state)
    torch.save(state, folder / "ImageReward.pt")
    with pytest.raises(RewardLoadError, match=message):
        loaded(folder)


class Harmful:
    def __reduce__(self):
        return (os.mkdir, ("harm",))


def test_code_in_a_checkpoint_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tiny["write"](tmp_path / "weights")
    (folder / "ImageReward.pt").write_bytes(pickle.dumps({"mlp": Harmful()}))
    with pytest.raises(RewardLoadError, match="not run"):
        loaded(folder)
    assert not (tmp_path / "harm").exists()


def test_missing_files_are_named(tmp_path):
    folder = tiny["write"](tmp_path)
    (folder / "med_config.json").unlink()
    with pytest.raises(RewardLoadError, match=r"lacks med_config\.json"):
        loaded(folder)


def test_a_wrong_configuration_is_an_error(tmp_path):
    folder = tiny["write"](tmp_path)
    (folder / "med_config.json").write_text('{"vocab_size": 3}')
    with pytest.raises(RewardLoadError, match="hidden_size"):
        loaded(folder)


def test_a_vocabulary_of_another_model_is_an_error(tmp_path):
    folder = tiny["write"](tmp_path)
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    with pytest.raises(RewardLoadError, match=r"8 tokens with BLIP's two, but the model has 133"):
        loaded(folder)


def test_an_unknown_dtype_names_the_choices(folder):
    with pytest.raises(RewardLoadError, match=r"float64.*bfloat16"):
        loaded(folder, dtype="float64")


def test_sources_follow_the_options():
    checkpoint, vocabulary = Model().sources(weights="here/it-is", dtype="float16")
    assert (checkpoint.repo, checkpoint.files) == ("here/it-is", ("ImageReward.pt", "med_config.json"))
    assert (vocabulary.repo, vocabulary.files) == ("google-bert/bert-base-uncased", ("vocab.txt",))
