"""T2I-CompBench: answers of BLIP-VQA held against its own code, and the rewards of every category.

The networks are small and random: they prove that the official checkpoint's layout is computed alike, not that
attributes are told apart.
"""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import DPTConfig, DPTForDepthEstimation

from reward_server.rewards import _compbench_depth, _compbench_vqa
from reward_server.rewards._compbench_rules import holds_3d
from reward_server.rewards._detector import Detection
from reward_server.rewards._geneval_rules import CLASSES
from reward_server.rewards.base import RewardLoadError, Score, load, prepare
from reward_server.rewards.t2i_compbench import EXAMPLES, Model

FIXTURES = Path(__file__).parent / "fixtures"
CPU = torch.device("cpu")
SIZES = ((64, 64), (50, 90), (1, 1), (333, 20))


def script(name):
    spec = importlib.util.spec_from_file_location(name, FIXTURES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make, shared = script("make_t2i_compbench"), script("make_geneval")


def stored(name):
    return json.loads((FIXTURES / "t2i_compbench" / name).read_text())


@pytest.fixture(scope="module")
def blip(tmp_path_factory):
    """A small BLIP-VQA in the layout of its published file, beside the vocabulary."""
    folder = tmp_path_factory.mktemp("blip")
    state = shared.random_state(stored("answers.json")["shapes"], 11)
    state = make.tied({key: torch.from_numpy(value) for key, value in state.items()})
    positions = torch.arange(512)[None]
    torch.save({"model": {**state, "text_encoder.embeddings.position_ids": positions}}, folder / "blip.pth")
    (folder / "vocab.txt").write_text("\n".join(make.vocabulary()) + "\n")
    return folder


@pytest.fixture(scope="module")
def vqa(blip):
    return _compbench_vqa.VisualQuestions(str(blip / "blip.pth"), str(blip), CPU, torch.float32, reward="x")


@pytest.fixture(scope="module")
def attribute(blip):
    model = Model()
    model.setup("cpu", vqa=str(blip / "blip.pth"), tokenizer=str(blip))
    return model


@pytest.fixture(scope="module")
def images():
    return [shared.random_image(size, 200 + seed) for seed, size in enumerate(SIZES)]


@pytest.fixture(scope="module")
def dpt(tmp_path_factory):
    """A small random DPT in the layout of the hub."""
    folder = tmp_path_factory.mktemp("dpt")
    torch.manual_seed(0)
    config = DPTConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=64,
        patch_size=16,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
    )
    DPTForDepthEstimation(config).save_pretrained(folder)
    return folder


@pytest.fixture
def from_metadata(dpt):
    """``from_metadata(category)``: the reward without a detector."""

    def set_up(category):
        model = Model()
        model.setup("cpu", category=category, detector="", depth=str(dpt))
        return model

    return set_up


# attributes


def test_answers_are_those_of_blips_own_code(vqa, images):
    expected = stored("answers.json")["answers"]
    for own, row in zip(vqa.yes(images, [make.QUESTIONS] * 4), expected, strict=True):
        for (yes, cut), (exact, rounded, tokens) in zip(own, row, strict=True):
            assert yes == pytest.approx(exact, abs=1e-5)
            assert f"{yes:.4f}" == f"{rounded:.4f}" or abs(yes - rounded) < 6e-5
            assert cut == (tokens == 35)
    assert len({round(row[0][0], 3) for row in expected}) == 4


def test_answers_do_not_depend_on_the_batch(vqa, images):
    alone = [[vqa.yes([image], [[phrase]])[0][0][0] for phrase in make.QUESTIONS] for image in images]
    order = [(2, (4, 0)), (0, ()), (1, (3,)), (0, (1, 1, 2))]
    answers = vqa.yes([images[i] for i, _ in order], [[make.QUESTIONS[q] for q in asked] for _, asked in order])
    for (i, asked), own in zip(order, answers, strict=True):
        assert [yes for yes, _ in own] == pytest.approx([alone[i][q] for q in asked], abs=1e-5)


def test_question_is_lower_case_without_punctuation():
    assert _compbench_vqa.question("The (red) Apple!") == "the red apple?"
    assert _compbench_vqa.question("a b. " * 40).split(" ")[-1] == "b"
    assert len(_compbench_vqa.question("a b. " * 40).split(" ")) == 50


def test_attribute_is_the_product_over_the_phrases(attribute, images):
    prompt = "a blue bench and a green cake"
    score = attribute.score(images[:1], [prompt], [{}])[0]
    first, second = (answer[0] for answer in stored("answers.json")["answers"][0][:2])
    assert score.value == pytest.approx(first * second, abs=1e-5)
    assert score.details["phrase.0"] == pytest.approx(first, abs=1e-5)
    assert score.details["raw"] == score.value
    assert score.details["truncated"] == 0.0


def test_a_question_of_exactly_the_context_is_whole(vqa):
    longest = " ".join(["red"] * 32)  # [ENC], the words, the question mark and [SEP]: 35
    ids, cut = vqa._tokens([longest, f"red {longest}"])
    assert (cut, list(map(len, ids))) == ([False, True], [35, 35])


def test_at_most_eight_phrases_are_asked(attribute, images):
    eight = ["a blue bench"] * 8
    of_eight, of_nine = attribute.score(
        [images[0]] * 2, ["", ""], [{"phrases": eight}, {"phrases": [*eight, "a green cake"]}]
    )
    assert of_nine.value == of_eight.value
    assert (of_eight.details["truncated"], of_nine.details["truncated"]) == (0.0, 1.0)
    long = attribute.score(images[:1], [""], [{"phrases": ["very " * 40 + "long train"]}])[0]
    assert long.details["truncated"] == 1.0


def test_attribute_pairs_each_image_with_its_own_prompt(attribute, images):
    prompts = ["a blue bench", "a green cake", "leather gloves", "an apple and a train"]
    alone = {(i, j): attribute.score([images[i]], [prompts[j]], [{}])[0].value for i in range(4) for j in range(4)}
    assert len({round(value, 4) for value in alone.values()}) > 12
    for rows, columns in (((0, 1, 2, 3), (3, 1, 0, 2)), ((3, 3, 0), (0, 1, 1))):
        batch = attribute.score([images[i] for i in rows], [prompts[j] for j in columns], [{}] * len(rows))
        expected = [alone[pair] for pair in zip(rows, columns, strict=True)]
        assert [score.value for score in batch] == pytest.approx(expected, abs=1e-5)


def test_prompt_that_no_rule_reads_fails_alone(attribute, images):
    bad, good = attribute.score(images[:2], ["The vase with a base was elegant.", "a blue bench"], [{}, {}])
    assert bad.value is None
    assert "phrases" in bad.reason
    assert good.value == pytest.approx(stored("answers.json")["answers"][1][0][0], abs=1e-5)


@pytest.mark.parametrize("change", ["missing", "unexpected", "no model", "not a BLIP", "vocabulary"])
def test_a_blip_that_does_not_fit_is_refused(blip, tmp_path, change):
    content = torch.load(blip / "blip.pth", weights_only=True)
    words = make.vocabulary()
    if change == "missing":
        del content["model"]["text_decoder.bert.encoder.layer.1.crossattention.self.query.bias"]
        match = "1 missing: text_decoder.bert.encoder.layer.1.crossattention.self.query.bias"
    elif change == "unexpected":
        content["model"]["visual_encoder.gate"] = torch.zeros(1)
        match = "1 unexpected: vision_model.gate"
    elif change == "no model":
        content, match = content["model"], "does not hold a state dict under 'model'"
    elif change == "not a BLIP":
        content, match = {"model": {"weight": torch.zeros(1)}}, "lacks 'visual_encoder.patch_embed.proj.weight'"
    else:
        words, match = words[:-1], "30521 tokens, but the model 30524 - 2"
    torch.save(content, tmp_path / "blip.pth")
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    with pytest.raises(RewardLoadError, match=match):
        _compbench_vqa.VisualQuestions(str(tmp_path / "blip.pth"), str(tmp_path), CPU, torch.float32, reward="x")


def test_a_blip_in_the_hubs_layout_gives_the_same_answers(vqa, blip, images, tmp_path):
    vqa._model.save_pretrained(tmp_path)
    other = _compbench_vqa.VisualQuestions(str(tmp_path), str(blip), CPU, torch.float32, reward="x")
    phrases = [make.QUESTIONS] * 2
    for own, theirs in zip(other.yes(images[:2], phrases), vqa.yes(images[:2], phrases), strict=True):
        assert [yes for yes, _ in own] == pytest.approx([yes for yes, _ in theirs], abs=1e-6)


# rewards on objects


def entry(name, box, score=0.9):
    return {"name": name, "score": score, "box": box}


def test_spatial_2d_on_given_detections(from_metadata):
    image = np.zeros((479, 479, 3), np.uint8)
    detections = [entry("chair", [300, 0, 340, 40], 0.6), entry("dog", [0, 0, 40, 40], 0.8)]
    model = from_metadata("spatial_2d")
    prompts = ["a dog on the left of a chair", "a dog on the right of a chair", "a girl near a dog"]
    left, right, girl = model.score([image] * 3, prompts, [{"detections": detections}] * 3)
    assert left.value == pytest.approx(0.25 * 0.8 + 0.25 * 0.6 + 0.5)
    assert left.details["relation"] == 1.0
    assert right.value == 0.0  # 0.35, below one half
    assert girl.value == 0.0


def test_boxes_are_compared_in_the_benchmarks_frame(from_metadata):
    """300 pixels of a 958-pixel image are 150 of the benchmark's: no longer near."""
    model = from_metadata("spatial_2d")
    scores = [
        model.score(
            [np.zeros((side, side, 3), np.uint8)],
            [""],
            [
                {
                    "objects": ["dog", "chair"],
                    "relation": "near",
                    "detections": [entry("dog", [0, 0, 4, 4], 1.0), entry("chair", [400, 400, 404, 404], 1.0)],
                }
            ],
        )[0].details["relation"]
        for side in (479, 958)
    ]
    assert scores == pytest.approx([150 / 400, 150 / 200])


def test_numeracy_on_given_detections(from_metadata):
    image = np.zeros((100, 100, 3), np.uint8)
    detections = [entry("dog", [0, 0, 40, 40]), entry("dog", [50, 0, 90, 40])]
    model = from_metadata("numeracy")
    metadata = [{"detections": detections}, {"detections": detections, "counts": {"dog": 3}}]
    right, wrong = model.score([image] * 2, ["two dogs", ""], metadata)
    assert (right.value, wrong.value) == (1.0, 0.5)


def test_spatial_3d_uses_the_depth_of_the_same_image(from_metadata, images):
    model = from_metadata("spatial_3d")
    image = shared.random_image((300, 300), 1)
    detections = [entry("dog", [0, 0, 200, 200], 0.8), entry("chair", [50, 50, 250, 250], 0.6)]
    metadata = {"detections": detections}
    front, behind = model.score([image] * 2, ["a dog in front of a chair", "a dog behind a chair"], [metadata] * 2)
    assert sorted([front.details["relation"], behind.details["relation"]]) == pytest.approx(
        [0.0, 1 * 0.78260869565], abs=0.01
    )
    depth = model._depth.maps([images[0], image])[1]
    assert depth.shape == (479, 479)
    assert depth.min() == 0.0
    expected = holds_3d("in front of", *([v * 479 / 300 for v in d["box"]] for d in detections), depth)
    assert front.details["relation"] == pytest.approx(expected)


def test_depth_network_sees_480_pixels_from_minus_one_to_one(from_metadata):
    estimator = from_metadata("spatial_3d")._depth
    seen = []

    def network(pixel_values):
        seen.append(pixel_values)
        return SimpleNamespace(predicted_depth=pixel_values.mean(dim=1))

    estimator._model = network
    image = np.zeros((20, 40, 3), np.uint8)
    image[:, 20:] = 255
    assert [depth.shape for depth in estimator.maps([image])] == [(240, 480)]
    assert seen[0].shape == (1, 3, 480, 480)
    assert (seen[0].min(), seen[0].max()) == (-1.0, 1.0)
    assert abs(seen[0].mean()) < 0.01
    # bilinear: a straight line across the edge, by one twelfth a pixel
    assert seen[0][0, 0, 0, 238:244].tolist() == pytest.approx([(2 * d + 1) / 12 for d in range(-2, 4)], abs=0.01)


def test_depth_map_is_scaled_to_the_image_in_256_steps():
    inverse = torch.tensor([[2.0, 4.0], [2.0, 4.0]])
    depth = _compbench_depth.as_stored(inverse, (479, 479))
    assert depth.shape == (479, 479)
    assert (depth[0, 0], depth[0, -1]) == (0.0, 1.0)
    assert depth[0, 239] == pytest.approx(127 / 255)
    assert set(np.unique(np.round(depth * 255))) == set(range(256))
    assert not _compbench_depth.as_stored(torch.ones(2, 2), (5, 9)).any()


def test_detector_finds_the_objects_where_the_metadata_has_none(from_metadata):
    model = from_metadata("numeracy")
    seen = []

    def detect(images, min_score):
        seen.append((len(images), min_score))
        boxes = [(0.0, 0.0, 5.0, 5.0), (6.0, 0.0, 9.0, 5.0)]
        return [[Detection(CLASSES.index("couch"), 0.9, box) for box in boxes] for _ in images]

    model._detector = SimpleNamespace(detect=detect)
    image = np.zeros((10, 10, 3), np.uint8)
    sofas, rabbit = model.score([image] * 2, ["two sofas", "a rabbit"], [{}, {}])
    assert sofas.value == 1.0
    assert rabbit == Score(None, reason=rabbit.reason)
    assert "does not know 'rabbit'" in rabbit.reason
    assert seen == [(1, 0.5)]


@pytest.mark.parametrize(
    ("category", "prompt", "metadata", "words"),
    [
        ("spatial_2d", "a dog", {}, "no relation in 'a dog'"),
        ("spatial_2d", "", {"objects": ["dog"], "relation": "near"}, "objects: [a, b]"),
        ("spatial_2d", "", {"objects": ["dog", "cat"], "relation": "behind"}, "one of on side of"),
        ("spatial_2d", "a dog near a cat", {}, "without a detector"),
        ("spatial_2d", "a dog near a cat", {"detections": 3}, "are not a list"),
        ("spatial_2d", "a dog near a cat", {"detections": [{"name": "dog"}]}, "are not a list of {name"),
        ("spatial_2d", "a dog near a cat", {"detections": [entry("dog", [5, 5, 5, 9])]}, "is empty"),
        ("spatial_2d", "a dog near a cat", {"detections": [entry("dog", [0, 0, 5, 9], 7)]}, "not in 0..1"),
        ("numeracy", "dogs", {"detections": []}, "no numbers in 'dogs'"),
        ("numeracy", "", {"counts": {"dog": 0}, "detections": []}, "no numbers"),
    ],
)
def test_what_cannot_be_scored_has_a_reason(from_metadata, category, prompt, metadata, words):
    score = from_metadata(category).score([np.zeros((9, 9, 3), np.uint8)], [prompt], [metadata])[0]
    assert score.value is None
    assert words in score.reason


def test_every_example_can_be_read(from_metadata):
    for category, (prompt, metadata) in EXAMPLES.items():
        if category != "attribute":
            model = from_metadata(category)
            assert model.example == (prompt, metadata)
            score = model.score([np.zeros((9, 9, 3), np.uint8)], [prompt], [{"detections": []}])[0]
            assert score.value == 0.0


def test_revision_and_provenance_tell_the_category_and_the_weights(attribute, from_metadata):
    assert attribute.revision.endswith("-attribute")
    assert attribute.provenance["weights"].startswith("sha256:")
    assert attribute.provenance["phrases"] == "rule/1"
    assert attribute.provenance["preprocessing"] == "blip-vqa-pil-bicubic-48x48/1"
    assert from_metadata("numeracy").revision == "no-weights-numeracy"
    assert from_metadata("spatial_3d").provenance["depth"].startswith("sha256:")


def test_sources_are_those_of_the_category():
    assert [s.repo for s in Model.sources()] == ["Salesforce/blip-vqa-capfilt-large", "google-bert/bert-base-uncased"]
    spatial = [s.repo for s in Model.sources(category="spatial_3d", detector="mask2former")]
    assert spatial == ["facebook/mask2former-swin-small-coco-instance", "Intel/dpt-hybrid-midas"]
    assert Model.sources(category="numeracy", detector="") == ()
    official = Model.sources(vqa="/weights/model_base_vqa_capfilt_large.pth")[0]
    assert (official.repo, official.files) == ("/weights", ("model_base_vqa_capfilt_large.pth",))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"category": "texture"}, "attribute, spatial_2d, spatial_3d, numeracy"),
        ({"dtype": "int8"}, "auto, float32"),
        ({"vqa": "/nowhere"}, "/nowhere is not a folder"),
    ],
)
def test_wrong_options_are_told(options, words):
    with pytest.raises(RewardLoadError, match=words):
        prepare(load("t2i_compbench"), "cpu", options)
