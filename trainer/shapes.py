"""The generated data set of the small policy: prompts about coloured shapes, and images that show them.

Prompts are "three red circles" (1 to 4 of a kind) and "a red circle left of a blue square" (pairs with left of,
right of, above, below). An image is a grid of 4 x 4 cells of 12 x 12 pixels; every object is drawn anti-aliased
inside one cell, jittered in place and size. A fixed fifth of all prompts is held out of training.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CELL = 12
GRID = 4
SIZE = CELL * GRID
SUPERSAMPLING = 4
BACKGROUND = (236, 236, 236)
COLOURS = {
    "red": (222, 48, 42),
    "yellow": (238, 196, 28),
    "green": (44, 160, 66),
    "cyan": (26, 184, 200),
    "blue": (48, 84, 214),
    "purple": (158, 52, 196),
}
SHAPES = ("circle", "square", "triangle")
COUNTS = {"one": 1, "two": 2, "three": 3, "four": 4}
RELATIONS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}  # (row, column) of A from B
HELD_OUT_FRACTION = 0.2
EXTENT = {"circle": (8.0, 10.2), "square": (7.0, 9.2), "triangle": (8.8, 10.4)}
"""Smallest and largest diameter, side, or base (= height), in pixels; 0.8 of a pixel of the cell stays free."""


@dataclass(frozen=True)
class Scene:
    """What a prompt claims: ``count`` objects of one kind, or object A in ``relation`` to object B."""

    prompt: str
    kinds: tuple[tuple[str, str], ...]
    """(colour, shape) of every object to draw"""
    relation: str | None = None


def all_scenes() -> list[Scene]:
    """Every prompt of the grammar: 72 counts and 1,224 pairs of different kinds, in a fixed order."""
    kinds = [(c, s) for c in COLOURS for s in SHAPES]
    scenes = []
    for colour, shape in kinds:
        for word, count in COUNTS.items():
            noun = shape if count == 1 else shape + "s"
            scenes.append(Scene(f"{word} {colour} {noun}", ((colour, shape),) * count))
    for a in kinds:
        for b in kinds:
            if a != b:
                for relation in RELATIONS:
                    prompt = f"a {a[0]} {a[1]} {relation} a {b[0]} {b[1]}"
                    scenes.append(Scene(prompt, (a, b), relation))
    return scenes


def split_scenes() -> tuple[list[Scene], list[Scene]]:
    """(training scenes, held-out scenes): disjoint prompts, by a hash of the prompt, so that the split never moves."""
    train: list[Scene] = []
    held_out: list[Scene] = []
    for scene in all_scenes():
        bucket = zlib.crc32(scene.prompt.encode()) % 1000
        (held_out if bucket < 1000 * HELD_OUT_FRACTION else train).append(scene)
    return train, held_out


def _place(scene: Scene, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Cells (row, column) of the scene's objects; a relation holds along its axis and dominates the other axis."""
    if scene.relation is None:
        cells = rng.choice(GRID * GRID, size=len(scene.kinds), replace=False)
        return [(int(c) // GRID, int(c) % GRID) for c in cells]
    along = int(rng.integers(1, GRID))
    across = int(rng.integers(-along + 1, along))
    row, column = RELATIONS[scene.relation]
    step = (row * along, across) if row else (across, column * along)
    b = tuple(int(rng.integers(max(0, -d), GRID - max(0, d))) for d in step)
    return [(b[0] + step[0], b[1] + step[1]), (b[0], b[1])]


def _coverage(
    shapes: NDArray[np.int64], extent: NDArray[np.float64], centre: NDArray[np.float64]
) -> NDArray[np.float32]:
    """(M, CELL, CELL): the part of every pixel that is covered by each of M objects; ``centre`` (M, 2) is (y, x)."""
    axis = (np.arange(CELL * SUPERSAMPLING) + 0.5) / SUPERSAMPLING
    y = axis[None, :, None] - centre[:, :1, None]
    x = axis[None, None, :] - centre[:, 1:, None]
    half = extent[:, None, None] / 2
    circle = y * y + x * x <= half * half
    square = (np.abs(y) <= half) & (np.abs(x) <= half)
    triangle = (np.abs(y) <= half) & (np.abs(x) <= (y + half) / 2)  # apex on top
    inside = np.stack([circle, square, triangle])[shapes, np.arange(len(shapes))]
    blocks = inside.reshape(len(shapes), CELL, SUPERSAMPLING, CELL, SUPERSAMPLING)
    cover: NDArray[np.float32] = blocks.mean(axis=(2, 4), dtype=np.float32)
    return cover


def render(scenes: Sequence[Scene], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw one image per scene: (B, 48, 48, 3) uint8. Placement, size and jitter come from ``rng``."""
    image, cells, shapes, colours = [], [], [], []
    for index, scene in enumerate(scenes):
        for (colour, shape), cell in zip(scene.kinds, _place(scene, rng), strict=True):
            image.append(index)
            cells.append(cell)
            shapes.append(SHAPES.index(shape))
            colours.append(COLOURS[colour])
    shape_M = np.array(shapes)
    low, high = np.array([EXTENT[s] for s in SHAPES])[shape_M].T
    extent = rng.uniform(low, high)
    slack = (CELL - 1.6 - extent) / 2
    centre = CELL / 2 + rng.uniform(-1, 1, size=(len(image), 2)) * slack[:, None]
    cover = _coverage(shape_M, extent, centre)[..., None]
    background = np.array(BACKGROUND, dtype=np.float32)
    patch = background + cover * (np.array(colours, dtype=np.float32)[:, None, None] - background)
    out = np.broadcast_to(np.array(BACKGROUND, dtype=np.uint8), (len(scenes), GRID, CELL, GRID, CELL, 3)).copy()
    row, column = np.array(cells).T
    out[np.array(image), row, :, column] = np.rint(patch).astype(np.uint8)
    return out.reshape(len(scenes), SIZE, SIZE, 3)
