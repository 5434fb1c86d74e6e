"""Every family trains by configuration alone: three steps, on one process and on two (whole or sharded).

Tiny random weights: this shows that the parts fit, not that images get better.
"""

import os
import sys
from pathlib import Path

import pytest
import yaml

from tests.integration.conftest import TinyRun
from tests.trainer.policies.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file"]
TWO = {"two": "configs/accelerate/cpu.yaml", "sharded": "configs/accelerate/fsdp2.yaml"}
WARMTH = '''
class Warmth:
    """Mean red minus mean blue, -1 to 1: a reward of any image."""

    name, revision, description, needs = "warmth", "1", "Mean red minus mean blue.", ()

    def setup(self, device):
        pass

    def score(self, images, prompts, metadata):
        return [float(image[..., 0].mean() - image[..., 2].mean()) / 255 for image in images]
'''


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
    """Files of a family and settings of its run; the reward is code of the user's own, found by PYTHONPATH."""
    folder = tmp_path_factory.mktemp(request.param)
    family = FAMILIES[request.param](folder)
    (folder / "warmth.py").write_text(WARMTH)
    (folder / "prompts.txt").write_text("\n".join(family.prompts))
    settings = {
        "policy": {
            "name": family.name, "checkpoint": str(family.source), "options": family.options, "device": "cpu",
            "ar_steps": 4, "diffusion_steps": 5, "guidance": 2.5,
        },
        "prompts": {"train": str(folder / "prompts.txt"), "heldout": str(folder / "prompts.txt")},
        "reward": {"names": {"warmth:Warmth": 1.0}},
        # the first step of MAR's schedule multiplies a random head's errors by thousands, which a trained one has not
        "algorithm": {"ar_steps_per_update": 2, "diffusion_steps": [1, 2, 3]},
        "train": {
            "steps": 3, "prompts_per_step": 2, "group_size": 4, "learning_rate": 1e-3, "micro_batch": 4, "threads": 1,
        },
        "evaluate": {"prompts": 2, "seeds": 1},
        "checkpoint": {"every": 0},
        "report": {"trackers": [], "sheet_prompts": 0, "snr_groups": 0},
    }  # fmt: skip
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
        yield family, TinyRun(folder)


def test_three_steps_on_one_process_and_on_two(tiny):
    family, run = tiny
    one = run.finish(run.start("one"), "one")
    assert len(one) == 3
    assert all(step["grad_norm"] > 0 and step["signal_fraction"] == 1.0 and step["missing"] == 0 for step in one)
    assert one[0]["kl"] == 0.0
    assert one[2]["kl"] > 0
    assert one[0]["reward/std"] > 0
    for kind, launcher in TWO.items():
        two = run.finish(run.start(kind, launcher=[*LAUNCH, launcher]), kind)
        assert "2 process(es)" in (run.folder / f"{kind}.log").read_text()
        assert len(two) == 3
        for name, value in one[0].items():  # later steps may differ by a pixel, and so by a reward
            assert two[0][name] == pytest.approx(value, rel=1e-3, abs=1e-5), (kind, name)
        assert two[2]["kl"] == pytest.approx(one[2]["kl"], rel=0.2)

    policy = family.load(run.folder / "one" / "checkpoints" / "step-00000003" / "policy.safetensors")
    before = dict(family.load().named_parameters())
    trained = {id(p) for p in policy.backbone_parameters()}
    for name, parameter in policy.named_parameters():
        assert parameter.equal(before[name]) != (id(parameter) in trained), name
