"""The generated data set: grammar, split, rendering."""

from pathlib import Path

import numpy as np

from trainer.shapes import BACKGROUND, COLOURS, RELATIONS, Scene, _place, all_scenes, render, split_scenes


def test_grammar_has_every_prompt_once():
    scenes = all_scenes()
    assert len(scenes) == 6 * 3 * 4 + 18 * 17 * 4
    assert len({s.prompt for s in scenes}) == len(scenes)
    assert Scene("three red circles", (("red", "circle"),) * 3) in scenes
    assert Scene("a red circle above a blue square", (("red", "circle"), ("blue", "square")), "above") in scenes


def test_split_is_disjoint_complete_and_has_both_kinds():
    train, held_out = split_scenes()
    assert not {s.prompt for s in train} & {s.prompt for s in held_out}
    assert len(train) + len(held_out) == len(all_scenes())
    assert 0.15 < len(held_out) / len(all_scenes()) < 0.25
    assert sum(s.relation is None for s in held_out) >= 10


def test_prompt_files_are_the_split():
    for name, scenes in zip(("train", "heldout"), split_scenes(), strict=True):
        lines = Path(f"configs/prompts/shapes_{name}.txt").read_text().splitlines()
        assert lines == [s.prompt for s in scenes]


def test_render_is_reproducible_and_has_the_right_colours():
    scene = Scene("two red squares", (("red", "square"),) * 2)
    image = render([scene], np.random.default_rng(3))
    assert image.shape == (1, 48, 48, 3)
    assert image.dtype == np.uint8
    assert np.array_equal(image, render([scene], np.random.default_rng(3)))
    assert not np.array_equal(image, render([scene], np.random.default_rng(4)))
    full = (image[0] == COLOURS["red"]).all(axis=-1).sum()
    assert 2 * 6 * 6 < full <= 2 * 9.2**2  # two squares with sides of 7 to 9.2 pixels; their rims are blends
    assert tuple(image[0, 0, 0]) in {BACKGROUND, COLOURS["red"]}


def test_relation_dominates_its_axis():
    rng = np.random.default_rng(0)
    for relation, (row, column) in RELATIONS.items():
        scene = Scene("", (("red", "circle"), ("blue", "square")), relation)
        for _ in range(200):
            a, b = _place(scene, rng)
            dy, dx = a[0] - b[0], a[1] - b[1]
            along, across = (dy * row, dx) if row else (dx * column, dy)
            assert along > abs(across)
            assert all(0 <= v < 4 for v in (*a, *b))
