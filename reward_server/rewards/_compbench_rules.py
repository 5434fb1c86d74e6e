"""T2I-CompBench's rules on detected objects as pure functions (arXiv 2307.06350; GitHub: Karine-Huang/T2I-CompBench).

The rules are those of ``UniDet_eval/{2D_spatial_eval,3D_spatial_eval,numeracy_eval}.py``. Objects come surest first, as
UniDet returns them, with boxes (x0, y0, x1, y1) in pixels of the size that the benchmark looks at: :func:`frame`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Box: TypeAlias = tuple[float, float, float, float]
Depth: TypeAlias = NDArray[np.float32]
"""[H, W], 0..1, larger is nearer"""

NEAR = ("on side of", "next to", "near")
RELATIONS_2D = (*NEAR, "on the left of", "on the right of", "on the bottom of", "on the top of")
"""In the order in which the benchmark looks for them in a prompt"""
RELATIONS_3D = ("in front of", "behind", "hidden")
MAX_IOU, NEAR_PIXELS, FULL_IOU_3D = 0.1, 150, 0.5
MIN_SCORE_2D = 0.5
"""A lower spatial_2d score is 0"""
SAME_OVERLAP = 0.9
"""Boxes of one class that overlap more are one object when counting"""
_PERSONS = ("girl", "boy", "man", "woman")
_SHORT_SIDE, _LONG_SIDE = 479, 480
_COUNTED_AS = {
    **dict.fromkeys(_PERSONS, "person"),
    "ship": "boat",
    "goldfish": "fish",
    "painting": "picture",
}


@dataclass(frozen=True)
class Found:
    """An object on an image."""

    name: str
    score: float
    box: Box


def frame(height: int, width: int) -> tuple[int, int]:
    """(height, width) of the image that the benchmark looks at: the short side 479, but the long one at most 480."""
    short, long = min(height, width), max(height, width)
    new_short, new_long = _SHORT_SIDE, int(_SHORT_SIDE * long / short)
    if new_long > _LONG_SIDE:
        new_short, new_long = max(1, int(_LONG_SIDE * new_short / new_long)), _LONG_SIDE
    return (new_short, new_long) if height <= width else (new_long, new_short)


def iou(a: Box, b: Box) -> float:
    """Intersection over union; 0 for boxes without area."""
    both = _overlap(a, b, 0)
    either = _area(a, 0) + _area(b, 0) - both
    return both / either if either else 0.0


def _overlap(a: Box, b: Box, inclusive: int) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0]) + inclusive
    height = min(a[3], b[3]) - max(a[1], b[1]) + inclusive
    return max(0.0, width) * max(0.0, height)


def _area(box: Box, inclusive: int) -> float:
    return (box[2] - box[0] + inclusive) * (box[3] - box[1] + inclusive)


def holds_2d(relation: str, a: Box, b: Box) -> float:
    """How far, 0..1, A is in a relation of RELATIONS_2D to B."""
    dx = (b[0] + b[2] - a[0] - a[2]) / 2
    dy = (b[1] + b[3] - a[1] - a[3]) / 2
    if relation in NEAR:
        if min(abs(dx), abs(dy)) < NEAR_PIXELS:
            return 1.0
        return NEAR_PIXELS / max(abs(dx), abs(dy))
    along, across = {
        "on the left of": (dx, dy),
        "on the right of": (-dx, dy),
        "on the top of": (dy, dx),
        "on the bottom of": (-dy, dx),
    }[relation]
    if along <= abs(across):
        return 0.0
    overlap = iou(a, b)
    return 1.0 if overlap < MAX_IOU else MAX_IOU / overlap


def holds_3d(relation: str, a: Box, b: Box, depth: Depth) -> float:
    """How far, 0..1, A is in a relation of RELATIONS_3D to B, in the depth map of the image they are on.

    The benchmark reads the map with x and y exchanged, ``depth[x0:x1, y0:y1]``, and so does this, for its numbers. A
    box that misses the map in this way makes the relation false.
    """
    near_a, near_b = (
        depth[max(0, int(x0)) : int(x1), max(0, int(y0)) : int(y1)] for x0, y0, x1, y1 in (a, b)
    )  # fmt: skip
    if not near_a.size or not near_b.size:
        return 0.0
    nearer = float(near_a.mean()) - float(near_b.mean())
    if (nearer if relation == "in front of" else -nearer) <= 0:
        return 0.0
    overlap = iou(a, b)
    if overlap == FULL_IOU_3D:
        return 0.0  # neither of the benchmark's two comparisons is true
    return min(1.0, overlap / FULL_IOU_3D)


def spatial_2d(objects: Sequence[Found], first: str, second: str, relation: str) -> dict[str, float]:
    """``raw`` 0..1, and its parts: a quarter of each object's confidence, half of the relation; below 0.5 it is 0.

    Names must be equal; of several objects of a name the surest is looked at.
    """
    a, b = (next((o for o in objects if o.name == _person(name)), None) for name in (first, second))
    parts = _spatial(a, b, holds_2d(relation, a.box, b.box) if a and b else 0.0)
    return {**parts, "raw": parts["raw"] if parts["raw"] >= MIN_SCORE_2D else 0.0}


def spatial_3d(objects: Sequence[Found], first: str, second: str, relation: str, depth: Depth) -> dict[str, float]:
    """As :func:`spatial_2d`, without the cut at 0.5, and a detected name need only contain the one looked for.

    If both names occur, the objects are the last ones seen when, in order of confidence, both have been seen; so the
    benchmark's loop has it.
    """
    names = " ".join(o.name for o in objects)
    first, second = _person(first), _person(second)
    a = b = None
    for found in objects:
        a = found if first in found.name else a
        b = found if second in found.name else b
        if (a and b) or ((a or b) and not (first in names and second in names)):
            break
    return _spatial(a, b, holds_3d(relation, a.box, b.box, depth) if a and b else 0.0)


def _spatial(a: Found | None, b: Found | None, relation: float) -> dict[str, float]:
    first, second = a.score if a else 0.0, b.score if b else 0.0
    if not (a and b):  # the benchmark then counts one object, the first if it is there
        second = 0.0 if a else second
    return {"first": first, "second": second, "relation": relation, "raw": 0.25 * first + 0.25 * second + relation / 2}


def _person(name: str) -> str:
    return "person" if name in _PERSONS else name


def counted_as(noun: str) -> str:
    """The word under which the benchmark counts a noun: "person" for "girl"."""
    return _COUNTED_AS.get(noun, noun)


def numeracy(objects: Sequence[Found], wanted: Mapping[str, int]) -> dict[str, float]:
    """``raw`` 0..1: of every class's equal share, half if it is there and half if its number is exact.

    Boxes of one name that nearly coincide, or of which one contains the other, are one object. A name that is not found
    stands for those that contain it.
    """
    kept: list[Found] = []
    for found in objects:
        if not any(found.name == other.name and _same(found.box, other.box) for other in kept):
            kept.append(found)
    names = [found.name for found in kept]
    scores: dict[str, float] = {}
    for asked, number in wanted.items():
        name = counted_as(asked)
        if name not in names:
            names = [name if name in other else other for other in names]
        count = names.count(name)
        scores[f"count.{asked}"] = float(count)
        scores["raw"] = scores.get("raw", 0.0) + (0.5 * (count > 0) + 0.5 * (count == number)) / len(wanted)
    return scores


def _same(a: Box, b: Box) -> bool:
    both, area_a, area_b = _overlap(a, b, 1), _area(a, 1), _area(b, 1)
    return max(both / (area_a + area_b - both), both / area_a, both / area_b) > SAME_OVERLAP
