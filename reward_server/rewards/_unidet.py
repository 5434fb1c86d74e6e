"""Objects on images: UniDet (arXiv 2102.13086, github.com/xingyizhou/UniDet) as T2I-CompBench runs it.

Reproduced from the benchmark's ``UniDet_eval``: the image resized by Pillow's bilinear filter to ``frame``, channels in
the order BGR (also for the ResNeSt, whose mean and deviation are in the order RGB: so the benchmark has it), classes
above 0.1 (its option of 0.5 has no effect), suppression by class at IoU 0.5, at most 300 objects. Names are the 722 of
the benchmark's ``dataset/detection_features.pt``, in its order (``weights/unidet/names.txt``).

The benchmark asks the ResNeSt-200 for ``spatial_2d``, but the ResNet-50 for ``spatial_3d`` and ``numeracy``. It runs
them under float16 autocast, which ``dtype="float16"`` does, too. Images are padded to a multiple of 32 each by itself;
the benchmark pads all 64 of a batch to the largest, which is the same for images of one size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch.nn import functional

from reward_server import weights
from reward_server.contract import Image
from reward_server.rewards import _clip, _unidet_boxes
from reward_server.rewards._compbench_rules import Found, frame
from reward_server.rewards._unidet_network import Sizes, UniDet
from reward_server.rewards.base import RewardLoadError

MIN_SCORE, MAX_IOU, MAX_OBJECTS = 0.1, 0.5, 300
DIVISOR = 32
PREPROCESSING = "unidet-pil-bilinear-479-480-bgr-pad32/1"
RESNEST = weights.Source("shikunl/prismer", ("expert_weights/Unified_learned_OCIM_RS200_6x+2x.pth",), "Apache-2.0")
RESNET_AT = "https://docs.google.com/uc?id=1C4sgkirmgMumKXXiLOPmCKNTZAc3oVbq"
"""``Unified_learned_OCIM_R50_6x+2x.pth``, which is not on the hub"""
_MEAN_STD = {
    True: ((123.68, 116.779, 103.939), (58.393, 57.12, 57.375)),
    False: ((103.53, 116.28, 123.675), (1.0, 1.0, 1.0)),
}
"""Of the channels as they come, by whether the backbone is a ResNeSt"""
_UNUSED = re.compile(r"pixel_(mean|std)|.*anchor_generator\.cell_anchors\.\d+|.*\.num_batches_tracked")
"""Constants that older versions of detectron2 stored, and a counter of training"""


def source(path: str, category: str) -> weights.Source:
    """The checkpoint that the benchmark uses for ``category``, or the one at ``path``.

    Raises:
        RewardLoadError: no path is given, and the category's is not on the hub.
    """
    if path:
        file = Path(path).expanduser().resolve()
        return weights.Source(str(file.parent), (file.name,), RESNEST.licence)
    if category == "spatial_2d":
        return RESNEST
    raise RewardLoadError(
        f"{category} of t2i_compbench needs UniDet's Unified_learned_OCIM_R50_6x+2x.pth: download it from {RESNET_AT} "
        "and give its path as the option unidet (or detector: mask2former, or detector: '' if the metadata always has "
        "detections)"
    )


class Detector:
    """A loaded UniDet; call :meth:`detect`."""

    def __init__(self, path: str, category: str, device: torch.device, dtype: torch.dtype, *, reward: str) -> None:
        """Load the checkpoint of :func:`source`.

        Raises:
            RewardLoadError: it is missing or damaged, or another network's.
        """
        needed = source(path, category)
        file = weights.find(weights.locate(needed, reward=reward), needed.files[0])
        state = read_checkpoint(file)
        try:
            sizes = Sizes.of(state)
        except KeyError as error:
            raise RewardLoadError(f"{file} is no UniDet of detectron2: it lacks {error}") from None
        if sizes.classes != len(names()):
            raise RewardLoadError(f"{file} has {sizes.classes} classes, not the {len(names())} of UniDet's OCIM models")
        with torch.device("meta"):
            model = UniDet(sizes)
        model.to_empty(device="cpu")
        weights.load_strictly(model, state, str(file))
        self._model = model.eval().to(device)
        self._device, self._dtype = device, dtype
        mean, std = _MEAN_STD[sizes.split]
        self._mean, self._std = (torch.tensor(v, device=device)[:, None, None] for v in (mean, std))
        self.network = f"unidet-{'resnest' if sizes.split else 'resnet'}{3 * sum(sizes.blocks) + 2}"
        self.sha256 = weights.sha256(file)

    @torch.inference_mode()
    def detect(self, images: Sequence[Image]) -> list[list[Found]]:
        """Objects on uint8 RGB images [H, W, 3], surest first, boxes in pixels of each image's ``frame``.

        Images of one frame go through the network together; none changes another's objects.
        """
        together: dict[tuple[int, int], list[int]] = {}
        for index, image in enumerate(images):
            together.setdefault(frame(*image.shape[:2]), []).append(index)
        found: list[list[Found]] = [[] for _ in images]
        for size, indices in together.items():
            x_N3HW = self._prepare([images[i] for i in indices], size)
            with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
                outputs = self._model(x_N3HW, size)
            for index, (boxes_K4, probabilities_KC) in zip(indices, outputs, strict=True):
                found[index] = _objects(boxes_K4, probabilities_KC, size)
        return found

    def _prepare(self, images: Sequence[Image], size: tuple[int, int]) -> torch.Tensor:
        """Normalised [N, 3, H', W'] with zeros right and below of ``size``."""
        height, width = size
        resized = [
            np.asarray(PIL.Image.fromarray(i).resize((width, height), PIL.Image.Resampling.BILINEAR)) for i in images
        ]
        pixels = _clip.to_device(torch.from_numpy(np.stack(resized)), self._device).flip(-1).permute(0, 3, 1, 2)
        padding = (0, -width % DIVISOR, 0, -height % DIVISOR)
        return functional.pad((pixels.float() - self._mean) / self._std, padding)


def _objects(boxes_K4: torch.Tensor, probabilities_KC: torch.Tensor, size: tuple[int, int]) -> list[Found]:
    """The objects of one image from the network's output; one box can be several objects."""
    rows, labels = (probabilities_KC > MIN_SCORE).nonzero(as_tuple=True)
    boxes_M4, scores_M = _unidet_boxes.clip(boxes_K4, size)[rows], probabilities_KC[rows, labels]
    kept = _unidet_boxes.suppress(boxes_M4, scores_M, labels, MAX_IOU)[:MAX_OBJECTS]
    kept = kept[_unidet_boxes.not_empty(boxes_M4[kept])]
    parts = zip(labels[kept].tolist(), scores_M[kept].tolist(), boxes_M4[kept].tolist(), strict=True)
    return [Found(names()[label], score, (x0, y0, x1, y1)) for label, score, (x0, y0, x1, y1) in parts]


@cache
def names() -> tuple[str, ...]:
    """The classes' names, some of which occur twice, in the order of the network's outputs."""
    file = Path(__file__).parent / "weights" / "unidet" / "names.txt"
    return tuple(file.read_text(encoding="utf-8").splitlines())


def read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """The tensors under ``model`` of detectron2's checkpoint (in it also as numpy arrays) that detection uses.

    Raises:
        RewardLoadError: the file is damaged, or holds something else.
    """
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged, or code where data was expected
        code = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it refers to the code {code[1]}" if code else " ".join(str(error).split())[:300]
        raise RewardLoadError(f"{path} is not read: {why}") from error
    state = content.get("model") if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor | np.ndarray) for v in state.values()):
        raise RewardLoadError(f"{path} does not hold tensors under 'model', as detectron2's checkpoints do")
    tensors = {key: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for key, v in state.items()}
    return weights.rename(tensors, lambda key: None if _UNUSED.fullmatch(key) else key)


def _numpy_globals() -> list[Any]:
    """What arrays and numbers of numpy are unpickled by, under the names of numpy 1 and 2; none runs foreign code."""
    rebuild, number = np.zeros(1).__reduce__()[0], np.float32(0).__reduce__()[0]
    made: list[Any] = [np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8", "b1"))]
    for core in ("numpy.core.multiarray", "numpy._core.multiarray"):
        made += [(rebuild, f"{core}._reconstruct"), (number, f"{core}.scalar")]
    return made
