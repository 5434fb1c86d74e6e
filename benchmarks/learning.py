"""What the algorithm's settings do to learning on the small model: the demo's settings beside alternatives.

Each row is `trainer/run.py` with `configs/train/small.yaml`, the overlays and the overrides below, the same seed, the
same prompts and the same number of steps; it reports the paired difference on the held-out prompts. One seed: a row
says what happened once, and its interval covers the choice of prompts, not of the seed.

    python benchmarks/learning.py --steps 20
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = ROOT / "configs" / "train" / "variants"
EVERY_STEP = ["--algorithm.diffusion_steps", "all", "--algorithm.diffusion_weights", "uniform"]
ROWS: dict[str, tuple[str | None, list[str]]] = {
    "demo: bridged MTE on all tokens": (None, []),
    "bridged MTE, all diffusion steps, uniform": (None, EVERY_STEP),
    "no MTE (fixed head)": ("fixed_head", []),
    "no MTE, all diffusion steps, uniform": ("fixed_head", EVERY_STEP),
    "end-to-end GRPO": ("grpo", []),
    "fresh MTE on all tokens": ("mte_all", []),
    "fresh MTE, top 30 %": ("mte_top30", []),
    "MAR-GRPO (fresh, top 30 %, consistency)": ("mar_grpo", []),
    "MAR-GRPO, all diffusion steps, uniform, KL 0.01": ("mar_grpo", [*EVERY_STEP, "--algorithm.kl_beta", "0.01"]),
}


def run(overlay: str | None, overrides: list[str], steps: int, folder: Path) -> Any:
    """Train once; returns the held-out part of the run's report.json."""
    command = [sys.executable, str(ROOT / "trainer" / "run.py"), "--config", str(ROOT / "configs/train/small.yaml")]
    command += ["--config", str(VARIANTS / f"{overlay}.yaml")] if overlay else []
    command += ["--steps", str(steps), "--train.scheduler", "constant", "--run-dir", str(folder)]
    command += ["--evaluate.every", "0", "--report.snr_groups", "0", "--report.sheet_prompts", "0", *overrides]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return json.loads((folder / "report.json").read_text())["heldout"]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="training steps of each run (default: %(default)s)")
    arguments = parser.parse_args()
    print("| settings | dense, before -> after | difference, 95 % interval | strict, difference |")
    print("|---|---|---|---|")
    for name, (overlay, overrides) in ROWS.items():
        with tempfile.TemporaryDirectory() as temporary:
            heldout = run(overlay, overrides, arguments.steps, Path(temporary) / "run")
        print(row(name, heldout), flush=True)


def row(name: str, heldout: Any) -> str:
    """A row of the table."""
    dense, strict = heldout["reward"], heldout["shapes.strict"]["difference"]
    change = dense["difference"]
    return (
        f"| {name} | {dense['before']['mean']:.3f} -> {dense['after']['mean']:.3f} "
        f"| {change['mean']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}] "
        f"| {strict['mean']:+.3f} [{strict['low']:+.3f}, {strict['high']:+.3f}] |"
    )


if __name__ == "__main__":
    main()
