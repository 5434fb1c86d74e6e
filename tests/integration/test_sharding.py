"""Two processes, sharded (FSDP2, gloo) or not, train as one does; checkpoints go from one kind of run to the other."""

import shutil
import sys

import pytest
from safetensors.torch import load_file

ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
TWO = ["--num_processes", "2"]
SHARDED = [*ACCELERATE, "--config_file", "configs/accelerate/fsdp2.yaml", *TWO]
PARALLEL = [*ACCELERATE, "--config_file", "configs/accelerate/ddp.yaml", *TWO]
SETTINGS = ["--steps", "2", "--checkpoint.every", "1", "--report.snr-groups", "2"]
"""Two steps: later, a rounding error may change a pixel and so a reward."""


def weights(tiny_run, name, step=2):
    return load_file(tiny_run.folder / name / "checkpoints" / f"step-{step:08d}" / "policy.safetensors")


def same(tiny_run, one, two):
    """Where training moved a tensor, both moved it alike: to 1e-3 of the way. A key's bias changes nothing: its
    gradient is rounding alone, which Adam blows up to full steps."""
    before = load_file(tiny_run.folder / "tiny.safetensors")
    one, two = weights(tiny_run, one), weights(tiny_run, two)
    assert one.keys() == two.keys() == before.keys()
    moved = {name for name in before if not one[name].equal(before[name])}
    assert len(moved) >= 8
    for name, start in before.items():
        way = float((one[name] - start).norm())
        allowed = 2e-2 if name.endswith("qkv.bias") else 1e-3
        assert float((two[name] - one[name]).norm()) <= allowed * way, name


def alike(one, two):
    assert len(one) == len(two)
    for step_of_one, step_of_two in zip(one, two, strict=True):
        assert step_of_one.keys() == step_of_two.keys()
        for name, value in step_of_one.items():
            assert step_of_two[name] == pytest.approx(value, rel=1e-3, abs=5e-6), name


@pytest.fixture(scope="module")
def one(tiny_run):
    return tiny_run.finish(tiny_run.start("one", *SETTINGS), "one")


@pytest.mark.parametrize("launcher", [SHARDED, PARALLEL], ids=["fsdp2", "ddp"])
def test_two_processes_end_with_the_weights_of_one(tiny_run, one, launcher):
    name = "fsdp2" if launcher is SHARDED else "ddp"
    two = tiny_run.finish(tiny_run.start(name, *SETTINGS, launcher=launcher), name)
    assert "2 process(es)" in (tiny_run.folder / f"{name}.log").read_text()
    alike(one, two)
    same(tiny_run, "one", name)


def test_checkpoints_go_from_one_process_to_two_sharded_ones_and_back(tiny_run, one):
    """Interrupted after step 1 of 2, and resumed as the other kind of run."""
    for begun, resumed_by, launcher in (("one", "onwards", SHARDED), ("fsdp2", "back", ())):
        if not (tiny_run.folder / begun).exists():
            tiny_run.finish(tiny_run.start(begun, *SETTINGS, launcher=SHARDED), begun)
        shutil.copytree(tiny_run.folder / begun, tiny_run.folder / resumed_by)
        shutil.rmtree(tiny_run.folder / resumed_by / "checkpoints" / "step-00000002")
        process = tiny_run.start(resumed_by, *SETTINGS, "--resume", "auto", launcher=launcher)
        resumed = tiny_run.finish(process, resumed_by)
        assert "resuming after step 1" in (tiny_run.folder / f"{resumed_by}.log").read_text()
        alike(one, resumed)
        same(tiny_run, "one", resumed_by)


def test_adapters_can_be_sharded(tiny_run):
    settings = [*SETTINGS, "--policy.lora.rank", "2", "--algorithm.kl-beta", "0.1"]
    whole = tiny_run.finish(tiny_run.start("lora", *settings), "lora")
    sharded = tiny_run.finish(tiny_run.start("lora-2", *settings, launcher=SHARDED), "lora-2")
    assert whole[-1]["kl"] > 0
    alike(whole, sharded)
    same(tiny_run, "lora", "lora-2")


def test_a_trained_head_that_scores_part_by_part_can_be_sharded(tiny_run):
    settings = [*SETTINGS, "--algorithm.head", "trained", "--train.head-rows", "50"]
    whole = tiny_run.finish(tiny_run.start("head", *settings), "head")
    sharded = tiny_run.finish(tiny_run.start("head-2", *settings, launcher=SHARDED), "head-2")
    alike(whole, sharded)
    same(tiny_run, "head", "head-2")
