"""GenEval held against the published code: mmdet's detector, the colours, and whole verdicts.

The networks are small and random: they prove that the official checkpoints' layout is computed alike, not that objects
are found.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from reward_server.rewards import _detector, _detector_mmdet, _geneval_colour, _geneval_rules, _hub, geneval
from reward_server.rewards._detector import Detection
from reward_server.rewards._geneval_rules import CLASSES
from reward_server.rewards.base import RewardLoadError, Score, load, prepare
from reward_server.rewards.geneval import Model

FIXTURES = Path(__file__).parent / "fixtures"
CPU = torch.device("cpu")


def load_script():
    spec = importlib.util.spec_from_file_location("make_geneval", FIXTURES / "make_geneval.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load_script()


def stored(name):
    return json.loads((FIXTURES / "geneval" / name).read_text())


def tensors(shapes, seed):
    return {key: torch.from_numpy(value) for key, value in make.random_state(shapes, seed).items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small detector in the layout of mmdet's published file."""
    path = tmp_path_factory.mktemp("mmdet") / "mask2former.pth"
    state = tensors(stored("detections.json")["shapes"], 0)
    torch.save({"meta": {"CLASSES": ("person",), "epoch": 50}, "state_dict": state}, path)
    return path


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A small CLIP in the layout of the hub."""
    folder = tmp_path_factory.mktemp("clip")
    expected = stored("colours.json")
    (folder / "config.json").write_text(json.dumps(expected["config"]))
    (folder / "vocab.json").write_text(json.dumps(make.letter_vocabulary()))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    save_file(tensors(expected["shapes"], 7), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def detector(checkpoint):
    return _detector.load(str(checkpoint), tuple(CLASSES), CPU, torch.float32, reward="geneval")[0]


@pytest.fixture(scope="module")
def images():
    return [make.random_image(size, seed) for seed, size in enumerate(make.SIZES)]


@pytest.fixture
def set_up(checkpoint, clip, monkeypatch):
    """``set_up(option=...)``: the small reward, looking at images of a fifth of the usual size, which is quick."""
    monkeypatch.setattr(_detector, "LONG_SIDE", 267)
    monkeypatch.setattr(_detector, "SHORT_SIDE", 160)

    def set_up(**options):
        model = Model()
        model.setup("cpu", weights=str(checkpoint), clip=str(clip), **options)
        return model

    return set_up


# the detector


def test_resize_is_opencvs_to_the_bit():
    for seed, (size, fitted, checksum) in enumerate(stored("resizes.json")):
        assert _detector.fitted_size(*size) == tuple(fitted)
        resized = _detector.resize_like_opencv(torch.from_numpy(make.random_image(size, seed)), fitted).numpy()
        weights = np.arange(resized.size, dtype=np.int64).reshape(resized.shape) % 1009
        assert int((resized * weights).sum()) == checksum, size


def same_detections(found, expected):
    assert len(found) == len(expected) > 10
    for own, (label, score, corners, area, x, y) in zip(found, expected, strict=True):
        assert own.label == label
        assert own.score == pytest.approx(score, abs=2e-4)
        assert own.box == tuple(corners)
        rows, columns = np.nonzero(own.mask)
        assert abs(int(own.mask.sum()) - area) <= 2
        assert (columns.mean(), rows.mean()) == pytest.approx((x, y), abs=0.05)


def test_detections_are_mmdets(detector, images):
    expected = stored("detections.json")["images"]
    for found, own in zip(detector.detect(images, make.MIN_SCORE), expected, strict=True):
        same_detections(found, own)


def test_detections_do_not_depend_on_the_batch(detector, images):
    order = [2, 0, 3, 1, 0]
    together = detector.detect([images[i] for i in order], make.MIN_SCORE)
    for index, found in zip(order, together, strict=True):
        same_detections(found, stored("detections.json")["images"][index])


def test_higher_threshold_gives_the_same_objects_above_it(detector, images):
    low, high = detector.detect(images[:1], 0.3)[0], detector.detect(images[:1], 0.45)[0]
    assert 0 < len(high) < len(low)
    assert [d.score for d in high] == [d.score for d in low if d.score > 0.45]


def test_a_folder_of_the_hub_gives_the_same_detections(detector, images, tmp_path):
    detector._model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    key = next(key for key in state if key.endswith("relative_position_bias_table"))
    state[key.replace("bias_table", "index")] = torch.zeros(49, 49, dtype=torch.long)  # as older checkpoints have it
    save_file(state, file, metadata={"format": "pt"})
    other, digest = _detector.load(str(tmp_path), tuple(CLASSES), CPU, torch.float32, reward="geneval")
    same_detections(other.detect(images[1:2], make.MIN_SCORE)[0], stored("detections.json")["images"][1])
    assert len(digest) == 64


def test_every_key_of_the_official_architecture_is_used():
    shapes = stored("mmdet_shapes.json")
    state = {key: torch.zeros(()).expand(shape) for key, shape in shapes.items()}
    config = _detector_mmdet.config_of(state, tuple(CLASSES))
    assert config.backbone_config.depths == [2, 2, 18, 2]
    assert config.backbone_config.num_heads == [3, 6, 12, 24]
    assert config.backbone_config.window_size == 7
    assert (config.num_queries, config.decoder_layers, config.encoder_layers) == (100, 10, 6)
    converted = _detector_mmdet.convert(state)
    model = _hub.build(
        _detector.Mask2FormerForUniversalSegmentation, config, converted, Path("official.pth"), _detector._UNUSED
    )
    used = [p.numel() for key, p in model.named_parameters() if not key.endswith(_detector._UNUSED)]
    assert sum(used) == sum(v.numel() for key, v in state.items() if not key.endswith("relative_position_index"))


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_a_checkpoint_that_does_not_fit_is_refused(checkpoint, tmp_path, change):
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    if change == "missing":
        del state["backbone.stages.1.blocks.0.attn.w_msa.proj.bias"]
        words = "missing: model.pixel_level_module.encoder"
    elif change == "unexpected":
        state["backbone.stages.1.blocks.0.attn.gate"] = torch.zeros(1)
        words = "unexpected: model.*gate"
    else:
        state["panoptic_head.level_embed.weight"] = torch.zeros(3, 16)
        words = "level_embed"
    torch.save({"state_dict": state}, tmp_path / "bad.pth")
    with pytest.raises(RewardLoadError, match=words):
        _detector.load(str(tmp_path / "bad.pth"), tuple(CLASSES), CPU, torch.float32, reward="geneval")


def test_a_detector_of_other_classes_is_refused(checkpoint):
    with pytest.raises(RewardLoadError, match="80 classes, not the 2"):
        _detector.load(str(checkpoint), ("cat", "dog"), CPU, torch.float32, reward="geneval")


# the colours


def case_objects(case):
    image = make.random_image(case["size"], case["seed"])
    for corners in case["boxes"]:
        mask = make.ellipse(corners, *case["size"])
        yield image, Detection(0, 0.9, tuple(corners), mask), case["name"]


def test_colours_are_those_of_genevals_classifier(clip):
    expected = stored("colours.json")
    classifier = _geneval_colour.ColourClassifier(str(clip), CPU, torch.float32, reward="geneval")
    objects = [entry for case in expected["cases"] for entry in case_objects(case)]
    assert classifier.classify(objects) == [colour for case in expected["cases"] for colour in case["colours"]]
    means = [mean for case in expected["cases"] for mean in case["means"]]
    for (image, detection, _), mean in zip(objects, means, strict=True):
        crop = torch.from_numpy(_geneval_colour.crop(image, detection, 32).copy()).float() / 255
        normalised = (crop - torch.tensor(_geneval_colour.MEAN)) / torch.tensor(_geneval_colour.STD)
        assert normalised.mean(dim=(0, 1)).tolist() == pytest.approx(mean, abs=1e-5)


def test_what_is_not_the_object_is_grey():
    image = np.zeros((8, 8, 3), np.uint8)
    mask = np.zeros((8, 8), bool)
    mask[2:6, 2:4] = True
    assert _geneval_colour.crop(image, Detection(0, 1.0, (2.0, 2.0, 4.0, 6.0), mask), 2).max() == 0
    whole = _geneval_colour.crop(image, Detection(0, 1.0, (0.0, 0.0, 8.0, 8.0), mask), 8)
    assert set(np.unique(whole)) == {0, 0x99}
    assert (whole[..., 0] == 0).sum() == 8


# the reward


def test_whole_verdicts_are_the_benchmarks(set_up, detector, images, monkeypatch):
    """As ``evaluate_image`` gives them on files; its classes are numbers here. Detections are those of full size."""
    numbers = [str(index) for index in range(80)]
    monkeypatch.setattr(_geneval_rules, "CLASSES", numbers)
    monkeypatch.setattr(geneval, "CLASSES", numbers)
    model = set_up(counting_threshold=0.6, max_objects=4)
    monkeypatch.undo()
    found = detector.detect(images, 0.3)
    monkeypatch.setattr(_geneval_rules, "CLASSES", numbers)
    monkeypatch.setattr(geneval, "CLASSES", numbers)
    cases = stored("verdicts.json")
    monkeypatch.setattr(model._detector, "detect", lambda images, min_score: [found[index] for index, _, _ in cases])
    scores = model.score([images[index] for index, _, _ in cases], [""] * len(cases), [case[1] for case in cases])
    assert [score.value == 1.0 for score in scores] == [correct for _, _, correct in cases]
    assert sum(correct for _, _, correct in cases) == 11


def clause_of(images_found, index, **more):
    """Metadata that is true of an image: as many of its most frequent class as were found."""
    labels = [detection.label for detection in images_found[index]]
    label = max(set(labels), key=labels.count)
    count = min(labels.count(label), 16)
    return {"tag": "made up", "include": [{"class": CLASSES[label], "count": count, **more}]}


def test_scores_pair_each_image_with_its_own_metadata(set_up, detector, images):
    model = set_up(score="dense", counting="==")
    found = detector.detect(images, 0.3)
    metadata = [clause_of(found, i) for i in range(len(images))]
    metadata[1]["include"].append({"class": "zebra", "count": 4})
    alone = {
        (i, j): model.score([images[i]], [""], [metadata[j]])[0].value for i in range(4) for j in range(4)
    }  # fmt: skip
    assert len(set(alone.values())) > 4
    for rows, columns in (((0, 1, 2, 3), (0, 1, 2, 3)), ((3, 1, 0, 2), (2, 0, 1, 3)), ((1, 1, 0), (0, 3, 1))):
        batch = model.score([images[i] for i in rows], [""] * len(rows), [metadata[j] for j in columns])
        assert [score.value for score in batch] == [alone[pair] for pair in zip(rows, columns, strict=True)]


def test_strict_and_dense_are_in_the_details_whatever_is_chosen(set_up, detector, images):
    metadata = clause_of(detector.detect(images, 0.3), 0)
    metadata["include"][0]["count"] += 1
    count = metadata["include"][0]["count"]
    for chosen in ("strict", "dense"):
        score = set_up(score=chosen).score(images[:1], [""], [metadata])[0]
        assert score.details["strict"] == 0.0
        assert score.details["dense"] == pytest.approx((count - 1) / count)
        assert score.value == score.details["raw"] == score.details[chosen]


def test_colours_are_checked_on_the_objects_found(set_up, detector, images):
    model = set_up()
    metadata = clause_of(detector.detect(images, 0.3), 0)
    metadata["include"][0]["count"] = 1
    passed = []
    for colour in _geneval_rules.COLOURS:
        metadata["include"][0]["color"] = colour
        score = model.score(images[:1], [""], [metadata])[0]
        assert score.value == score.details["include.0.color"]
        passed.append(score.value)
    assert sorted(passed) == [0.0] * 9 + [1.0]  # one of the ten colours


def test_counting_has_a_higher_threshold(set_up, detector, images):
    found = detector.detect(images[:1], 0.3)[0]
    label = found[-1].label
    scores = [d.score for d in found if d.label == label]
    assert len(scores) > 2
    model = set_up(counting="==", counting_threshold=(scores[0] + scores[1]) / 2)
    for tag, count in (("counting", 1), ("two_object", len(scores))):
        score = model.score(images[:1], [""], [{"tag": tag, "include": [{"class": CLASSES[label], "count": count}]}])
        assert score[0].value == 1.0, tag


def test_at_most_so_many_objects_of_a_class(set_up, detector, images):
    metadata = clause_of(detector.detect(images, 0.3), 0)
    metadata["include"][0]["count"] = 3
    assert set_up(counting="==", max_objects=3).score(images[:1], [""], [metadata])[0].value == 1.0
    assert set_up(counting="==").score(images[:1], [""], [metadata])[0].value == 0.0


def test_metadata_that_cannot_be_checked_fails_alone(set_up, detector, images):
    good = clause_of(detector.detect(images, 0.3), 1)
    bad = {"tag": "x", "include": [{"class": "unicorn", "count": 1}]}
    first, second = set_up().score(images[:2], ["", ""], [bad, good])
    assert first == Score(None, reason=first.reason)
    assert "unicorn" in first.reason
    assert second.value == 1.0


def test_revision_and_provenance_tell_the_weights_and_the_variant(set_up):
    strict, dense = set_up(), set_up(score="dense", counting="==")
    assert strict.revision.endswith("-strict-at-least")
    assert dense.revision == strict.revision[:12] + "-dense-exactly"
    assert strict.provenance["dtype"] == "float32"
    assert strict.provenance["weights"].startswith("sha256:")
    assert all(isinstance(value, str) for value in strict.provenance.values())


def test_half_precision_runs(set_up, images):
    prompt, metadata = Model.example
    model = set_up(dtype="bfloat16")
    assert model.score(images[:1], [prompt], [metadata])[0].value in (0.0, 1.0)
    assert model.provenance["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": ""}, "download https://download.openmmlab.com"),
        ({"score": "soft"}, "strict or dense"),
        ({"counting": "<"}, ">= or =="),
        ({"dtype": "float64"}, "auto, float32"),
        ({"weights": "/nowhere/x.pth"}, "/nowhere is not a folder"),
        ({"clip": "/nowhere"}, "/nowhere is not a folder"),
    ],
)
def test_wrong_options_are_told(checkpoint, clip, options, words):
    with pytest.raises(RewardLoadError, match=words):
        prepare(load("geneval"), "cpu", {"weights": str(checkpoint), "clip": str(clip), **options})


def test_sources_are_what_setup_reads(checkpoint, clip):
    detector, colours = Model.sources(weights=str(checkpoint), clip=str(clip), score="dense")
    assert (detector.repo, detector.files) == (str(checkpoint.parent), ("mask2former.pth",))
    assert colours.repo == str(clip)
    hub, _ = Model.sources(weights="facebook/mask2former-swin-small-coco-instance")
    assert hub.files == ("config.json", "model.safetensors|pytorch_model.bin")
    with pytest.raises(RewardLoadError, match="not on the Hugging Face hub"):
        Model.sources()
