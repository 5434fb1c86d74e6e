"""The shapes reward against rendered ground truth, and against every kind of wrong image."""

import numpy as np
import pytest

from reward_server.rewards.shapes import Claim, Model, find_objects, parse, verify
from trainer.shapes import COLOURS, SHAPES, Scene, all_scenes, render


def strict(image, prompt):
    return verify(image, parse(prompt)).details["strict"]


def single(colour, shape, count):
    return Scene("", ((colour, shape),) * count)


def test_ground_truth_passes_strictly():
    rng = np.random.default_rng(11)
    scenes = all_scenes()
    scenes = scenes[:72] * 4 + [scenes[72 + int(i)] for i in rng.integers(0, len(scenes) - 72, size=400)]
    scores = [verify(i, parse(s.prompt)) for i, s in zip(render(scenes, rng), scenes, strict=True)]
    assert np.mean([s.details["strict"] for s in scores]) >= 0.99
    assert np.mean([s.value for s in scores]) >= 0.99


@pytest.mark.parametrize("claimed", [1, 2, 3, 4])
def test_wrong_counts_fail(claimed):
    rng = np.random.default_rng(claimed)
    word = ["", "one", "two", "three", "four"][claimed]
    prompt = f"{word} green triangle{'s' if claimed > 1 else ''}"
    for drawn in {1, 2, 3, 4, 5} - {claimed}:
        images = render([single("green", "triangle", drawn)] * 20, rng)
        scores = [verify(i, parse(prompt)) for i in images]
        assert all(s.details["strict"] == 0 for s in scores)
        expected = max(0, 1 - abs(drawn - claimed) / claimed)
        assert np.allclose([s.details["count"] for s in scores], expected)


def test_wrong_colours_fail():
    rng = np.random.default_rng(5)
    for claimed in COLOURS:
        for drawn in set(COLOURS) - {claimed}:
            for image in render([single(drawn, "circle", 2)] * 4, rng):
                score = verify(image, parse(f"two {claimed} circles"))
                assert score.details["strict"] == 0
                assert score.details["colour"] < 0.95
                assert score.details["shape"] > 0.9


def test_wrong_shapes_fail():
    rng = np.random.default_rng(6)
    for claimed in SHAPES:
        for drawn in set(SHAPES) - {claimed}:
            for image in render([single("blue", drawn, 2)] * 40, rng):
                score = verify(image, parse(f"two blue {claimed}s"))
                assert score.details["strict"] == 0
                assert score.details["colour"] > 0.95


def test_wrong_relations_fail():
    rng = np.random.default_rng(7)
    relations = ("left of", "right of", "above", "below")
    for drawn in relations:
        scene = Scene("", (("red", "circle"), ("blue", "square")), drawn)
        for image in render([scene] * 30, rng):
            passed = [r for r in relations if strict(image, f"a red circle {r} a blue square") == 1]
            assert passed == [drawn]
            assert strict(image, f"a blue square {drawn} a red circle") == 0


def test_one_wrong_object_among_many_fails():
    rng = np.random.default_rng(8)
    scene = Scene("", (("red", "circle"), ("red", "circle"), ("red", "square")))
    for image in render([scene] * 30, rng):
        assert strict(image, "three red circles") == 0
        assert strict(image, "two red circles") == 0


def test_dense_score_orders_images_by_how_right_they_are():
    rng = np.random.default_rng(9)
    claim = parse("two red circles")
    right, off_by_one, wrong_shape, wrong_both = (
        verify(render([single(*kind)], rng)[0], claim).value
        for kind in (("red", "circle", 2), ("red", "circle", 3), ("red", "square", 2), ("blue", "square", 4))
    )
    assert right > off_by_one > wrong_both
    assert right > wrong_shape > wrong_both


def test_blank_and_noise_images_score_low_and_never_pass():
    blank = np.full((48, 48, 3), 236, np.uint8)
    assert verify(blank, parse("one red circle")).value == 0.0
    noise = np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    for prompt in ("one red circle", "a red circle left of a blue square"):
        assert strict(noise, prompt) == 0
        assert verify(noise, parse(prompt)).value < 0.7


def test_size_background_and_specks_do_not_matter():
    image = render([single("purple", "triangle", 3)], np.random.default_rng(1))[0]
    assert strict(image.repeat(4, axis=0).repeat(4, axis=1), "three purple triangles") == 1
    grey = np.clip(image.astype(int) - 40, 0, 255).astype(np.uint8)  # darker paper
    assert len(find_objects(grey)) == 3
    speck = image.copy()
    speck[0:2, 0:2] = (222, 48, 42)
    assert len(find_objects(speck)) == 3


@pytest.mark.parametrize(
    ("prompt", "claim"),
    [
        ("Three  red circles.", Claim(("red", "circle"), 3)),
        ("one blue square", Claim(("blue", "square"), 1)),
        ("a red circle to the left of a blue square", Claim(("red", "circle"), 1, ("blue", "square"), "left of")),
        ("a red circle is below a blue square", Claim(("red", "circle"), 1, ("blue", "square"), "below")),
        ("a photo of a cat", None),
        ("three red", None),
        ("", None),
    ],
)
def test_parse(prompt, claim):
    assert parse(prompt) == claim


def test_model_scores_in_order_and_gives_a_reason_for_what_it_cannot_read():
    model = Model()
    model.setup("cpu")
    images = render([single("red", "circle", 1), single("blue", "square", 2)], np.random.default_rng(2))
    first, second, third = model.score(
        [images[0], images[1], images[0]], ["one red circle", "one red circle", "a cat"], [{}] * 3
    )
    assert first.details["strict"] == 1
    assert second.details["strict"] == 0
    assert third.value is None
    assert "a cat" in third.reason
    assert model.revision.startswith("sha256:")
