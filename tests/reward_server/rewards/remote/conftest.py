"""A small server on loopback, and the reward ``remote`` set up on it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from reward_server.rewards import _remote_http
from reward_server.rewards.base import load, prepare


class Server:
    """``answer(path, headers, body)`` gives (status, headers, bytes), or an object to be sent as JSON."""

    def __init__(self):
        self.answer = None
        self.requests = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.requests.append(SimpleNamespace(path=self.path, headers=self.headers, body=body))
                answer = outer.answer(self.path, self.headers, body)
                status, headers, content = (
                    answer if isinstance(answer, tuple) else (200, {}, json.dumps(answer).encode())
                )
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST  # noqa: N815

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(_remote_http, "FIRST_PAUSE_S", 0.01)
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def remote(server):
    """``remote(protocol, **options)``: the reward, set up on the server."""

    made = []

    def make(protocol, *, url=None, **options):
        reward = load("remote")
        options = {"protocol": protocol, "url": url or server.url, "timeout_s": 5.0, "retries": 0, **options}
        prepare(reward, "cpu", options)
        made.append(reward)
        server.requests.clear()
        return reward

    yield make
    for reward in made:
        reward.close()
