"""LAION's aesthetic predictor v2: an MLP on the L2-normalised image embedding of CLIP ViT-L/14, about 1..10.

Source: github.com/christophschuhmann/improved-aesthetic-predictor (``simple_inference.py``), Apache-2.0. The
head's official file is ``sac+logos+ava1-l14-linearMSE.pth`` there (sha256 21dd590f3ccdc646f0d53120778b2960...); by
default a copy on the hub. It is linear layers 768-1024-128-64-16-1 without activations; dropout is off. The prompt is
not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reward_server.contract import Image
from reward_server.rewards import _clip, clip
from reward_server.rewards._options import dtype_name
from reward_server.rewards.base import Score, Scored
from reward_server.weights import Source, load_strictly, locate, read_state_dict, sha256

HEAD = "camenduru/improved-aesthetic-predictor"
HEAD_FILE = "sac+logos+ava1-l14-linearMSE.pth"
WIDTHS = (1024, 128, 64, 16, 1)


class Model:
    name = "aesthetic"
    description = "LAION aesthetic predictor v2 on CLIP ViT-L/14, about 1..10; the prompt is not read"
    needs: tuple[str, ...] = ()
    revision = ""

    def sources(self, *, weights: str = clip.DEFAULT, head: str = HEAD, **_: Any) -> list[Source]:
        model = Source(weights, (*_clip.MODEL_FILES, "preprocessor_config.json"), licence=clip.LICENCE)
        if not head.endswith((".pth", ".pt", ".safetensors")):
            return [model, Source(head, (HEAD_FILE,), licence="Apache-2.0")]
        path = Path(head).expanduser().absolute()
        return [model, Source(str(path.parent), (path.name,), licence="Apache-2.0")]

    def setup(self, device: str, *, weights: str = clip.DEFAULT, head: str = HEAD, dtype: str = "auto") -> None:
        """Load.

        Args:
            device: a torch device.
            weights: CLIP: hub id, or a folder with config.json, model.safetensors (or pytorch_model.bin) and
                preprocessor_config.json.
            head: hub id or folder that holds ``sac+logos+ava1-l14-linearMSE.pth``, or a file of that layout.
            dtype: of CLIP: auto, float32, bfloat16 or float16; the head is always float32.

        Raises:
            RewardLoadError: an option is wrong, or the weights are missing or do not fit.
        """
        sources = self.sources(weights=weights, head=head)
        folder, head_folder = (locate(source, reward=self.name) for source in sources)
        head_path = head_folder / sources[1].files[0]
        model, path = _clip.read_model(folder)
        self._head = _Head(model.visual_projection.out_features)
        load_strictly(self._head, read_state_dict(head_path), str(head_path))
        self._model = _clip.placed(model, device, dtype)
        self._head = self._head.to(self._model.device).eval().requires_grad_(False)
        self._preprocess = _clip.PillowPreprocess.of(folder, self._model)
        digest = sha256(path, head_path)
        self.revision = digest[:12]
        self.provenance = {
            "weights": f"sha256:{digest}",
            "preprocessing": self._preprocess.id,
            "dtype": dtype_name(self._model.dtype),
        }

    @torch.inference_mode()
    def score(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Scored]:
        """Scores of uint8 RGB images [H, W, 3] of any size, in order; ``details``: raw, which is the value."""
        refusals = [_clip.refusal(image) for image in images]
        kept = [image for image, reason in zip(images, refusals, strict=True) if reason is None]
        values = iter(self._head(_clip.encode(self._model, self._preprocess, kept)).tolist() if kept else [])
        return [reason or _scored(next(values)) for reason in refusals]


class _Head(nn.Module):
    """Keys ``layers.0``, ``.2``, ``.4``, ``.6``, ``.7``, as the official file has them: between are the dropouts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        first, second, third, fourth, last = WIDTHS
        self.layers = nn.Sequential(
            nn.Linear(width, first),
            nn.Identity(),
            nn.Linear(first, second),
            nn.Identity(),
            nn.Linear(second, third),
            nn.Identity(),
            nn.Linear(third, fourth),
            nn.Linear(fourth, last),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[N, width] -> [N]"""
        scores: torch.Tensor = self.layers(features)
        return scores[:, 0]


def _scored(value: float) -> Score:
    return Score(value, {"raw": value})
