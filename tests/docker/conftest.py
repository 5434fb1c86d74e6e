"""One engine and one set of services for all scenarios; what was built and started is removed at the end."""

import contextlib
import functools
import http.server
import json
import os
import re
import secrets
import signal
import sys
import threading
import time

import httpx
import numpy as np
import pytest

from reward_server.rewards.base import load, prepare
from tests.docker.engine import ROOT, NoEngineError, compose_tool, engine, images, told
from trainer.rewards import RewardClient
from trainer.shapes import render, split_scenes

PROJECT = "mar-grpo-test"
PORTS = range(8700, 8702)  # of two gateways


class Services:
    """The compose project of the tests."""

    def __init__(self, environment):
        self.token = environment["REWARD_SERVER_TOKEN"]
        self.environment = environment

    @property
    def url(self):
        """Of the first gateway there is; its port is one of PORTS."""
        return self.url_of(self.containers("reward_server")[0])

    def url_of(self, gateway):
        return f"http://{told('docker', 'port', gateway, '8000', quiet=True)}"

    def compose(self, *arguments, **options):
        return told(compose_tool(), *arguments, cwd=ROOT, env=self.environment, **options)

    def containers(self, service):
        return self.compose("ps", "--quiet", service, quiet=True).split()

    def kill(self, container):
        """Kill the processes of a container, as a crash would: what the restart policy says then happens."""
        pid = int(told("docker", "inspect", "--format", "{{.State.Pid}}", container, quiet=True))
        print(f"# kill -9, all processes of {container[:12]}", flush=True)
        os.kill(pid, signal.SIGKILL)  # the first process of a namespace takes the others with it

    def get(self, path, url=None):
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.get(f"{url or self.url}{path}", headers=headers, trust_env=False).raise_for_status()

    def rewards(self):
        return {info["name"]: info for info in self.get("/v1/rewards").json()["rewards"]}

    def images_accepted(self, gateway):
        """Of one gateway, by its container."""
        metrics = self.get("/metrics", self.url_of(gateway)).text
        return float(re.search(r"^reward_server_images_total (\S+)$", metrics, re.M)[1])

    def client(self, **options):
        return RewardClient(self.url, self.token, ["shapes"], give_up_after_s=120, **options)


def eventually(condition, timeout=120):
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if value := condition():
                return value
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.2)


@pytest.fixture(scope="session")
def services(tmp_path_factory):
    """Redis, the gateway and the shapes reward, built and started by ``docker compose up reward_server`` alone."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(engine())
            made = images(PROJECT)
        except NoEngineError as error:
            pytest.skip(str(error))
        print("# engine", told("docker", "version", "--format", "{{.Server.Version}}", quiet=True), flush=True)
        print("#", told(compose_tool(), "version", quiet=True), flush=True)
        environment = os.environ | made
        environment |= {
            "REDIS_PASSWORD": secrets.token_hex(16),
            "REWARD_SERVER_TOKEN": secrets.token_hex(16),
            "COMPOSE_PROJECT_NAME": PROJECT,
            "IMAGES": PROJECT,
            "PUBLISH": f"127.0.0.1:{PORTS[0]}-{PORTS[-1]}",
            "DOCKER_BUILDKIT": "0",
        }
        environment.pop("PIP_FIND_LINKS", None)  # a folder of this machine is none of the image's
        built = Services(environment)
        stack.callback(_remove, built, made)
        built.compose("up", "--detach", "--wait", "--wait-timeout", "600", "reward_server")
        yield built


def _remove(services, made):
    services.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5")
    names = told("docker", "images", "--format", "{{.Repository}}:{{.Tag}}", quiet=True).split()
    ours = [name for name in names if name.startswith(f"{PROJECT}/")]
    if ours:
        told("docker", "image", "rm", "--force", *ours, quiet=True)
    told("docker", "image", "prune", "--force", "--filter", "label=com.docker.compose.project", quiet=True, check=False)


@pytest.fixture(scope="session")
def trainer_image(services, tmp_path_factory):
    """The trainer's image, with the same build of torch as this environment has."""
    from importlib.metadata import version

    folder = tmp_path_factory.mktemp("index")
    wanted = f"torch=={version('torch').partition('+')[0]}"
    told(
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder / "torch"),
        wanted,
        quiet=True,
    )
    bridge = json.loads(told("docker", "network", "inspect", "bridge", quiet=True))[0]["IPAM"]["Config"][0]
    handler = functools.partial(_Silent, directory=folder)
    with http.server.ThreadingHTTPServer((bridge.get("Gateway", "172.17.0.1"), 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host, port = server.server_address
        arguments = {"TORCH_INDEX": f"http://{host}:{port}/", "PIP_TRUSTED_HOST": str(host)}
        flags = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
        services.compose("--profile", "trainer", "build", *flags, "trainer", timeout=1500)
        server.shutdown()


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def drawn():
    """Eight images with their prompts, and what the reward says of them here."""
    scenes = split_scenes()[0][::40][:8]
    pictures = render(scenes, np.random.default_rng(7))
    prompts = [scene.prompt for scene in scenes]
    reward = load("shapes")
    prepare(reward, "cpu", {})
    prompts[::2] = prompts[1::2]  # half of them show something else than asked
    scores = [getattr(score, "value", score) for score in reward.score(list(pictures), prompts, [{}] * len(prompts))]
    return pictures, prompts, scores
