"""Two processes make the same run as one with the same global batch, up to rounding, and resume exactly."""

import shutil
import sys

import pytest

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
LAUNCH += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]


def test_two_processes_equal_one_and_resume(tiny_run):
    settings = ["--train.depth", "1", "--steps", "4", "--evaluate.prompts", "3"]
    one = tiny_run.finish(tiny_run.start("one", *settings), "one")
    two = tiny_run.finish(tiny_run.start("two", *settings, launcher=LAUNCH), "two")
    assert "2 process(es)" in (tiny_run.folder / "two.log").read_text()
    assert len(one) == len(two) == 4
    for step_of_one, step_of_two in zip(one, two, strict=True):
        assert step_of_one.keys() == step_of_two.keys()
        for name, value in step_of_one.items():
            # advantages of order 1 cancel in the policy term: its rounding is absolute
            assert step_of_two[name] == pytest.approx(value, rel=1e-4, abs=2e-6), name

    # as if killed in step 3: each process has a rollout of its own that waits for its scores
    shutil.rmtree(tiny_run.folder / "two" / "checkpoints" / "step-00000004")
    resumed = tiny_run.finish(tiny_run.start("two", *settings, "--resume", "auto", launcher=LAUNCH), "two")
    assert "resuming after step 2" in (tiny_run.folder / "two.log").read_text()
    assert resumed == two
