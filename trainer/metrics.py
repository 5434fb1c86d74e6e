"""The numbers that a training step logs, over all processes."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator

from trainer.evaluate import TOTAL, Flags, Floats


class Totals:
    """Sums of one update's statistics, kept on the device until the update is done."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        self.ratio_max = torch.zeros(1, device=device)

    def add(self, result: Any) -> None:
        rows = result.policy_rows
        parts = [result.policy, result.kl, result.ratio_mean * rows, result.clip_fraction * rows]
        self.sums += torch.stack([*(p.double() for p in parts), torch.tensor(rows, device=self.sums.device).double()])
        self.ratio_max = torch.maximum(self.ratio_max, result.ratio_max.reshape(1).to(self.ratio_max))

    def metrics(self, accelerator: Accelerator) -> dict[str, Any]:
        policy, kl, ratio, clipped, rows = accelerator.reduce(self.sums, "sum").tolist()
        largest = float(accelerator.gather(self.ratio_max).max())
        return {
            "policy_term": policy,
            "kl": kl,
            "ratio_mean": ratio / rows if rows else None,
            "ratio_max": largest if rows else None,
            "clip_fraction": clipped / rows if rows else None,
            "transitions": int(rows),
        }


def reward_metrics(scores: dict[str, Floats], valid: dict[str, Flags]) -> dict[str, Any]:
    """Mean and standard deviation of each score over the images that have it, and how many have none."""
    metrics: dict[str, Any] = {}
    for name, values in scores.items():
        seen = values[valid[name]]
        prefix = TOTAL if name == TOTAL else f"{TOTAL}/{name}"
        metrics[f"{prefix}/mean"] = float(seen.mean()) if len(seen) else None
        metrics[f"{prefix}/std"] = float(seen.std()) if len(seen) else None
    metrics["missing"] = int((~valid[TOTAL]).sum())
    return metrics
