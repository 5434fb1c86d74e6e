"""What all processes of a run decide together, so that none waits for one that has gone another way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait

import torch
from accelerate import Accelerator

from trainer.rewards import RewardScores

_LOOK_S = 1.0
"""Seconds between two looks whether the user asked to stop"""


class Stopped(Exception):  # noqa: N818
    """The user asked to stop while the run waited for scores."""


def agree(accelerator: Accelerator, flag: bool) -> bool:
    """Whether any process raised its flag, so that all of them act alike."""
    flags = torch.tensor([float(flag)], device=accelerator.device)
    return float(accelerator.reduce(flags, "sum")) > 0


def wait_for_scores(accelerator: Accelerator, job: Future[RewardScores] | None, stop: Callable[[], bool]) -> None:
    """Return when every process's job has ended, well or badly; None is a process that waits for nothing.

    Raises Stopped, on all processes, within about a second of a request to stop on any of them.
    """
    while agree(accelerator, job is not None and not wait([job], _LOOK_S).done):
        if agree(accelerator, stop()):
            raise Stopped
