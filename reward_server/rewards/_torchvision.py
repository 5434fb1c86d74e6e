"""Make torchvision importable beside a CPU build of torch, for packages that need its transforms.

The index's torchvision is compiled for torch with CUDA. Beside a CPU build its operators (non-maximum suppression and
the like) are absent, and since it describes two of them without looking, importing it fails with "operator
torchvision::nms does not exist". Transforms need no operator.
"""

from __future__ import annotations

import importlib

import torch

_operators: list[torch.library.Library] = []  # a declaration lasts as long as its library object


def make_importable() -> None:
    """Import torchvision; where its operators are absent, with mere declarations of those that it describes.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
        _operators.append(library)
        importlib.import_module("torchvision")
