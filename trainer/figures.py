"""The pictures of a run: reward curve and contact sheets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

CELL = 96
"""Least edge of an image on a sheet, pixels; smaller images are enlarged by whole factors."""
GAP, LABEL, BETWEEN = 4, 18, 28


def reward_curve(path: Path, metrics: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Training reward per step, raw and smoothed, and the held-out reward with its 95 % interval, as a PNG."""
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = [(line["step"], line["reward/mean"]) for line in metrics if line["reward/mean"] is not None]
    if points:
        steps, rewards = np.array(points).T
        axes.plot(steps, rewards, color="tab:blue", alpha=0.3, linewidth=1, label="training, each step")
        axes.plot(steps, smooth(rewards), color="tab:blue", linewidth=2, label="training, smoothed")
    rows = [(e["step"], e["intervals"]["reward"]) for e in evaluations if e["intervals"]["reward"]["mean"] is not None]
    if rows:
        means = np.array([row["mean"] for _, row in rows])
        low = np.array([row["mean"] if row["low"] is None else row["low"] for _, row in rows])
        high = np.array([row["mean"] if row["high"] is None else row["high"] for _, row in rows])
        axes.errorbar(
            [step for step, _ in rows], means, yerr=np.stack([means - low, high - means]),
            color="tab:orange", marker="o", capsize=3, label="held-out prompts, 95 % interval",
        )  # fmt: skip
    axes.set_xlabel("training step")
    axes.set_ylabel("reward")
    axes.grid(alpha=0.3)
    if points or rows:
        axes.legend(loc="lower right")
    figure.savefig(path)


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A centred moving average over a tenth of the run; the window shrinks at the ends, so nothing is made up."""
    half = max(1, len(values) // 20)
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def contact_sheet(
    path: Path,
    images: NDArray[np.uint8],
    prompts: Sequence[str],
    labels: Sequence[str],
    *,
    after: NDArray[np.uint8] | None = None,
    after_labels: Sequence[str] = (),
) -> None:
    """One row per prompt, the prompt and its score above it; ``after`` puts a second block beside the first.

    ``images`` and ``after`` are (P, M, H, W, 3); the score of a block stands in ``labels`` and ``after_labels``.
    """
    _, count, height, width, _ = images.shape
    factor = max(1, -(-CELL // min(height, width)))
    cell_h, cell_w = height * factor, width * factor
    block = count * (cell_w + GAP)
    blocks = [images] if after is None else [images, after]
    titles = [""] if after is None else ["before", "after"]
    row = cell_h + LABEL + 2 * GAP
    top = LABEL if after is not None else 0
    sheet = Image.new("RGB", (len(blocks) * (block + BETWEEN), top + len(prompts) * row + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=13)
    for column, (part, title) in enumerate(zip(blocks, titles, strict=True)):
        left = GAP + column * (block + BETWEEN)
        draw.text((left, 2), title, fill="black", font=font)
        scores = labels if column == 0 else after_labels
        for p, prompt in enumerate(prompts):
            y = top + p * row
            text = f"{prompt}  [{scores[p]}]" if column == 0 else f"[{scores[p]}]"
            draw.text((left, y), _fit(text, draw, font, block), fill="black", font=font)
            for m in range(count):
                tile = Image.fromarray(part[p, m]).resize((cell_w, cell_h), Image.Resampling.NEAREST)
                sheet.paste(tile, (left + m * (cell_w + GAP), y + LABEL))
    partial = path.with_suffix(".partial")
    sheet.save(partial, format="PNG")
    partial.replace(path)


def _fit(text: str, draw: ImageDraw.ImageDraw, font: Any, width: int) -> str:
    """Shorten a text that is wider than its block, in the middle, so that the score at its end stays."""
    if draw.textlength(text, font=font) <= width:
        return text
    keep = len(text)
    while keep > 8 and draw.textlength(text[: keep - 8] + "..." + text[-8:], font=font) > width:
        keep -= 1
    return text[: keep - 8] + "..." + text[-8:]
