"""ImageReward-v1.0: human preference by BLIP (ViT-L/16 and a BERT that attends to the image) and an MLP, unbounded.

The model of arXiv 2304.05977 (``THUDM/ImageReward``), on transformers' BLIP instead of the package ``image-reward``,
whose pins exclude today's transformers; ``imagereward_package`` serves that package in an environment of its own.

- Image: Pillow's bicubic resize of the shorter side to 224, centre crop, CLIP's mean and standard deviation. The
  package resizes an image with alpha before it drops the alpha; this server's images are RGB from its door on.
- Text: bert-base-uncased with BLIP's two extra tokens, cut and padded to 35; the output at [CLS] goes to the MLP.
- Score: (MLP - 0.16717362830052426) / 1.0333394966054072.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import BertTokenizer, BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel
from transformers.initialization import no_init_weights

from reward_server import weights as files
from reward_server.contract import Image
from reward_server.rewards._clip import normalised, to_device
from reward_server.rewards._imagereward import (
    CONTEXT,
    HEAD_WIDTH,
    TOKENIZER,
    WEIGHTS,
    is_unused,
    read,
    refusal,
    sources,
)
from reward_server.rewards._options import dtype_name, torch_dtype
from reward_server.rewards.base import RewardLoadError, Score, Scored

MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of the MLP's output on the package's reference set"""
PIXEL_MEAN, PIXEL_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

_VISION_NAMES = (  # of the checkpoint, of transformers' BLIP; in this order
    ("cls_token", "embeddings.class_embedding"),
    ("pos_embed", "embeddings.position_embedding"),
    ("patch_embed.proj.", "embeddings.patch_embedding."),
    ("blocks.", "encoder.layers."),
    (".norm1.", ".layer_norm1."),
    (".norm2.", ".layer_norm2."),
    (".attn.qkv.", ".self_attn.qkv."),
    (".attn.proj.", ".self_attn.projection."),
)


class Network(nn.Module):
    """Pixels and tokens to raw scores; the parameters' names are :func:`network_name`'s."""

    def __init__(self, vision: Mapping[str, int], text: Mapping[str, Any]) -> None:
        super().__init__()
        self.vision: nn.Module = BlipVisionModel(
            BlipVisionConfig(
                hidden_size=vision["width"],
                intermediate_size=vision["hidden"],
                num_hidden_layers=vision["depth"],
                num_attention_heads=vision["width"] // HEAD_WIDTH,
                image_size=vision["side"],
                patch_size=vision["patch"],
                layer_norm_eps=1e-6,
            )
        )
        names = (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("max_position_embeddings", "layer_norm_eps", "hidden_act"),
        )
        # a decoder by its parameters (cross-attention), an encoder by its attention mask, below
        sizes_of_text = {name: text[name] for name in names}
        config = BlipTextConfig(
            **sizes_of_text, encoder_hidden_size=vision["width"], is_decoder=True, bos_token_id=None
        )
        self.text: nn.Module = BlipTextModel(config, add_pooling_layer=False)
        sizes = (text["hidden_size"], 1024, 128, 64, 16, 1)
        first, second, third, fourth, last = (nn.Linear(*pair) for pair in itertools.pairwise(sizes))
        # the dropouts keep the places that they have in the checkpoint's names; there are no activations
        self.mlp = nn.Sequential(first, nn.Dropout(), second, nn.Dropout(), third, nn.Dropout(), fourth, last)

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Normalised pixels (B, 3, side, side), token ids and mask (B, 35) -> scores (B,), float32."""
        image = self.vision(pixel_values=pixels).last_hidden_state
        text = self.text(
            input_ids=ids, attention_mask=mask, encoder_hidden_states=image, is_decoder=False, use_cache=False
        )
        output: torch.Tensor = self.mlp(text.last_hidden_state[:, 0].float())
        return (output[:, 0] - MEAN) / STD


def network_name(key: str) -> str | None:
    """The name in :class:`Network` of a key of the checkpoint; None if the score does not need it."""
    if is_unused(key):
        return None
    if rest := _after(key, "blip.visual_encoder."):
        if rest.startswith("norm."):
            return "vision.post_layernorm." + rest.removeprefix("norm.")
        for old, new in _VISION_NAMES:
            rest = rest.replace(old, new)
        return "vision." + rest
    if rest := _after(key, "blip.text_encoder."):
        return "text." + rest
    if rest := _after(key, "mlp.layers."):
        return "mlp." + rest
    return key


def _after(key: str, prefix: str) -> str:
    return key.removeprefix(prefix) if key.startswith(prefix) else ""


def crop(image: Image, side: int) -> NDArray[np.uint8]:
    """uint8 RGB [H, W, 3] -> [side, side, 3]: shorter side resized to ``side`` by Pillow's bicubic, centre cropped."""
    height, width = image.shape[:2]
    short = min(height, width)
    height, width = int(side * height / short), int(side * width / short)
    picture = PIL.Image.fromarray(image)
    if picture.size != (width, height):
        picture = picture.resize((width, height), PIL.Image.Resampling.BICUBIC)
    top, left = round((height - side) / 2), round((width - side) / 2)
    return np.asarray(picture.crop((left, top, left + side, top + side)))


class Model:
    """The ``imagereward`` reward."""

    name = "imagereward"
    description = "ImageReward-v1.0: human preference for an image given its prompt, unbounded, about -2..2"
    needs: tuple[str, ...] = ()
    revision = ""

    def setup(self, device: str, *, weights: str = WEIGHTS, tokenizer: str = TOKENIZER, dtype: str = "auto") -> None:
        """Load the checkpoint; sizes come from its shapes and ``med_config.json``, so that small ones load, too.

        Args:
            weights: hub id or folder with ``ImageReward.pt`` and ``med_config.json``.
            tokenizer: hub id or folder with bert-base-uncased's ``vocab.txt``.
            dtype: of BLIP: ``float32``, ``bfloat16`` or ``float16``; ``auto`` is float32, as the package has it, on
                every device. The MLP is float32 always.

        Raises:
            RewardLoadError: files are missing or damaged, or a key is missing, unexpected or of another shape.
        """
        self._dtype = torch_dtype(dtype, device)
        self._device = torch.device(device)
        checkpoint = read(weights, tokenizer, self.name)
        with no_init_weights():
            network = Network(checkpoint.vision, checkpoint.text)
        files.load_strictly(network, files.rename(checkpoint.state, network_name), str(checkpoint.path))
        self._tokenizer = _read_tokenizer(checkpoint.vocabulary, checkpoint.text["vocab_size"])
        self._side = checkpoint.vision["side"]
        self._network = network.eval().requires_grad_(False).to(self._device)
        self._network.vision.to(self._dtype)
        self._network.text.to(self._dtype)
        self.provenance = {
            **checkpoint.provenance(),
            "preprocessing": f"imagereward-pil-bicubic-crop-{self._side}/1",
            "dtype": dtype_name(self._dtype),
        }
        self.revision = self.provenance["weights"].removeprefix("sha256:")[:12]

    def sources(self, *, weights: str = WEIGHTS, tokenizer: str = TOKENIZER, **_: Any) -> tuple[files.Source, ...]:
        """The files that setup reads."""
        return sources(weights, tokenizer)

    @torch.inference_mode()
    def score(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Scored]:
        """Score image i against prompt i. Details: ``raw`` and ``truncated`` (1: the prompt exceeds 35 tokens)."""
        scores: list[Scored] = [refusal(image) for image in images]
        left = [i for i, refused in enumerate(scores) if refused is None]
        if not left:
            return scores
        ids, mask, truncated = self._tokens([prompts[i] for i in left])
        values = self._network(self._pixels([images[i] for i in left]), ids, mask).tolist()
        for i, value, cut in zip(left, values, truncated, strict=True):
            scores[i] = Score(value, {"raw": value, "truncated": cut})
        return scores

    def _pixels(self, images: Sequence[Image]) -> torch.Tensor:
        """Normalised pixels (B, 3, side, side) on the device; they travel there as bytes."""
        with ThreadPoolExecutor(min(len(images), os.cpu_count() or 1, 8)) as pool:
            crops = list(pool.map(partial(crop, side=self._side), images))
        pixels = to_device(torch.from_numpy(np.stack(crops)), self._device).permute(0, 3, 1, 2)
        return normalised(pixels.float() / 255, PIXEL_MEAN, PIXEL_STD).to(self._dtype)

    def _tokens(self, prompts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
        """Ids and mask (B, 35) on the device, and whether each prompt was cut; a repeated prompt is split once."""
        distinct = list(dict.fromkeys(prompts))
        whole = self._tokenizer(distinct, add_special_tokens=False, verbose=False)["input_ids"]
        tokens = self._tokenizer(
            distinct, padding="max_length", truncation=True, max_length=CONTEXT, return_tensors="pt"
        )
        rows = [distinct.index(prompt) for prompt in prompts]
        truncated = [float(len(whole[row]) + 2 > CONTEXT) for row in rows]
        ids, mask = tokens["input_ids"][rows].to(self._device), tokens["attention_mask"][rows].to(self._device)
        return ids, mask, truncated


def _read_tokenizer(path: Path, vocab_size: int) -> BertTokenizer:
    """bert-base-uncased with BLIP's [DEC] and [ENC] after its vocabulary, as the embeddings have them."""
    vocabulary = {token: i for i, token in enumerate(path.read_text(encoding="utf-8").splitlines())}
    tokenizer = BertTokenizer(vocab=vocabulary)
    tokenizer.add_special_tokens({"bos_token": "[DEC]", "additional_special_tokens": ["[ENC]"]})
    if len(tokenizer) != vocab_size:
        raise RewardLoadError(f"{path} has {len(tokenizer)} tokens with BLIP's two, but the model has {vocab_size}")
    return tokenizer
