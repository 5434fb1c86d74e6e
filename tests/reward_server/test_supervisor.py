"""What becomes of children that crash: real processes, supervised within the test's own process."""

import io
import os
import signal
import socket
import time
from dataclasses import replace

import httpx
import psutil
import pytest
import redis
from PIL import Image

from reward_server.options import load
from reward_server.queue import WorkerInfo, WorkQueue
from reward_server.roster import Roster
from reward_server.settings import ENV_PREFIX, RewardSettings, ServerSettings, WorkerSettings
from reward_server.supervisor import Supervisor, SupervisorError, environment_of

PNG = io.BytesIO()
Image.new("RGB", (8, 8)).save(PNG, "PNG")
PNG = PNG.getvalue()


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
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)
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
    assert events[1]["message"].startswith(f"{name} was killed by SIGKILL; it starts again in 0.2 s; its log ends:")
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
    with pytest.raises(SupervisorError, match=r"^no reward 'shape'; did you mean 'shapes'.*Class$") as failure:
        until(supervisor, lambda: False)
    assert failure.value.mistake
    assert events == []


def test_a_redis_that_does_not_answer_is_told_before_anything_starts(supervise, monkeypatch, children):
    monkeypatch.setattr("reward_server.supervisor._REDIS_WAIT_S", 0.3)
    with pytest.raises(
        SupervisorError, match=r"^redis_url: no Redis that answers at redis://user:\*\*\*@127"
    ) as failure:
        supervise(redis_url="redis://user:secret@127.0.0.1:9/0")
    assert failure.value.mistake
    assert "secret" not in str(failure.value)
    assert children() == []


def test_a_start_that_fails_otherwise_is_no_mistake_and_shows_the_log(supervise, plugin):
    supervisor, _ = supervise(rewards={"plugged:DiesAtStart": RewardSettings()})
    with pytest.raises(
        SupervisorError, match=r"worker-plugged-DiesAtStart-0 exited with code 2 at the start.*\n  bye$"
    ) as failure:
        until(supervisor, lambda: False)
    assert not failure.value.mistake


def test_a_setup_that_raises_is_one_line_and_its_traceback_stays_in_the_log(supervise, plugin, tmp_path):
    supervisor, _ = supervise(rewards={"plugged:NoWeights": RewardSettings()})
    log = tmp_path / "logs" / "worker-plugged-NoWeights-0.log"
    with pytest.raises(SupervisorError) as failure:
        until(supervisor, lambda: False)
    assert str(failure.value) == (
        f"reward 'no-weights' cannot be set up: ValueError: weights are missing: w.pt (the traceback is in {log})"
    )
    assert failure.value.mistake
    assert "Traceback (most recent call last)" in log.read_text()


def test_a_reward_that_cannot_score_a_first_image_is_not_served(supervise, plugin):
    supervisor, _ = supervise(rewards={"plugged:GivesNan": RewardSettings()})
    with pytest.raises(SupervisorError, match=r"^reward 'gives-nan' scores a first image nan") as failure:
        until(supervisor, lambda: False)
    assert failure.value.mistake


def test_a_reward_that_crashes_too_often_is_given_up_alone(supervise, plugin):
    rewards = {"null": RewardSettings(), "plugged:Dies": RewardSettings(heartbeat_s=60, claim_idle_ms=200)}
    supervisor, events = supervise(rewards=rewards, max_restarts=1, token="secret")
    until(supervisor, lambda: events)
    assert events[0]["names"]["plugged:Dies"] == "dies"
    headers = {"Authorization": "Bearer secret"}
    image = {"image": ("a.png", PNG)}
    with httpx.Client(base_url=events[0]["url"], headers=headers, trust_env=False) as client:

        def post(reward, wait):
            return client.post("/v1/score", data={"prompt": "p", "reward": reward, "wait": wait}, files=image)

        answer = post("null,dies", 0)
        assert answer.status_code == 202
        until(supervisor, lambda: events[-1]["event"] == "given_up")
        assert [event["event"] for event in events] == ["ready", "restarted", "given_up"]
        assert events[2]["reward"] == "plugged:Dies"
        assert events[2]["message"].startswith(
            "worker-plugged-Dies-0 exited with code 3 after 1 restarts: plugged:Dies is given up and no longer served "
            "(still served: null); its log ends:\n"
        )
        assert events[2]["message"].endswith("\n  dying")
        until(supervisor, lambda: not supervisor._to_retire)
        job = client.get(f"/v1/jobs/{answer.json()['id']}", params={"wait": 10}).json()
        assert job["state"] == "done"
        assert job["results"]["null"]["scores"] == [1.0]
        assert job["results"]["dies"]["scores"] == [None]
        why = "reward 'dies' was given up: worker-plugged-Dies-0 exited with code 3 after 1 restarts"
        assert job["results"]["dies"]["reasons"] == [why]
        refused = post("dies", 0)
        assert refused.status_code == 404
        assert refused.json()["error"]["message"] == "no worker serves 'dies'; served: null"
        assert [reward["name"] for reward in client.get("/v1/rewards").json()["rewards"]] == ["null"]
        assert post("null", 10).json()["results"]["null"]["scores"] == [1.0]


def test_one_worker_of_two_is_given_up_and_the_reward_is_still_served(supervise):
    supervisor, events = supervise(rewards={"null": RewardSettings(workers=2)}, max_restarts=0)
    until(supervisor, lambda: events)
    os.kill(child(supervisor, "worker-null-1").process.pid, signal.SIGKILL)
    until(supervisor, lambda: len(events) == 2)
    assert (events[1]["event"], events[1]["reward"]) == ("given_up", "")
    assert "other workers go on serving null" in events[1]["message"]
    assert list(supervisor._roster.names()).count(child(supervisor, "worker-null-0").process.pid) == 1
    os.kill(child(supervisor, "worker-null-0").process.pid, signal.SIGKILL)
    with pytest.raises(SupervisorError, match="worker-null-0 was killed by SIGKILL after 0 restarts"):
        until(supervisor, lambda: False)


def test_a_reward_is_retired_once_redis_is_back_and_only_if_nobody_else_serves_it(own_redis):
    with redis.Redis.from_url(own_redis.url, decode_responses=True) as client:
        own = WorkerInfo("red", "r1", "", (), 4, 60.0, socket.gethostname(), 11)
        queue = WorkQueue(client, "red", "ours", claim_idle_ms=1000)
        queue.join()
        queue.heartbeat(own)
        WorkQueue(client, "red", "other", claim_idle_ms=1000).heartbeat(replace(own, host="elsewhere"))
        roster = Roster(own_redis.url)
        assert roster.names() == {11: "red"}
        assert roster.retire("red", {11}, "crashed")
        assert client.zscore("rs:served", "red")
        client.zrem("rs:seen", "other")
        assert roster.retire("red", {11}, "crashed")
        assert client.zscore("rs:served", "red") is None
        assert roster.names() == {}
        own_redis.stop()
        assert not roster.retire("red", {11}, "crashed")
        assert roster.names() == {}
        roster.close()


def test_a_reward_may_be_served_under_another_name_and_twice(supervise):
    rewards = {"null": RewardSettings(), "second": RewardSettings(reward="null"), "3rd": RewardSettings(reward="null")}
    supervisor, events = supervise(rewards=rewards)
    until(supervisor, lambda: events)
    assert events[0]["names"] == {"null": "null", "second": "second", "3rd": "3rd"}


def test_too_slow_a_start_is_a_failure_with_every_log(supervise):
    supervisor, _ = supervise(start_timeout_s=0.01)
    with pytest.raises(
        SupervisorError,
        match=r"(?s)^worker-null-0 not ready after 0\.01 s; raise start_timeout_s .*redis\.log.*worker-null-0\.log",
    ):
        until(supervisor, lambda: False)
