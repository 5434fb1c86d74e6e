"""ImageReward-v1.0 by the package ``image-reward`` 1.5 itself, in an environment of its own (transformers 4.46).

For those who want the package's own code behind their numbers, and to check ``imagereward``, which scores batches in
the main environment: both have the same options, weights and scores. Each image is scored by the package's
``score(prompt, image)``. Around it stands what the package leaves out:

- weights and tokenizer come from where they lie, not from the network, and every key must fit (the package ignores
  those that do not);
- a checkpoint smaller than ViT-L, which the package cannot be told of, is built of the package's classes by the
  shapes of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import PIL.Image
import torch

from reward_server import weights as files
from reward_server.contract import Image
from reward_server.rewards._imagereward import (
    CONTEXT,
    HEAD_WIDTH,
    TOKENIZER,
    WEIGHTS,
    Checkpoint,
    is_unused,
    read,
    refusal,
    sources,
)
from reward_server.rewards._torchvision import make_importable
from reward_server.rewards.base import RewardLoadError, Score, Scored

VERSION = version("image-reward")  # not installed: a ModuleNotFoundError
make_importable()


class Model:
    """The ``imagereward_package`` reward."""

    name = "imagereward_package"
    description = "ImageReward-v1.0 by the package image-reward itself: unbounded, about -2..2"
    needs: tuple[str, ...] = ()
    revision = ""

    def setup(self, device: str, *, weights: str = WEIGHTS, tokenizer: str = TOKENIZER, dtype: str = "auto") -> None:
        """Load the checkpoint into the package's model.

        Args:
            weights: hub id or folder with ``ImageReward.pt`` and ``med_config.json``.
            tokenizer: hub id or folder with bert-base-uncased's ``vocab.txt``.
            dtype: ``auto`` or ``float32``: the package knows no other.

        Raises:
            RewardLoadError: files are missing or damaged, or a key is missing or unexpected.
        """
        if dtype not in ("auto", "float32"):
            raise RewardLoadError(f"dtype of imagereward_package is {dtype!r}; the package has float32 only")
        checkpoint = read(weights, tokenizer, self.name)
        self._model = _build(checkpoint, device)
        _load(self._model, checkpoint)
        self._model.eval().requires_grad_(False).to(device)
        self.provenance = {
            **checkpoint.provenance(),
            "preprocessing": f"image-reward-{VERSION}",
            "dtype": "float32",
        }
        self.revision = self.provenance["weights"].removeprefix("sha256:")[:12]

    def sources(self, *, weights: str = WEIGHTS, tokenizer: str = TOKENIZER, **_: Any) -> tuple[files.Source, ...]:
        """The files that setup reads."""
        return sources(weights, tokenizer)

    @torch.inference_mode()
    def score(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Scored]:
        """Score image i against prompt i, one by one. Details: ``raw`` and ``truncated``, as ``imagereward`` has."""
        return [self._score(image, prompt) for image, prompt in zip(images, prompts, strict=True)]

    def _score(self, image: Image, prompt: str) -> Score:
        if refused := refusal(image):
            return refused
        value = float(self._model.score(prompt, PIL.Image.fromarray(image)))
        tokens = len(self._model.blip.tokenizer(prompt, verbose=False)["input_ids"])
        return Score(value, {"raw": value, "truncated": float(tokens > CONTEXT)})


def _build(checkpoint: Checkpoint, device: str) -> Any:
    """The package's model, without weights."""
    package = import_module("ImageReward.ImageReward")
    with _sizes_and_tokenizer_of(checkpoint):
        model = package.ImageReward(med_config=str(checkpoint.text_path), device=device)
    if (width := checkpoint.text["hidden_size"]) != model.mlp.input_size:
        model.mlp = package.MLP(width)
    return model


@contextmanager
def _sizes_and_tokenizer_of(checkpoint: Checkpoint) -> Iterator[None]:
    """While the package builds: its tokenizer is the checkpoint's, and its ViT-L has the checkpoint's sizes."""
    blip = import_module("ImageReward.models.BLIP.blip")
    pretrain = import_module("ImageReward.models.BLIP.blip_pretrain")
    vit = import_module("ImageReward.models.BLIP.vit")
    sizes, tokenizer = checkpoint.vision, blip.BertTokenizer

    def create_vit(name: str, image_size: int, *_: Any) -> tuple[Any, int]:
        width, depth, patch = sizes["width"], sizes["depth"], sizes["patch"]
        return vit.VisionTransformer(image_size, patch, 3, 1000, width, depth, width // HEAD_WIDTH), width

    replaced = [
        (blip, "BertTokenizer", SimpleNamespace(from_pretrained=lambda name: tokenizer(checkpoint.vocabulary))),
        (pretrain, "create_vit", create_vit),
    ]
    originals = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    try:
        for module, name, value in replaced:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in originals:
            setattr(module, name, value)


def _load(model: Any, checkpoint: Checkpoint) -> None:
    """Fill the model; only keys without a part in the score may be missing or over.

    Raises:
        RewardLoadError: another is; the message names it.
    """
    unused = {key: value for key, value in model.state_dict().items() if is_unused(key)}
    used = {key: value for key, value in checkpoint.state.items() if not is_unused(key)}
    files.load_strictly(model, {**unused, **used}, str(checkpoint.path))
