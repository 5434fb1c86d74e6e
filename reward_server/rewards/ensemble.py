"""A weighted sum of other rewards, each part's own score and details reported beside it.

The parts are loaded into this one process, and so share its environment. Parts that cannot (their packages contradict
each other, or each wants a GPU of its own) are served as rewards of their own, and mixed here as parts of kind
``remote`` with protocol ``native``: configs/rewards/ensemble.yaml shows both.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward_server.contract import NAME_PATTERN, Image
from reward_server.rewards import base
from reward_server.rewards.base import Reward, RewardLoadError, Score, Scored
from reward_server.weights import Source

KEYS = {"weight", "reward", "options"}


@dataclass(frozen=True)
class Part:
    name: str
    weight: float
    reward: Reward
    options: Mapping[str, Any]


class Model:
    """The ``ensemble`` reward: ``sum(weight * score)`` over its parts, in the parts' own scales."""

    name = "ensemble"
    description = "a weighted sum of other rewards, each part reported"
    needs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.revision = "unknown"
        self.relative = False
        self.provenance: dict[str, str] = {}
        self.example: tuple[str, Mapping[str, Any]] = ("a red circle", {})
        self._parts: list[Part] = []

    def setup(self, device: str, *, parts: Mapping[str, Mapping[str, Any]]) -> None:
        """Load every part on ``device``.

        Args:
            parts: by the name under which it is reported: ``weight`` (a number, not 0), ``reward`` (the reward's
                name or module:Class; default: the part's name) and ``options`` (of its setup).

        Raises:
            RewardLoadError: no parts, an unknown one, an ensemble among them, or one that cannot be set up.
        """
        self._parts = _load(parts)
        for part in self._parts:
            try:
                base.prepare(part.reward, device, part.options)
            except RewardLoadError as error:
                raise RewardLoadError(f"part {part.name!r}: {error}") from error
        self.needs = tuple(dict.fromkeys(key for part in self._parts for key in part.reward.needs))
        self.relative = any(base.is_relative(part.reward) for part in self._parts)
        identity = json.dumps([[part.name, part.weight, part.reward.revision] for part in self._parts])
        self.revision = hashlib.sha256(identity.encode()).hexdigest()[:12]
        self.provenance = {}
        examples = [base.example(part.reward) for part in self._parts]
        own = [example for example, part in zip(examples, self._parts, strict=True) if hasattr(part.reward, "example")]
        metadata = {key: value for _, given in reversed(examples) for key, value in given.items()}
        self.example = ((own or examples)[0][0], metadata)
        for part in self._parts:
            told = {"revision": part.reward.revision, **base.provenance(part.reward), "weight": str(part.weight)}
            self.provenance |= {f"{part.name}.{key}": value for key, value in told.items()}

    def sources(self, *, parts: Mapping[str, Mapping[str, Any]]) -> list[Source]:
        """The weights that the parts need, each once."""
        found: dict[Source, None] = {}
        for part in _load(parts):
            if (sources := getattr(part.reward, "sources", None)) is not None:
                found |= dict.fromkeys(sources(**part.options))
        return list(found)

    def score(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Scored]:
        """The weighted sums; null where a part has no score, with that part's reason.

        ``details``: ``raw`` (the sum), each part's score under its name, and its details under ``name.detail``.
        """
        columns = []
        for part in self._parts:
            column = part.reward.score(images, prompts, metadata)
            if len(column) != len(images):
                raise ValueError(f"part {part.name!r} returned {len(column)} scores for {len(images)} images")
            columns.append(column)
        return [self._mix([column[i] for column in columns]) for i in range(len(images))]

    def close(self) -> None:
        """Let go of what the parts hold: connections of remote ones."""
        for part in self._parts:
            if (close := getattr(part.reward, "close", None)) is not None:
                close()

    def _mix(self, scored: Sequence[Scored]) -> Score:
        details: dict[str, float | None] = {"raw": None}
        total, reasons = 0.0, []
        for part, given in zip(self._parts, scored, strict=True):
            score = given if isinstance(given, Score) else Score(given)
            value = score.value if score.value is not None and math.isfinite(score.value) else None
            details[part.name] = value
            details |= {f"{part.name}.{key}": detail for key, detail in score.details.items()}
            if value is None:
                why = score.reason or (f"it returned {score.value}" if score.value is not None else "it gave no reason")
                reasons.append(f"part {part.name!r}: {why}")
            else:
                total += part.weight * value
        if reasons:
            return Score(None, details, "; ".join(reasons))
        return Score(total, {**details, "raw": total})


def _load(parts: Mapping[str, Mapping[str, Any]]) -> list[Part]:
    """The parts, not yet set up."""
    if not isinstance(parts, Mapping) or not parts:
        raise RewardLoadError("an ensemble needs parts, e.g. {shapes: {weight: 1.0}, ocr: {weight: 0.5}}")
    loaded = []
    for name, given in parts.items():
        if not isinstance(name, str) or not re.match(NAME_PATTERN, name):
            raise RewardLoadError(f"part {name!r}: its name must match {NAME_PATTERN}")
        if not isinstance(given, Mapping) or not given.keys() <= KEYS or "weight" not in given:
            raise RewardLoadError(f"part {name!r} must be {{weight: NUMBER, reward: NAME, options: {{...}}}}")
        weight = given["weight"]
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight == 0:
            raise RewardLoadError(f"part {name!r}: weight {weight!r} is no finite number other than 0")
        try:
            reward = base.load(given.get("reward", name))
        except RewardLoadError as error:
            raise RewardLoadError(f"part {name!r}: {error}") from error
        kind: type = type(reward)
        if issubclass(kind, Model):
            raise RewardLoadError(f"part {name!r} is an ensemble: give its parts here, with their weights multiplied")
        loaded.append(Part(name, float(weight), reward, given.get("options") or {}))
    return loaded
