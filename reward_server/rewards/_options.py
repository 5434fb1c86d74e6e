"""Options that several rewards have: one of some choices, and the dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reward_server.rewards.base import RewardLoadError

DTYPES = ("auto", "float32", "bfloat16", "float16")


def check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """Raises RewardLoadError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise RewardLoadError(f"{option} is {value!r}; choose one of: {', '.join(choices)}")


def torch_dtype(dtype: str, device: str, on_gpu: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype that an option names; ``auto`` is ``on_gpu``, what the model's project uses, on a GPU, else float32.

    Raises:
        RewardLoadError: it is none of DTYPES.
    """
    check_choice("dtype", dtype, DTYPES)
    if dtype == "auto":
        return on_gpu if torch.device(device).type == "cuda" else torch.float32
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
