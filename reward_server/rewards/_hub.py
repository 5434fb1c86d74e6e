"""Build a transformers model from a state dict, strictly.

A checkpoint's names are those of the day it was published; ``from_pretrained`` knows what each transformers release
made of them, and tells what it could not use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from reward_server.rewards.base import RewardLoadError

M = TypeVar("M", bound=PreTrainedModel)


def build(
    model: type[M],
    config: PretrainedConfig,
    state: Mapping[str, torch.Tensor],
    path: Path,
    unused: tuple[str, ...] = (),
) -> M:
    """The model in float32 and evaluation mode, every tensor of ``state`` used and every parameter filled.

    Args:
        path: the file that ``state`` is from, for messages.
        unused: ends of names that may lack or be left over, since the score does not depend on them.

    Raises:
        RewardLoadError: a key is missing or unexpected, or a shape differs; the message names the first few.
    """
    state = {key: value for key, value in state.items() if not key.endswith(unused)}
    with _quiet():
        loaded: Any = model.from_pretrained(
            None,
            config=config,
            state_dict=state,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported, and refused below
            dtype=torch.float32,
        )
    built: M
    built, report = loaded
    missing = sorted(key for key in report["missing_keys"] if not key.endswith(unused))
    unexpected = sorted(report["unexpected_keys"])
    shapes = sorted(f"{key} {list(own)}, not {list(wanted)}" for key, own, wanted in report["mismatched_keys"])
    problems = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
    if any(keys for _, keys in problems):
        told = "; ".join(f"{len(keys)} {what}: {', '.join(keys[:5])}" for what, keys in problems if keys)
        raise RewardLoadError(f"{path} does not fit the model; keys {told}")
    return built


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own report and progress bar: what is wrong is an error here, and the rest is no news."""
    settings: Any = logging
    verbosity, bars = settings.get_verbosity(), settings.is_progress_bar_enabled()
    settings.set_verbosity_error()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        settings.set_verbosity(verbosity)
        if bars:
            settings.enable_progress_bar()
