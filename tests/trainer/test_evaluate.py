"""Means, intervals and paired differences worked out by hand; generation that does not depend on the batch."""

import json

import numpy as np
import pytest
from accelerate import Accelerator

from trainer import evaluate as command
from trainer.evaluate import Evaluation, Interval, bootstrap, columns, difference, evaluate, share, spread
from trainer.policies.small import SmallPolicy
from trainer.prompts import Prompt
from trainer.rewards import RewardScores


def evaluation(rows, valid=None, prompts=("a", "b")):
    scores = np.array(rows, dtype=float)
    return Evaluation(
        list(prompts), {"reward": scores}, {"reward": np.ones_like(scores, bool) if valid is None else valid}
    )


def test_bootstrap_over_prompts():
    # four prompts, values 0 or 1: a resampled mean is Binomial(4, 1/2) / 4, whose 2.5 and 97.5 percentiles are 0 and 1
    assert bootstrap(np.array([0.0, 0.0, 1.0, 1.0])) == Interval(0.5, 0.0, 1.0, 4)
    assert bootstrap(np.array([0.25])) == Interval(0.25, None, None, 1)
    assert bootstrap(np.zeros(0)) == Interval(None, None, None, 0)
    values = np.random.default_rng(1).normal(2.0, 1.0, size=400)
    interval = bootstrap(values)
    half_width = 1.96 * values.std() / 20
    assert interval.low == pytest.approx(values.mean() - half_width, abs=0.01)
    assert interval.high == pytest.approx(values.mean() + half_width, abs=0.01)
    assert bootstrap(values) == interval


def test_prompt_means_leave_missing_scores_out():
    valid = np.array([[True, False], [True, True], [False, False]])
    result = evaluation([[0.5, np.nan], [0.2, 0.4], [np.nan, np.nan]], valid, "abc")
    means, seen = result.prompt_means("reward")
    assert means[:2].tolist() == pytest.approx([0.5, 0.3])
    assert seen.tolist() == [True, True, False]
    assert result.interval("reward").mean == pytest.approx(0.4)
    assert result.interval("reward").prompts == 2
    assert result.missing("reward") == 3


def test_difference_is_paired_by_prompt():
    before = evaluation([[0.0, 0.2], [0.8, 1.0]])
    after = evaluation([[0.1, 0.3], [0.9, 1.1]])
    change = difference(before, after, "reward")
    # both prompts gained exactly 0.1: pairing leaves no spread, though the prompts differ by 0.8
    assert (change.mean, change.low, change.high) == pytest.approx((0.1, 0.1, 0.1))
    missing = evaluation([[0.1, 0.3], [0.9, 1.1]], np.array([[True, True], [False, False]]))
    assert difference(before, missing, "reward").prompts == 1
    with pytest.raises(ValueError, match="same prompts"):
        difference(before, evaluation([[0, 0], [0, 0]], prompts="xy"), "reward")


def test_json_round_trip_keeps_missing_scores_missing():
    valid = np.array([[True, False], [True, True]])
    line = json.loads(json.dumps(evaluation([[0.5, np.nan], [0.2, 0.4]], valid).to_json(), allow_nan=False))
    assert line["scores"]["reward"] == [[0.5, None], [0.2, 0.4]]
    assert line["missing"] == {"reward": 1}
    back = Evaluation.from_json(line)
    assert back.valid["reward"].tolist() == valid.tolist()
    assert back.interval("reward").mean == pytest.approx(0.4)


def test_columns_sum_rewards_and_drop_what_is_missing():
    nan = np.nan
    answer = RewardScores(
        scores={"a": np.array([1.0, nan, 3.0]), "b": np.array([10.0, 20.0, 30.0])},
        valid={"a": np.array([True, False, True]), "b": np.array([True, True, True])},
        reasons={"a": [None, "broken", None], "b": [None] * 3},
        details={"a": {"strict": np.array([1.0, nan, nan])}, "b": {}},
        revisions={},
        provenance={},
        seconds=0.0,
        away_s=0.0,
    )
    scores, valid = columns(answer, {"a": 2.0, "b": 0.1})
    assert list(scores) == ["reward", "a", "a.strict", "b"]
    assert valid["reward"].tolist() == [True, False, True]
    assert scores["reward"][[0, 2]].tolist() == pytest.approx([3.0, 9.0])
    assert valid["a.strict"].tolist() == [True, False, False]


def test_spread_and_share():
    assert spread(10, 4) == [0, 2, 5, 7]
    assert spread(3, 8) == [0, 1, 2]
    assert spread(5, 0) == []

    class Two:
        num_processes = 2

        def __init__(self, rank):
            self.process_index = rank

    assert [*share(5, Two(0)), *share(5, Two(1))] == [0, 1, 2, 3, 4]
    assert len(share(4, Two(0))) == len(share(4, Two(1))) == 2


def test_evaluate_does_not_depend_on_the_batch(tiny, server, monkeypatch):
    policy = SmallPolicy.load(tiny.checkpoint, ar_steps=3, diffusion_steps=4)
    sampled = []
    rollout = policy.rollout
    monkeypatch.setattr(policy, "rollout", lambda texts, seeds: sampled.append(len(texts)) or rollout(texts, seeds))
    prompts = [Prompt("one red circle"), Prompt("two blue squares"), Prompt("a red circle above a blue square")]
    found = []
    with server.client() as client:
        for batch in (2, 7):
            found.append(
                evaluate(
                    policy,
                    client,
                    prompts,
                    images_per_prompt=3,
                    weights={"shapes": 1.0},
                    accelerator=Accelerator(cpu=True),
                    batch=batch,
                    shown=[0, 2],
                )
            )
    small, large = found
    assert sampled == [2, 1, 2, 1, 2, 1, 6, 3], "no more at once than the batch"
    texts = [prompt.text for prompt in prompts]
    cuts = [texts[:1], texts[1:2], texts[2:], texts[:2], texts[2:]]
    assert [r.prompts for r in server.requests] == [[t for t in cut for _ in range(3)] for cut in cuts], "whole prompts"
    np.testing.assert_allclose(small.scores["shapes"], large.scores["shapes"], atol=2e-3)  # a pixel may round apart
    assert small.images.shape == (2, 3, 48, 48, 3)
    assert large.valid["reward"].all()
    # the images that are shown are those that were scored
    expected = (large.images[..., 0].mean(axis=(2, 3)) - large.images[..., 2].mean(axis=(2, 3))) / 255
    np.testing.assert_allclose(large.scores["shapes"][[0, 2]], expected, atol=1e-9)


def test_command_reports_a_paired_difference(tiny, make_run, server, tmp_path, monkeypatch, capsys):
    from trainer.loop import save

    run = make_run()
    run.policy.backbone.mask_token.data += 1.0
    run.step = 7
    save(run)
    monkeypatch.setattr(command_parts(), "RewardClient", lambda *args, **kwargs: server.client())
    status = command.main(
        [
            *("--policy.ar-steps", "4", "--policy.diffusion-steps", "5", "--prompts.heldout", str(tiny.prompts)),
            *("--checkpoint", str(run.folder.root), "--baseline", str(tiny.checkpoint), "--reward-url", "http://test"),
            *("--evaluate.prompts", "4", "--seeds", "2", "--output", str(tmp_path / "out.json")),
        ]
    )
    assert status == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["checkpoint"]["path"].endswith("step-00000007/policy.safetensors")
    change = report["differences"]["shapes"]
    means = [report[name]["intervals"]["shapes"]["mean"] for name in ("checkpoint", "baseline")]
    assert change["mean"] == pytest.approx(means[0] - means[1])
    assert change["mean"] != 0
    assert "4 prompts, 2 images each" in capsys.readouterr().out


def test_command_explains_a_missing_path(tiny, capsys, monkeypatch):
    monkeypatch.setattr(command_parts(), "RewardClient", None)  # not reached: an absent server is not waited for
    arguments = ["--prompts.heldout", str(tiny.prompts), "--reward-url", "http://test"]
    for given in (["--checkpoint", "/nowhere"], ["--checkpoint", str(tiny.checkpoint), "--baseline", "/nowhere"]):
        assert command.main([*arguments, *given]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "there is no checkpoint at /nowhere: name a file" in line
    assert command.main([*arguments, "--output", "/nowhere/x.json"]) == 2
    assert "output: there is no folder /nowhere" in capsys.readouterr().err


def test_command_explains_a_prompt_that_the_policy_cannot_read(tiny, tmp_path, capsys, monkeypatch, server):
    monkeypatch.setattr(command_parts(), "RewardClient", lambda *args, **kwargs: server.client())
    (tmp_path / "cats.txt").write_text("a red circle\na cat\n")
    arguments = ["--checkpoint", str(tiny.checkpoint), "--prompts.heldout", str(tmp_path / "cats.txt")]
    assert command.main([*arguments, "--reward-url", "http://test"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/cats.txt: the small policy does not know cat (prompt: 'a cat')" in line
    assert server.requests == []


def command_parts():
    from trainer import parts

    return parts
