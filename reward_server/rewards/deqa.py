"""DeQA-Score: the quality of an image as people rate it, 1 (bad) to 5 (excellent), whatever it shows.

The model of arXiv 2501.11561 (``zhiyuanyou/DeQA-Score-Mix3``, an mPLUG-Owl2). Its own code runs on transformers 4.36
or 4.46 only; here the network is ``_mplug_owl2.py``, which needs PyTorch alone and reads the same checkpoint.

- Image: padded to a square with CLIP's mean colour (122, 116, 104), the image in the middle; Pillow's bicubic resize to
  448; CLIP's mean and standard deviation. The project's code mistakes an image of 1 x 1 or 3 x 3 pixels for one with
  its channels first, and fails or scores other pixels; here it is scored like any other. That code also fails on
  greyscale and transparent images that are not square; this server's images are RGB from its door on.
- Text: fixed, so the request's prompt does not matter: "USER: How would you rate the quality of this image?", the
  image, "ASSISTANT: The quality of the image is". The token ids are those of LLaMA's tokenizer.
- Score: softmax over the logits of excellent, good, fair, poor, bad, dotted with 5, 4, 3, 2, 1. The project computes
  this in float16, which moves a score by up to 0.004; here the last step is float32 always.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray

from reward_server import weights as files
from reward_server.contract import Image
from reward_server.rewards import _large
from reward_server.rewards._mplug_owl2 import MPLUGOwl2
from reward_server.rewards._options import check_choice, dtype_name, torch_dtype
from reward_server.rewards.base import RewardLoadError, Score, Scored

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BACKGROUND = tuple(int(255 * mean) for mean in MEAN)

BEFORE = (1, 3148, 1001, 29901, 1128, 723, 366, 6554, 278, 11029, 310, 445, 1967, 29973, 13)
"""Token ids of the beginning of text and 'USER: How would you rate the quality of this image?\\n'"""
AFTER = (29871, 13, 22933, 9047, 13566, 29901, 450, 11029, 310, 278, 1967, 338)
"""Token ids of '\\nASSISTANT: The quality of the image is'"""
WORDS = {15129: 5.0, 1781: 4.0, 6534: 3.0, 6460: 2.0, 4319: 1.0}
"""Rating of each of the tokens excellent, good, fair, poor, bad"""

SCALES = ("raw", "raw/5")
MAX_SIDE = 1 << 14
"""Pixels of an image's longer side; padded to a square, a longer one would take more than 0.8 GB"""


def padded(image: Image, side: int) -> NDArray[np.uint8]:
    """uint8 RGB [H, W, 3] of any size -> [side, side, 3]: padded to a square, then resized by Pillow's bicubic."""
    height, width = image.shape[:2]
    longest = max(height, width)
    square = PIL.Image.new("RGB", (longest, longest), BACKGROUND)
    square.paste(PIL.Image.fromarray(image), ((longest - width) // 2, (longest - height) // 2))
    return np.asarray(square.resize((side, side), PIL.Image.Resampling.BICUBIC))


class Model:
    """The ``deqa`` reward."""

    name = "deqa"
    revision = ""
    description = "DeQA-Score: quality of the image, 1..5, whatever the prompt"
    needs: tuple[str, ...] = ()

    def setup(
        self,
        device: str,
        *,
        weights: str = "zhiyuanyou/DeQA-Score-Mix3",
        scale: str = "raw",
        dtype: str = "auto",
    ) -> None:
        """Load the checkpoint; its sizes come from ``config.json``.

        Args:
            weights: hub id or folder with ``config.json`` and the weights, in one file or in shards with an index.
            scale: of the score: ``raw`` (1..5) or ``raw/5``; the details have both.
            dtype: ``float32``, ``bfloat16`` or ``float16``; ``auto`` is float16, as the project runs it, on a GPU, else
                float32.

        Raises:
            RewardLoadError: no such scale or dtype, weights missing or damaged, or of another model.
        """
        check_choice("scale", scale, SCALES)
        chosen = torch_dtype(dtype, device, torch.float16)
        folder = files.locate(self.sources(weights=weights)[0], reward=self.name)
        config = _read_config(folder / "config.json")
        paths = _large.shards(folder)
        self._network = _large.load(lambda: MPLUGOwl2(config).to(chosen), paths, device, rename=lambda key: key)
        self._side = int(config["visual_config"]["visual_model"]["image_size"])
        self._device, self._dtype, self._scale = torch.device(device), chosen, scale
        self._before, self._after = (torch.tensor(ids, device=self._device) for ids in (BEFORE, AFTER))
        digest = files.sha256(*paths)
        self.revision = digest[:12] if scale == "raw" else f"{digest[:12]}-{scale}"
        self.provenance = {
            "weights": f"sha256:{digest}",
            "preprocessing": f"deqa-pad-mean-pillow-bicubic-{self._side}/1",
            "dtype": dtype_name(chosen),
        }

    def sources(self, *, weights: str = "zhiyuanyou/DeQA-Score-Mix3", **_: Any) -> tuple[files.Source, ...]:
        """What :meth:`setup` reads with the same options."""
        return (files.Source(weights, ("config.json", *_large.SHARDED), licence="MIT; LLaMA 2 community licence"),)

    @torch.inference_mode()
    def score(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Scored]:
        """Qualities of uint8 RGB images [H, W, 3], in order, null for one too long; prompts are not looked at."""
        refusals = [_refusal(image) for image in images]
        kept = [padded(image, self._side) for image, refused in zip(images, refusals, strict=True) if refused is None]
        values = iter(self._ratings(kept) if kept else [])
        return [refused or self._scored(next(values)) for refused in refusals]

    def _ratings(self, squares: Sequence[NDArray[np.uint8]]) -> list[float]:
        """1..5 of each image [side, side, 3]."""
        pixels = torch.from_numpy(np.stack(squares))
        if self._device.type == "cuda":
            pixels = pixels.pin_memory()
        pixels = pixels.to(self._device, non_blocking=True).permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(x, device=self._device)[:, None, None] for x in (MEAN, STD))
        logits = self._network(((pixels - mean) / std).to(self._dtype), self._before, self._after, list(WORDS))
        ratings = torch.tensor(list(WORDS.values()), device=self._device)
        return (logits.float().softmax(dim=1) @ ratings).tolist()  # type: ignore[no-any-return]

    def _scored(self, raw: float) -> Score:
        details = {"raw": raw, "raw/5": raw / 5}
        return Score(details[self._scale], details)


def _refusal(image: Image) -> Score | None:
    height, width = image.shape[:2]
    if max(height, width) > MAX_SIDE:
        return Score(None, reason=f"{width} x {height} pixels: more than {MAX_SIDE} on the longer side")
    return None


def _read_config(path: Path) -> dict[str, Any]:
    """Raises RewardLoadError if it describes no mPLUG-Owl2, or one with parts that this network lacks."""
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        if config["model_type"] != "mplug_owl2":
            raise RewardLoadError(f"{path}: model_type is {config['model_type']!r}, not 'mplug_owl2'")
        if config.get("rope_scaling") or config.get("attention_bias"):
            raise RewardLoadError(f"{path}: rope_scaling and attention_bias are not supported")
        if config["vocab_size"] <= max(*BEFORE, *AFTER, *WORDS):
            raise RewardLoadError(f"{path}: a vocabulary of {config['vocab_size']} is not LLaMA's, of 32000")
        abstractor = config["visual_config"]["visual_abstractor"]
        abstractor["grid_size"] = abstractor.get("grid_size") or 32
    except (ValueError, KeyError, TypeError) as error:
        raise RewardLoadError(f"{path} is no configuration of mPLUG-Owl2: {type(error).__name__}: {error}") from error
    return config
