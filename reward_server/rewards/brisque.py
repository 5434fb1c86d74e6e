"""Technical quality without a reference: BRISQUE (Mittal, Moorthy, Bovik, IEEE TIP 2012), by the package ``brisque``.

BRISQUE measures how far the image's local contrasts are from those of undistorted photographs: about 0 for a clean one
and 100 for a badly blurred, noisy or compressed one, with excursions on both sides; lower is better. The score is
therefore **minus BRISQUE**, so that higher is better; ``details`` have the package's own number as ``raw``.

The prompt is not looked at. Drawn or flat images are no photographs, and are scored all the same, unless their
statistics do not exist at all. The package's support vector machine and its scaling are in its wheel (Apache-2.0);
the package unpickles the latter, a file of its own. It needs numpy < 2.4: ``reward-server env brisque``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from brisque import BRISQUE
from brisque.models import MODEL_PATH

from reward_server import weights
from reward_server.contract import Image
from reward_server.rewards.base import Score, Scored

MIN_SIDE = 16
"""Pixels: at half size, the second of the two that are looked at, a 7x7 window still fits"""


class _Brisque(BRISQUE):  # type: ignore[misc]  # untyped
    def calculate_image_quality_score(self, brisque_features: Any) -> float:
        """The package's, but NaN where a feature is: its machine answers a number even then."""
        features = np.array([np.asarray(feature, float).item() for feature in brisque_features])
        return float(super().calculate_image_quality_score(features)) if np.isfinite(features).all() else float("nan")


class Model:
    """The ``brisque`` reward: minus BRISQUE, roughly -100 (bad) .. 0 (clean)."""

    name = "brisque"
    description = "technical quality without a reference: minus BRISQUE, higher is better"
    needs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.revision = "unknown"
        self.provenance: dict[str, str] = {}

    def setup(self, device: str) -> None:
        """Load the machine that the package brings. ``device`` is unused: it runs on the CPU."""
        self._brisque = _Brisque(url=False)
        digest = weights.sha256(Path(MODEL_PATH) / "svm.txt", Path(MODEL_PATH) / "normalize.pickle")
        self.revision = digest[:12]
        self.provenance = {"weights": f"sha256:{digest}", "preprocessing": "brisque-grey/1", "dtype": "float64"}

    def score(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Scored]:
        """Minus BRISQUE of each image; null for one smaller than 16 pixels, or too uniform to have statistics."""
        return [self._score(image) for image in images]

    def _score(self, image: Image) -> Score:
        if min(image.shape[:2]) < MIN_SIDE:
            size = f"{image.shape[1]}x{image.shape[0]}"
            return Score(None, reason=f"an image of {size} pixels is too small: BRISQUE needs {MIN_SIDE} each way")
        with np.errstate(all="ignore"):
            value = float(self._brisque.score(image))
        if not np.isfinite(value):
            return Score(None, reason="the image is too uniform for BRISQUE: it has no local contrasts to measure")
        return Score(-value, {"raw": value})
