"""The embedded server's life: it serves, and nothing of it outlives the process that started it, however that dies."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from reward_server.embedded import EmbeddedServer, EmbeddedServerError, EmbeddedServerMistake, available_cores
from reward_server.settings import EmbeddedSettings, RewardSettings
from trainer.rewards import RewardClient

NULL = EmbeddedSettings(rewards={"null": RewardSettings()})
IMAGES = np.zeros((3, 8, 8, 3), np.uint8)

PARENT = """
import time
from reward_server.embedded import EmbeddedServer
from reward_server.settings import EmbeddedSettings
import psutil
if __name__ == "__main__":
    with EmbeddedServer(EmbeddedSettings(rewards="null")) as server:
        print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)
        time.sleep(60)
"""


@pytest.fixture
def process(children):
    return lambda name: next(p for p in children() if name in " ".join(p.cmdline()))


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def test_it_serves_with_a_random_token_and_leaves_nothing_behind(children):
    started = time.monotonic()
    with EmbeddedServer(EmbeddedSettings(rewards={"shapes": RewardSettings()})) as server:
        assert time.monotonic() - started < 15, "the shapes reward is ready in 2 s on an idle machine"
        assert httpx.get(f"{server.url}/v1/rewards", trust_env=False).status_code == 401
        with RewardClient(server.url, server.token, ["shapes"]) as client:
            assert client.check()["shapes"].startswith("sha256:")
            scores = client.submit(IMAGES, ["a red circle"] * 3).result(20)
        assert scores.valid["shapes"].all()
        running = children()
        assert len(running) == 4, "supervisor, Redis, gateway, worker"
        assert not any(server.token in " ".join(p.cmdline()) for p in running)
        assert len(server.token) >= 32
    assert not any(p.is_running() for p in running)
    server.close()


def test_open_access_needs_no_token():
    with EmbeddedServer(NULL, open_access=True) as server, RewardClient(server.url, None, ["null"]) as client:
        assert server.token is None
        assert client.submit(IMAGES, ["p"] * 3).result(20).scores["null"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_parent(number):
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        started = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(started) == 4
        parent.send_signal(number)
        assert parent.wait(15) == -number
        assert wait_until(lambda: not any(p.is_running() for p in started), 5.0)


def test_a_killed_worker_comes_back_and_a_killed_redis_too(process, caplog):
    with EmbeddedServer(NULL) as server, RewardClient(server.url, server.token, ["null"]) as client:
        client.check()
        process("reward_server worker").kill()
        assert client.submit(IMAGES, ["p"] * 3).result(30).valid["null"].all()
        process("valkey").kill()
        assert client.submit(IMAGES, ["p"] * 3).result(30).valid["null"].all()
        assert wait_until(lambda: "redis was killed by SIGKILL" in caplog.text, 5)
    assert "worker-null-0 was killed by SIGKILL; it starts again" in caplog.text
    assert server.failure is None


if sys.platform == "linux":  # elsewhere no kernel ends orphans

    def test_even_a_killed_supervisor_takes_its_children_along(children, process, caplog):
        with EmbeddedServer(NULL) as server:
            running = children()
            supervisor = process("reward_server.supervisor")
            supervisor.kill()
            server.wait()
            assert wait_until(lambda: not any(p.is_running() for p in running if p != supervisor), 5)
            with pytest.raises(EmbeddedServerError, match="its supervisor ended unexpectedly"):
                server.check()
        assert "its supervisor ended unexpectedly" in caplog.text
        assert len(server._folders) == 2
        assert not any(Path(folder).exists() for folder in server._folders)


def test_a_reward_that_does_not_exist_is_a_clear_error_and_leaves_nothing(children, caplog):
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(EmbeddedServerMistake, match="cannot start: no reward 'nul'; did you mean 'null'"),
        EmbeddedServer(EmbeddedSettings(rewards={"nul": RewardSettings()})),
    ):
        pass
    assert children() == []


def test_cores_are_shared_out(monkeypatch):
    rewards = {"a": RewardSettings(workers=2, threads=2), "b": RewardSettings()}
    assert EmbeddedServer(EmbeddedSettings(rewards=rewards, cores=8)).trainer_threads == 3
    assert EmbeddedServer(EmbeddedSettings(rewards=rewards, cores=4)).trainer_threads == 1
    assert 1 <= available_cores() <= os.cpu_count()


def test_names_say_what_requests_call_each_reward(plugin):
    settings = EmbeddedSettings(rewards="null,plugged:Good")
    server = EmbeddedServer(settings)
    assert server.names == {}
    with server:
        assert server.names == {"null": "null", "plugged:Good": "good-name"}


def test_a_trainer_learns_soon_that_its_reward_was_given_up(plugin, caplog):
    settings = EmbeddedSettings(rewards="null,plugged:Dies", max_restarts=0)
    with EmbeddedServer(settings) as server, RewardClient(server.url, server.token, ["null", "dies"]) as client:
        client.check()
        client._while_away = server.check

        def train():
            while True:  # the first is null with a reason, those after it are refused
                assert not client.submit(IMAGES, ["p"] * 3).result(30).valid["dies"].any()

        with pytest.raises(EmbeddedServerError, match="plugged:Dies is given up and no longer served"):
            train()
        assert server.failure is None
        assert list(server.given_up) == ["plugged:Dies"]
        with RewardClient(server.url, server.token, ["null"]) as other:
            assert other.submit(IMAGES, ["p"] * 3).result(30).valid["null"].all()
    assert "plugged:Dies is given up" in caplog.text


def test_a_server_whose_only_reward_is_given_up_is_down(plugin):
    with EmbeddedServer(EmbeddedSettings(rewards="plugged:Dies", max_restarts=0)) as server:
        client = RewardClient(server.url, server.token, ["dies"], while_away=server.check)
        with client, pytest.raises(EmbeddedServerError, match="worker-plugged-Dies-0 exited with code 3"):
            client.submit(IMAGES, ["p"] * 3).result(30)
        assert server.failure is not None
