"""Load a checkpoint of several gigabytes strictly, holding it in memory once.

The model is made without memory (on the meta device), the files' names and shapes are checked against it, and only
then is memory taken, once, in the wanted dtype and on the wanted device, and filled tensor by tensor from the mapped
files. Nothing is initialised at random, and there is no second copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from reward_server import weights
from reward_server.rewards.base import RewardLoadError

M = TypeVar("M", bound=nn.Module)

INDEX = "model.safetensors.index.json"
SHARDED = (f"{INDEX}|model.safetensors", "model-*.safetensors|model.safetensors")
"""``Source.files`` of a checkpoint in one file or in shards"""


def shards(folder: Path) -> list[Path]:
    """The files of a checkpoint: ``model.safetensors``, or all that ``model.safetensors.index.json`` names.

    Raises:
        RewardLoadError: one that the index names is not there, or the index is damaged.
    """
    if not (folder / INDEX).exists():
        return [weights.find(folder, "model.safetensors")]
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise RewardLoadError(f"{folder / INDEX} is no index of a checkpoint: {error}") from error
    if missing := [name for name in names if not (folder / name).exists()]:
        raise RewardLoadError(f"{folder} lacks {', '.join(missing)}, which {INDEX} names")
    return [folder / name for name in names]


def load(make: Callable[[], M], paths: Sequence[Path], device: str, rename: Callable[[str], str | None]) -> M:
    """The module that ``make`` makes, in its dtypes, filled from safetensors files, in evaluation mode.

    Buffers that are not in the files (non-persistent ones) are left without a value: set them afterwards.

    Args:
        rename: from a key of the files to the module's name; None for one that the score does not need.

    Raises:
        RewardLoadError: a file is damaged, a key is missing, unexpected or there twice, or a shape differs.
    """
    with torch.device("meta"):
        module = make()
    places: dict[str, tuple[Path, str]] = {}
    shapes: dict[str, torch.Tensor] = {}
    try:
        for path in paths:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    name = rename(key)
                    if name is None:
                        continue
                    if name in places:
                        raise RewardLoadError(f"{key} is in {places[name][0]} and in {path}")
                    places[name] = path, key
                    shapes[name] = torch.empty(file.get_slice(key).get_shape(), device="meta")
        weights.load_strictly(module, shapes, str(paths[0] if len(paths) == 1 else paths[0].parent))
        module.to_empty(device=torch.device(device))
        own = module.state_dict()
        for path in paths:
            with safe_open(path, framework="pt") as file:
                for name, (_, key) in places.items():
                    if places[name][0] == path:
                        own[name].copy_(file.get_tensor(key))
    except (SafetensorError, OSError) as error:
        raise RewardLoadError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}") from error
    return module.eval().requires_grad_(False)


def half_or_float32(dtype: str, device: str, half: torch.dtype) -> torch.dtype:
    """The dtype that an option names; ``auto`` is ``half``, which the model's project uses, on a GPU, else float32.

    Raises:
        RewardLoadError: it is none of auto, float32, bfloat16, float16.
    """
    choices = {
        "auto": half if torch.device(device).type == "cuda" else torch.float32,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    if dtype not in choices:
        raise RewardLoadError(f"dtype is {dtype!r}; choose one of: {', '.join(choices)}")
    return choices[dtype]
