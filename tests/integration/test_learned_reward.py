"""The trainer goes from the shapes' verifier to the learned reward and to a mix of both by configuration alone."""

import json
from pathlib import Path

import pytest

from trainer import run

ROOT = Path(__file__).resolve().parents[2]
LEARNED = ("--config", "configs/train/variants/learned_reward.yaml")


def test_the_trainer_switches_between_shapes_their_clip_and_a_mix(tiny_run, monkeypatch):
    """The first step's images are those of the seed, so that its mean rewards can be compared between runs."""
    monkeypatch.chdir(ROOT)
    choices = {"shapes": (), "learned": LEARNED, "mix": (*LEARNED, "--reward", "shapes_clip=1,shapes=0.5")}
    means = {}
    for name, choice in choices.items():
        settings = ["--config", str(tiny_run.folder / "tiny.yaml"), "--run-dir", str(tiny_run.folder / name)]
        assert run.main([*settings, *choice, "--steps", "1"]) == 0
        (step,) = tiny_run.metrics(name)
        assert step["missing"] == 0
        assert step["grad_norm"] > 0
        means[name] = step["reward/mean"]
    assert means["mix"] == pytest.approx(means["learned"] + 0.5 * means["shapes"], abs=1e-6)
    assert abs(means["learned"] - means["shapes"]) > 1e-3
    provenance = json.loads((tiny_run.folder / "mix" / "versions.json").read_text())["provenance"]
    assert provenance.keys() == {"shapes_clip", "shapes"}
    assert provenance["shapes_clip"]["weights"].startswith("sha256:")
