"""Killed at any moment and resumed, a run goes on exactly as if nothing had happened."""

import pytest


@pytest.mark.parametrize(("depth", "killed_after"), [(0, 3), (1, 5)])
def test_a_killed_run_resumes_with_the_metrics_of_an_uninterrupted_one(tiny_run, depth, killed_after):
    settings = ["--train.depth", str(depth)]
    name = f"killed-{depth}-{killed_after}"
    process = tiny_run.start(name, *settings)
    tiny_run.kill_after(process, name, killed_after)
    before = tiny_run.metrics(name)
    resumed = tiny_run.finish(tiny_run.start(name, *settings, "--resume", "auto"), name)
    assert "resuming after step" in (tiny_run.folder / f"{name}.log").read_text()

    whole = tiny_run.finish(tiny_run.start(f"whole-{name}", *settings), f"whole-{name}")
    assert [step["step"] for step in resumed] == [1, 2, 3, 4, 5, 6]
    assert resumed == whole
    assert before == whole[: len(before)]
    assert len({step["grad_norm"] for step in whole}) == 6  # the steps differ, so equality says something
    if depth:
        assert max(step["ratio_max"] for step in whole) > 1.0  # pending rollouts were sampled by an older policy
