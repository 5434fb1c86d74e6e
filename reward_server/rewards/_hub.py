"""Build a transformers model from a state dict, strictly.

A checkpoint's names are those of the day it was published; ``from_pretrained`` knows what each transformers release
made of them, and tells what it could not use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PretrainedConfig, PreTrainedModel

from reward_server.rewards.base import RewardLoadError

M = TypeVar("M", bound=PreTrainedModel)

DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Of the option ``dtype`` of rewards whose field computes in float32 on every device"""


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
    try:
        built, report = model.from_pretrained(
            None, config=config, state_dict=state, output_loading_info=True, dtype=torch.float32
        )
    except RuntimeError as error:  # shapes that differ
        raise RewardLoadError(f"{path} does not fit the model: {' '.join(str(error).split())[:300]}") from error
    missing = sorted(key for key in report["missing_keys"] if not key.endswith(unused))
    unexpected = sorted(report["unexpected_keys"])
    if missing or unexpected:
        raise RewardLoadError(
            f"{path} does not fit the model; {len(missing)} keys are missing: {', '.join(missing[:5])}; "
            f"{len(unexpected)} are unexpected: {', '.join(unexpected[:5])}"
        )
    return built.eval()


def dtype_of(name: str, reward: str) -> torch.dtype:
    """The torch dtype that an option names.

    Raises:
        RewardLoadError: it is none of DTYPES.
    """
    if name not in DTYPES:
        raise RewardLoadError(f"dtype of {reward} is {name!r}; it can be {', '.join(DTYPES)}")
    return DTYPES[name]
