"""Two processes make the same run as one with the same global batch, up to rounding, and resume exactly."""

import json
import shutil
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
LAUNCH = [*ACCELERATE, "--config_file", "configs/accelerate/cpu.yaml", "--num_processes", "2"]


def test_two_processes_equal_one_and_resume(tiny_run):
    settings = ["--train.depth", "1", "--steps", "4", "--evaluate.prompts", "3"]
    one = tiny_run.finish(tiny_run.start("one", *settings), "one")
    two = tiny_run.finish(tiny_run.start("two", *settings, launcher=LAUNCH), "two")
    assert "2 process(es)" in (tiny_run.folder / "two.log").read_text()
    assert len(one) == len(two) == 4
    for step_of_one, step_of_two in zip(one, two, strict=True):
        assert step_of_one.keys() == step_of_two.keys()
        for name, value in step_of_one.items():
            # advantages of order 1 cancel in the policy term: its rounding is absolute
            assert step_of_two[name] == pytest.approx(value, rel=1e-4, abs=2e-6), name

    # as if killed in step 3: each process has a rollout of its own that waits for its scores
    shutil.rmtree(tiny_run.folder / "two" / "checkpoints" / "step-00000004")
    resumed = tiny_run.finish(tiny_run.start("two", *settings, "--resume", "auto", launcher=LAUNCH), "two")
    assert "resuming after step 2" in (tiny_run.folder / "two.log").read_text()
    assert resumed == two


def test_accelerate_alone_starts_one_process_and_the_run_says_how_to_start_more(tiny_run):
    process = tiny_run.start("alone", launcher=[*ACCELERATE, "--cpu", "--num_processes", "2"])
    assert process.wait(timeout=60) != 0
    lines = (tiny_run.folder / "alone.log").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("trainer/run.py: error: ")]
    assert " ".join(LAUNCH[3:-1]) in line  # the command that the test above runs
    assert not (tiny_run.folder / "alone").exists()


class Busy(BaseHTTPRequestHandler):
    """A reward server that serves shapes but never takes a job."""

    def do_GET(self):
        info = {"name": "shapes", "revision": "1", "workers": 1, "max_batch": 16, "depth": 0}
        self.answer(200, json.dumps({"rewards": [info]}).encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(503, b"")

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_stop_request_ends_the_wait_for_an_absent_server_on_all_processes(tiny_run):
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            process = tiny_run.start("waits", "--reward-url", url, launcher=LAUNCH)
            log = tiny_run.folder / "waits.log"
            deadline = time.monotonic() + 60
            while "is away" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.terminate()  # the launcher passes it on
            process.wait(timeout=20)  # of the 600 s that the server may be away
        finally:
            process.kill()
            server.shutdown()
    assert "stopped after 0 of 6 steps; --resume auto goes on from there" in log.read_text()
    saved = tiny_run.folder / "waits" / "checkpoints" / "step-00000000"
    assert {path.name for path in saved.glob("pending-*")} == {"pending-0.safetensors", "pending-1.safetensors"}
