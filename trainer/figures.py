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
) -> None:
    """A row of images per prompt, the prompt and a label (its scores) above it, as a PNG.

    ``images`` is (P, M, H, W, 3); ``after``, of the same shape, puts a second block beside the first.
    """
    _, count, height, width, _ = images.shape
    factor = max(1, -(-CELL // min(height, width)))
    cell_h, cell_w = height * factor, width * factor
    blocks = [images] if after is None else [images, after]
    block = count * (cell_w + GAP) - GAP
    left = [GAP + column * (block + BETWEEN) for column in range(len(blocks))]
    top = GAP if after is None else LABEL + GAP
    row = LABEL + cell_h + 2 * GAP
    sheet = Image.new("RGB", (left[-1] + block + GAP, top + len(prompts) * row), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=13)
    if after is not None:
        for x, title in zip(left, ("BEFORE", "AFTER"), strict=True):
            draw.text((x, 2), title, fill="black", font=font)
    for p, (prompt, label) in enumerate(zip(prompts, labels, strict=True)):
        y = top + p * row
        room = sheet.width - 2 * GAP - draw.textlength(f"  {label}", font=font)
        draw.text((GAP, y), f"{_shorten(prompt, draw, font, room)}  {label}", fill="black", font=font)
        for x, part in zip(left, blocks, strict=True):
            for m in range(count):
                tile = Image.fromarray(part[p, m]).resize((cell_w, cell_h), Image.Resampling.NEAREST)
                sheet.paste(tile, (x + m * (cell_w + GAP), y + LABEL))
    partial = path.with_suffix(".partial")
    sheet.save(partial, format="PNG")
    partial.replace(path)


def _shorten(text: str, draw: ImageDraw.ImageDraw, font: Any, room: float) -> str:
    """The text, or as much of its beginning as fits into ``room`` pixels."""
    if draw.textlength(text, font=font) <= room:
        return text
    while text and draw.textlength(text + "...", font=font) > room:
        text = text[:-1]
    return text + "..."
