"""A scripted OpenAI-compatible server on loopback: real HTTP, and whatever answer a test wants."""

import base64
import contextlib
import io
import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import PIL.Image
import pytest

from reward_server.rewards import judge


class ScriptedChat:
    """``answer(body)`` gives the reply to a chat completion: a dict or text (200), or (status, headers, bytes)."""

    def __init__(self):
        self.answer = lambda body: completion("4")
        self.models = [{"id": "tiny-judge", "owned_by": "tests", "root": "/weights/tiny"}]
        self.bodies, self.headers = [], []
        self.busy = self.busiest = 0
        self._lock = threading.Lock()
        chat = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # or each answer waits 40 ms for an acknowledgement

            def do_GET(self):
                known = self.path == "/v1/models" and chat.models is not None
                self.send(json_answer({"data": chat.models}) if known else (404, {}, b"no such path"))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with chat._lock:
                    chat.bodies.append(body)
                    chat.headers.append(dict(self.headers))
                    chat.busy += 1
                    chat.busiest = max(chat.busiest, chat.busy)
                try:
                    answer = chat.answer(body)
                finally:
                    with chat._lock:
                        chat.busy -= 1
                self.send(json_answer(answer) if isinstance(answer, dict) else answer)

            def send(self, answer):
                if answer is None:  # the connection breaks
                    self.close_connection = True
                    return
                status, headers, content = answer
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(content))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    for piece in content if isinstance(content, list) else [content]:
                        self.wfile.write(piece)
                        self.wfile.flush()
                        if isinstance(content, list):
                            time.sleep(0.1)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def json_answer(value):
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def completion(text, *tokens, finish="stop"):
    """An answer as OpenAI's; each token is its candidates with their probabilities, the generated one first."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    if tokens:
        content = [
            {
                "token": next(iter(candidates)),
                "logprob": math.log(next(iter(candidates.values()))),
                "top_logprobs": [{"token": t, "logprob": math.log(p)} for t, p in candidates.items()],
            }
            for candidates in tokens
        ]
        choice["logprobs"] = {"content": content}
    return {"id": "1", "object": "chat.completion", "choices": [choice]}


def pictures(body):
    """The images of a request, as arrays."""
    urls = [part["image_url"]["url"] for part in body["messages"][-1]["content"] if part["type"] == "image_url"]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    return [np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))) for url in urls]


@pytest.fixture
def chat():
    server = ScriptedChat()
    server.completion, server.pictures, server.json_answer = completion, pictures, json_answer
    yield server
    server.close()


@pytest.fixture
def make_judge(chat):
    """``make_judge(option=...)``: a judge at the scripted server, set up; the requests of that are forgotten."""
    with contextlib.ExitStack() as stack:

        def make(reward_class=judge.Model, **options):
            reward = reward_class()
            try:
                reward.setup("cpu", **{"base_url": chat.url, "retries": 0, **options})
            finally:
                if hasattr(reward, "chat"):
                    stack.callback(reward.chat.close)
            chat.setup_bodies = list(chat.bodies)
            chat.bodies.clear()
            return reward

        yield make
