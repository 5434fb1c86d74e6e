"""Verify a prompt's claim about coloured shapes on the pixels, the way GenEval does for photographs.

The prompt is read for a colour, a shape and a count ("three red circles"), or for two objects and their relation
("a red circle left of a blue square"). Objects are found by colour and connected components; the shape of each is the
template (circle, square, upright triangle) of equal area and centroid with the largest soft intersection over union.

- ``value`` (dense, 0..1): the mean of the clauses' soft scores (count, colour, shape; or object A, object B, count,
  relation). Every clause is continuous in the pixels' evidence, so that reinforcement learning has a slope to climb.
- ``details``: every clause and ``strict``: 1 if every clause holds exactly, else 0 (GenEval, arXiv 2310.11513).

Images of any size; objects must be saturated, upright and on a plain background. A prompt that claims none of
this is not scored (null with the reason).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from reward_server.rewards.base import Score

Image = NDArray[np.uint8]

COLOURS = {
    "red": (222, 48, 42),
    "yellow": (238, 196, 28),
    "green": (44, 160, 66),
    "cyan": (26, 184, 200),
    "blue": (48, 84, 214),
    "purple": (158, 52, 196),
}
SHAPES = ("circle", "square", "triangle")
COUNTS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6}
RELATIONS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}  # (y, x) of A from B

MIN_COVERAGE = 0.4
"""A pixel belongs to an object if at least this part of it is covered."""
MIN_AREA = 0.007
"""Components smaller than this part of the image are specks, not objects."""
MIN_IOU = 0.78
"""The claimed shape must be the best template and fit at least this well to pass strictly."""
MIN_PURITY = 0.90
"""Cosine between an object's mean colour (from the background) and the claimed colour, to pass strictly."""

_KIND = rf"(?P<{{0}}c>{'|'.join(COLOURS)})\s+(?P<{{0}}s>{'|'.join(SHAPES)})s?"
_SINGLE = re.compile(rf"^\s*(?P<n>{'|'.join(COUNTS)})\s+{_KIND.format('a')}\s*\.?\s*$")
_PAIR = re.compile(
    rf"^\s*(?:an?|one)\s+{_KIND.format('a')}\s+(?:is\s+)?(?:(?:to|on)\s+the\s+)?(?P<r>{'|'.join(RELATIONS)})\s+"
    rf"(?:an?|one)\s+{_KIND.format('b')}\s*\.?\s*$"
)


@dataclass(frozen=True)
class Claim:
    """``count`` objects of kind A; or, with ``relation``, one A in that relation to one B."""

    a: tuple[str, str]
    count: int
    b: tuple[str, str] | None = None
    relation: str | None = None


@dataclass(frozen=True)
class Found:
    """One object on the image: its centroid (pixels), its soft shape fits and its colour likeness, each 0..1."""

    y: float
    x: float
    fits: NDArray[np.float64]
    """(3,) soft IoU with the template of every shape of SHAPES"""
    purity: NDArray[np.float64]
    """(6,) cosine with every colour of COLOURS"""

    def soft(self, kind: tuple[str, str]) -> tuple[float, float]:
        """(colour, shape) likeness to a kind, each 0..1."""
        colour = _ramp(self.purity[list(COLOURS).index(kind[0])], 0.5, 0.98)
        fit = self.fits[SHAPES.index(kind[1])]
        margin = fit - np.delete(self.fits, SHAPES.index(kind[1])).max()
        return colour, _ramp(fit, 0.5, 0.9) * _ramp(margin, -0.2, 0.05)

    def strict(self, kind: tuple[str, str]) -> bool:
        colour, shape = list(COLOURS).index(kind[0]), SHAPES.index(kind[1])
        pure = self.purity.argmax() == colour and self.purity[colour] >= MIN_PURITY
        return bool(pure and self.fits.argmax() == shape and self.fits[shape] >= MIN_IOU)


def parse(prompt: str) -> Claim | None:
    """The claim that a prompt makes, or None if it makes none that this reward can verify."""
    text = " ".join(prompt.lower().split())
    if match := _SINGLE.match(text):
        return Claim((match["ac"], match["as"]), COUNTS[match["n"]])
    if match := _PAIR.match(text):
        return Claim((match["ac"], match["as"]), 1, (match["bc"], match["bs"]), match["r"])
    return None


def find_objects(image: Image) -> list[Found]:
    """The objects on an image, largest first. ``image``: (H, W, 3) uint8 on a plain background."""
    pixels = image.astype(np.float64)
    background = np.median(pixels.reshape(-1, 3), axis=0)
    palette = np.array(list(COLOURS.values()), dtype=np.float64) - background
    length = np.linalg.norm(palette, axis=1)
    away = pixels - background
    along = away @ (palette / length[:, None]).T  # (H, W, colours): how far each pixel goes towards each colour
    nearest = (along / np.maximum(np.linalg.norm(away, axis=2), 1e-9)[..., None]).argmax(axis=2)
    coverage = np.clip(np.take_along_axis(along, nearest[..., None], axis=2)[..., 0] / length[nearest], 0, 1)
    objects = []
    for colour in np.unique(nearest[coverage >= MIN_COVERAGE]):
        labels, _ = ndimage.label((coverage >= MIN_COVERAGE) & (nearest == colour))
        for index, window in enumerate(ndimage.find_objects(labels), start=1):
            padded = tuple(slice(max(0, s.start - 2), s.stop + 2) for s in window)
            own = labels[padded] == index
            # the soft rim of the object, but not its neighbours' pixels
            reach = ndimage.binary_dilation(own, iterations=1) & ((labels[padded] == 0) | own)
            cover = np.where(reach, coverage[padded], 0.0)
            area = float(cover.sum())
            if area < MIN_AREA * coverage.size:
                continue
            mean = (away[padded] * cover[..., None]).sum(axis=(0, 1)) / area
            purity = (palette / length[:, None]) @ mean / max(float(np.linalg.norm(mean)), 1e-9)
            rows, columns = np.indices(cover.shape)
            y, x = float((rows * cover).sum() / area), float((columns * cover).sum() / area)
            fits = np.array([_soft_iou(cover, _template(s, area, y, x, cover.shape)) for s in SHAPES])
            objects.append((area, Found(y + padded[0].start, x + padded[1].start, fits, purity)))
    return [found for _, found in sorted(objects, key=lambda pair: -pair[0])]


def _template(shape: str, area: float, y: float, x: float, size: tuple[int, ...]) -> NDArray[np.float64]:
    """Coverage of an ideal shape of this area (pixels) and centroid, anti-aliased, on a canvas of ``size``."""
    fine = 3
    rows, columns = _fine_grid(size[0], size[1], fine)
    rows, columns = rows - y, columns - x
    if shape == "circle":
        inside = rows**2 + columns**2 <= area / np.pi
    elif shape == "square":
        inside = np.maximum(np.abs(rows), np.abs(columns)) <= np.sqrt(area) / 2
    else:  # base = height; the centroid lies two thirds of the height below the apex
        base = np.sqrt(2 * area)
        inside = (rows <= base / 3) & (np.abs(columns) <= (rows + 2 * base / 3) / 2)
    blocks: NDArray[np.float64] = inside.reshape(size[0], fine, size[1], fine).mean(axis=(1, 3))
    return blocks


@lru_cache(maxsize=256)
def _fine_grid(height: int, width: int, fine: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rows = (np.arange(height * fine) + 0.5) / fine - 0.5
    columns = (np.arange(width * fine) + 0.5) / fine - 0.5
    return rows[:, None], columns[None, :]


def _soft_iou(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(np.minimum(a, b).sum() / max(float(np.maximum(a, b).sum()), 1e-9))


def _ramp(value: float, low: float, high: float) -> float:
    return float(np.clip((value - low) / (high - low), 0.0, 1.0))


def _count_score(found: int, claimed: int) -> float:
    return max(0.0, 1.0 - abs(found - claimed) / claimed)


def _holds(a: Found, b: Found, relation: str, size: tuple[int, ...]) -> tuple[float, bool]:
    """(soft 0..1, strict) truth of a relation between centroids: along its axis, and more than across it."""
    row, column = RELATIONS[relation]
    dy, dx = a.y - b.y, a.x - b.x
    along, across = (dy * row, dx) if row else (dx * column, dy)
    soft = _ramp(along - 0.5 * abs(across), -0.25 * size[0], 0.15 * size[0])
    return soft, along > 0.05 * size[0] and along > abs(across)


def _verify_single(claim: Claim, objects: list[Found]) -> dict[str, float | None]:
    softs = np.array([o.soft(claim.a) for o in objects])
    exact = len(objects) == claim.count and all(o.strict(claim.a) for o in objects)
    return {
        "count": _count_score(len(objects), claim.count),
        "colour": float(softs[:, 0].mean()),
        "shape": float(softs[:, 1].mean()),
        "strict": float(exact),
    }


def _verify_pair(claim: Claim, objects: list[Found], size: tuple[int, ...]) -> dict[str, float | None]:
    assert claim.b is not None
    assert claim.relation is not None
    like = np.array([[np.mean(o.soft(kind)) for kind in (claim.a, claim.b)] for o in objects])
    if len(objects) == 1:
        best = float(like.max())
        first = int(like[0].argmax())
        return {
            "object_a": best if first == 0 else 0.0,
            "object_b": best if first == 1 else 0.0,
            "count": _count_score(1, 2),
            "relation": 0.0,
            "strict": 0.0,
        }
    pairs = [(i, j) for i in range(len(objects)) for j in range(len(objects)) if i != j]
    i, j = max(pairs, key=lambda p: like[p[0], 0] + like[p[1], 1])
    soft, holds = _holds(objects[i], objects[j], claim.relation, size)
    exact = len(objects) == 2 and objects[i].strict(claim.a) and objects[j].strict(claim.b) and holds
    return {
        "object_a": float(like[i, 0]),
        "object_b": float(like[j, 1]),
        "count": _count_score(len(objects), 2),
        "relation": soft * float(min(like[i, 0], like[j, 1])),
        "strict": float(exact),
    }


def verify(image: Image, claim: Claim) -> Score:
    """Score one image against a claim; a blank image is a wrong answer (0), not a failure."""
    objects = find_objects(image)
    clauses = ("count", "colour", "shape") if claim.b is None else ("object_a", "object_b", "count", "relation")
    if not objects:
        return Score(0.0, details={**dict.fromkeys(clauses, 0.0), "strict": 0.0})
    parts = _verify_single(claim, objects) if claim.b is None else _verify_pair(claim, objects, image.shape)
    dense = float(np.mean([float(parts[c] or 0.0) for c in clauses]))
    return Score(dense, details=parts)


class Model:
    """The ``shapes`` reward: no weights; ``revision`` is the sha256 of this file, which is the whole model."""

    name = "shapes"
    description = "colour, shape, count and relation of drawn objects, verified on the pixels; dense 0..1 and strict"
    needs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.revision = "sha256:" + hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

    def setup(self, device: str) -> None:
        """Nothing to load."""

    def score(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[float | Score | None]:
        """Scores of (H, W, 3) uint8 images against their prompts, in the same order."""
        scores: list[float | Score | None] = []
        for image, prompt in zip(images, prompts, strict=True):
            claim = parse(prompt)
            if claim is None:
                scores.append(Score(None, reason="the prompt makes no claim that shapes can verify: " + prompt[:80]))
            else:
                scores.append(verify(image, claim))
        return scores
