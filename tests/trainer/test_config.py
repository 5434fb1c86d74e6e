"""Settings: where they come from, what is refused and with which words, and the paper's table of variants."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from reward_server import options
from trainer.config import ALIASES, ENV_PREFIX, Config, UserError
from trainer.rollout import build_objective

ROOT = Path(__file__).resolve().parents[2]


def load(*arguments):
    return options.load(Config, arguments, prog="run", description="", env_prefix=ENV_PREFIX, aliases=ALIASES)


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        load(*arguments)
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


def test_later_sources_win(tmp_path, monkeypatch):
    file = tmp_path / "a.yaml"
    file.write_text("train: {steps: 5, depth: 1, seed: 7}\nreport: {run_dir: here}\n")
    monkeypatch.setenv("TRAINER_TRAIN__DEPTH", "2")
    monkeypatch.setenv("TRAINER_TRAIN__STEPS", "6")
    config = load("--config", str(file), "--steps", "9")
    assert (config.train.steps, config.train.depth, config.train.seed) == (9, 2, 7)
    assert config.report.run_dir == Path("here")


def test_aliases_and_shorthand():
    config = load(
        *("--reward-url", "http://h:1", "--reward", "shapes=1,null=0.25", "--resume", "auto"),
        *("--run-dir", "x", "--seed", "3", "--algorithm.diffusion-steps", "2,3", "--algorithm.clip", "null"),
    )
    assert config.reward.url == "http://h:1"
    assert config.reward.names == {"shapes": 1.0, "null": 0.25}
    assert config.checkpoint.resume == "auto"
    assert (config.report.run_dir, config.train.seed) == (Path("x"), 3)
    assert config.algorithm.diffusion_steps == [2, 3]
    assert config.algorithm.clip is None
    assert load("--reward", "null").reward.names == {"null": 1.0}


def test_unknown_and_ill_typed_settings_name_the_nearest_and_the_type(capsys):
    assert "did you mean 'train.steps'" in refused(capsys, "--train.stepz", "1")
    message = refused(capsys, "--train.learning-rate", "fast")
    assert "train.learning_rate is 'fast'" in message
    assert "expected: number" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train.depth", "1", "--algorithm.clip", "null"], "algorithm.clip must be a number when train.depth > 0"),
        (["--algorithm.mte-trajectories", "1"], "must be at least 2 when algorithm.top_fraction < 1"),
        (["--report.snr-groups", "1"], "report.snr_groups must be 0 or at least 2"),
        (["--reward-url", "localhost:8000"], "must start with http:// or https://"),
        (["--reward", "reward"], '"reward" names the weighted sum'),
        (["--algorithm.diffusion-steps", "2,2"], "must hold each step once"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(capsys, arguments, words):
    assert words in refused(capsys, *arguments)


def test_checks_against_the_model():
    config = Config.model_validate({"algorithm": {"diffusion_steps": [1, 16], "ar_steps_per_update": 4}})
    config.check_model(4, 18, range(17))
    with pytest.raises(UserError, match=r"names \[16\], but of the model's 17 diffusion steps those with noise"):
        config.check_model(4, 17, range(16))  # the last has none
    with pytest.raises(UserError, match="ar_steps_per_update is 4, but the model has 3 AR steps"):
        config.check_model(3, 18, range(17))
    weighted = Config.model_validate({"algorithm": {"diffusion_weights": [0, 0, 3]}})
    with pytest.raises(UserError, match="has 3 entries, but the model has 4 diffusion steps"):
        weighted.check_model(64, 4, range(3))
    with pytest.raises(UserError, match=r"is 0 at all trained steps, \[0, 1\]"):
        weighted.check_model(64, 3, range(2))


def test_whole_groups_must_share_out():
    config = Config.model_validate({"train": {"prompts_per_step": 6}})
    config.check_processes(3)
    with pytest.raises(UserError, match="6, which 4 processes cannot share"):
        config.check_processes(4)


def test_nothing_changes_after_loading():
    with pytest.raises(ValidationError, match="frozen"):
        Config().train.steps = 3


def test_secrets_do_not_reach_the_dump():
    dumped = options.dump(Config.model_validate({"reward": {"token": "s3cret", "url": "http://h"}}))
    assert "s3cret" not in dumped
    assert "url: http://h" in dumped


@pytest.mark.parametrize(
    ("name", "head", "trajectories", "fraction", "which", "consistency"),
    [
        ("grpo", "trained", 0, None, None, False),
        ("head_only", "only", 0, None, None, False),
        ("fixed_head", "frozen", 0, None, None, False),
        ("mte_all", "frozen", 3, 1.0, None, False),
        ("mte_least_uncertain", "frozen", 3, 0.7, "least", False),
        ("mte_top30", "frozen", 3, 0.3, "most", False),
        ("mar_grpo", "frozen", 3, 0.3, "most", True),
    ],
)
def test_the_papers_variants_are_a_few_keys(monkeypatch, name, head, trajectories, fraction, which, consistency):
    monkeypatch.chdir(ROOT)
    config = load("--config", "configs/train/small.yaml", "--config", f"configs/train/variants/{name}.yaml")
    objective = build_objective(config.algorithm)
    assert config.algorithm.head == head
    assert objective.mte_trajectories == trajectories
    assert fraction is None or objective.top_fraction == fraction
    assert which is None or objective.which == which
    assert objective.consistency is consistency


def test_clip_is_symmetric():
    assert build_objective(Config.model_validate({"algorithm": {"clip": 0.1}}).algorithm).clip_range == (0.1, 0.1)


@pytest.mark.parametrize("weight", ["nan", "inf"])
def test_weights_are_finite(weight):
    with pytest.raises(ValidationError, match=f"the weight of shapes is {weight}; it must be a finite number"):
        Config.model_validate({"reward": {"names": f"shapes={weight}"}})


def test_weights_that_are_all_zero_are_refused():
    with pytest.raises(ValidationError, match="every weight is 0"):
        Config.model_validate({"reward": {"names": {"a": 0.0, "b": 0}}})
    assert Config.model_validate({"reward": {"names": {"a": 0.0, "b": 1}}}).reward.names == {"a": 0.0, "b": 1.0}
