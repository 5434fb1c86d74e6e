"""HPSv3's network: Qwen2-VL without its language head, and an MLP that reads the hidden state at one token.

On transformers 5, with the numbers of the project's code on transformers 4.45. Two things there are of the model as it
was trained, and kept here:

- Positions count tokens, for the image's as for the text's: the project's forward pass never makes Qwen2-VL's
  three-dimensional positions.
- Its whole model was cast to bfloat16, with the rotary frequencies of both towers, and the angles, cosines and sines of
  the vision tower are computed in bfloat16 from them. This module does so whatever the dtype of the rest.
"""

# mypy: allow-untyped-calls
# (of transformers' methods, some of which have no annotations)

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig, Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VisionTransformerPretrainedModel,
    Qwen2VLRotaryEmbedding,
    Qwen2VLTextModel,
    Qwen2VLVisionRotaryEmbedding,
)

from reward_server.rewards import _large

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HEAD_SIZES = (1024, 16)


class Bfloat16VisionRotary(Qwen2VLVisionRotaryEmbedding):
    """Rotary positions of patches, with angles, cosines and sines in bfloat16."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column of each patch (N, 2) -> cosines and sines (N, head width)"""
        angles = position_ids[..., None].bfloat16() * self.inv_freq.bfloat16()
        return self.recomposition_frequencies(angles.cos()), self.recomposition_frequencies(angles.sin())


class Network(nn.Module):
    """Patches and tokens to HPSv3's two numbers; the MLP is float32 always."""

    def __init__(self, vision: Qwen2VLVisionConfig, text: Qwen2VLTextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        attention = {"attn_implementation": "sdpa"}
        self.visual = Qwen2VisionTransformerPretrainedModel._from_config(vision, **attention).to(dtype)
        self.language_model = Qwen2VLTextModel._from_config(text, **attention).to(dtype)
        width, (first, second) = text.hidden_size, HEAD_SIZES
        self.rm_head = nn.Sequential(
            nn.Linear(width, first),
            nn.ReLU(),
            nn.Dropout(0.05),
            nn.Linear(first, second),
            nn.ReLU(),
            nn.Linear(second, 2),
        )

    def forward(
        self, patches: torch.Tensor, grid: torch.Tensor, ids: torch.Tensor, image_id: int, last: torch.Tensor
    ) -> torch.Tensor:
        """The two outputs of each sequence, (B, 2), float32.

        What follows a sequence's reward token cannot reach it, since attention is causal: sequences are padded on the
        right with anything, without a mask.

        Args:
            patches: of all images, in order: (N, channels * 2 * patch * patch), see :func:`patches_of`.
            grid: (B, 3): 1, and how many patches an image is high and wide.
            ids: token ids (B, L), with ``image_id`` at the places of the images' tokens.
            last: (B,): where the reward token is.
        """
        picture = self.visual(patches.to(self.visual.dtype), grid_thw=grid).pooler_output
        x = self.language_model.embed_tokens(ids)
        x[ids == image_id] = picture.to(x.dtype)
        positions = torch.arange(ids.shape[1], device=ids.device).expand(3, len(ids), -1)
        x = self.language_model(inputs_embeds=x, position_ids=positions, use_cache=False).last_hidden_state
        output: torch.Tensor = self.rm_head(x[torch.arange(len(ids), device=ids.device), last].float())
        return output


def load(vision: Qwen2VLVisionConfig, text: Qwen2VLTextConfig, path: Path, device: str, dtype: torch.dtype) -> Network:
    """The network with the weights of ``HPSv3.safetensors``.

    Raises:
        RewardLoadError: see :func:`reward_server.rewards._large.load`.
    """
    network = _large.load(lambda: Network(vision, text, dtype), [path], device, _name)
    rotary = Qwen2VLRotaryEmbedding(text)  # type: ignore[arg-type]  # its annotation names the whole configuration
    rotary.inv_freq.copy_(rotary.inv_freq.bfloat16())
    network.language_model.rotary_emb = rotary.to(device)
    network.visual.rotary_pos_emb = Bfloat16VisionRotary(vision).to(device)
    return network


def _name(key: str) -> str | None:
    """The name in :class:`Network` of a key of the checkpoint, which is of transformers 4.45."""
    if key == "lm_head.weight":  # for generating text
        return None
    return key.replace("model.", "language_model.", 1) if key.startswith("model.") else key


def patches_of(pixels: torch.Tensor, patch: int, merge: int) -> torch.Tensor:
    """uint8 [H, W, 3], multiples of ``patch * merge``, to normalised patches (H * W / patch^2, 3 * 2 * patch^2).

    Patches that are merged into one token follow each other; each is there twice, as two frames of a film.
    """
    height, width = pixels.shape[0] // patch // merge, pixels.shape[1] // patch // merge
    mean, std = (torch.tensor(x, device=pixels.device) for x in (MEAN, STD))
    x = (pixels.float() / 255 - mean) / std
    x = x.view(height, merge, patch, width, merge, patch, 3).permute(0, 3, 1, 4, 6, 2, 5)
    return x.unsqueeze(5).expand(-1, -1, -1, -1, -1, 2, -1, -1).reshape(height * width * merge**2, -1)
