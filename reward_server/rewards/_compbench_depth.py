"""Depth maps for T2I-CompBench's 3d-spatial metric: DPT (arXiv 2103.13413), the benchmark's being DPT-Hybrid-MiDaS.

As ``UniDet_eval`` has it: the image resized to 480 x 480 by Pillow's bilinear filter and scaled to -1..1; the inverse
depth scaled to 0..1 over the image, resized to the image's size, kept in 256 steps, and resized to the frame in which
boxes are compared. Larger is nearer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import nn
from torch.nn import functional
from transformers import DPTConfig, DPTForDepthEstimation

from reward_server import weights
from reward_server.contract import Image
from reward_server.rewards import _clip, _hub
from reward_server.rewards._compbench_rules import Depth, frame

SIDE = 480
_UNUSED = ("dpt.layernorm.weight", "dpt.layernorm.bias", "dpt.pooler.dense.weight", "dpt.pooler.dense.bias")
"""Not part of a depth map; checkpoints may have them or lack them"""


def source(name: str) -> weights.Source:
    """What a hub id or folder must have."""
    return weights.Source(name, ("config.json", "model.safetensors|pytorch_model.bin"), licence="MIT or Apache-2.0")


class DepthEstimator:
    """A loaded DPT; call :meth:`maps`."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype, *, reward: str) -> None:
        """Load it.

        Raises:
            RewardLoadError: files are missing or damaged, or are another model's.
        """
        needed = source(name)
        folder = weights.locate(needed, reward=reward)
        path = weights.find(folder, needed.files[1])
        config = DPTConfig.from_json_file(folder / "config.json")
        model = _hub.build(DPTForDepthEstimation, config, weights.read_state_dict(path), path, unused=_UNUSED)
        module: nn.Module = model
        module.to(device=device, dtype=dtype)
        embeddings: Any = model.dpt.embeddings
        embeddings.image_size = (SIDE, SIDE)  # it resamples its positions to any size, but refuses all but one
        self._model: Any = model
        self._device, self._dtype = device, dtype
        self.sha256 = weights.sha256(path)

    @torch.inference_mode()
    def maps(self, images: Sequence[Image]) -> list[Depth]:
        """Depth, 0..1 and larger is nearer, of each image at the size of its :func:`frame`."""
        resized = [
            np.asarray(PIL.Image.fromarray(i).resize((SIDE, SIDE), PIL.Image.Resampling.BILINEAR)) for i in images
        ]
        pixels = _clip.to_device(torch.from_numpy(np.stack(resized)), self._device).permute(0, 3, 1, 2).float() / 255
        inverse = self._model(pixel_values=((pixels - 0.5) / 0.5).to(self._dtype)).predicted_depth.float()
        return [as_stored(depth, image.shape[:2]) for depth, image in zip(inverse, images, strict=True)]


def as_stored(inverse: torch.Tensor, size: tuple[int, int]) -> Depth:
    """The benchmark's map for an image of ``size`` (height, width) from DPT's output [h, w]; a flat one is all 0."""
    spread = inverse.max() - inverse.min()
    scaled = (inverse - inverse.min()) / spread if spread > 0 else torch.zeros_like(inverse)
    whole = functional.interpolate(scaled[None, None], size=size, mode="bilinear", align_corners=True)[0, 0]
    steps = PIL.Image.fromarray((255 * whole).cpu().numpy()).convert("L")
    height, width = frame(*size)
    return np.asarray(steps.resize((width, height), PIL.Image.Resampling.BILINEAR), np.float32) / np.float32(255)
