"""Load a checkpoint of several gigabytes strictly, holding it in memory once.

The model is made without memory (on the meta device), the names and shapes of the mapped files are checked against it,
and only then is memory taken, once, in the wanted dtype and on the wanted device, and filled from the files. Nothing is
initialised at random, and there is no second copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from reward_server import weights
from reward_server.rewards.base import RewardLoadError

M = TypeVar("M", bound=nn.Module)

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WHOLE = "model.safetensors|pytorch_model.bin"
SHARDED = ("|".join((*INDEXES, WHOLE)), f"model-*.safetensors|pytorch_model-*.bin|{WHOLE}")
"""``Source.files`` of a checkpoint in one file, or in shards with an index"""


def shards(folder: Path) -> list[Path]:
    """The files of a checkpoint: the one that there is, or all that the index of the shards names.

    Raises:
        RewardLoadError: one that the index names is not there, or the index is damaged.
    """
    index = next((folder / name for name in INDEXES if (folder / name).exists()), None)
    if index is None:
        return [weights.find(folder, WHOLE)]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise RewardLoadError(f"{index} is no index of a checkpoint: {error}") from error
    if missing := [name for name in names if not (folder / name).exists()]:
        raise RewardLoadError(f"{folder} lacks {', '.join(missing)}, which {index.name} names")
    return [folder / name for name in names]


def load(make: Callable[[], M], paths: Sequence[Path], device: str, rename: Callable[[str], str | None]) -> M:
    """The module that ``make`` makes, in its dtypes, filled from the files, in evaluation mode without gradients.

    Buffers that are not in the files (non-persistent ones) are left without a value: set them afterwards.

    Args:
        rename: from a key of the files to the module's name; None for one that the score does not need.

    Raises:
        RewardLoadError: a file is damaged, a key is missing, unexpected or there twice, or a shape differs.
    """
    with torch.device("meta"):
        module = make()
    state: dict[str, torch.Tensor] = {}
    for path in paths:
        part = weights.rename(weights.read_state_dict(path), rename)  # mapped, not read
        if again := sorted(part.keys() & state.keys()):
            raise RewardLoadError(f"{path} has {again[0]}, which another file of the checkpoint has, too")
        state |= part
    shapes = {name: tensor.to("meta") for name, tensor in state.items()}
    weights.load_strictly(module, shapes, str(paths[0] if len(paths) == 1 else paths[0].parent))
    module.to_empty(device=torch.device(device))
    module.load_state_dict(state)
    return module.eval().requires_grad_(False)
