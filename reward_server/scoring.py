"""Turn a batch into scores or reasons, whatever the reward model does with it: raise, run out of memory, return NaN."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from reward_server.payloads import Item
from reward_server.rewards.base import Reward, Score, Scored, is_relative

log = logging.getLogger(__name__)


@dataclass
class Scorer:
    """Scores batches of at most ``limit`` images; the limit shrinks when the model runs out of memory.

    A relative reward gets its images whole: it has no limit, and a batch that fails is not tried in halves.
    """

    reward: Reward
    limit: int

    def __post_init__(self) -> None:
        self._relative = is_relative(self.reward)
        if self._relative:
            self.limit = sys.maxsize

    def score(self, items: Sequence[Item]) -> list[Score]:
        """One entry per item, in order; the value is finite, or None with a reason."""
        complete = [i for i, item in enumerate(items) if not self._missing(item)]
        scored: dict[int, Score] = {}
        start = 0
        while start < len(complete):  # the limit may shrink on the way
            indices = complete[start : start + self.limit]
            scored |= zip(indices, self._attempt([items[i] for i in indices]), strict=True)
            start += len(indices)
        refused = "metadata lacks {}, which this reward needs"
        return [
            scored[i] if i in scored else Score(None, reason=refused.format(", ".join(self._missing(item))))
            for i, item in enumerate(items)
        ]

    def _missing(self, item: Item) -> list[str]:
        return [key for key in self.reward.needs if key not in item.metadata]

    def _attempt(self, items: Sequence[Item]) -> list[Score]:
        """Score in one call; if that fails, in halves, down to the image that is at fault."""
        try:
            values = self.reward.score(
                [item.image for item in items], [item.prompt for item in items], [item.metadata for item in items]
            )
            if len(values) != len(items):
                raise ValueError(f"{len(values)} scores for {len(items)} images")
            return [_checked(value) for value in values]
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            out_of_memory = _is_out_of_memory(error)
            log.warning("%s failed on %d images: %s", self.reward.name, len(items), reason, exc_info=len(items) == 1)
        # outside the except block, so that the traceback no longer keeps the failed batch's tensors alive
        if len(items) == 1 or self._relative:
            return [Score(None, reason=reason)] * len(items)
        half = len(items) // 2
        if out_of_memory:
            _release_memory()
            self.limit = min(self.limit, half)
            log.warning("%s ran out of memory: batches of at most %d images from now on", self.reward.name, self.limit)
        return self._attempt(items[:half]) + self._attempt(items[half:])


def _checked(value: Scored) -> Score:
    """A finite score, or None with a reason. Sub-scores that are not finite become None."""
    score = value if isinstance(value, Score) else Score(None if value is None else float(value))
    details = {name: _finite(detail) for name, detail in score.details.items()}
    if score.value is None:
        return Score(None, details, score.reason or "the reward gave no score and no reason")
    if not math.isfinite(score.value):
        return Score(None, details, f"the reward returned {score.value}, which is not a score")
    return Score(float(score.value), details)


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _is_out_of_memory(error: Exception) -> bool:
    """Recognised by name, since a reward need not use torch (torch.cuda.OutOfMemoryError is a RuntimeError)."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "out of memory" in str(error).lower())
    )


def _release_memory() -> None:
    """Return cached device memory, if the reward uses torch on a GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
