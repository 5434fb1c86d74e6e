"""The command: settings, signals, and errors in one line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from reward_server.embedded import EmbeddedServerError
from trainer import evaluate, parts, run
from trainer.config import Config, UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def arguments(tiny, tmp_path, monkeypatch, server):
    """Tiny settings as arguments, with the in-process reward server."""
    monkeypatch.setattr(parts, "RewardClient", lambda *args, **kwargs: server.client())
    settings = {
        "policy": {"checkpoint": str(tiny.checkpoint), "ar_steps": 4, "diffusion_steps": 5},
        "prompts": {"train": str(tiny.prompts), "heldout": str(tiny.prompts)},
        "reward": {"url": "http://user:s3cret@test", "token": "s3cret"},
        "algorithm": {"ar_steps_per_update": 2},
        "train": {"steps": 2, "prompts_per_step": 2, "group_size": 4, "threads": 1},
        "evaluate": {"prompts": 3, "seeds": 1},
        "report": {"run_dir": str(tmp_path / "run"), "sheet_prompts": 2, "snr_groups": 2},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    return ["--config", str(tmp_path / "tiny.yaml")]


def test_a_run_leaves_everything_in_its_folder(arguments, tmp_path, capsys):
    assert run.main(arguments) == 0
    folder = tmp_path / "run"
    expected = {"config.yaml", "versions.json", "metrics.jsonl", "evaluations.jsonl", "signal.jsonl", "reward.png"}
    expected |= {"sheet.png", "report.json", "report.md", "samples", "checkpoints", "tensorboard"}
    assert {path.name for path in folder.iterdir()} == expected
    assert list((folder / "tensorboard" / "mar-grpo").glob("events.*"))
    assert "s3cret" not in (folder / "config.yaml").read_text()
    for name in ("versions.json", "report.json"):
        assert json.loads((folder / name).read_text())["provenance"] == {
            "shapes": {"device": "cpu", "dtype": "float32"}
        }
    assert "s3cret" not in "".join(p.read_text() for p in (folder / "checkpoints").glob("*/manifest.json"))
    resolved = Config.model_validate(yaml.safe_load((folder / "config.yaml").read_text()))
    assert resolved.train.prompts_per_step == 2
    out = capsys.readouterr().out
    assert "2 steps" in out
    assert "paired difference" in out

    assert run.main([*arguments, "--resume", "auto", "--steps", "3"]) == 0
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
    assert run.main([*arguments, "--steps", "1"]) == 0  # a new run does not touch the old one
    assert len((tmp_path / "run-2" / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--policy.name", "smal"], "there is no policy 'smal'; there are: "),
        (["--policy.checkpoint", "nowhere.safetensors"], "no checkpoint at nowhere.safetensors"),
        (["--policy.ar-steps", "99"], "ar_steps must lie in 1..16"),
        (["--prompts.train", "nowhere.txt"], "nowhere.txt"),
        (["--prompts.train", "cats.txt"], "cats.txt: the small policy does not know cat (prompt: 'a cat')"),
        (["--prompts.heldout", "cats.txt"], "cats.txt: the small policy does not know cat (prompt: 'a cat')"),
        (["--resume", "nowhere"], "checkpoint.resume: nowhere is not a checkpoint folder"),
        (["--reward", "beauty"], "does not serve 'beauty'"),
        (["--reward.token-file", "nowhere"], "reward.token_file nowhere cannot be read"),
        (["--report.trackers", "foo"], "there is no tracker 'foo'; there are: "),
        (["--report.trackers", "comet_ml"], "comet_ml is not installed; pip install comet-ml"),
        (["--run-dir", "cats.txt/run"], "report.run_dir cannot be used: Not a directory: "),
        (["--run-dir", "x" * 300], "report.run_dir cannot be used: File name too long"),
        (["--run-dir", "/proc/nowhere/run"], "report.run_dir cannot be used: "),
        (["--algorithm.diffusion-steps", "9,10"], "names [9, 10], but of the model's 5 diffusion steps"),
    ],
)
def test_a_users_mistake_is_one_line(arguments, more, words, capsys, monkeypatch, server, tmp_path):
    (tmp_path / "cats.txt").write_text("a red circle\na cat\n")
    monkeypatch.chdir(tmp_path)
    if "nowhere" in more and "--reward.token-file" in more:
        monkeypatch.setattr(parts, "RewardClient", None)  # not reached
        settings = yaml.safe_load((tmp_path / "tiny.yaml").read_text())
        del settings["reward"]["token"]
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    if "beauty" in more:
        monkeypatch.setattr(parts, "RewardClient", lambda *args, **kwargs: server.client(["beauty"]))
    assert run.main([*arguments, *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trainer/run.py: error: ")
    assert words in line
    assert server.requests == []  # found before anything was sampled
    assert not (tmp_path / "run").exists()  # nor is its name used up


def test_first_signal_asks_second_interrupts(capsys):
    before = signal.getsignal(signal.SIGINT)
    with run.stop_requests() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopping after this step" in capsys.readouterr().err


def test_launching_several_processes_the_wrong_way_is_refused(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UserError, match=r"--config_file configs/accelerate/cpu\.yaml --num_processes N"):
        parts.build_accelerator(Config())


@pytest.mark.parametrize("script", ["run.py", "evaluate.py"])
def test_help_is_complete_from_any_folder(script, tmp_path):
    command = [sys.executable, str(ROOT / "trainer" / script), "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert answer.returncode == 0
    for name in (
        "--policy.checkpoint",
        "--algorithm.mte-source",
        "--train.depth",
        "--server.gateway.spool",
        "TRAINER_",
    ):
        assert name in answer.stdout
    assert answer.stderr == ""


class FakeServer:
    """Stands in for the embedded server."""

    started = ()

    def __init__(self, settings):
        FakeServer.started = (*FakeServer.started, settings)
        self.url, self.token, self.trainer_threads = "http://test", "secret", 3
        self.names = {name: name.rpartition(":")[2].lower() for name in settings.rewards}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def check(self):
        raise RuntimeError("down for good")


def test_the_embedded_server_serves_the_rewards_of_the_run(server, monkeypatch, make_config):
    clients = []
    monkeypatch.setattr(parts, "EmbeddedServer", FakeServer)
    monkeypatch.setattr(
        parts, "RewardClient", lambda *args, **kwargs: clients.append((args, kwargs)) or server.client()
    )
    config = make_config(
        reward={"names": {"shapes": 1.0, "null": 2.0}},
        server={"rewards": {"shapes": {"workers": 2}, "other": {}}},
    )
    threads = torch.get_num_threads()
    try:
        with parts.reward_client(config, parts.build_accelerator(config)):
            assert torch.get_num_threads() == 3  # what the server leaves
    finally:
        torch.set_num_threads(threads)
    with pytest.raises(RuntimeError, match="down for good"):
        clients[0][1]["while_away"]()  # an outage of a server that is down for good ends at once
    (settings,) = FakeServer.started
    assert {name: reward.workers for name, reward in settings.rewards.items()} == {"shapes": 2, "null": 1}
    assert [args for args, _ in clients] == [("http://test", "secret", {"shapes": 1.0, "null": 2.0})]


def test_a_server_that_does_not_start_is_one_line(arguments, monkeypatch, capsys, tmp_path):
    def fail(settings):
        raise EmbeddedServerError("the gateway did not start: no memory")

    monkeypatch.setattr(parts, "EmbeddedServer", fail)
    settings = yaml.safe_load((tmp_path / "tiny.yaml").read_text())
    del settings["reward"]
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    assert run.main(arguments) == 2
    assert capsys.readouterr().err == "trainer/run.py: error: the gateway did not start: no memory\n"


def test_a_token_file_that_is_not_there_is_one_line_with_an_own_server(make_config):
    config = make_config(server={"token_file": "/missing"})
    with (
        pytest.raises(UserError, match=r"^server\.token_file /missing cannot be read"),
        parts.reward_client(config, parts.build_accelerator(config)),
    ):
        raise AssertionError


def test_rewards_named_by_their_class_are_scored_under_the_served_name(server, monkeypatch, arguments, tmp_path):
    given = []
    monkeypatch.setattr(parts, "EmbeddedServer", FakeServer)
    monkeypatch.setattr(parts, "RewardClient", lambda *args, **kwargs: given.append(args[2]) or server.client(args[2]))
    settings = yaml.safe_load((tmp_path / "tiny.yaml").read_text())
    settings["reward"] = {"names": {"my_rewards:Shapes": 2.0}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    threads = torch.get_num_threads()
    try:
        assert run.main(arguments) == 0
        assert run.main([*arguments, "--resume", "auto", "--steps", "3"]) == 0  # by the name that was given
        output = ["--output", str(tmp_path / "scores.json")]
        assert evaluate.main([*arguments, *output]) == 0
    finally:
        torch.set_num_threads(threads)
    assert given == [{"shapes": 2.0}] * 3
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["reward/mean"] == pytest.approx(2 * line["reward/shapes/mean"])
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert resolved["reward"]["names"] == {"my_rewards:Shapes": 2.0}
    assert "shapes" in json.loads((tmp_path / "scores.json").read_text())["checkpoint"]["scores"]


def test_resuming_says_what_changed_and_what_is_left(arguments, capsys):
    assert run.main(arguments) == 0
    assert "settings changed" not in capsys.readouterr().err
    assert run.main([*arguments, "--resume", "auto"]) == 0
    told = capsys.readouterr().err
    assert "all train.steps are done: nothing to train" in told
    assert "settings changed" not in told
    more = ["--resume", "auto", "--steps", "3", "--train.learning_rate", "0.01"]
    assert run.main([*arguments, *more]) == 0
    line = "settings changed since the checkpoint: train.steps 2 -> 3, train.learning_rate 2e-06 -> 0.01"
    assert line in capsys.readouterr().err.splitlines()
    assert run.main([*arguments, "--resume", "auto"]) == 2
    assert "step-00000003 is of step 3, and train.steps is 2: nothing is left to train" in capsys.readouterr().err


def test_other_heldout_prompts_on_resume_are_evaluated_before_and_after(arguments, tmp_path, capsys):
    assert run.main(arguments) == 0
    other = tmp_path / "other.txt"
    other.write_text("two red circles\none blue square\na red circle left of a blue square\n")
    capsys.readouterr()
    assert run.main([*arguments, "--resume", "auto", "--steps", "3", "--prompts.heldout", str(other)]) == 0
    said = capsys.readouterr()
    assert "prompts.heldout" in said.err
    assert "paired difference" in said.out
    folder = next(path for path in tmp_path.rglob("report.json"))
    assert json.loads(folder.read_text())["heldout"]["prompts"] == 3
    steps = [json.loads(line)["step"] for line in folder.with_name("evaluations.jsonl").read_text().splitlines()]
    assert steps == [0, 2, 2, 3]


def test_variables_of_evaluate_do_not_disturb_and_other_processes_are_silent(arguments, monkeypatch, capsys):
    monkeypatch.setenv("TRAINER_BASELINE", "x")
    monkeypatch.setenv("TRAINER_OUTPUT", "y")
    monkeypatch.setattr(run, "is_main", lambda: False)
    assert run.main([*arguments, "--policy.name", "smal"]) == 2
    assert capsys.readouterr().err == ""
