"""The reward that looks at nothing and gives every image 1.0: for measuring the path there and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reward_server.contract import Image


class Model:
    name = "null"
    revision = "1"
    description = "Always 1.0, whatever the image: measures the reward path itself."
    needs: tuple[str, ...] = ()

    def setup(self, device: str) -> None:
        """Nothing to load."""

    def score(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        return [1.0] * len(images)
