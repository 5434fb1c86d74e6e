"""docs/add-a-reward.md works as it stands: every file that it shows is written, every command run, in a copy."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("reward_server", "trainer", "configs", "docker", "pyproject.toml", "constraints.txt")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)

LEAVE_NOTHING = "trap 'test $? = 0 || kill $(jobs -p) || true; wait' EXIT\n"
"""What runs in the background when a command fails is ended; nothing outlives the shell"""


@pytest.fixture
def copy(tmp_path):
    """The project's code, and ``python`` and ``reward-server`` that run it."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, arguments in (("python", ""), ("reward-server", "-P -m reward_server")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    return folder


@pytest.fixture
def shell(copy, tmp_path):
    """``shell(commands)``: run them by bash in the copy, stopping at the first that fails; what they printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("REWARD_SERVER_")},
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(copy),
        "REWARD_SERVER_ENVS": str(tmp_path / "envs"),
        "REWARD_SERVER_PORT": str(port),
        "REWARD_SERVER_URL": f"http://127.0.0.1:{port}",
    }

    def run(commands):
        with subprocess.Popen(
            ["bash", "-ec", LEAVE_NOTHING + commands.replace("127.0.0.1:8000", f"127.0.0.1:{port}")],
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                printed, errors = process.communicate(timeout=200)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
        assert process.returncode == 0, f"{commands}\n{printed}\n{errors}"
        return printed

    return run


def test_the_page_is_followed_to_the_letter(copy, shell):
    printed = []
    for language, text in BLOCK.findall((ROOT / "docs" / "add-a-reward.md").read_text(encoding="utf-8")):
        named = re.match(r"# (\S+)(, under (\S+))?\n", text)
        if language == "bash":
            printed.append(shell(text))
        elif named is None:  # what the last commands print
            assert text in printed[-1]
        elif named[3] is not None:
            path = copy / named[1]
            whole = path.read_text()
            assert whole.count(f"{named[3]}\n") == 1
            path.write_text(whole.replace(f"{named[3]}\n", f"{named[3]}\n{text}"))
        else:
            assert not (copy / named[1]).exists()
            (copy / named[1]).parent.mkdir(parents=True, exist_ok=True)
            (copy / named[1]).write_text(text)
    resolved, made, tested, _ = printed
    lock = (copy / "docker" / "requirements" / "warmth.txt").read_text()
    assert resolved.splitlines()[-1].startswith(str(copy.parent / "envs"))
    assert re.search(r"^safetensors==", lock, flags=re.MULTILINE)
    assert "torch==" not in lock
    assert made.splitlines()[0] == "my-warmth"
    assert made.count(" ok\n") == 3
    assert "1 passed" in tested
    (step,) = map(json.loads, (copy / "runs" / "warmth" / "metrics.jsonl").read_text().splitlines())
    assert step["missing"] == 0
    assert step["reward/warmth.x100/mean"] == pytest.approx(100 * step["reward/warmth/mean"], rel=1e-6)
    assert -1 < step["reward/warmth/mean"] < 1
    assert step["reward/warmth/std"] > 0
    for check in (
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy", "reward_server/rewards/warmth.py"],
    ):
        done = subprocess.run([sys.executable, "-m", *check], cwd=copy, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
