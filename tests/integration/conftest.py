"""A run small enough for tests: a random policy of 40 k parameters, four AR steps, sixteen images a step."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from trainer.policies.small import SmallConfig, SmallPolicy
from trainer.shapes import render, split_scenes

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = """
policy: {{checkpoint: {folder}/tiny.safetensors, ar_steps: 4, diffusion_steps: 5, device: cpu}}
prompts: {{train: {folder}/prompts.txt, heldout: {folder}/prompts.txt}}
algorithm: {{ar_steps_per_update: 2}}
train: {{steps: 6, prompts_per_step: 4, group_size: 4, learning_rate: 1.0e-3, micro_batch: 4, threads: 1}}
evaluate: {{prompts: 0}}
checkpoint: {{every: 2}}
report: {{trackers: [], sheet_prompts: 0, snr_groups: 0}}
"""


def end(process):
    """Kill a run and the processes that a launcher started for it, which would outlive the launcher."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for member in [process, *family]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


class TinyRun:
    """Starts ``trainer/run.py`` on the tiny settings and reads what it logged."""

    def __init__(self, folder):
        self.folder = folder

    def start(self, name, *arguments, launcher=()):
        command = [*(launcher or [sys.executable]), str(ROOT / "trainer" / "run.py")]
        command += ["--config", str(self.folder / "tiny.yaml"), "--run-dir", str(self.folder / name), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        log = (self.folder / f"{name}.log").open("a")
        with log:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def finish(self, process, name):
        try:
            status = process.wait(timeout=120)
        finally:
            end(process)
        assert status == 0, (self.folder / f"{name}.log").read_text()
        return self.metrics(name)

    def kill_after(self, process, name, steps):
        """SIGKILL as soon as ``steps`` steps are logged: the next one has begun."""
        deadline = time.monotonic() + 120
        while len(self.metrics(name)) < steps:
            assert process.poll() is None, (self.folder / f"{name}.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL

    def metrics(self, name):
        """What each step logged, without what depends on the clock."""
        path = self.folder / name / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        steps = [json.loads(line) for line in lines]
        return [{k: v for k, v in s.items() if not k.startswith("time/") and k != "images_per_s"} for s in steps]


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    policy = SmallPolicy(SmallConfig(width=32, depth=2, heads=2, head_width=32, head_depth=1, channels=8))
    scenes, _ = split_scenes()
    policy.fit_codec(render(scenes[:200], np.random.default_rng(0)))
    policy.save(folder / "tiny.safetensors")
    (folder / "prompts.txt").write_text("\n".join(scene.prompt for scene in scenes[:40]))
    (folder / "tiny.yaml").write_text(SETTINGS.format(folder=folder))
    return TinyRun(folder)
