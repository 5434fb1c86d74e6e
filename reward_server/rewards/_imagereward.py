"""ImageReward's checkpoint, for ``imagereward`` and ``imagereward_package``: files, sizes, images it cannot score."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reward_server import weights as files
from reward_server.contract import Image
from reward_server.rewards.base import RewardLoadError, Score

WEIGHTS = "THUDM/ImageReward"
TOKENIZER = "google-bert/bert-base-uncased"
CONTEXT = 35
"""Tokens of a prompt, [CLS] and [SEP] included"""
HEAD_WIDTH = 64
"""Of the vision transformer: 16 heads of ViT-L's width 1024"""
MAX_ASPECT = 400
"""A longer image would be resized to gigabytes before the crop"""


@dataclass(frozen=True)
class Checkpoint:
    """``ImageReward.pt`` with what belongs to it."""

    path: Path
    state: Mapping[str, torch.Tensor]
    vision: Mapping[str, int]
    """``width``, ``depth``, ``patch``, ``side`` (pixels) and ``hidden`` of the vision transformer"""
    text: Mapping[str, Any]
    """``med_config.json``, a configuration of BERT"""
    text_path: Path
    vocabulary: Path
    """bert-base-uncased's ``vocab.txt``"""

    def provenance(self) -> dict[str, str]:
        return {
            "weights": f"sha256:{files.sha256(self.path)}",
            "tokenizer": f"sha256:{files.sha256(self.vocabulary)}",
        }


def read(weights: str, tokenizer: str, reward: str) -> Checkpoint:
    """The checkpoint of two folders or hub ids.

    Raises:
        RewardLoadError: a file is missing, damaged, or something else.
    """
    folder, vocabulary = (files.locate(source, reward=reward) for source in sources(weights, tokenizer))
    path, text_path = folder / "ImageReward.pt", folder / "med_config.json"
    state = files.read_state_dict(path)
    text = _read_text_config(text_path)
    return Checkpoint(path, state, _vision_sizes(state, path), text, text_path, vocabulary / "vocab.txt")


def sources(weights: str, tokenizer: str) -> tuple[files.Source, files.Source]:
    """What setup reads: the checkpoint and the tokenizer's vocabulary."""
    return (
        files.Source(weights, ("ImageReward.pt", "med_config.json"), licence="Apache-2.0"),
        files.Source(tokenizer, ("vocab.txt",), licence="Apache-2.0"),
    )


def is_unused(key: str) -> bool:
    """Whether a key of the checkpoint has no part in the score: BLIP's contrastive heads, and a constant."""
    return key.startswith(("blip.vision_proj.", "blip.text_proj.")) or key.endswith(".position_ids")


def _vision_sizes(state: Mapping[str, torch.Tensor], path: Path) -> dict[str, int]:
    """By the tensors' shapes."""
    prefix = "blip.visual_encoder."
    try:
        patch = state[prefix + "patch_embed.proj.weight"].shape[-1]
        positions, width = state[prefix + "pos_embed"].shape[1:]
        hidden = state[prefix + "blocks.0.mlp.fc1.weight"].shape[0]
    except KeyError as error:
        raise RewardLoadError(f"{path} is no checkpoint of ImageReward: it lacks {error}") from error
    depth = len({key.split(".")[3] for key in state if key.startswith(prefix + "blocks.")})
    return {
        "width": width,
        "depth": depth,
        "patch": patch,
        "side": round((positions - 1) ** 0.5) * patch,
        "hidden": hidden,
    }


def _read_text_config(path: Path) -> dict[str, Any]:
    defaults = {"layer_norm_eps": 1e-12, "hidden_act": "gelu", "max_position_embeddings": 512}
    try:
        config = {**defaults, **json.loads(path.read_text())}
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            config[name] = int(config[name])
    except (ValueError, TypeError, KeyError) as error:
        raise RewardLoadError(f"{path} is no configuration of BERT: {type(error).__name__} {error}") from error
    return config


def refusal(image: Image) -> Score | None:
    """Why an image cannot be scored, or None."""
    long, short = max(image.shape[:2]), min(image.shape[:2])
    if long > MAX_ASPECT * short:
        return Score(None, reason=f"the image is {long} x {short}: more than {MAX_ASPECT} times as long as wide")
    return None
