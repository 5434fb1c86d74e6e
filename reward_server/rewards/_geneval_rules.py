"""GenEval's clauses as pure functions of detected objects (arXiv 2310.11513, github.com/djghosh13/geneval).

A specification says what an image must show: ``include`` clauses (class, count, colour, position relative to an earlier
clause's objects) that must all hold, and ``exclude`` clauses (class, count) that must not. Two published readings:

- ``counting=">="``: the benchmark (``evaluate``). At least ``count`` objects; only the ``count`` surest are looked at.
- ``counting="=="``: the reward server of the flow_grpo family (``evaluate_reward``). Exactly ``count`` objects.

``dense`` is that server's "score": the mean over the include clauses of

- the count: 1 - |found - count| / count, which is negative when more than twice too many are found (with ``>=``, too
  many are no fault, so found is at most count);
- the colour: 1 - |of that colour - count| / count;
- the position: 1 if it holds; if not, two entries, 0 and 1, as that server appends both (so that a wrong position is
  half a fault); one 0 if the clause that it refers to failed; no entry if the colour was wrong.

An exclude clause that an exact count of the same class implies has no entry in ``dense`` (that server has none at
all); others have 1 or 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

Counting: TypeAlias = Literal[">=", "=="]
Box: TypeAlias = tuple[float, float, float, float]

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
CLASSES = (
    "person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,stop sign,parking meter,"
    "bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,backpack,umbrella,handbag,tie,suitcase,frisbee,"
    "skis,snowboard,sports ball,kite,baseball bat,baseball glove,skateboard,surfboard,tennis racket,bottle,wine glass,"
    "cup,fork,knife,spoon,bowl,banana,apple,sandwich,orange,broccoli,carrot,hot dog,pizza,donut,cake,chair,couch,"
    "potted plant,bed,dining table,toilet,tv,laptop,computer mouse,tv remote,computer keyboard,cell phone,microwave,"
    "oven,toaster,sink,refrigerator,book,clock,vase,scissors,teddy bear,hair drier,toothbrush"
).split(",")
"""COCO's 80 classes in the order of the detector's outputs, by the names of GenEval's prompts"""
POSITION_THRESHOLD = 0.1
"""An offset counts beyond this part of both objects' summed sizes"""


@dataclass(frozen=True)
class Include:
    """``count`` objects of a class, perhaps of a colour, perhaps in a relation to the objects of clause ``to``."""

    name: str
    count: int
    colour: str | None = None
    relation: str | None = None
    to: int = 0


@dataclass(frozen=True)
class Exclude:
    """Fewer than ``count`` objects of a class."""

    name: str
    count: int


@dataclass(frozen=True)
class Spec:
    """What an image must show; ``tag`` is GenEval's task, e.g. ``counting``."""

    tag: str
    include: tuple[Include, ...]
    exclude: tuple[Exclude, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The result for one image."""

    strict: bool
    """Every clause holds"""
    dense: float
    clauses: dict[str, float] = field(default_factory=dict)
    """Soft value of every clause that was looked at: ``include.0.count``, ``include.1.position``, ``exclude.0`` ..."""


def parse(metadata: Mapping[str, Any]) -> Spec:
    """The specification in a line of GenEval's ``evaluation_metadata.jsonl``: ``tag``, ``include``, ``exclude``.

    Raises:
        ValueError: it is malformed, or names a class, colour or relation that GenEval does not have.
    """
    include: list[Include] = []
    for index, clause in enumerate(_clauses(metadata, "include")):
        where = f"include[{index}]"
        name, count = _name_and_count(clause, where)
        colour = clause.get("color")
        if colour is not None and colour not in COLOURS:
            raise ValueError(f"{where}.color is {colour!r}, not one of {', '.join(COLOURS)}")
        relation, to = None, 0
        if (position := clause.get("position")) is not None:
            if not isinstance(position, list | tuple) or len(position) != 2 or position[0] not in RELATIONS:
                raise ValueError(f"{where}.position is {position!r}, not [one of {', '.join(RELATIONS)}; a number]")
            relation, to = position
            if not isinstance(to, int) or not 0 <= to < index:
                raise ValueError(f"{where}.position refers to include[{to}], which does not come before it")
        include.append(Include(name, count, colour, relation, to))
    exclude = [Exclude(*_name_and_count(c, f"exclude[{i}]")) for i, c in enumerate(_clauses(metadata, "exclude"))]
    if not include and not exclude:
        raise ValueError("include and exclude are both empty: there is nothing to score")
    return Spec(str(metadata.get("tag", "")), tuple(include), tuple(exclude))


def _clauses(metadata: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    value = metadata.get(key) or []
    if not isinstance(value, list | tuple) or not all(isinstance(clause, Mapping) for clause in value):
        raise ValueError(f"{key} is not a list of clauses: {value!r}")
    return value


def _name_and_count(clause: Mapping[str, Any], where: str) -> tuple[str, int]:
    name, count = clause.get("class"), clause.get("count")
    if name not in CLASSES:
        raise ValueError(f"{where}.class is {name!r}, which is not one of GenEval's {len(CLASSES)} object names")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{where}.count is {count!r}, not a number from 1 up")
    return str(name), count


def looked_at(clause: Include, found: int, counting: Counting) -> int | None:
    """How many of a class's objects, surest first, further checks are made on; None if the count is wrong."""
    if found < clause.count or (counting == "==" and found > clause.count):
        return None
    return clause.count


def relations(a: Box, b: Box, threshold: float = POSITION_THRESHOLD) -> set[str]:
    """Where A is, seen from B: the relations that hold, up to one along each axis."""
    corners = np.array([a, b], dtype=np.float64).reshape(2, 2, 2)
    centres = corners.mean(axis=1)
    sizes = np.abs(corners[:, 1] - corners[:, 0])
    offset = centres[0] - centres[1]
    beyond = np.maximum(np.abs(offset) - threshold * sizes.sum(axis=0), 0) * np.sign(offset)
    if (np.abs(beyond) < 1e-3).all():
        return set()
    dx, dy = beyond / np.linalg.norm(offset)
    holds = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return {name for name, true in holds.items() if true}


def judge(
    spec: Spec,
    objects: Mapping[str, Sequence[Box]],
    colours: Mapping[int, Sequence[str]],
    counting: Counting,
    position_threshold: float = POSITION_THRESHOLD,
) -> Verdict:
    """Whether, and how far, the objects on an image are what is specified.

    Args:
        objects: boxes of every class that was found, surest first.
        colours: by the number of an include clause with a colour whose count is right: the colours of the objects that
            :func:`looked_at` says.
    """
    strict = True
    dense: list[float] = []
    clauses: dict[str, float] = {}
    matched: list[Sequence[Box] | None] = []
    for index, clause in enumerate(spec.include):
        found = objects.get(clause.name, ())
        counted = len(found) if counting == "==" else min(len(found), clause.count)
        dense.append(1 - abs(clause.count - counted) / clause.count)
        clauses[f"include.{index}.count"] = dense[-1]
        number = looked_at(clause, len(found), counting)
        holds = number is not None
        if number is None and (clause.colour or clause.relation):
            dense.append(0.0)
        if number is not None and clause.colour:
            right = list(colours[index]).count(clause.colour)
            dense.append(1 - abs(clause.count - right) / clause.count)
            clauses[f"include.{index}.color"] = dense[-1]
            holds = right == clause.count
        if holds and clause.relation:
            targets = matched[clause.to]
            holds = targets is not None and all(
                clause.relation in relations(a, b, position_threshold) for a in found[:number] for b in targets
            )
            clauses[f"include.{index}.position"] = float(holds)
            dense += [0.0] if targets is None else [1.0] if holds else [0.0, 1.0]
        matched.append(found[:number] if holds else None)
        strict = strict and holds
    exact = {clause.name for clause in spec.include} if counting == "==" else set()
    for index, unwanted in enumerate(spec.exclude):
        absent = len(objects.get(unwanted.name, ())) < unwanted.count
        clauses[f"exclude.{index}"] = float(absent)
        strict = strict and absent
        if unwanted.name not in exact:
            dense.append(float(absent))
    return Verdict(strict, sum(dense) / len(dense) if dense else 0.0, clauses)
