"""kill -9 of a worker in the middle of a batch: every image still gets its score, once. Real processes throughout."""

import os
import signal
import subprocess
import sys

import pytest
import redis

REWARD = """
import os, pathlib, time
folder = pathlib.Path(os.environ["TEST_FOLDER"])

class Slow:
    name, revision, description, needs = "red", "1", "", ()
    example = ("warm-up", {})

    def setup(self, device):
        ...

    def score(self, images, prompts, metadata):
        if prompts == ["warm-up"]:
            return [0.0]
        started = folder / f"{os.getpid()}.started"
        started.write_text(str(len(images)))
        while not (folder / "go").exists():
            time.sleep(0.01)
        return [float(image[0, 0, 0]) for image in images]
"""
RUN = """
import sys
from reward_server.settings import WorkerSettings
from reward_server.worker import run
run(WorkerSettings(reward="slow_reward:Slow", redis_url=sys.argv[1], max_batch=8, claim_idle_ms=500, heartbeat_s=0.1))
"""


@pytest.fixture
def start_process(tmp_path, redis_url):
    (tmp_path / "slow_reward.py").write_text(REWARD)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TEST_FOLDER": str(tmp_path)}
    processes = []

    def start():
        processes.append(subprocess.Popen([sys.executable, "-c", RUN, redis_url], env=environment))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_every_image_is_scored_once_when_a_worker_is_killed(
    tmp_path, redis_url, start_gateway, start_process, send, red_images, eventually
):
    gateway = start_gateway(redis_url=redis_url)
    victim = start_process()
    eventually(lambda: gateway.get("/readyz").status_code == 200, timeout=20)
    jobs = {send(gateway, red_images(*reds), wait=0).json()["id"]: reds for reds in ((1, 2, 3, 4, 5), (6, 7, 8, 9))}
    eventually((tmp_path / f"{victim.pid}.started").exists)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    (tmp_path / "go").touch()
    start_process()
    for job, reds in jobs.items():
        answer = gateway.get(f"/v1/jobs/{job}", params={"wait": 20}).json()
        assert answer["state"] == "done"
        assert answer["results"]["red"]["scores"] == list(reds)
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        assert client.get("rs:depth:red") == "0"
        assert client.xlen("rs:stream:red") == 0
        assert client.exists("rs:dead:red") == 0


def test_sigterm_finishes_the_batch_and_exits_with_0(
    tmp_path, redis_url, start_gateway, start_process, send, red_images, eventually
):
    gateway = start_gateway(redis_url=redis_url)
    process = start_process()
    eventually(lambda: gateway.get("/readyz").status_code == 200, timeout=20)
    job = send(gateway, red_images(1, 2), wait=0).json()["id"]
    eventually((tmp_path / f"{process.pid}.started").exists)
    process.terminate()
    (tmp_path / "go").touch()
    assert process.wait(timeout=10) == 0
    assert gateway.get(f"/v1/jobs/{job}").json()["results"]["red"]["scores"] == [1, 2]
    assert gateway.get("/v1/rewards").json()["rewards"][0]["workers"] == 0
