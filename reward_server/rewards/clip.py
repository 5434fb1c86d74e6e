"""CLIP score: the cosine between the CLIP embeddings of image and prompt (row "CLIP score" of the field's table).

RL code takes ``openai/clip-vit-large-patch14``; any checkpoint that transformers' ``CLIPModel`` reads will do, from the
hub or from a folder, and its own ``preprocessor_config.json`` and tokenizer are obeyed. CLIPScore (Hessel et al. 2021,
arXiv 2104.08718, section 3) is ``weights: openai/clip-vit-base-patch32, prefix: A photo depicts, scale: clipscore``.
"""

from __future__ import annotations

import hashlib
from typing import Any

from reward_server.rewards import _clip
from reward_server.rewards._options import check_choice
from reward_server.weights import Source, locate

DEFAULT = "openai/clip-vit-large-patch14"
LICENCE = "MIT for OpenAI's weights, whose model card asks for research use only"


class Model(_clip.ClipReward):
    name = "clip"
    description = "CLIP score: cosine of image and prompt; scalings x100 and clipscore (2.5 * max(cosine, 0))"
    scales = ("raw", "x100", "clipscore")

    def sources(self, *, weights: str = DEFAULT, **_: Any) -> list[Source]:
        return [Source(weights, (*_clip.MODEL_FILES, *_clip.PROCESSOR_FILES), licence=LICENCE)]

    def setup(
        self, device: str, *, weights: str = DEFAULT, prefix: str = "", scale: str = "raw", dtype: str = "auto"
    ) -> None:
        """Load.

        Args:
            device: a torch device.
            weights: hub id, or a folder with config.json, model.safetensors (or pytorch_model.bin),
                preprocessor_config.json and tokenizer.json (or vocab.json and merges.txt).
            prefix: put before each prompt, with a space; CLIPScore's is "A photo depicts".
            scale: of the value: raw (the cosine, -1..1), x100 or clipscore (2.5 * max(cosine, 0), 0..2.5).
            dtype: auto, float32, bfloat16 or float16.

        Raises:
            RewardLoadError: an option is wrong, or the weights are missing or do not fit.
        """
        check_choice("scale", scale, self.scales)
        folder = locate(self.sources(weights=weights)[0], reward=self.name)
        model, path = _clip.read_model(folder)
        model = _clip.placed(model, device, dtype)
        preprocess = _clip.PillowPreprocess.of(folder, model)
        clip = _clip.Clip(model, _clip.tokenizer_of(folder), preprocess)
        self._prefix = f"{prefix.strip()} " if prefix.strip() else ""
        variant = "prefix" + hashlib.sha256(self._prefix.encode()).hexdigest()[:6] if self._prefix else ""
        self._ready(clip, scale=scale, files=[path], variant=variant, preprocessing=preprocess.id)

    def text(self, prompt: str) -> str:
        return self._prefix + prompt

    def scalings(self, cosine: float) -> dict[str, float]:
        return {"raw": cosine, "x100": 100 * cosine, "clipscore": 2.5 * max(cosine, 0.0)}
