"""Training data, tokenizer and loss of the CLIP model of the drawn shapes."""

import math

import numpy as np
import pytest
import torch
from transformers import CLIPTokenizer

from reward_server.rewards.shapes import Model as ShapesReward
from trainer import pretrain_clip
from trainer.policies.small import WORDS, SmallPolicy
from trainer.pretrain_clip import CAPTIONED, FAULTS, HELD_OUT, changed_captions, key, spoilt, training_scenes
from trainer.shapes import Scene, all_scenes, render, split_scenes

RED_CIRCLE, BLUE_SQUARE = ("red", "circle"), ("blue", "square")
BY_PROMPT = {scene.prompt: scene for scene in all_scenes()}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    pretrain_clip.write_tokenizer(folder)
    return CLIPTokenizer.from_pretrained(folder)


def test_a_mirrored_prompt_shows_the_same_and_a_swapped_one_does_not():
    scene = BY_PROMPT["a red circle left of a blue square"]
    assert key(scene) == key(BY_PROMPT["a blue square right of a red circle"])
    assert key(scene) != key(BY_PROMPT["a blue square left of a red circle"])
    assert key(scene) != key(BY_PROMPT["a red circle right of a blue square"])
    assert key(BY_PROMPT["a red circle above a blue square"]) == key(BY_PROMPT["a blue square below a red circle"])
    assert len({key(s) for s in all_scenes()}) == 72 + 1224 // 2


def test_neither_held_out_prompts_nor_their_mirrors_are_trained_on():
    held_out = {scene.prompt for scene in split_scenes()[1]}
    mirrored = {
        CAPTIONED[s.kinds[::-1], pretrain_clip.OPPOSITE[s.relation]].prompt for s in training_scenes() if s.relation
    }
    assert held_out.isdisjoint({scene.prompt for scene in training_scenes()} | mirrored)
    rng = np.random.default_rng(0)
    for scene in training_scenes()[::7]:
        assert key(pretrain_clip._draw_spoilt(scene, rng)) not in HELD_OUT
        assert held_out.isdisjoint({s.prompt for s in pretrain_clip._draw_captions(scene, rng)})


def test_changed_captions_of_a_count():
    changed = {
        name: [s.prompt for s in scenes] for name, scenes in changed_captions(BY_PROMPT["two red circles"]).items()
    }
    assert changed["shape"] == ["two red squares", "two red triangles"]
    assert changed["count"] == ["one red circle", "three red circles", "four red circles"]
    assert changed["colour"] == [f"two {colour} circles" for colour in ("yellow", "green", "cyan", "blue", "purple")]


def test_changed_captions_of_a_pair_leave_out_pairs_of_one_kind():
    changed = changed_captions(BY_PROMPT["a red circle left of a red square"])
    assert [s.prompt for s in changed["shape"]] == [
        "a red triangle left of a red square",
        "a red circle left of a red triangle",
    ]
    assert len(changed["colour"]) == 10
    assert [s.relation for s in changed["relation"]] == ["right of", "above", "below"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_spoilt_image_never_passes_the_verifier_and_the_right_one_does(fault):
    rng = np.random.default_rng(3)
    scenes = all_scenes()[::9]
    prompts, shapes = [scene.prompt for scene in scenes], ShapesReward()
    right = shapes.score(render(scenes, rng), prompts, [{}] * len(scenes))
    wrong = shapes.score(render([spoilt(s, fault, rng) for s in scenes], rng), prompts, [{}] * len(scenes))
    assert {score.details["strict"] for score in wrong} == {0.0}
    assert np.mean([score.details["strict"] for score in right]) > 0.95


def test_what_each_fault_changes():
    rng = np.random.default_rng(0)
    pair = BY_PROMPT["a red circle left of a blue square"]
    assert len(spoilt(pair, "missing", rng).kinds) == 1
    assert len(spoilt(pair, "extra", rng).kinds) == 3
    assert spoilt(pair, "relation", rng).kinds == (RED_CIRCLE, BLUE_SQUARE)
    assert spoilt(pair, "relation", rng).relation != "left of"
    for fault, same in (("colour", 1), ("shape", 0)):
        new = spoilt(BY_PROMPT["three red circles"], fault, rng).kinds
        [odd] = [kind for kind in new if kind != RED_CIRCLE]
        assert odd[same] == RED_CIRCLE[same]


def test_every_word_is_one_token_and_every_byte_is_known(tokenizer):
    words = [word for word in WORDS if not word.startswith("<")]
    ids = [tokenizer(word)["input_ids"] for word in words]
    start, end = len(tokenizer) - 2, len(tokenizer) - 1
    assert all(len(row) == 3 and row[0] == start and row[-1] == end for row in ids)
    assert len({row[1] for row in ids}) == len(words)
    row = tokenizer("ZÜRICH's 42 猫 🎈")["input_ids"]
    assert end not in row[:-1]  # the end also stands for the unknown: there is none
    assert tokenizer.decode(row[1:-1]) == "zürich 's 4 2 猫 🎈"


def test_the_mask_leaves_out_only_others_that_show_the_same():
    logits = torch.arange(6.0).reshape(2, 3)
    masked = pretrain_clip._but_own(logits, ["a", "b"], ["a", "b", "a"])
    assert masked.tolist() == [[0.0, 1.0, -math.inf], [3.0, 4.0, 5.0]]


def test_roughened_images_stay_close_and_differ():
    rng = np.random.default_rng(0)
    images = render([Scene("", (RED_CIRCLE, BLUE_SQUARE))] * 20, rng)
    rough = pretrain_clip.roughen(images, SmallPolicy.load(pretrain_clip.CODEC), rng)
    error = np.abs(rough.astype(float) - images).mean(axis=(1, 2, 3))
    assert error.min() > 0.1
    assert error.max() < 25


def test_training_is_repeatable(tokenizer):
    first, second = (
        pretrain_clip.train(tokenizer, steps=4, batch=8, learning_rate=1e-3, seed=1).state_dict() for _ in range(2)
    )
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_training_lowers_the_loss(tokenizer):
    trained = pretrain_clip.train(tokenizer, steps=60, batch=8, learning_rate=2e-3, seed=1)
    fresh = pretrain_clip.build_model(tokenizer).eval()
    codec, scenes = SmallPolicy.load(pretrain_clip.CODEC), training_scenes()[::16]
    with torch.no_grad():
        before, after = (
            pretrain_clip.contrastive_loss(model, tokenizer, codec, scenes, np.random.default_rng(0)).item()
            for model in (fresh, trained)
        )
    assert after < before - 0.3
