"""PickScore v1 (Kirstain et al. 2023, arXiv 2305.01569): a CLIP ViT-H/14 fine-tuned on people's choices between images.

``raw`` is what the model card computes for one image, exp(logit_scale) * cosine, about 17..25. The flow_grpo family
divides it by 26 (``raw/26``); DanceGRPO and Pref-GRPO use the bare ``cosine``. Checkpoint:
``yuvalkirstain/PickScore_v1``; tokenizer and preprocessing: ``laion/CLIP-ViT-H-14-laion2B-s32B-b79K``, as in its card.
"""

from __future__ import annotations

from typing import Any

from reward_server.rewards import _clip
from reward_server.rewards._options import check_choice
from reward_server.weights import Source, locate

DEFAULT = "yuvalkirstain/PickScore_v1"


class Model(_clip.ClipReward):
    name = "pickscore"
    description = "PickScore v1: exp(logit_scale) * cosine, about 17..25; scalings raw/26 and cosine"
    scales = ("raw", "raw/26", "cosine")

    def sources(self, *, weights: str = DEFAULT, processor: str = "", **_: Any) -> list[Source]:
        processor = processor or _clip.own_or(weights, _clip.PROCESSOR_FILES, _clip.LAION_H)
        return [
            Source(weights, _clip.MODEL_FILES, licence="MIT"),
            Source(processor, _clip.PROCESSOR_FILES, licence="MIT"),
        ]

    def setup(
        self, device: str, *, weights: str = DEFAULT, processor: str = "", scale: str = "raw", dtype: str = "auto"
    ) -> None:
        """Load.

        Args:
            device: a torch device.
            weights: hub id, or a folder with config.json and model.safetensors (or pytorch_model.bin).
            processor: hub id or folder of preprocessor_config.json and tokenizer.json (or vocab.json and merges.txt).
                Default: the folder of ``weights`` if it is a local one that has them, else LAION's ViT-H/14.
            scale: of the value: raw, raw/26 or cosine.
            dtype: auto, float32, bfloat16 or float16.

        Raises:
            RewardLoadError: an option is wrong, or the weights are missing or do not fit.
        """
        check_choice("scale", scale, self.scales)
        folder, processors = (locate(s, reward=self.name) for s in self.sources(weights=weights, processor=processor))
        model, path = _clip.read_model(folder)
        self._factor = float(model.logit_scale.exp())
        model = _clip.placed(model, device, dtype)
        preprocess = _clip.PillowPreprocess.of(processors, model)
        clip = _clip.Clip(model, _clip.tokenizer_of(processors), preprocess)
        self._ready(clip, scale=scale, files=[path], variant="", preprocessing=preprocess.id)

    def scalings(self, cosine: float) -> dict[str, float]:
        raw = self._factor * cosine
        return {"raw": raw, "raw/26": raw / 26, "cosine": cosine}
