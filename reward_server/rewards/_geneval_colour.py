"""The colour of a detected object by CLIP ViT-L/14, as GenEval classifies it (``color_classification``).

What is not the object becomes grey (#999); the box is cut out, its shorter side resized to the model's size (224) by
Pillow's bicubic filter and the centre cropped. A colour's text embedding is the normalised mean of three templates'
normalised embeddings; the colour of the largest cosine wins. GenEval computes the image side under CUDA's autocast;
here it is the reward's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from reward_server import weights
from reward_server.contract import Image
from reward_server.rewards import _hub
from reward_server.rewards._detector import Detection
from reward_server.rewards._geneval_rules import COLOURS

BACKGROUND = (0x99, 0x99, 0x99)
BATCH = 64
"""Crops that go through CLIP together"""
_TEMPLATES = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def source(name: str) -> weights.Source:
    """What the classifier reads of a hub id or folder."""
    return weights.Source(
        name, ("config.json", "model.safetensors|pytorch_model.bin", "vocab.json", "merges.txt"), licence="MIT"
    )


class ColourClassifier:
    """A loaded CLIP; call :meth:`classify`."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype, *, reward: str) -> None:
        """Load CLIP from a hub id or folder.

        Raises:
            RewardLoadError: files are missing or damaged, or are another model's.
        """
        needed = source(name)
        folder = weights.locate(needed, reward=reward)
        path = weights.find(folder, needed.files[1])
        config = CLIPConfig.from_json_file(folder / "config.json")
        model = _hub.build(CLIPModel, config, weights.read_state_dict(path), path, unused=("position_ids",))
        self._model = model.to(device=device, dtype=dtype)
        self._tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
        self._device, self._dtype = device, dtype
        self._side: int = config.vision_config.image_size
        self._mean = torch.tensor(_MEAN, device=device)[:, None, None]
        self._std = torch.tensor(_STD, device=device)[:, None, None]
        self._classifiers: dict[str, torch.Tensor] = {}
        self.sha256 = weights.sha256(path)

    @torch.inference_mode()
    def classify(self, objects: Sequence[tuple[Image, Detection, str]]) -> list[str]:
        """The colour of each (image [H, W, 3], object on it, name of its class)."""
        colours: list[str] = []
        for start in range(0, len(objects), BATCH):
            batch = objects[start : start + BATCH]
            crops = np.stack([crop(image, detection, self._side) for image, detection, _ in batch])
            pixels = torch.from_numpy(crops).to(self._device).permute(0, 3, 1, 2).float() / 255
            pixels = ((pixels - self._mean) / self._std).to(self._dtype)
            features = functional.normalize(
                self._model.get_image_features(pixel_values=pixels).pooler_output.float(), dim=-1
            )
            classifiers = torch.stack([self._classifier(name) for _, _, name in batch])
            best = torch.einsum("bd,bcd->bc", features, classifiers).argmax(dim=1)
            colours += [COLOURS[index] for index in best.tolist()]
        return colours

    def _classifier(self, name: str) -> torch.Tensor:
        """Text embeddings [colours, D] for a class of objects."""
        if name not in self._classifiers:
            texts = [template.format(colour=colour, name=name) for colour in COLOURS for template in _TEMPLATES]
            tokens = self._tokenizer(texts, padding=True, return_tensors="pt").to(self._device)
            features = functional.normalize(self._model.get_text_features(**tokens).pooler_output.float(), dim=-1)
            means = features.unflatten(0, (len(COLOURS), len(_TEMPLATES))).mean(dim=1)
            self._classifiers[name] = functional.normalize(means, dim=-1)
        return self._classifiers[name]


def crop(image: Image, detection: Detection, side: int) -> NDArray[np.uint8]:
    """[side, side, 3] of an object on grey: what CLIP looks at."""
    picture = PIL.Image.fromarray(image)
    if detection.mask is not None:
        blank = PIL.Image.new("RGB", picture.size, BACKGROUND)
        picture = PIL.Image.composite(picture, blank, PIL.Image.fromarray(detection.mask))
    picture = picture.crop(tuple(round(edge) for edge in detection.box))
    width, height = picture.size
    short = min(width, height)
    width, height = int(side * width / short), int(side * height / short)
    if picture.size != (width, height):
        picture = picture.resize((width, height), PIL.Image.Resampling.BICUBIC)
    left, top = round((width - side) / 2), round((height - side) / 2)
    return np.asarray(picture.crop((left, top, left + side, top + side)))
