"""What the rewards built on CLIP share: a loaded model with its tokenizer and preprocessing, and its cosines.

A batch is encoded in one forward pass per tower; on a CPU, images go in parts (``CPU_BYTES``). Each distinct prompt is
encoded once, padded to the longest one: the text tower is causal and reads the end-of-text token, so what follows it
changes nothing. Image i is compared with prompt i only. The towers run in the chosen dtype; normalisation and cosine
are always float32.

Numbers are those of transformers' ``CLIPModel`` and of the Pillow variant of its ``CLIPImageProcessor`` (the variant on
torchvision resizes otherwise). Images come as RGB: transparency was composited on white at the server's door
(``reward_server/images.py``). OpenAI's own package resizes the RGBA or palette picture and converts it afterwards,
repairs text with ftfy, and, where 3, 7, 11 ... pixels are to be cut, centres the crop one pixel further.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image as PillowImage
from torch import nn
from torch.nn import functional
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer
from transformers.initialization import no_init_weights
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from reward_server import weights
from reward_server.contract import Image
from reward_server.rewards._options import dtype_name, torch_dtype
from reward_server.rewards.base import RewardLoadError, Score, Scored

LAION_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
"""Hub id of the tokenizer and preprocessing that PickScore and HPSv2 are used with"""
MODEL_FILES = ("config.json", "model.safetensors|pytorch_model.bin")
TOKENIZER_FILES = ("tokenizer.json|vocab.json", "tokenizer.json|merges.txt")
PROCESSOR_FILES = ("preprocessor_config.json", *TOKENIZER_FILES)
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of OpenAI's CLIP, and of most since, by channel"""
MAX_ASPECT = 400
"""Long side / short side of an image; beyond it a resize makes nothing, or a picture of gigabytes"""
CPU_BYTES = 16 << 20
"""Of the widest activation on a CPU. glibc gets blocks above 32 MiB from the kernel at each operation, and page faults
then cost more than a GELU does; larger batches do not make matrix products faster"""

Preprocess = Callable[[Sequence[Image]], torch.Tensor]
"""uint8 RGB images [H, W, 3] of any sizes -> normalised float32 [N, 3, S, S] on the model's device"""


@dataclass(frozen=True)
class Similarity:
    cosine: float
    truncated: bool
    """Whether the prompt exceeded the model's context, so that its end was not read"""


@torch.inference_mode()
def encode(model: CLIPModel, preprocess: Preprocess, images: Sequence[Image]) -> torch.Tensor:
    """L2-normalised projected embeddings [N, D], float32, of one or more images that :func:`refusal` lets through."""
    pixels = preprocess(images).to(model.dtype)
    size = images_at_once(model) if pixels.device.type == "cpu" else len(pixels)
    parts = [pixels[i : i + size] for i in range(0, len(pixels), size)]
    features = torch.cat([model.get_image_features(part).pooler_output for part in parts])
    return functional.normalize(features.float(), dim=-1)


def images_at_once(model: CLIPModel) -> int:
    """How many images keep the widest activation, [images, patches + 1, intermediate], within ``CPU_BYTES``."""
    settings: Any = model.config
    vision = settings.vision_config
    tokens = (vision.image_size // vision.patch_size) ** 2 + 1
    each: int = tokens * vision.intermediate_size * model.dtype.itemsize
    return max(1, CPU_BYTES // each)


@dataclass(frozen=True)
class Clip:
    """A CLIP model ready to compare images with prompts."""

    model: CLIPModel
    tokenizer: CLIPTokenizer
    preprocess: Preprocess

    @torch.inference_mode()
    def text_features(self, prompts: Sequence[str]) -> tuple[torch.Tensor, list[bool]]:
        """L2-normalised projected embeddings [N, D], float32, and which prompts were truncated."""
        distinct = list(dict.fromkeys(prompts))
        ids = self.tokenizer(distinct, verbose=False)["input_ids"]
        context = self.model.text_model.embeddings.position_embedding.num_embeddings
        truncated = [len(row) > context for row in ids]
        end = self.tokenizer.eos_token_id
        rows = [[*row[: context - 1], end] if long else row for row, long in zip(ids, truncated, strict=True)]
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [end] * (longest - len(row)) for row in rows])
        features = self.model.get_text_features(to_device(tokens, self.model.device)).pooler_output.float()
        where = [distinct.index(prompt) for prompt in prompts]
        return functional.normalize(features, dim=-1)[where], [truncated[i] for i in where]

    @torch.inference_mode()
    def compare(self, images: Sequence[Image], prompts: Sequence[str]) -> list[Similarity | Score]:
        """How alike image i and prompt i are, in order; a ``Score`` without value for an image that is refused."""
        refusals = [refusal(image) for image in images]
        if all(refusals):
            return [reason for reason in refusals if reason]
        kept = [i for i, reason in enumerate(refusals) if reason is None]
        features, truncated = self.text_features([prompts[i] for i in kept])
        image_features = encode(self.model, self.preprocess, [images[i] for i in kept])
        cosines = (image_features * features).sum(dim=-1).tolist()
        similar = dict(zip(kept, map(Similarity, cosines, truncated), strict=True))
        return [reason or similar[i] for i, reason in enumerate(refusals)]


class ClipReward:
    """A reward that is a scaling of the cosine of image and prompt; its ``setup`` calls :meth:`_ready`."""

    name: ClassVar[str]
    scales: ClassVar[tuple[str, ...]]
    """Names of the scalings; all are in ``details`` of every score"""
    needs: tuple[str, ...] = ()
    revision = ""
    provenance: Mapping[str, str]

    def scalings(self, cosine: float) -> dict[str, float]:
        """The cosine in each of ``scales``."""
        raise NotImplementedError

    def text(self, prompt: str) -> str:
        """What of a prompt the tokenizer gets."""
        return prompt

    def _ready(self, clip: Clip, *, scale: str, files: Sequence[Path], variant: str, preprocessing: str) -> None:
        """Keep what was loaded.

        Args:
            files: of the weights.
            variant: of the ways in which these weights can score, or empty.
        """
        self._clip, self._scale = clip, scale
        digest = weights.sha256(*files)
        self.revision = "-".join(filter(None, (digest[:12], variant, scale if scale != "raw" else "")))
        self.provenance = {
            "weights": f"sha256:{digest}",
            "preprocessing": preprocessing,
            "dtype": dtype_name(clip.model.dtype),
        }

    def score(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Scored]:
        """Scores of uint8 RGB images [H, W, 3] of any size against their prompts, in the same order.

        ``details``: the value in every scaling, and ``truncated`` (1.0 if the prompt's end was not read).
        """
        pairs = self._clip.compare(images, [self.text(prompt) for prompt in prompts])
        return [pair if isinstance(pair, Score) else self._score(pair) for pair in pairs]

    def _score(self, pair: Similarity) -> Score:
        values = self.scalings(pair.cosine)
        return Score(values[self._scale], {**values, "truncated": float(pair.truncated)})


@dataclass(frozen=True)
class PillowPreprocess:
    """Resize and centre crop by Pillow, then rescale and normalise on the device; as ``preprocessor_config.json`` says.

    Pillow resizes in threads, which it lets run at once.
    """

    processor: Any
    """A CLIPImageProcessorPil, for its settings"""
    device: torch.device

    @classmethod
    def of(cls, folder: Path, model: CLIPModel) -> PillowPreprocess:
        """Read the settings from a folder.

        Raises:
            RewardLoadError: they do not make the square images that ``model`` wants.
        """
        side = image_size(model)
        processor: Any = CLIPImageProcessorPil.from_pretrained(folder)
        size, crop = processor.size, processor.crop_size
        made = (crop.height, crop.width) if processor.do_center_crop else (size.height, size.width)
        known = size.shortest_edge or (size.height and size.width)
        if made != (side, side) or not (processor.do_resize and known and processor.do_normalize):
            raise RewardLoadError(
                f"{folder}/preprocessor_config.json: expected a resize (shortest_edge, or height and width), a centre "
                f"crop to {side} x {side}, which the model in use wants, and a normalisation"
            )
        return cls(processor, model.device)

    @property
    def id(self) -> str:
        size = self.processor.size
        filter_name = PillowImage.Resampling(self.processor.resample).name.lower()
        mean, std = self.processor.image_mean, self.processor.image_std
        own = "" if (*mean, *std) == (*MEAN, *STD) else f"-mean{list(mean)}-std{list(std)}".replace(" ", "")
        return f"clip-pillow-{filter_name}-{size.shortest_edge or f'{size.height}x{size.width}'}{own}/1"

    def __call__(self, images: Sequence[Image]) -> torch.Tensor:
        with ThreadPoolExecutor(min(len(images), os.cpu_count() or 1, 8)) as pool:
            cropped = torch.from_numpy(np.stack(list(pool.map(self._resized, images))))
        pixels = to_device(cropped, self.device).permute(0, 3, 1, 2).float()
        if self.processor.do_rescale:
            pixels = pixels * self.processor.rescale_factor
        return normalised(pixels, self.processor.image_mean, self.processor.image_std)

    def _resized(self, image: Image) -> Image:
        height, width = image.shape[:2]
        size, crop = self.processor.size, self.processor.crop_size
        if size.shortest_edge:
            short, long = size.shortest_edge, int(size.shortest_edge * max(height, width) / min(height, width))
            wanted = (short, long) if width <= height else (long, short)
        else:
            wanted = (size.width, size.height)
        picture = PillowImage.fromarray(image).resize(wanted, self.processor.resample)
        if self.processor.do_center_crop:
            left, top = (picture.width - crop.width) // 2, (picture.height - crop.height) // 2
            picture = picture.crop((left, top, left + crop.width, top + crop.height))
        return np.asarray(picture)


def normalised(pixels: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """(pixels - mean) / std of each channel; pixels [N, 3, H, W]."""
    channel = partial(torch.tensor, dtype=pixels.dtype, device=pixels.device)
    return (pixels - channel(mean)[:, None, None]) / channel(std)[:, None, None]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """From the CPU to ``device``; to a GPU through pinned memory, so that the copy overlaps with its work."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def refusal(image: Image) -> Score | None:
    """A score without value if the image cannot be resized for CLIP, else None."""
    height, width = image.shape[:2]
    if max(height, width) > MAX_ASPECT * min(height, width):
        return Score(None, reason=f"{width} x {height} pixels: more than {MAX_ASPECT} times as long as wide")
    return None


def tokenizer_of(folder: Path) -> CLIPTokenizer:
    """The tokenizer in ``tokenizer.json``, or ``vocab.json`` and ``merges.txt``, of a folder."""
    tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(folder)
    return tokenizer


def read_model(folder: Path) -> tuple[CLIPModel, Path]:
    """The model in a folder of transformers' layout, and the file of its weights.

    Raises:
        RewardLoadError: it is no CLIP, or its weights do not fit its ``config.json``.
    """
    try:
        settings, _ = CLIPConfig.get_config_dict(folder)
    except (OSError, ValueError) as error:
        raise RewardLoadError(f"{folder}/config.json cannot be read: {' '.join(str(error).split())}") from error
    if settings.get("model_type") != "clip":
        raise RewardLoadError(f"{folder}/config.json: model_type is {settings.get('model_type')!r}, not 'clip'")
    path = weights.find(folder, MODEL_FILES[1])
    # older versions of transformers saved the positions 0, 1, 2 ... beside the weights
    state = weights.rename(
        weights.read_state_dict(path), lambda key: None if key.endswith(".embeddings.position_ids") else key
    )
    return build(CLIPConfig.from_dict(settings), state, str(path)), path


def build(config: CLIPConfig, state: Mapping[str, torch.Tensor], what: str) -> CLIPModel:
    """A model with these weights, widened or rounded to float32.

    Raises:
        RewardLoadError: see :func:`reward_server.weights.load_strictly`, whose ``what`` this one's is.
    """
    with no_init_weights():
        model = CLIPModel(config)
    weights.load_strictly(model, state, what)
    module: nn.Module = model
    module.eval().requires_grad_(False)
    return model


def placed(model: CLIPModel, device: str, dtype: str) -> CLIPModel:
    """``model`` on ``device`` in the dtype of an option; ``auto`` is float16 on a GPU, as these projects have it."""
    module: nn.Module = model
    module.to(device=torch.device(device), dtype=torch_dtype(dtype, device, torch.float16))
    return model


def image_size(model: CLIPModel) -> int:
    """Side of the square images that a model takes, pixels."""
    settings: Any = model.config
    return int(settings.vision_config.image_size)


def own_or(weights_option: str, files: Sequence[str], default: str) -> str:
    """Where files that belong to a checkpoint are: in its own folder, if it is a local one that has them."""
    source = weights.Source(weights_option, tuple(files))
    folder = Path(weights_option).expanduser()
    own = source.is_local and all(any((folder / name).exists() for name in entry.split("|")) for entry in files)
    return weights_option if own else default
