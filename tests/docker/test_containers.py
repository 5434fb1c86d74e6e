"""What `docker compose up` promises, in an engine (make test-docker); docs/deployment.md has a run's output."""

import io
import json
import os
import subprocess
import sys

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.docker.conftest import PORTS, PROJECT, eventually
from tests.docker.engine import PYTHON, ROOT, compose_tool, told

pytestmark = [pytest.mark.docker, pytest.mark.timeout(3600)]

JOBS, COPIES = 24, 16  # jobs of a load, and how often each repeats the eight images
SHORT = ["--train.steps", "5", "--train.prompts-per-step", "4", "--train.group-size", "4", "--train.warmup-steps", "1"]
SHORT += ["--evaluate.prompts", "8", "--evaluate.seeds", "1", "--report.snr-groups", "0", "--train.threads", "1"]
SHORT += ["--train.rollout-batch", "16", "--train.micro-batch", "16", "--config", "configs/train/small.yaml"]


class Load:
    """Jobs under way; :meth:`check` waits for all and compares each score."""

    def __init__(self, services, drawn, name):
        pictures, prompts, self.expected = drawn
        self.client = services.client(max_jobs=8)
        big = [np.asarray(Image.fromarray(p).resize((128, 128), Image.Resampling.NEAREST)) for p in pictures]
        self.jobs = [
            self.client.submit(np.stack(big * COPIES), prompts * COPIES, job_id=f"{name}-{number}")
            for number in range(JOBS)
        ]

    def done(self):
        return sum(job.done() for job in self.jobs)

    def check(self):
        first = None
        for job in self.jobs:
            result = job.result(timeout=300)
            scores = result.scores["shapes"]
            assert result.valid["shapes"].all()
            assert len(scores) == 8 * COPIES
            first = scores if first is None else first
            np.testing.assert_array_equal(scores, first)
        assert len({round(score, 3) for score in first[:8]}) > 2  # they tell the images apart
        print(f"# {len(self.jobs)} jobs, {len(self.jobs) * 8 * COPIES} images: all scored, and alike", flush=True)
        self.client.close()


def test_up_serves_a_scored_image_at_once(services, drawn):
    pictures, prompts, expected = drawn
    for picture, prompt, score in zip(pictures, prompts, expected, strict=True):
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "PNG")
        answer = httpx.post(
            f"{services.url}/v1/score",
            headers={"Authorization": f"Bearer {services.token}"},
            files={"image": ("a.png", file.getvalue(), "image/png")},
            data={"prompt": prompt, "reward": "shapes"},
            trust_env=False,
            timeout=60,
        )
        assert answer.raise_for_status().json()["results"]["shapes"]["scores"] == [pytest.approx(score, abs=1e-6)]
    print(f"# curl -F image=@a.png -F prompt={prompts[-1]!r} -F reward=shapes: {expected[-1]:.3f}, as in process")
    assert 0.0 <= min(expected) < 0.6 < max(expected) <= 1.0
    assert httpx.post(f"{services.url}/v1/score", trust_env=False).status_code == 401


@pytest.mark.parametrize("service", ["reward_server", "worker-shapes"])
def test_a_container_runs_as_nobody_reads_only_and_has_no_tools(services, service):
    def within(*command):
        return told("docker", "exec", services.containers(service)[0], *command, check=False, quiet=True)

    assert within("id", "-u") == "10001"
    assert within("sh", "-c", "touch /app/x 2>&1").endswith("Read-only file system")
    assert within("sh", "-c", "command -v gcc g++ cc make ld git curl") == ""
    assert within("python", "-c", "import importlib.util as u; print(u.find_spec('pip'))") == "None"
    assert within("sh", "-c", "grep CapEff /proc/1/status").split()[1] == "0" * 16


def test_only_the_gateway_is_published_on_loopback(services):
    told("docker", "ps", "--format", "table {{.Names}}\t{{.Status}}\t{{.Ports}}")
    shown = told("docker", "ps", "--format", "{{.Names}} {{.Ports}}", quiet=True).splitlines()
    published = {line.split()[0]: line for line in shown if "->" in line}
    assert set(published) == {f"{PROJECT}-reward_server-1"}
    assert f"127.0.0.1:{PORTS[0]}->8000/tcp" in published.popitem()[1]


def test_a_killed_workers_images_are_scored_all_the_same(services, drawn):
    load = Load(services, drawn, "worker-killed")
    eventually(lambda: load.done() >= 3)
    assert load.done() < JOBS
    services.kill(services.containers("worker-shapes")[0])
    load.check()


def test_a_killed_redis_loses_nothing_that_was_acknowledged(services, drawn):
    pictures, prompts, _ = drawn
    worker = services.containers("worker-shapes")[0]
    told("docker", "pause", worker)
    header = {"Authorization": f"Bearer {services.token}"}
    file = io.BytesIO()
    Image.fromarray(pictures[1]).save(file, "PNG")
    jobs = []
    for _ in range(20):
        answer = httpx.post(
            f"{services.url}/v1/score",
            headers=header,
            files={"image": ("a.png", file.getvalue(), "image/png")},
            data={"prompt": prompts[1], "reward": "shapes", "wait": "0"},
            trust_env=False,
        )
        assert answer.status_code == 202
        jobs.append(answer.json()["id"])
    print(f"# {len(jobs)} jobs acknowledged (202), none scored", flush=True)
    services.kill(services.containers("redis")[0])
    told("docker", "unpause", worker)

    def results():
        found = [httpx.get(f"{services.url}/v1/jobs/{job}?wait=2", headers=header, trust_env=False) for job in jobs]
        assert [answer.status_code for answer in found if answer.status_code == 404] == []  # none is forgotten
        return all(answer.status_code == 200 for answer in found) and [answer.json() for answer in found]

    scores = [result["results"]["shapes"]["scores"] for result in eventually(results)]
    assert len(scores) == 20
    assert all(score == scores[0] and score[0] is not None for score in scores)
    print("# all 20 scored after Redis came back", flush=True)


def test_workers_are_scaled_up_and_down_under_load(services, drawn):
    for count in (3, 1):
        load = Load(services, drawn, f"scaled-to-{count}")
        services.compose("up", "--detach", "--no-recreate", "--scale", f"worker-shapes={count}", "worker-shapes")
        eventually(lambda count=count: services.rewards()["shapes"]["workers"] == count)
        load.check()  # a worker that is stopped gives back what it holds


UNDER_LOAD = """
import os, numpy as np
from trainer.rewards import RewardClient
images = np.random.default_rng(1).integers(0, 256, (32, 1, 1, 3), np.uint8).repeat(64, 1).repeat(64, 2)
url, token = os.environ["TRAINER_REWARD__URL"], os.environ["TRAINER_REWARD__TOKEN"]
with RewardClient(url, token, ["shapes"], give_up_after_s=120) as client:
    for number in range(150):
        result = client.submit(images, ["one red circle"] * 32, job_id=f"gateway-{number}").result(300)
        print(number, int(result.valid["shapes"].sum()), repr(float(result.scores["shapes"].sum())), flush=True)
"""


def test_of_two_gateways_one_is_killed_under_load(services, trainer_image):
    services.compose("up", "--detach", "--no-recreate", "--scale", "reward_server=2", "reward_server")
    both = services.containers("reward_server")
    assert len(both) == 2
    before = {gateway: eventually(lambda gateway=gateway: [services.images_accepted(gateway)])[0] for gateway in both}

    def served(gateway):
        return services.images_accepted(gateway) - before[gateway]

    command = [compose_tool(), "--profile", "trainer", "run", "--rm", "--no-deps", "-T", "--entrypoint", "python"]
    client = subprocess.Popen(
        [*command, "trainer", "-c", UNDER_LOAD],
        cwd=ROOT,
        env=services.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = [client.stdout.readline() for _ in range(10)]
    victim = max(both, key=served)
    assert served(victim) >= 10 * 32
    told("docker", "kill", victim)  # unlike one that crashed it is not started again
    rest, errors = client.communicate(timeout=300)
    told_of = [line for line in errors.splitlines() if " is away " in line]
    print(*[f"# {line}" for line in told_of], sep="\n", flush=True)
    rows = [line.split() for line in [*lines, *rest.splitlines()]]
    assert client.returncode == 0, errors
    assert len(told_of) == 1  # one outage, and it was short
    survivor = next(container for container in both if container != victim)
    assert served(survivor) >= 100 * 32
    assert [int(row[0]) for row in rows] == list(range(150))
    assert {row[1] for row in rows} == {"32"}
    assert len({row[2] for row in rows}) == 1  # each time the same scores
    print("# 150 jobs, 4800 images, one gateway killed after the tenth: all scored", flush=True)
    services.compose("up", "--detach", "--no-recreate", "--scale", "reward_server=1", "reward_server")
    services.compose("up", "--detach", "--wait", "reward_server")


def test_a_trainer_on_the_host_and_one_in_a_container_train_alike(services, trainer_image, tmp_path):
    eventually(lambda: services.rewards()["shapes"]["workers"] == 1)
    environment = os.environ | {"TRAINER_REWARD__TOKEN": services.token, "OMP_NUM_THREADS": "1"}
    options = [*SHORT, "--reward-url", services.url, "--run-dir", str(tmp_path / "run")]
    told(sys.executable, "trainer/run.py", *options, cwd=ROOT, env=environment)
    services.compose("--profile", "trainer", "run", "--rm", "-T", "trainer", *SHORT, "--run-dir", "/runs/run")
    inside = services.compose(
        *["--profile", "trainer", "run", "--rm", "--no-deps", "-T", "--entrypoint", "cat", "trainer"],
        "/runs/run/metrics.jsonl",
        quiet=True,
    )
    runs = [(tmp_path / "run" / "metrics.jsonl").read_text(), inside]
    host, container = [[row for row in map(json.loads, run.splitlines()) if "reward/mean" in row] for run in runs]
    assert len(host) == len(container) == 5
    rewards = [[row["reward/mean"] for row in rows] for rows in (host, container)]
    print("# mean reward of each step, host and container:", *rewards, sep="\n# ", flush=True)
    assert len(set(rewards[0])) > 1
    np.testing.assert_allclose(rewards[1], rewards[0], atol=1e-3)


def test_images_are_small(services, trainer_image):
    def megabytes(name):
        return int(told("docker", "image", "inspect", "--format", "{{.Size}}", name, quiet=True)) / 1e6

    base = megabytes(services.environment["BASE_IMAGE"] or PYTHON)
    print(f"# base: {base:.0f} MB", flush=True)
    for name, more in {"gateway": 200, "worker-shapes": 350, "trainer": 1800}.items():
        size = megabytes(f"{PROJECT}/{name}")
        print(f"# {name}: {size:.0f} MB, of which {size - base:.0f} are not the base's", flush=True)
        assert size - base < more
