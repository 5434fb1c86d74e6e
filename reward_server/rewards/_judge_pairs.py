"""Comparing images in pairs: which pairs of a group meet, and what their comparisons make of each image."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any


def groups(prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[int]]:
    """Indices of the images that are compared with one another: of one prompt, or of one value of metadata ``key``."""
    found: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        found.setdefault(repr(metadata[index][key]) if key else prompt, []).append(index)
    return found


def pairs(members: Sequence[int], opponents: int, seed: str) -> list[tuple[int, int]]:
    """The pairs of a group that meet: all if ``opponents`` is 0, else a random schedule that ``seed`` decides.

    In the schedule the members stand in a random ring and meet their nearest on both sides: each has the same number
    of opponents, namely ``opponents``, rounded up to an even one, or all.
    """
    reach = (opponents + 1) // 2
    if not opponents or 2 * reach >= len(members) - 1:
        return list(combinations(members, 2))
    ring = random.Random(seed).sample(list(members), len(members))
    return [(ring[i], ring[(i + step) % len(ring)]) for step in range(1, reach + 1) for i in range(len(ring))]
