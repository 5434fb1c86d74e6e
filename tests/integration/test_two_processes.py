"""Two processes make the same run as one with the same global batch, up to rounding, and resume exactly."""

import shutil
import sys

import pytest

ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
LAUNCH = [*ACCELERATE, "--config_file", "configs/accelerate/cpu.yaml", "--num_processes", "2"]


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


def test_accelerate_alone_starts_one_process_and_the_run_says_how_to_start_more(tiny_run):
    process = tiny_run.start("alone", launcher=[*ACCELERATE, "--cpu", "--num_processes", "2"])
    assert process.wait(timeout=60) != 0
    lines = (tiny_run.folder / "alone.log").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("trainer/run.py: error: ")]
    assert " ".join(LAUNCH[3:-1]) in line  # the command that the test above runs
    assert not (tiny_run.folder / "alone").exists()
