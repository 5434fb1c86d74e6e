"""The colour of a detected object by CLIP ViT-L/14, as GenEval classifies it (``color_classification``).

What is not the object becomes grey (#999); the box is cut out, its shorter side resized to the model's size (224) by
Pillow's bicubic filter and the centre cropped. A colour's text embedding is the normalised mean of three templates'
normalised embeddings; the colour of the largest cosine wins. GenEval computes the image side under CUDA's autocast;
here it is the reward's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import PIL.Image
import torch
from torch import nn
from torch.nn import functional

from reward_server import weights
from reward_server.contract import Image
from reward_server.rewards import _clip
from reward_server.rewards._detector import Detection
from reward_server.rewards._geneval_rules import COLOURS

BACKGROUND = (0x99, 0x99, 0x99)
BATCH = 64
"""Crops that go through CLIP together"""
_TEMPLATES = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def source(name: str) -> weights.Source:
    """What the classifier reads of a hub id or folder."""
    return weights.Source(name, (*_clip.MODEL_FILES, *_clip.TOKENIZER_FILES), licence="MIT")


class ColourClassifier:
    """A loaded CLIP; call :meth:`classify`."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype, *, reward: str) -> None:
        """Load CLIP from a hub id or folder.

        Raises:
            RewardLoadError: files are missing or damaged, or are another model's.
        """
        folder = weights.locate(source(name), reward=reward)
        model, path = _clip.read_model(folder)
        self._side = _clip.image_size(model)
        module: nn.Module = model
        module.to(device=device, dtype=dtype).eval()
        self._clip = _clip.Clip(model, _clip.tokenizer_of(folder), partial(_normalised, device=device))
        self._classifiers: dict[str, torch.Tensor] = {}
        self.sha256 = weights.sha256(path)

    @torch.inference_mode()
    def classify(self, objects: Sequence[tuple[Image, Detection, str]]) -> list[str]:
        """The colour of each (image [H, W, 3], object on it, name of its class)."""
        colours: list[str] = []
        for start in range(0, len(objects), BATCH):
            batch = objects[start : start + BATCH]
            crops = [crop(image, found, self._side) for image, found, _ in batch]
            features = _clip.encode(self._clip.model, self._clip.preprocess, crops)
            classifiers = torch.stack([self._classifier(name) for _, _, name in batch])
            best = torch.einsum("bd,bcd->bc", features, classifiers).argmax(dim=1)
            colours += [COLOURS[index] for index in best.tolist()]
        return colours

    def _classifier(self, name: str) -> torch.Tensor:
        """Text embeddings [colours, D] for a class of objects."""
        if name not in self._classifiers:
            texts = [template.format(colour=colour, name=name) for colour in COLOURS for template in _TEMPLATES]
            features, _ = self._clip.text_features(texts)
            means = features.reshape(len(COLOURS), len(_TEMPLATES), -1).mean(dim=1)
            self._classifiers[name] = functional.normalize(means, dim=-1)
        return self._classifiers[name]


def _normalised(crops: Sequence[Image], *, device: torch.device) -> torch.Tensor:
    pixels = _clip.to_device(torch.from_numpy(np.stack(crops)), device).permute(0, 3, 1, 2).float() / 255
    return _clip.normalised(pixels, MEAN, STD)


def crop(image: Image, detection: Detection, side: int) -> Image:
    """[side, side, 3] of an object on grey: what CLIP looks at."""
    picture = PIL.Image.fromarray(image)
    if detection.mask is not None:
        blank = PIL.Image.new("RGB", picture.size, BACKGROUND)
        picture = PIL.Image.composite(picture, blank, PIL.Image.fromarray(detection.mask))
    left, top, right, bottom = map(round, detection.box)
    picture = picture.crop((left, top, right, bottom))
    width, height = picture.size
    short = min(width, height)
    width, height = int(side * width / short), int(side * height / short)
    if picture.size != (width, height):
        picture = picture.resize((width, height), PIL.Image.Resampling.BICUBIC)
    left, top = round((width - side) / 2), round((height - side) / 2)
    return np.asarray(picture.crop((left, top, left + side, top + side)))
