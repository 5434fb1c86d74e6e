"""Does the image show the text that the prompt asks for? Read by RapidOCR (PP-OCRv6 on ONNX Runtime, Apache-2.0).

As flow_grpo's OCR reward (flow_grpo/ocr.py, there with PaddleOCR): the text that was read, line after line, and the
text asked for are compared without spaces and in lower case; a text that contains the one asked for is perfect, else
the score is ``1 - Levenshtein distance / length of the text asked for``, at least 0. Lines that the recogniser
is less than half sure of do not count, which is PaddleOCR's default, too.

Departs from it in three points: all quoted pieces of a prompt count, joined in order, not the first alone; typographic
quotes count, too; and what cannot be scored is null, not 0. PaddleOCR's and GOT-OCR's readings may differ.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import rapidocr
from rapidocr.utils.process_img import ResizeImgError

from reward_server import weights
from reward_server.contract import Image
from reward_server.rewards.base import RewardLoadError, Score, Scored

MODELS = {"Det": "PP-OCRv6_det_small.onnx", "Rec": "PP-OCRv6_rec_small.onnx"}
"""Of the wheel, for rapidocr 3.10: named here, since rapidocr downloads what it does not find where it looks"""
_QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”|„([^“”]*)[“”]|«([^»]*)»')


def wanted_text(prompt: str, metadata: Mapping[str, Any]) -> str | None:
    """The text that the image should show: metadata ``text``, else what the prompt has in double quotes; or None."""
    if isinstance(text := metadata.get("text"), str):
        return text
    pieces = ["".join(groups) for groups in _QUOTED.findall(prompt)]
    return " ".join(pieces) if pieces else None


def normalise(text: str) -> str:
    """Lower case without white space: what is compared."""
    return "".join(text.lower().split())


def distance(a: str, b: str) -> int:
    """Levenshtein distance: insertions, deletions and substitutions that make ``a`` into ``b``."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


class Model:
    """The ``ocr`` reward, 0..1."""

    name = "ocr"
    description = "text in the image against the text quoted in the prompt: 1 - edit distance / length, 0..1"
    needs: tuple[str, ...] = ()
    example = ('a sign that says "OPEN"', dict[str, Any]())

    def __init__(self) -> None:
        self.revision = "unknown"
        self.provenance: dict[str, str] = {}

    def setup(self, device: str, *, min_confidence: float = 0.5, threads: int = 0) -> None:
        """Load the models of the installed rapidocr; nothing is downloaded.

        Args:
            device: ``cuda`` or ``cuda:N`` needs the package onnxruntime-gpu; all others are the CPU.
            min_confidence: lines that the recogniser is less sure of (0..1) do not count.
            threads: of ONNX Runtime; 0: OMP_NUM_THREADS, or else one.

        Raises:
            RewardLoadError: this rapidocr brings other models, or ONNX Runtime cannot use the device.
        """
        folder = Path(rapidocr.__file__).parent / "models"
        files = [folder / name for name in MODELS.values()]
        if missing := [path.name for path in files if not path.is_file()]:
            version = importlib.metadata.version("rapidocr")
            raise RewardLoadError(f"rapidocr {version} brings no {', '.join(missing)}: install rapidocr 3.10")
        cuda = device.startswith("cuda")
        if cuda and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise RewardLoadError(f"device {device}: this onnxruntime has no CUDA; install onnxruntime-gpu, or use cpu")
        threads = threads or int(os.environ.get("OMP_NUM_THREADS", "1"))
        engine = "EngineConfig.onnxruntime"
        self._read: Callable[[Image], Any] = rapidocr.RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.use_cls": False,
                "Global.text_score": min_confidence,
                **{f"{task}.model_path": str(folder / name) for task, name in MODELS.items()},
                f"{engine}.intra_op_num_threads": threads,
                f"{engine}.inter_op_num_threads": 1,
                f"{engine}.use_cuda": cuda,
                f"{engine}.cuda_ep_cfg.device_id": int(device.partition(":")[2] or 0) if cuda else 0,
            }
        )
        digest = weights.sha256(*files)
        self.revision = digest[:12] if min_confidence == 0.5 else f"{digest[:12]}-confidence-{min_confidence:g}"
        self.provenance = {"weights": f"sha256:{digest}", "preprocessing": "rapidocr-bgr/1", "dtype": "float32"}

    def score(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Scored]:
        """Scores of [H, W, 3] images of any size, 0..1; null for a prompt that asks for no text.

        ``details``: ``raw``, ``distance`` (edits, at most the length), ``target_length`` and ``recognised_length``
        (characters without spaces) and ``confidence`` (0..1, mean of the lines; None where nothing was read).
        """
        return [self._score(*item) for item in zip(images, prompts, metadata, strict=True)]

    def _score(self, image: Image, prompt: str, metadata: Mapping[str, Any]) -> Score:
        text = wanted_text(prompt, metadata)
        target = normalise(text or "")
        if not target:
            found = "no text in double quotes" if text is None else "only empty quotes"
            return Score(None, reason=f"the prompt has {found}, and the metadata no text: {prompt[:80]}")
        try:
            result = self._read(np.ascontiguousarray(image[:, :, ::-1]))  # BGR, as OpenCV has it
        except ResizeImgError:
            size = f"{image.shape[1]} x {image.shape[0]}"
            return Score(None, reason=f"{size} pixels: too long and narrow to be resized for RapidOCR")
        read = normalise("".join(result.txts or ()))
        edits = 0 if target in read else min(distance(read, target), len(target))
        value = 1 - edits / len(target)
        details = {
            "raw": value,
            "distance": float(edits),
            "target_length": float(len(target)),
            "recognised_length": float(len(read)),
            "confidence": float(np.mean(result.scores)) if result.scores else None,
        }
        return Score(value, details)
