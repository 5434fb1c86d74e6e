"""What becomes of children that crash: real processes, supervised within the test's own process."""

import os
import signal
import time

import httpx
import psutil
import pytest

from reward_server.options import load
from reward_server.settings import ENV_PREFIX, RewardSettings, ServerSettings, WorkerSettings
from reward_server.supervisor import Supervisor, SupervisorError, environment_of


@pytest.fixture
def supervise(tmp_path, children):
    """Start a supervisor; returns it and the events that it emits. ``until`` ticks until a condition holds."""
    started = []

    def make(**settings):
        events = []
        settings = {"rewards": {"null": RewardSettings()}, "port": 0, "log_dir": tmp_path / "logs", **settings}
        supervisor = Supervisor(ServerSettings(**settings), "secret", events.append)
        started.append(supervisor)
        supervisor.start()
        return supervisor, events

    yield make
    for supervisor in started:
        supervisor.stop()
    assert children() == []


def until(supervisor, condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        supervisor.tick()
        time.sleep(0.02)


def child(supervisor, name):
    return next(c for c in supervisor._children if c.name == name)


def test_environment_carries_settings_to_a_child_unchanged(monkeypatch):
    settings = WorkerSettings(
        reward="m:C", token="s3cret", device="null", options={"a": [1, None], "b": "x,y"}, max_wait_ms=0.5
    )
    for name, value in environment_of(settings).items():
        monkeypatch.setenv(name, value)
    assert load(WorkerSettings, [], prog="p", description="", env_prefix=ENV_PREFIX) == settings


def test_ready_means_that_every_worker_lives_and_stop_leaves_nothing(supervise, tmp_path, children):
    rewards = {"null": RewardSettings(workers=2, threads=3), "shapes": RewardSettings()}
    supervisor, events = supervise(rewards=rewards)
    until(supervisor, lambda: events)
    assert events[0]["event"] == "ready"
    assert events[0]["url"].startswith("http://127.0.0.1:")
    assert events[0]["names"] == {"null": "null", "shapes": "shapes"}
    logs = list((tmp_path / "logs").iterdir())
    names = {"redis.log", "gateway.log", "worker-null-0.log", "worker-null-1.log", "worker-shapes-0.log"}
    assert {path.name for path in logs} == names
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in logs)

    assert not any("secret" in " ".join(p.cmdline()) for p in children())
    pids = {c.name: c.process.pid for c in supervisor._children if c.name != "redis"}  # Valkey overwrites its own
    threads = {name: psutil.Process(pid).environ()["OMP_NUM_THREADS"] for name, pid in pids.items()}
    assert threads == {"gateway": "1", "worker-null-0": "3", "worker-null-1": "3", "worker-shapes-0": "1"}

    assert (supervisor._folder / "redis.sock").is_socket()
    assert supervisor._folder.stat().st_mode & 0o777 == 0o700
    supervisor.stop()
    assert not supervisor._folder.exists()
    assert not supervisor._payloads.exists()
    assert children() == []


def test_a_crashed_child_starts_again_and_the_server_serves_as_before(supervise):
    supervisor, events = supervise()
    until(supervisor, lambda: events)
    name, url = "gateway", events[0]["url"]
    before = child(supervisor, name).process.pid
    os.kill(before, signal.SIGKILL)
    until(supervisor, lambda: len(events) == 2)
    assert events[1]["event"] == "restarted"
    assert events[1]["message"].startswith(
        f"{name} was killed by SIGKILL; it starts again in 0.2 s; the end of its log:"
    )
    until(supervisor, lambda: child(supervisor, name).process is not None)
    assert child(supervisor, name).process.pid != before
    headers = {"Authorization": "Bearer secret"}

    def serves():
        try:
            return httpx.get(f"{url}/v1/rewards", headers=headers, trust_env=False).json()["rewards"][0]["workers"] == 1
        except httpx.TransportError:
            return False

    until(supervisor, serves)


def test_a_child_that_crashes_too_often_is_a_failure_but_old_restarts_are_forgotten(supervise):
    supervisor, events = supervise(max_restarts=2)
    until(supervisor, lambda: events)
    worker = child(supervisor, "worker-null-0")

    def kill_and_tick():
        until(supervisor, lambda: worker.process is not None)
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
        supervisor.tick()

    kill_and_tick()
    worker.restarts[0] -= 301  # restart_window_s is 300
    kill_and_tick()
    kill_and_tick()
    assert [event["event"] for event in events] == ["ready"] + 3 * ["restarted"]
    with pytest.raises(SupervisorError, match="worker-null-0 was killed by SIGKILL after 2 restarts; its log ends:"):
        kill_and_tick()


def test_a_child_that_cannot_start_fails_at_once_with_its_own_words(supervise):
    supervisor, events = supervise(rewards={"shape": RewardSettings()})
    with pytest.raises(
        SupervisorError, match=r"worker-shape-0 exited with code 2 at the start.*\n.*did you mean 'shapes'"
    ):
        until(supervisor, lambda: False)
    assert events == []


def test_too_slow_a_start_is_a_failure_with_every_log(supervise):
    supervisor, _ = supervise(start_timeout_s=0.01)
    with pytest.raises(SupervisorError, match=r"(?s)not ready after 0\.01 s.*redis\.log.*worker-null-0\.log"):
        until(supervisor, lambda: False)
