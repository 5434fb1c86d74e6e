"""Objects on images: Mask2Former with a Swin backbone (arXiv 2112.01527), as GenEval runs it through mmdet.

Reproduced step by step from mmdet 2.28's ``mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco`` configuration:

- resize so that the image fits into 1333 x 800 (either way round), aspect kept, with OpenCV's integer bilinear filter;
- pad right and bottom with grey (128) to a multiple of 32, then normalise with ImageNet's mean and deviation;
- upsample the mask logits to the padded size, cut the padding off, and resize to the image's own size;
- of all (query, class) pairs keep the 100 of the largest class probability; a detection's score is that probability
  times the mean foreground probability of its mask; its box is the mask's extent.

``load`` reads mmdet's own checkpoint, or any Mask2Former with a Swin backbone in the layout of the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation

from reward_server import weights
from reward_server.contract import Image
from reward_server.rewards import _clip, _detector_mmdet, _hub
from reward_server.rewards.base import RewardLoadError

LONG_SIDE, SHORT_SIDE, DIVISOR = 1333, 800, 32
MAX_DETECTIONS = 100
_PAD = 128.0
_MEAN = (123.675, 116.28, 103.53)
_STD = (58.395, 57.12, 57.375)
_UNUSED = ("criterion.empty_weight", "swin.layernorm.weight", "swin.layernorm.bias", "relative_position_index")
"""Tensors that detection does not use, or that are constants: checkpoints may have them or lack them"""

PREPROCESSING = "mmdet-mask2former-1333x800-cv2linear-pad32/1"


@dataclass(frozen=True)
class Detection:
    """One object."""

    label: int
    """Index of its class"""
    score: float
    """0..1"""
    box: tuple[float, float, float, float]
    """x0, y0, x1, y1 in pixels; x1 and y1 are one past the last pixel"""
    mask: NDArray[np.bool_] | None = None
    """[H, W] of the image"""


class Detector:
    """A loaded Mask2Former; call :meth:`detect`."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model.to(device=device, dtype=dtype)
        self._device, self._dtype = device, dtype
        self._mean = torch.tensor(_MEAN, device=device)[:, None, None]
        self._std = torch.tensor(_STD, device=device)[:, None, None]

    @torch.inference_mode()
    def detect(self, images: Sequence[Image], min_score: float) -> list[list[Detection]]:
        """Objects of score above ``min_score`` on uint8 RGB images [H, W, 3], best first; one list per image.

        Images that become equally large go through the network together; the others' padding cannot touch them.
        """
        inputs = [self._prepare(image) for image in images]
        together: dict[tuple[int, int], list[int]] = {}
        for index, (pixels, _) in enumerate(inputs):
            together.setdefault((pixels.shape[1], pixels.shape[2]), []).append(index)
        found: list[list[Detection]] = [[] for _ in images]
        for indices in together.values():
            out = self._model(pixel_values=torch.stack([inputs[i][0] for i in indices]).to(self._dtype))
            for row, i in enumerate(indices):
                height, width = images[i].shape[:2]
                logits, masks = out.class_queries_logits[row].float(), out.masks_queries_logits[row].float()
                padded = (inputs[i][0].shape[1], inputs[i][0].shape[2])
                found[i] = _postprocess(logits, masks, padded, inputs[i][1], (height, width), min_score)
        return found

    def _prepare(self, image: Image) -> tuple[torch.Tensor, tuple[int, int]]:
        """Normalised [3, H', W'] with padding, and the (height, width) without."""
        pixels = _clip.to_device(torch.tensor(image), self._device)
        size = fitted_size(image.shape[0], image.shape[1])
        resized = resize_like_opencv(pixels, size).permute(2, 0, 1).float()
        padding = (0, -size[1] % DIVISOR, 0, -size[0] % DIVISOR)
        return (functional.pad(resized, padding, value=_PAD) - self._mean) / self._std, size


def fitted_size(height: int, width: int) -> tuple[int, int]:
    """(height, width) of an image that is scaled, aspect kept, to fit into 1333 x 800 or 800 x 1333."""
    scale = min(LONG_SIDE / max(height, width), SHORT_SIDE / min(height, width))
    return max(1, int(height * scale + 0.5)), max(1, int(width * scale + 0.5))


def resize_like_opencv(pixels: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """``cv2.resize(..., interpolation=INTER_LINEAR)`` of uint8 [H, W, C], to the bit and on any device.

    OpenCV rounds the filter's weights to 1/2048 and the sums twice, which no float filter reproduces; and it halves an
    image exactly by averaging.
    """
    height, width = pixels.shape[:2]
    values = pixels.to(torch.int32)
    if (height, width) == (2 * size[0], 2 * size[1]):
        four = values[::2, ::2] + values[1::2, ::2] + values[::2, 1::2] + values[1::2, 1::2]
        return ((four + 2) >> 2).to(torch.uint8)
    low, high, low_weight, high_weight = _taps(width, size[1], pixels.device, clamped=True)
    rows = values[:, low] * low_weight[:, None] + values[:, high] * high_weight[:, None]
    rows >>= 4
    low, high, low_weight, high_weight = _taps(height, size[0], pixels.device, clamped=False)
    below = (rows[low] * low_weight[:, None, None]) >> 16
    above = (rows[high] * high_weight[:, None, None]) >> 16
    return ((below + above + 2) >> 2).to(torch.uint8)


def _taps(
    size: int, new: int, device: torch.device, *, clamped: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Indices of the two neighbours of every new pixel, and their weights in 1/2048.

    ``clamped``: a position beyond the edge is moved onto it (columns); otherwise only its neighbours are (rows).
    """
    scale = 1 / (new / size)
    position = ((np.arange(new) + 0.5) * scale - 0.5).astype(np.float32)
    low = np.floor(position).astype(np.int64)
    fraction = position - low.astype(np.float32)
    if clamped:
        fraction = np.where((low < 0) | (low >= size - 1), np.float32(0), fraction)
    high = (low + 1).clip(0, size - 1)
    weights_ = np.rint(np.stack([1 - fraction, fraction]) * np.float32(2048)).astype(np.int32)
    arrays = (low.clip(0, size - 1), high, weights_[0], weights_[1])
    low_, high_, low_weight, high_weight = (torch.from_numpy(array).to(device) for array in arrays)
    return low_, high_, low_weight, high_weight


def _postprocess(
    logits: torch.Tensor,
    masks: torch.Tensor,
    padded: tuple[int, int],
    resized: tuple[int, int],
    original: tuple[int, int],
    min_score: float,
) -> list[Detection]:
    """Detections of one image from class logits [queries, classes + 1] and mask logits [queries, h, w]."""
    probabilities = logits.softmax(dim=-1)[:, :-1]
    classes = probabilities.shape[1]
    scores, pairs = probabilities.flatten().topk(min(MAX_DETECTIONS, probabilities.numel()))
    likely = scores > min_score  # a mask can only lower the score
    scores, pairs = scores[likely], pairs[likely]
    if not len(scores):
        return []
    upsampled = functional.interpolate(masks[pairs // classes][None], padded, mode="bilinear", align_corners=False)
    upsampled = upsampled[:, :, : resized[0], : resized[1]]
    upsampled = functional.interpolate(upsampled, original, mode="bilinear", align_corners=False)[0]
    inside = upsampled > 0
    scores = scores * (upsampled.sigmoid() * inside).sum(dim=(1, 2)) / (inside.sum(dim=(1, 2)) + 1e-6)
    sure = scores > min_score
    scores, labels, inside = scores[sure], (pairs % classes)[sure], inside[sure]
    found = zip(labels.tolist(), scores.tolist(), inside.cpu().numpy(), strict=True)
    detections = [Detection(label, score, _extent(mask), mask) for label, score, mask in found]
    return sorted(detections, key=lambda detection: -detection.score)


def _extent(mask: NDArray[np.bool_]) -> tuple[float, float, float, float]:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def source(name: str, licence: str = "Apache-2.0 (mmdet), MIT (facebook)") -> weights.Source:
    """What ``name`` needs: a local ``.pth`` file of mmdet, or a hub id or folder in the layout of the hub."""
    path = Path(name).expanduser()
    if path.suffix == ".pth":
        return weights.Source(str(path.resolve().parent), (path.name,), licence)
    return weights.Source(name, ("config.json", "model.safetensors|pytorch_model.bin"), licence)


def load(
    name: str, labels: tuple[str, ...], device: torch.device, dtype: torch.dtype, *, reward: str
) -> tuple[Detector, str]:
    """The detector of :func:`source`, and its weights' sha256.

    Args:
        labels: name of each class, in the order of the outputs.
        reward: whose it is, for messages.

    Raises:
        RewardLoadError: files are missing or damaged, or are another network's.
    """
    needed = source(name)
    folder = weights.locate(needed, reward=reward)
    path = weights.find(folder, needed.files[-1])
    state = weights.read_state_dict(path)
    if _detector_mmdet.is_mmdet(state):
        config = _detector_mmdet.config_of(state, labels)
        state = _detector_mmdet.convert(state)
    else:
        config = _hub_config(weights.find(folder, "config.json"), labels)
    model = _hub.build(Mask2FormerForUniversalSegmentation, config, state, path, _UNUSED)
    return Detector(model, device, dtype), weights.sha256(path)


def _hub_config(path: Path, labels: tuple[str, ...]) -> Mask2FormerConfig:
    config = Mask2FormerConfig.from_json_file(path)
    if config.num_labels != len(labels):
        raise RewardLoadError(f"{path}: {config.num_labels} classes, not the {len(labels)} of COCO instances")
    return config
