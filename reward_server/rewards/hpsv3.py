"""HPSv3: human preference for an image given its prompt, by Qwen2-VL-7B and an MLP; unbounded, about 0..15.

The model of arXiv 2508.03789 (``MizzenAI/HPSv3``), on today's transformers instead of the package ``hpsv3``, which pins
4.45. Of the base model ``Qwen/Qwen2-VL-7B-Instruct`` only ``config.json`` and ``tokenizer.json`` are read: the
checkpoint has all weights.

- Image: Pillow's bicubic resize to about 200704 pixels (256 * 28 * 28) in multiples of 28, keeping the aspect ratio;
  more than 200 times as long as wide is refused, as there. CLIP's mean and standard deviation. The package drops
  an image's transparency; this server composites it on white at its door.
- Text: ``_hpsv3_prompt.py``; nothing is cut. A prompt too long for the model's context (32768 tokens) is refused.
  The package reads ``<|Reward|>`` or ``<|im_end|>`` inside a prompt as its own special tokens; here they are text.
- Score: the first output of the MLP at the token ``<|Reward|>`` (mu). The second is the logarithm of sigma in the loss
  that the model was trained with; the details have sigma. The package returns both outputs, and the order of the
  arguments of its ``reward`` changed between versions; its forward pass kept gradients.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig, Qwen2VLVisionConfig

from reward_server import weights as files
from reward_server.contract import Image
from reward_server.rewards._hpsv3_prompt import AFTER_PROMPT, BEFORE_PROMPT, HEAD
from reward_server.rewards._options import check_choice, dtype_name, torch_dtype
from reward_server.rewards._qwen2vl import load, patches_of
from reward_server.rewards.base import RewardLoadError, Score, Scored

PIXELS = 256 * 28 * 28
MAX_ASPECT = 200
SCALES = ("raw", "raw/5")
WEIGHTS, BASE = "MizzenAI/HPSv3", "Qwen/Qwen2-VL-7B-Instruct"
FILE = "HPSv3.safetensors"


def fitted_size(height: int, width: int, factor: int = 28) -> tuple[int, int]:
    """Height and width, multiples of ``factor``, of about PIXELS in all, at about the same aspect ratio.

    As ``smart_resize`` of qwen-vl-utils with equal minimum and maximum: sizes that round to more than PIXELS are
    rounded down, to fewer up.
    """
    rounded = [max(factor, round(side / factor) * factor) for side in (height, width)]
    if math.prod(rounded) == PIXELS:
        return rounded[0], rounded[1]
    # the two expressions of the original, which round differently
    if math.prod(rounded) > PIXELS:
        shrink = math.sqrt(height * width / PIXELS)
        return math.floor(height / shrink / factor) * factor, math.floor(width / shrink / factor) * factor
    grow = math.sqrt(PIXELS / (height * width))
    return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor


def resized(image: Image) -> NDArray[np.uint8]:
    """uint8 RGB [H, W, 3] at :func:`fitted_size`, by Pillow's bicubic."""
    height, width = fitted_size(*image.shape[:2])
    return np.array(PIL.Image.fromarray(image).resize((width, height), PIL.Image.Resampling.BICUBIC))


class Model:
    """The ``hpsv3`` reward."""

    name = "hpsv3"
    revision = ""
    description = "HPSv3: human preference for an image given its prompt, unbounded, about 0..15"
    needs: tuple[str, ...] = ()

    def setup(
        self, device: str, *, weights: str = WEIGHTS, base: str = BASE, scale: str = "raw", dtype: str = "auto"
    ) -> None:
        """Load the checkpoint; its sizes come from the base's ``config.json``.

        Args:
            weights: hub id or folder with ``HPSv3.safetensors``, or a local file.
            base: hub id or folder with the ``config.json`` and ``tokenizer.json`` of Qwen2-VL-7B-Instruct.
            scale: of the score: ``raw`` (mu) or ``raw/5``; the details have both, and ``mu`` and ``sigma``.
            dtype: of Qwen2-VL: ``float32``, ``bfloat16`` or ``float16``; ``auto`` is bfloat16, as the project runs it,
                on a GPU, else float32. The MLP is float32.

        Raises:
            RewardLoadError: no such scale or dtype, files missing or damaged, or of another model.
        """
        check_choice("scale", scale, SCALES)
        chosen = torch_dtype(dtype, device, torch.bfloat16)
        checkpoint, described = self.sources(weights=weights, base=base)
        path = files.find(files.locate(checkpoint, reward=self.name), checkpoint.files[0])
        folder = files.locate(described, reward=self.name)
        self._read_tokenizer(folder / "tokenizer.json")
        vision, text = _read_config(folder / "config.json")
        text.vocab_size = self._reward_id + 1  # it is the last token
        self._network = load(vision, text, path, device, chosen)
        self._patch, self._merge = cast(int, vision.patch_size), vision.spatial_merge_size
        self._context = text.max_position_embeddings
        self._device, self._scale = torch.device(device), scale
        digest = files.sha256(path)
        self.revision = digest[:12] if scale == "raw" else f"{digest[:12]}-{scale}"
        self.provenance = {
            "weights": f"sha256:{digest}",
            "tokenizer": f"sha256:{files.sha256(folder / 'tokenizer.json')}",
            "template": "sha256:" + hashlib.sha256((HEAD + BEFORE_PROMPT + AFTER_PROMPT).encode()).hexdigest(),
            "preprocessing": "hpsv3-pillow-bicubic-200704/1",
            "dtype": dtype_name(chosen),
        }

    def sources(self, *, weights: str = WEIGHTS, base: str = BASE, **_: Any) -> tuple[files.Source, ...]:
        """What :meth:`setup` reads with the same options: the checkpoint, and the base's description."""
        path = Path(weights).expanduser()
        repo, name = (str(path.parent.absolute()), path.name) if path.is_file() else (weights, FILE)
        return (
            files.Source(repo, (name,), licence="MIT"),
            files.Source(base, ("config.json", "tokenizer.json"), licence="Apache-2.0"),
        )

    def _read_tokenizer(self, path: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise RewardLoadError(f"{path} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        image_id = self._tokenizer.token_to_id("<|image_pad|>")
        if image_id is None:
            raise RewardLoadError(f"{path} is not the tokenizer of Qwen2-VL: it has no token <|image_pad|>")
        self._image_id = image_id
        head = self._tokenizer.encode(HEAD, add_special_tokens=False).ids
        place = head.index(image_id)
        self._before_image, self._after_image = head[:place], head[place + 1 :]
        # the package adds the reward token to those of the base
        self._reward_id = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._tokenizer.encode_special_tokens = True  # as text: a prompt is data

    @torch.inference_mode()
    def score(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Scored]:
        """Preferences for uint8 RGB images [H, W, 3] given their prompts, image i with prompt i, in order."""
        texts = {prompt: self._encode(prompt) for prompt in prompts}
        scores: list[Scored] = []
        pixels: list[NDArray[np.uint8]] = []
        sequences: list[list[int]] = []
        for image, prompt in zip(images, prompts, strict=True):
            height, width = image.shape[:2]
            if max(height, width) > MAX_ASPECT * min(height, width):
                reason = f"{width} x {height} pixels: more than {MAX_ASPECT} times as long as wide"
                scores.append(Score(None, reason=reason))
                continue
            fitted = resized(image)
            count = fitted.shape[0] * fitted.shape[1] // (self._patch * self._merge) ** 2
            sequence = self._before_image + [self._image_id] * count + self._after_image + texts[prompt]
            if len(sequence) > self._context:
                reason = f"the prompt is too long: {len(sequence)} tokens with the image, and at most {self._context}"
                scores.append(Score(None, reason=reason))
                continue
            pixels.append(fitted)
            sequences.append(sequence)
            scores.append(None)
        outputs = iter(self._run(pixels, sequences) if pixels else [])
        return [self._scored(*next(outputs)) if score is None else score for score in scores]

    def _encode(self, prompt: str) -> list[int]:
        """Token ids from the image to the reward token, which is the last that matters: attention is causal."""
        ids: list[int] = self._tokenizer.encode(BEFORE_PROMPT + prompt + AFTER_PROMPT, add_special_tokens=False).ids
        return [*ids, self._reward_id]

    def _run(self, pixels: Sequence[NDArray[np.uint8]], sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """[first, second] output for each image and its sequence of token ids."""
        patches = torch.cat([patches_of(self._to_device(p), self._patch, self._merge) for p in pixels])
        grid = torch.tensor([(1, p.shape[0] // self._patch, p.shape[1] // self._patch) for p in pixels])
        ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence)] = torch.tensor(sequence)
        last = torch.tensor([len(sequence) - 1 for sequence in sequences], device=self._device)
        output = self._network(patches, grid.to(self._device), ids.to(self._device), self._image_id, last)
        return output.tolist()  # type: ignore[no-any-return]

    def _to_device(self, pixels: NDArray[np.uint8]) -> torch.Tensor:
        tensor = torch.from_numpy(pixels)
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)

    def _scored(self, mu: float, log_sigma: float) -> Score:
        sigma = math.exp(log_sigma) if log_sigma < 700 else None
        details = {"raw": mu, "raw/5": mu / 5, "mu": mu, "sigma": sigma}
        return Score(details[self._scale], details)


def _read_config(path: Path) -> tuple[Qwen2VLVisionConfig, Qwen2VLTextConfig]:
    """Raises RewardLoadError if it does not describe a Qwen2-VL."""
    try:
        settings = json.loads(path.read_text())
        if settings["model_type"] != "qwen2_vl":
            raise RewardLoadError(f"{path}: model_type is {settings['model_type']!r}, not 'qwen2_vl'")
        config = Qwen2VLConfig.from_dict(settings)
    except (ValueError, KeyError, TypeError) as error:
        raise RewardLoadError(f"{path} is no configuration of Qwen2-VL: {type(error).__name__}: {error}") from error
    return cast(Qwen2VLVisionConfig, config.vision_config), cast(Qwen2VLTextConfig, config.text_config)
