"""The reward-server command: what it prints, what it exits with, and its errors in one line."""

import json
import os
import signal
import socket
import subprocess
import sys

import httpx
import numpy as np
import pytest
from PIL import Image

from reward_server import cli, client_cli, gateway, worker
from reward_server.embedded import EmbeddedServer
from reward_server.environments import Environment, description, own
from reward_server.rewards.base import RewardLoadError, available


@pytest.fixture
def run(capsys):
    """Run a command within this process; returns (exit code, stdout, stderr)."""

    def command(*argv):
        try:
            code = cli.main(list(argv))
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


@pytest.fixture
def served(monkeypatch):
    """Make the client commands talk to a function in place of a server."""

    def install(handler):
        transport = httpx.MockTransport(handler)
        real = httpx.Client
        monkeypatch.setattr(client_cli.httpx, "Client", lambda **settings: real(**settings, transport=transport))

    return install


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
    return path


def finished(scores, reasons):
    timings = {"queued_ms": 1, "scored_ms": 1}
    result = {"revision": "1", "scores": scores, "reasons": reasons, "timings": timings}
    return httpx.Response(200, json={"id": "j", "state": "done", "results": {"shapes": result}})


def test_help_lists_the_commands_and_each_command_all_its_settings(run):
    code, out, _ = run("--help")
    assert code == 0
    assert all(f"\n  {name} " in out for name in cli.COMMANDS)
    for command, settings in {
        "up": [
            "--rewards",
            "--port",
            "--redis-url",
            "--cores",
            "--gateway.max-depth",
            "[REWARD_SERVER_GATEWAY__SPOOL]",
            "--rewards.NAME.max-batch",
            "--rewards.NAME.reward",
            "--envs",
            "\naddress and access:\n",
            "\nrewards and processes:\n",
            "\nlogging:\n",
            "\nrewards.NAME: batches and retries:\n",
            "\ngateway: payloads:\n",
            "\ngateway: limits:\n",
        ],
        "gateway": [
            "\naddress and access:\n",
            "\npayloads:\n",
            "\nlimits:\n",
            "\nlogging:\n",
            "--host",
            "--spool",
            "--token-file",
            "[REWARD_SERVER_MAX_BODY_BYTES]",
        ],
        "worker": [
            "\nreward model:\n",
            "\nbatches and retries:\n",
            "REWARD",
            "--device",
            "--options",
            "--claim-idle-ms",
        ],
        "prefetch": ["REWARD", "--options", "--envs"],
        "selftest": ["REWARD", "--options", "--device", "--images"],
        "env": ["REWARD", "--check", "--envs", "[REWARD_SERVER_ENVS]"],
        "list": ["\naddress and access:\n", "--url", "--json", "--envs"],
        "score": ["\naddress and access:\n", "IMAGES", "--prompt", "--prompts", "--rewards", "--timeout-s"],
    }.items():
        code, out, _ = run(command, "--help")
        assert code == 0
        assert [setting for setting in settings if setting not in out] == [], command
        assert ("\nsettings:\n" in out) == (command not in ("up", "gateway", "worker")), (
            "a server's settings are all under a heading"
        )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["wroker"], "reward-server: error: no command 'wroker'; did you mean 'worker'? known: up, gateway, "),
        (["gateway", "--prt", "1"], "reward-server gateway: error: --prt: unknown setting 'prt'; did you mean 'port'?"),
        (["list", "--token-file", "nowhere"], "reward-server list: error: token_file nowhere cannot be read: "),
        (["score", "a.png", "--url", "foo"], "reward-server score: error: --url: url is 'foo': an http:// or"),
        (["list", "--url", "h:8000"], "reward-server list: error: --url: url is 'h:8000': an http:// or"),
        (["score", "nowhere.png"], "reward-server score: error: nowhere.png: no such file or folder"),
        (["score"], "reward-server score: error: no images: name files or folders, reward-server score IMAGES"),
        (["env"], "reward-server env: error: which reward? reward-server env NAME"),
        (["env", "shape"], "reward-server env: error: no lock file shape.txt; there are: aesthetic, "),
        (["worker", "shape"], "reward-server worker: error: no reward 'shape'; did you mean 'shapes'?"),
        (["gateway", "--host", "0.0.0.0"], "reward-server gateway: error: host '0.0.0.0' can be reached from other"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(run, argv, message):
    code, out, err = run(*argv)
    assert code == 2
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_no_command_shows_the_usage_as_an_error(run):
    code, out, _ = run()
    assert code == 2
    assert out.startswith("usage: reward-server COMMAND")


def test_gateway_and_worker_run_with_their_settings(run, monkeypatch):
    monkeypatch.setenv("REWARD_SERVER_TOKEN", "secret")
    seen = []
    monkeypatch.setattr(gateway, "run", lambda settings, ready: (seen.append(settings), ready("http://h:1")))
    monkeypatch.setattr(worker, "run", seen.append)
    code, out, _ = run("gateway", "--port", "0", "--max-depth", "7")
    assert (code, json.loads(out)) == (0, {"url": "http://h:1"})
    assert run("worker", "null", "--options", "{a: 1}")[0] == 0
    assert (seen[0].port, seen[0].max_depth, seen[0].bearer_token()) == (0, 7, "secret")
    assert (seen[1].reward, seen[1].options, seen[1].bearer_token()) == ("null", {"a": 1}, "secret")


def test_what_a_gateway_or_worker_refuses_is_a_line(run, monkeypatch):
    def refuse(error):
        def raising(*_):
            raise error

        return raising

    monkeypatch.setattr(gateway, "run", refuse(OSError(98, "Address already in use")))
    assert (
        run("gateway")[2] == "reward-server gateway: error: cannot listen on 127.0.0.1:8000: Address already in use\n"
    )
    monkeypatch.setattr(worker, "run", refuse(RewardLoadError("reward 'x' needs the package 'y'")))
    assert run("worker", "x")[2] == "reward-server worker: error: reward 'x' needs the package 'y'\n"


def test_list_without_a_server_says_what_can_be_served_and_where(run, tmp_path):
    lines = run("list", "--envs", str(tmp_path))[1].splitlines()
    assert lines[0].split() == ["reward", "environment"]
    assert [line.split()[0] for line in lines[1:]] == available()
    listed = {entry["name"]: entry for entry in json.loads(run("list", "--json", "--envs", str(tmp_path))[1])}
    assert listed["null"] == {"name": "null", "environment": "main", "description": description("null")}
    assert listed["hpsv2_package"]["environment"] == "not installed"


def test_env_prints_the_python_or_what_differs(run, monkeypatch, tmp_path):
    monkeypatch.setattr(Environment, "make", lambda self: (self.python.parent.mkdir(parents=True), self.python.touch()))
    folder = own("null", tmp_path).folder
    unmade = f"{folder} has not been made: reward-server env null\n"
    assert run("env", "null", "--check", "--envs", str(tmp_path)) == (1, "", unmade)
    assert not folder.exists()
    monkeypatch.setattr(Environment, "differences", lambda self: [])
    assert run("env", "null", "--envs", str(tmp_path)) == (0, f"{folder}/bin/python\n", "")
    monkeypatch.setenv("REWARD_SERVER_ENVS", str(tmp_path))
    assert run("env", "null", "--check") == (0, f"{folder}/bin/python\n", "")


def test_score_prints_numbers_and_reasons(run, served, image, tmp_path):
    (tmp_path / "b.JPG").write_bytes(image.read_bytes())
    (tmp_path / "a.txt").write_text("a red circle\n")
    (tmp_path / "b.txt").write_text("two, blue squares\n")
    requests = []

    def serve(request):
        requests.append((request.method, request.url.path, request.read()))
        if len(requests) == 1:
            return httpx.Response(202, json={"id": "j", "state": "queued"})
        return finished([0.5, None], [None, "too dark"])

    served(serve)
    code, out, _ = run("score", str(tmp_path))
    assert code == 0
    assert out.splitlines() == [
        f"image{' ' * (len(str(image)) - 5)}  shapes",
        f"{image}  0.5000",
        f"{tmp_path / 'b.JPG'}  -       shapes: too dark",
    ]
    assert [request[:2] for request in requests] == [("POST", "/v1/score"), ("GET", "/v1/jobs/j")]
    body = requests[0][2]
    assert body.index(b"a red circle") < body.index(b"two, blue squares")
    assert body.count(b'name="image"') == 2


def test_score_fails_if_nothing_was_scored(run, served, image):
    served(lambda request: finished([None], ["too dark"]))
    code, out, _ = run("score", str(image), "--prompt", "a")
    assert code == 1
    assert "too dark" in out


def test_score_as_json_with_one_prompt_or_a_file_of_them(run, served, image, tmp_path):
    served(lambda request: finished([0.5], [None]))
    printed = json.loads(run("score", str(image), "--prompt", "a, b", "--json", "--metadata", '[{"k": 1}]')[1])
    assert printed["prompts"] == ["a, b"]
    assert printed["results"]["shapes"]["scores"] == [0.5]
    (tmp_path / "p.list").write_text("one\n\n")
    assert json.loads(run("score", str(image), "--prompts", str(tmp_path / "p.list"), "--json")[1])["prompts"] == [
        "one"
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "a.txt: no such file; give --prompt, --prompts FILE, or a .txt beside each image"),
        (["--prompts", "{folder}/two.list"], "two.list has 2 prompts for 1 images"),
        (["--prompts", "{folder}/a.png"], "a.png cannot be read as text"),
        (["--prompt", "p", "--metadata", "[]"], "0 metadata for 1 images: one per image is needed"),
        (["--prompt", "p", "--rewards", "[]"], "at least one reward must be named"),
        (["--prompt", "p", "--rewards", "a,b,a"], "each reward can be named once, got a, b, a"),
    ],
)
def test_score_explains_what_does_not_fit(run, image, tmp_path, argv, message):
    (tmp_path / "two.list").write_text("one\ntwo\n")
    code, _, err = run("score", str(image), *(part.format(folder=tmp_path) for part in argv))
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (httpx.ConnectError("refused"), "no answer from http://s: refused; is `reward-server up` running?"),
        (httpx.Response(502, text="proxy"), "answered 502: 'proxy', which is not from a reward server"),
        (httpx.Response(200, text="<html>"), "reward-server score: error: Invalid JSON"),
        (httpx.Response(202, json={"id": "j", "state": "running"}), "no scores within 0.001 s"),
        (
            httpx.Response(404, json={"error": {"code": "unknown_reward", "message": "no worker serves 'shapes'"}}),
            "http://s answered 404: no worker serves 'shapes'",
        ),
        (
            httpx.Response(
                422, json={"error": {"code": "malformed", "message": "damaged", "where": "form.image b/a.png"}}
            ),
            "http://s answered 422: damaged (at form.image b/a.png)",
        ),
    ],
)
def test_score_says_what_the_server_said(run, served, image, reply, message):
    def serve(request):
        if isinstance(reply, Exception):
            raise reply
        return reply

    served(serve)
    code, out, err = run("score", str(image), "--prompt", "p", "--url", "http://s", "--timeout-s", "0.001")
    assert (code, out) == (2, "")
    assert message in err


def test_up_serves_and_says_how_to_use_it(run, monkeypatch, image):
    """A real server, used through the other commands while it is up, then stopped as by Ctrl-C."""
    used = {}

    def use(server):
        used["list"] = run("list", "--url", server.url, "--json")
        used["table"] = run("list", "--url", server.url)
        used["score"] = run(
            "score", str(image), "--prompt", "a red circle", "--rewards", "null,shapes", "--url", server.url
        )
        raise KeyboardInterrupt

    monkeypatch.setattr(EmbeddedServer, "wait", use)
    before = signal.getsignal(signal.SIGTERM)
    code, out, err = run("up", "--rewards", "shapes,null", "--port", "0", "--log-level", "warning")
    signal.signal(signal.SIGTERM, before)
    assert (code, out, err) == (0, "", "stopped\n")
    code, listed, _ = used["list"]  # capsys: what `up` printed before is in front
    line, _, rest = listed.partition("\n")
    assert json.loads(line)["rewards"] == ["shapes", "null"]
    assert {reward["name"]: reward["workers"] for reward in json.loads(rest)} == {"shapes": 1, "null": 1}
    assert "curl -F image=@image.png" in used["list"][2]
    assert "TOKEN" not in used["list"][2]
    assert used["table"][1].splitlines()[0].split() == ["reward", "revision", "workers", "waiting", "needs"]
    assert used["score"][1].splitlines()[1].split() == [str(image), "1.0000", "0.0000"]


def test_ctrl_c_ends_up_quietly():
    command = [
        sys.executable,
        "-m",
        "reward_server",
        "up",
        "--rewards",
        "null",
        "--port",
        "0",
        "--log-level",
        "warning",
    ]
    environment = {**os.environ, "REWARD_SERVER_TOKEN": "secret"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        url = json.loads(process.stdout.readline())["url"]
        assert httpx.get(f"{url}/v1/rewards", trust_env=False).status_code == 401
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=15)
    assert process.returncode == 0
    assert out == ""
    assert err.endswith("stopped\n")
    assert "Traceback" not in err
    assert "secret" not in err
    assert "$REWARD_SERVER_TOKEN" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rewards", "nul"], "the reward server cannot start: no reward 'nul'; did you mean 'null'?"),
        (["--rewards", "hpsv2_package"], "the reward server cannot start: reward 'hpsv2_package' needs hpsv2==1.2.0"),
        (["--rewards", "{n: {reward: 'null', python: /no}}"], "the reward server cannot start: rewards.n.python: /no "),
        (["--port", "{taken}"], "the reward server cannot start: cannot listen on 127.0.0.1:{taken}: "),
        (["--host", "0.0.0.0"], "the reward server cannot start: host '0.0.0.0' can be reached from other machines"),
    ],
)
def test_a_mistake_in_what_up_is_to_do_is_one_line_and_exit_code_2(run, argv, message, tmp_path, monkeypatch):
    monkeypatch.setenv("REWARD_SERVER_ENVS", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        code, out, err = run(
            "up", "--rewards", "null", "--port", "0", *(part.replace("{taken}", str(taken)) for part in argv)
        )
    signal.signal(signal.SIGTERM, before)
    assert (code, out) == (2, "")
    assert err.startswith(f"reward-server up: error: {message.replace('{taken}', str(taken))}")
    assert err.count("\n") == 1


def test_up_prints_the_names_that_requests_use_and_which_variables_hold_the_token(run, monkeypatch, plugin):
    monkeypatch.setenv("REWARD_SERVER_TOKEN", "s3cret")

    def use(server):
        raise KeyboardInterrupt

    monkeypatch.setattr(EmbeddedServer, "wait", use)
    before = signal.getsignal(signal.SIGTERM)
    code, out, err = run("up", "--rewards", "plugged:Good,null", "--port", "0", "--log-level", "warning")
    signal.signal(signal.SIGTERM, before)
    assert code == 0
    assert json.loads(out)["rewards"] == ["good-name", "null"]
    assert "-F reward=good-name,null " in err
    assert "  TRAINER_REWARD__TOKEN=<the token> python trainer/run.py " in err
    assert "plugged:" not in err
    assert "s3cret" not in err


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "reward_server", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
