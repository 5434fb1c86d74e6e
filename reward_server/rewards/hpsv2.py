"""HPSv2 and v2.1 (Wu et al. 2023, arXiv 2306.09341): a CLIP ViT-H/14 fine-tuned on people's choices between images.

``raw`` is the cosine of image and prompt; papers print it times 100 (``x100``). The two versions' scores cannot be
compared. Checkpoints: ``HPS_v2_compressed.pt`` and ``HPS_v2.1_compressed.pt`` of ``xswu/HPSv2``, in open_clip's layout,
read here into transformers' ``CLIPModel``. Numbers are those of the package ``hpsv2`` 1.2.0, which

- makes the image a tensor first and resizes *that*, longest side to 224, bicubic, then pads with zeros to a square.
  torchvision smooths that resize (antialias) since 0.17, and did not before; the package pins no version. The option
  ``antialias`` chooses: in the tests it moves the score of a small random model by up to 0.003.
- does not pad an image whose longest side is 224 already, and so fails on it unless it is square; here it is padded.
- fails on transparency, which this server composites on white beforehand.
- repairs text with ftfy before it tokenises. Here that is done for HTML entities, curly quotes, ligatures, full-width
  letters and control characters; text decoded by a wrong code page (mojibake) is left as it is.
- computes in float16 on a GPU and rounds the score to it; here normalisation and score are float32.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import CLIPConfig

from reward_server.contract import Image
from reward_server.rewards import _clip
from reward_server.rewards._options import check_choice
from reward_server.rewards.base import RewardLoadError
from reward_server.weights import Source, locate, read_state_dict

DEFAULT = "xswu/HPSv2"
FILES = {"2.0": "HPS_v2_compressed.pt", "2.1": "HPS_v2.1_compressed.pt"}
CONFIG_FILE = "open_clip_config.json"
VIT_H_14: dict[str, Any] = {
    "embed_dim": 1024,
    "vision_cfg": {"image_size": 224, "layers": 32, "width": 1280, "head_width": 80, "patch_size": 14},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 1024, "heads": 16, "layers": 24},
}


class Model(_clip.ClipReward):
    name = "hpsv2"
    description = "HPSv2 / v2.1, human preference: cosine of image and prompt; scaling x100"
    scales = ("raw", "x100")

    def sources(self, *, weights: str = DEFAULT, version: str = "2.1", tokenizer: str = "", **_: Any) -> list[Source]:
        check_choice("version", version, tuple(FILES))
        tokenizer = tokenizer or _clip.own_or(weights, _clip.TOKENIZER_FILES, _clip.LAION_H)
        return [
            Source(weights, (FILES[version],), licence="Apache-2.0"),
            Source(tokenizer, _clip.TOKENIZER_FILES, licence="MIT"),
        ]

    def setup(
        self,
        device: str,
        *,
        weights: str = DEFAULT,
        version: str = "2.1",
        tokenizer: str = "",
        antialias: bool = True,
        scale: str = "raw",
        dtype: str = "auto",
    ) -> None:
        """Load.

        Args:
            device: a torch device.
            weights: hub id, or a folder with the official file of the version; beside it, for models of other sizes
                than ViT-H/14, an ``open_clip_config.json``.
            version: 2.1 or 2.0.
            tokenizer: hub id or folder of CLIP's tokenizer.json (or vocab.json and merges.txt). Default: the folder of
                ``weights`` if it is a local one that has them, else LAION's ViT-H/14.
            antialias: as torchvision >= 0.17 does it; False as older ones did.
            scale: of the value: raw (the cosine) or x100.
            dtype: auto, float32, bfloat16 or float16.

        Raises:
            RewardLoadError: an option is wrong, or the weights are missing or do not fit.
        """
        check_choice("scale", scale, self.scales)
        sources = self.sources(weights=weights, version=version, tokenizer=tokenizer)
        folder, tokens = (locate(source, reward=self.name) for source in sources)
        path = folder / FILES[version]
        config = to_clip_config(_model_config(folder))
        model = _clip.build(config, from_open_clip(read_state_dict(path)), f"{path}, by transformers' names,")
        model = _clip.placed(model, device, dtype)
        preprocess = TensorPreprocess(_clip.image_size(model), antialias, model.device)
        self._ready(
            _clip.Clip(model, _clip.tokenizer_of(tokens), preprocess),
            scale=scale,
            files=[path],
            variant=f"v{version}" + ("" if antialias else "-noaa"),
            preprocessing=preprocess.id,
        )

    def text(self, prompt: str) -> str:
        return clean(prompt)

    def scalings(self, cosine: float) -> dict[str, float]:
        return {"raw": cosine, "x100": 100 * cosine}


@dataclass(frozen=True)
class TensorPreprocess:
    """Longest side to ``size`` and zeros around, on the device; images of one size go together."""

    size: int
    antialias: bool
    device: torch.device

    @property
    def id(self) -> str:
        return f"hpsv2-tensor-bicubic{'' if self.antialias else '-noaa'}-{self.size}/1"

    def __call__(self, images: Sequence[Image]) -> torch.Tensor:
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, image in enumerate(images):
            groups[image.shape].append(i)
        pixels = torch.empty(len(images), 3, self.size, self.size, device=self.device)
        for indices in groups.values():
            stacked = torch.from_numpy(np.stack([images[i] for i in indices]))
            pixels[indices] = self._squares(_clip.to_device(stacked, self.device))
        return _clip.normalised(pixels, _clip.MEAN, _clip.STD)

    def _squares(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 [N, H, W, 3] -> [N, 3, S, S] around 0..1 (bicubic overshoots, and is not clipped)"""
        pixels = images.permute(0, 3, 1, 2).contiguous().float().div(255)
        scale = self.size / float(max(pixels.shape[2:]))
        height, width = (max(1, round(side * scale)) for side in pixels.shape[2:])  # 0: only below 200 pixels
        if scale != 1.0:
            pixels = functional.interpolate(
                pixels, (height, width), mode="bicubic", align_corners=False, antialias=self.antialias
            )
        down, right = self.size - height, self.size - width
        return functional.pad(pixels, (right // 2, right - right // 2, down // 2, down - down // 2))


def clean(prompt: str) -> str:
    """The text that the package's tokenizer makes of a prompt, up to white space and case (the tokenizer's part)."""
    text = html.unescape(html.unescape(prompt))
    text = re.sub("[\u02bc\u2018-\u201b]", "'", re.sub("[\u201c-\u201f]", '"', text))
    wide = "[\u0132\u0133\ufb00-\ufb06\u3000\uff01-\uffef]+"  # Latin ligatures, half- and full-width forms
    text = re.sub(wide, lambda match: unicodedata.normalize("NFKC", match[0]), text)
    return re.sub("[\x00-\x08\x0b\x0e-\x1f\x7f\u200e\u200f\ufeff\ufff9-\ufffb]", "", text)


def to_clip_config(open_clip: Mapping[str, Any]) -> CLIPConfig:
    """transformers' configuration of an open_clip ``model_cfg`` (embed_dim, vision_cfg, text_cfg, quick_gelu).

    Raises:
        RewardLoadError: it has a setting that this layout of ViT and text tower does not.
    """
    known = {
        "": {"embed_dim", "vision_cfg", "text_cfg", "quick_gelu"},
        "vision_cfg": {"image_size", "layers", "width", "head_width", "patch_size", "mlp_ratio"},
        "text_cfg": {"context_length", "vocab_size", "width", "heads", "layers"},
    }
    for part, names in known.items():
        if other := sorted((open_clip[part] if part else open_clip).keys() - names):
            raise RewardLoadError(f"{CONFIG_FILE}: settings that are not supported: {', '.join(other)}")
    vision, text = open_clip["vision_cfg"], open_clip["text_cfg"]
    act = "quick_gelu" if open_clip.get("quick_gelu") else "gelu"
    return CLIPConfig(
        projection_dim=open_clip["embed_dim"],
        vision_config={
            "image_size": vision["image_size"],
            "patch_size": vision["patch_size"],
            "num_hidden_layers": vision["layers"],
            "hidden_size": vision["width"],
            "intermediate_size": int(vision["width"] * vision.get("mlp_ratio", 4)),
            "num_attention_heads": vision["width"] // vision.get("head_width", 64),
            "hidden_act": act,
        },
        text_config={
            "max_position_embeddings": text["context_length"],
            "vocab_size": text["vocab_size"],
            "num_hidden_layers": text["layers"],
            "hidden_size": text["width"],
            "intermediate_size": 4 * text["width"],
            "num_attention_heads": text["heads"],
            "hidden_act": act,
            "eos_token_id": 2,  # transformers' sign for open_clip's rule: the embedding of the highest token id
        },
    )


def _model_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.exists():
        return VIT_H_14
    try:
        config: dict[str, Any] = json.loads(path.read_text())["model_cfg"]
    except (ValueError, KeyError) as error:
        raise RewardLoadError(f"{path} is not a JSON object with a model_cfg: {error}") from error
    return config


_NAMES = (
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),
    (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"^visual\.proj$", "visual_projection.weight"),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^transformer\.resblocks\.", "text_model.encoder.layers."),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^text_projection$", "text_projection.weight"),
    (r"(?<=\d)\.ln_([12])\.", r".layer_norm\1."),
    (r"(?<=\d)\.attn\.", ".self_attn."),
    (r"(?<=\d)\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"(?<=\d)\.mlp\.c_proj\.", ".mlp.fc2."),
)


def from_open_clip(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An open_clip state dict under the names and shapes of transformers' ``CLIPModel``.

    Keys that open_clip's ViT and text tower do not have stay as they are, so that strict loading names them.
    """
    converted = {}
    for key, value in state.items():
        name = key
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        if name.endswith("_projection.weight"):
            converted[name] = value.T
        elif name.endswith((".self_attn.in_proj_weight", ".self_attn.in_proj_bias")):
            stem, _, kind = name.rpartition("in_proj_")
            converted |= zip((f"{stem}{x}_proj.{kind}" for x in "qkv"), value.chunk(3), strict=True)
        else:
            converted[name] = value
    return converted
