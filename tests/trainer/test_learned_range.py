"""A head that predicts its own variance: which std the log-probability is of (``policy.variance``)."""

import pytest
import torch

from tests.trainer.policies.families import mar
from trainer import loop


@pytest.fixture(scope="module")
def tiny_mar(tmp_path_factory):
    return mar(tmp_path_factory.mktemp("mar"))


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("variance", ["recorded", "current"])
def test_log_probabilities_are_of_the_std_that_the_setting_names(
    make_run, tiny_mar, tmp_path, monkeypatch, variance, updates
):
    (tmp_path / "classes.txt").write_text("0\n1\n2\n3\n4\n5\n")
    files = {"train": tmp_path / "classes.txt", "heldout": tmp_path / "classes.txt"}
    run = make_run(
        policy={
            "name": "mar",
            "checkpoint": tiny_mar.source,
            "guidance": 2.0,
            "variance": variance,
            "options": tiny_mar.options,
        },
        prompts=files,
        algorithm={"updates_per_rollout": updates, "kl_beta": 0.0, "diffusion_steps": [3]},
        train={"steps": 1, "learning_rate": 1e-3},
    )
    seen, real = [], loop.loss

    def spy(step, new, *rest, **named):
        seen.append(new.std)
        return real(step, new, *rest, **named)

    monkeypatch.setattr(loop, "loss", spy)
    loop.train(run)
    passes = len(seen) // updates
    assert passes == 2  # AR steps
    assert {std.requires_grad for std in seen} == {variance == "current"}
    assert all(std.shape[-1] == run.policy.channels for std in seen)
    if updates == 2:  # the weights have moved between them
        same = [torch.equal(first, second) for first, second in zip(seen[:passes], seen[passes:], strict=True)]
        assert same == [variance == "recorded"] * passes
