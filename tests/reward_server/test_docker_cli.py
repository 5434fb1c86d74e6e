"""``reward-server docker`` and ``up --backend docker``, against a small Docker daemon: real HTTP on a unix socket."""

import gc
import io
import json
import re
import socketserver
import tarfile
import threading
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from reward_server import cli, docker_cli
from reward_server.commands import DockerScaleSettings, UpSettings
from reward_server.compose_file import ComposeFile, ComposeFileError, seconds
from reward_server.environments import ROOT

COMPOSE = """
name: proj
x-worker: &worker
  init: true
  read_only: true
  tmpfs: [/tmp]
  cap_drop: [ALL]
  environment: {REWARD_SERVER_TOKEN: "${REWARD_SERVER_TOKEN:?see .env.example}", PRICE: "5$$", EXTRA: "${EXTRA:-none}"}
  volumes: ["spool:/spool", "./weights:/weights:ro"]
  networks: [queue]
  stop_grace_period: 1m30s
  depends_on: {redis: {condition: service_healthy}}
services:
  redis:
    image: redis:7
    networks: [queue]
    healthcheck: {test: [CMD, ping], interval: 5s, timeout: 1500ms, retries: 3}
  reward_server:
    image: proj/gateway
    build: {context: ., dockerfile: docker/gateway.Dockerfile, args: {REVISION: "${REVISION:-unknown}", INDEX: }}
    ports: ["${PUBLISH:-127.0.0.1:8000}:8000"]
    networks: [front, queue]
    depends_on: {redis: {condition: service_healthy}, worker-shapes: {condition: service_healthy}}
  worker-shapes: {<<: *worker, image: proj/worker-shapes}
  worker-null: {<<: *worker, profiles: ["null"], image: proj/worker-null}
  judge: {image: vllm, environment: {KEY: "${JUDGE_KEY:?the judge's}"}}
  odd: {image: odd, sysctls: {a: 1}}
networks: {front: , queue: }
volumes:
  spool: {driver_opts: {type: tmpfs, device: tmpfs, o: "size=${SPOOL_SIZE:-2g}"}}
"""


class Daemon(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """The endpoints that are used; containers become healthy at the second look."""

    daemon_threads = True

    def __init__(self, path):
        self.images = {"redis:7", "proj/worker-shapes", "proj/worker-null"}
        self.containers, self.networks, self.volumes, self.builds, self.stops = {}, {}, {}, [], []
        self.broken = set()  # services that never become healthy
        super().__init__(str(path), Handler)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def address_string(self):
        return "unix"

    def log_message(self, *_):
        pass

    def answer(self, status, body=None, raw=False):
        data = body if raw else (b"" if body is None else json.dumps(body).encode())
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream" if raw else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_any(self):
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        path = unquote(re.sub(r"^/v[\d.]+", "", url.path))
        body = self.rfile.read(int(self.headers["Content-Length"])) if "Content-Length" in self.headers else b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        for (method, pattern), action in ROUTES.items():
            if method == self.command and (found := re.fullmatch(pattern, path)):
                return action(self, *found.groups(), query=query, body=body)
        return self.answer(404, {"message": f"the test's daemon knows no {self.command} {path}"})

    do_GET = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815

    def ping(self, query, body):
        self.answer(200, b"OK", raw=True)

    def version(self, query, body):
        self.answer(200, {"ApiVersion": "1.47", "MinAPIVersion": "1.24"})

    def image(self, name, query, body):
        if name.removesuffix(":latest") not in self.server.images:
            return self.answer(404, {"message": f"No such image: {name}"})
        return self.answer(200, {"Id": f"sha256:{name}", "RepoTags": [name]})

    def build(self, query, body):
        with tarfile.open(fileobj=io.BytesIO(body)) as archive:
            self.server.builds.append({**query, "files": archive.getnames()})
        if json.loads(query["buildargs"]).get("REVISION") == "broken":
            lines = [{"stream": "Step 1/2\n"}, {"error": "pip: no such\n package"}]
        else:
            self.server.images.add(query["t"])
            lines = [{"stream": "Step 1/2 : FROM x\n"}, {"stream": "\n"}, {"stream": "Successfully built\n"}]
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in lines:
            data = json.dumps(line).encode() + b"\r\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")

    def list_networks(self, query, body):
        self.answer(200, [{"Id": name, "Name": name} for name in self.server.networks])

    def create_network(self, query, body):
        wanted = json.loads(body)
        self.server.networks[wanted["Name"]] = wanted
        self.answer(201, {"Id": wanted["Name"]})

    def network(self, name, query, body):
        self.answer(200, {"Id": name, "Name": name})

    def connect(self, name, query, body):
        wanted = json.loads(body)
        self.server.containers[wanted["Container"]]["networks"].append((name, wanted["EndpointConfig"]["Aliases"]))
        self.answer(200)

    def create_volume(self, query, body):
        wanted = json.loads(body)
        self.server.volumes[wanted["Name"]] = wanted
        self.answer(201, {"Name": wanted["Name"]})

    def create_container(self, query, body):
        wanted, name = json.loads(body), query["name"]
        if name in self.server.containers:
            return self.answer(409, {"message": f'The container name "/{name}" is already in use'})
        networks = [(key, value["Aliases"]) for key, value in wanted["NetworkingConfig"]["EndpointsConfig"].items()]
        self.server.containers[name] = {"wanted": wanted, "state": "created", "looks": 0, "networks": networks}
        return self.answer(201, {"Id": name, "Warnings": []})

    def list_containers(self, query, body):
        wanted = dict(label.split("=", 1) for label in json.loads(query["filters"])["label"])
        found = [n for n, c in self.server.containers.items() if wanted.items() <= c["wanted"]["Labels"].items()]
        self.answer(200, [{"Id": name} for name in found])

    def container(self, name, query, body):
        container = self.server.containers[name]
        container["looks"] += 1
        wanted, state = container["wanted"], {"Status": container["state"]}
        if wanted.get("Healthcheck") or "worker" in name or "reward_server" in name:
            service = wanted["Labels"]["com.docker.compose.service"]
            well = container["looks"] > 1 and service not in self.server.broken
            state["Health"] = {"Status": "healthy" if well else "starting"}
        config = {"Labels": wanted["Labels"], "Image": wanted["Image"], "Tty": False}
        self.answer(200, {"Id": name, "Name": f"/{name}", "State": state, "Config": config})

    def start(self, name, query, body):
        self.server.containers[name]["state"] = "running"
        self.answer(204)

    def stop(self, name, query, body):
        self.server.containers[name]["state"] = "exited"
        self.server.stops.append((name, query["t"]))
        self.answer(204)

    def remove(self, name, query, body):
        del self.server.containers[name]
        self.answer(204)

    def logs(self, name, query, body):
        frames = (f"{name} says {word}\n".encode() for word in ("hello", "more"))
        self.answer(200, b"".join(b"\x01\0\0\0" + len(f).to_bytes(4, "big") + f for f in frames), raw=True)


ROUTES = {
    ("GET", "/_ping"): Handler.ping,
    ("GET", "/version"): Handler.version,
    ("GET", "/images/(.+)/json"): Handler.image,
    ("POST", "/build"): Handler.build,
    ("GET", "/networks"): Handler.list_networks,
    ("POST", "/networks/create"): Handler.create_network,
    ("GET", "/networks/([^/]+)"): Handler.network,
    ("POST", "/networks/([^/]+)/connect"): Handler.connect,
    ("POST", "/volumes/create"): Handler.create_volume,
    ("POST", "/containers/create"): Handler.create_container,
    ("GET", "/containers/json"): Handler.list_containers,
    ("GET", "/containers/([^/]+)/json"): Handler.container,
    ("POST", "/containers/([^/]+)/start"): Handler.start,
    ("POST", "/containers/([^/]+)/stop"): Handler.stop,
    ("DELETE", "/containers/([^/]+)"): Handler.remove,
    ("GET", "/containers/([^/]+)/logs"): Handler.logs,
}


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    path = tmp_path / "docker.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    monkeypatch.setattr("reward_server.docker_engine._POLL_S", 0.01)
    with Daemon(path) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        yield server
        server.shutdown()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a compose file, which is the project's."""
    folder = tmp_path / "project"
    (folder / "docker").mkdir(parents=True)
    (folder / "compose.yaml").write_text(COMPOSE)
    (folder / "docker" / "gateway.Dockerfile").write_text("FROM scratch\n")
    (folder / ".env").write_text("# a comment\nREWARD_SERVER_TOKEN=secret  # of the test\nSPOOL_SIZE='3g'\n")
    monkeypatch.setattr(docker_cli, "ROOT", folder)
    for name in ("REWARD_SERVER_TOKEN", "PUBLISH", "REVISION"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def run(capfd):
    def run(*arguments):
        code = cli.main(arguments)
        return code, *capfd.readouterr()

    return run


def running(daemon):
    return {name for name, container in daemon.containers.items() if container["state"] == "running"}


def test_up_builds_what_is_missing_starts_in_order_and_waits_until_all_are_healthy(daemon, project, run, monkeypatch):
    monkeypatch.setenv("INDEX", "http://mirror")
    code, out, err = run("docker", "up", "shapes", "null")
    assert code == 0, err
    assert json.loads(out) == {"url": "http://127.0.0.1:8000", "rewards": ["shapes", "null"]}
    names = ["proj-redis-1", "proj-worker-shapes-1", "proj-reward_server-1", "proj-worker-null-1"]
    assert list(daemon.containers) == names
    assert running(daemon) == set(names)
    (build,) = daemon.builds
    assert build["t"] == "proj/gateway"
    assert build["dockerfile"] == "docker/gateway.Dockerfile"
    assert json.loads(build["buildargs"]) == {"REVISION": "unknown", "INDEX": "http://mirror"}
    assert "docker/gateway.Dockerfile" in build["files"]
    assert "proj/gateway: Step 1/2 : FROM x" in err
    assert "secret" not in out + err

    worker = daemon.containers["proj-worker-shapes-1"]
    wanted, host = worker["wanted"], worker["wanted"]["HostConfig"]
    assert set(wanted["Env"]) == {"REWARD_SERVER_TOKEN=secret", "PRICE=5$", "EXTRA=none"}
    assert host["ReadonlyRootfs"] is host["Init"] is True
    assert host["CapDrop"] == ["ALL"]
    assert host["Tmpfs"] == {"/tmp": ""}
    assert host["Binds"] == ["proj_spool:/spool", f"{project}/weights:/weights:ro"]
    assert worker["networks"] == [("proj_queue", ["worker-shapes"])]
    assert daemon.volumes["proj_spool"]["DriverOpts"]["o"] == "size=3g"
    gateway = daemon.containers["proj-reward_server-1"]
    assert gateway["networks"] == [("proj_front", ["reward_server"]), ("proj_queue", ["reward_server"])]
    binding = {"HostIp": "127.0.0.1", "HostPort": "8000"}
    assert gateway["wanted"]["HostConfig"]["PortBindings"] == {"8000/tcp": [binding]}
    health = daemon.containers["proj-redis-1"]["wanted"]["Healthcheck"]
    assert {key: value for key, value in health.items() if value is not None} == {
        "Test": ["CMD", "ping"],
        "Interval": 5 * 10**9,
        "Timeout": 15 * 10**8,
        "Retries": 3,
    }

    assert run("docker", "up", "shapes")[0] == 0  # a second time: nothing is started anew
    assert len(daemon.containers) == 4
    assert len(daemon.builds) == 1
    assert not daemon.stops


def test_up_replaces_what_was_started_with_other_settings_and_nothing_else(daemon, project, run, monkeypatch):
    run("docker", "up", "null")
    before = {name: container["wanted"] for name, container in daemon.containers.items()}
    del before["proj-redis-1"]["Labels"]["com.docker.compose.config-hash"]  # as if Compose had started it
    monkeypatch.setenv("EXTRA", "changed")
    assert run("docker", "up", "null")[0] == 0
    assert {name for name, _ in daemon.stops} == {"proj-worker-shapes-1", "proj-worker-null-1"}
    assert "EXTRA=changed" in daemon.containers["proj-worker-null-1"]["wanted"]["Env"]
    assert daemon.containers["proj-redis-1"]["wanted"] is before["proj-redis-1"]
    assert len(running(daemon)) == 4


def test_scale_starts_and_stops_with_the_time_that_the_service_asks_for(daemon, project, run):
    assert run("docker", "scale", "null", "--workers", "3")[0] == 0
    assert running(daemon) == {f"proj-worker-null-{n}" for n in (1, 2, 3)}
    del daemon.containers["proj-worker-null-2"]
    assert run("docker", "scale", "null", "--workers", "3")[0] == 0
    assert running(daemon) == {f"proj-worker-null-{n}" for n in (1, 2, 3)}
    assert run("docker", "scale", "null", "--workers", "1")[0] == 0
    assert running(daemon) == {"proj-worker-null-1"}
    assert sorted(daemon.stops) == [("proj-worker-null-2", "90"), ("proj-worker-null-3", "90")]


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        # (seconds, workers, images) -> workers; 10 images a worker, at least 1 and at most 4, one fewer after 60 s
        ([(0, 1, 0)], [1]),
        ([(0, 1, 10), (5, 1, 11), (10, 2, 35), (15, 4, 99)], [1, 2, 4, 4]),
        ([(0, 4, 5), (59, 4, 0), (60, 4, 0), (70, 3, 0), (120, 3, 0)], [4, 4, 3, 3, 2]),
        ([(0, 3, 0), (50, 3, 30), (100, 3, 0), (150, 3, 0), (160, 3, 0)], [3, 3, 3, 3, 2]),
        ([(0, 0, 0), (5, 6, 99)], [1, 5]),
    ],
)
def test_the_depth_decides_how_many_workers_run(seen, wanted):
    settings = DockerScaleSettings(reward="null", images_per_worker=10, least=1, most=4, idle_s=60)
    scaler = docker_cli.Scaler(settings)
    assert [scaler.wanted(workers, depth, now) for now, workers, depth in seen] == wanted


def test_scale_follows_a_real_queue_up_and_down(
    daemon, project, run, capfd, redis_url, start_gateway, start_worker, make_reward, send, red_images, eventually
):
    go = threading.Event()
    gateway = start_gateway(redis_url=redis_url, token="secret", headers={"Authorization": "Bearer secret"})
    reward = make_reward(lambda images, prompts, metadata: go.wait(30) and [1.0] * len(images), name="null")
    start_worker(reward, redis_url=redis_url, max_batch=4)
    job = send(gateway, red_images(*range(12)), rewards=["null"], wait=0).json()["id"]
    looks = []

    def sleep(seconds):
        looks.append(len(running(daemon)))
        if len(looks) == 2:
            go.set()
            assert gateway.get(f"/v1/jobs/{job}", params={"wait": 20}).json()["state"] == "done"
        if looks[-1] == 1 and len(looks) > 2:
            raise KeyboardInterrupt

    arguments = [
        "null",
        "--url",
        str(gateway.base_url),
        "--images-per-worker",
        "5",
        "--idle-s",
        "0",
        "--every-s",
        "0.5",
    ]
    with pytest.raises(KeyboardInterrupt):
        docker_cli.scale(arguments, sleep)
    assert looks == [3, 3, 2, 1]
    assert "null: 12 images, 0 -> 3 workers" in capfd.readouterr().err


def test_status_and_logs(daemon, project, run):
    run("docker", "up", "null", "--timeout-s", "20")
    code, out, err = run("docker", "status", "--url", "http://127.0.0.1:9")
    assert code == 0
    assert re.search(r"^worker-null +proj-worker-null-1 +running +healthy +proj/worker-null$", out, re.MULTILINE)
    assert "the gateway does not tell its rewards" in err
    daemon.containers["proj-redis-1"]["state"] = "exited"
    assert run("docker", "status", "--url", "http://127.0.0.1:9")[0] == 1
    code, out, _ = run("docker", "logs", "worker-null", "redis")
    assert code == 0
    assert out.splitlines()[0] == "proj-redis-1 | proj-redis-1 says hello"
    assert len(out.splitlines()) == 4
    code, _, err = run("docker", "logs", "judge")
    assert code == 2
    assert "no container of judge" in err


def test_up_with_the_docker_backend_serves_until_it_is_stopped(daemon, project, run, monkeypatch):
    seen = {}

    def sleep(seconds):
        if seconds >= 1:  # all is up
            seen.update({name: dict(container["wanted"]) for name, container in daemon.containers.items()})
            raise KeyboardInterrupt

    monkeypatch.setattr(docker_cli.time, "sleep", sleep)
    arguments = ["--rewards", "null", "--rewards.null.workers", "2", "--rewards.null.max-batch", "7"]
    arguments += ["--rewards.null.options", '{"cost": "$5"}', "--port", "8123", "--gateway.max-depth", "9"]
    code, out, err = run("up", "--backend", "docker", *arguments)
    assert code == 0, err
    assert json.loads(out) == {"url": "http://127.0.0.1:8123", "rewards": ["null"]}
    assert {"proj-worker-null-1", "proj-worker-null-2", "proj-reward_server-1"} < seen.keys()
    assert {"REWARD_SERVER_MAX_BATCH=7", 'REWARD_SERVER_OPTIONS={"cost": "$5"}', "EXTRA=none"} <= set(
        seen["proj-worker-null-1"]["Env"]
    )
    assert seen["proj-reward_server-1"]["Env"] == ["REWARD_SERVER_MAX_DEPTH=9"]
    assert seen["proj-reward_server-1"]["HostConfig"]["PortBindings"]["8000/tcp"][0]["HostPort"] == "8123"
    assert not daemon.containers  # all stopped and removed
    assert ("proj-worker-null-2", "90") in daemon.stops
    assert err.rstrip().endswith("stopped")


MISTAKES = [
    (["docker", "up", "shape"], "no service serves 'shape'; rewards: shapes, null"),
    (["docker", "scale", "null", "--least", "3", "--most", "2"], "least is 3, more than most, 2"),
    (["docker", "up", "--files", "none.yaml"], "none.yaml cannot be read: "),
    (["up", "--backend", "docker", "--redis-url", "redis://h"], "redis_url cannot be set with backend docker"),
    (["up", "--backend", "docker", "--rewards", "m:C"], "no service serves 'm:C'; rewards: shapes, null"),
    (
        ["up", "--backend", "docker", "--rewards.a.reward", "shapes"],
        "rewards.a.reward cannot be set with backend docker",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_one_line(daemon, project, run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
    assert not daemon.containers


def test_a_secret_that_is_not_set_is_named_before_anything_starts(daemon, project, run):
    (project / ".env").unlink()
    code, _, err = run("docker", "up")
    assert code == 2
    assert err == "reward-server docker: error: REWARD_SERVER_TOKEN is not set: see .env.example\n"
    assert not daemon.containers


def test_a_build_that_fails_and_a_container_that_stays_ill_are_told(daemon, project, run, monkeypatch):
    monkeypatch.setenv("REVISION", "broken")
    code, _, err = run("docker", "up")
    assert code == 2
    assert err.splitlines()[-1].endswith("proj/gateway could not be built: pip: no such package")
    monkeypatch.delenv("REVISION")
    daemon.broken.add("worker-null")
    code, _, err = run("docker", "up", "null", "--timeout-s", "0.5")
    assert code == 2
    assert "proj-worker-null-1 is not healthy but starting; its log ends:\nproj-worker-null-1 says hello" in err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the SDK leaves a socket open
def test_no_daemon_is_told_in_one_line(project, run, monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    for command in (["docker", "status"], ["up", "--backend", "docker"]):
        code, _, err = run(*command)
        assert code == 2
        assert len(err.splitlines()) == 1
        assert "no Docker daemon answers" in err
        assert "start it, or set DOCKER_HOST" in err
    gc.collect()


def test_the_compose_file_is_read_as_compose_does(project):
    override = project / "more.yaml"
    override.write_text("services: {worker-null: {environment: {EXTRA: yes}, mem_limit: 1g, cap_drop: [X]}}")
    file = ComposeFile([project / "compose.yaml", override], {"EXTRA": "some"})
    assert file.service("worker-null").create["environment"]["EXTRA"] == "True"
    assert file.service("worker-null").create["mem_limit"] == "1g"
    assert file.service("worker-null").create["cap_drop"] == ["ALL", "X"]
    assert file.service("worker-shapes").create["environment"]["EXTRA"] == "some"
    with pytest.raises(ComposeFileError, match="JUDGE_KEY is not set: the judge's"):
        file.service("judge")
    with pytest.raises(ComposeFileError, match=r"services\.odd\.sysctls is not understood here"):
        file.service("odd")
    assert [seconds(text) for text in ("1m30s", "1500ms", "2h")] == [90.0, 1.5, 7200.0]
    with pytest.raises(ComposeFileError, match="'soon' is no duration"):
        seconds("soon")


def test_every_service_of_the_projects_own_file_is_understood():
    variables = {"REDIS_PASSWORD": "p", "REWARD_SERVER_TOKEN": "t"}
    file = ComposeFile([ROOT / "compose.yaml", ROOT / "docker" / "compose.gpu.yaml"], variables)
    for name in file.services:
        file.service(name)
    assert file.service("worker-hpsv2").create["device_requests"][0]["Capabilities"] == [["gpu"]]
    assert file.service("reward_server").published == ["127.0.0.1:8000"]
    assert file.volume("spool")["driver_opts"]["type"] == "tmpfs"
    assert UpSettings().port == 8000  # where `up` publishes what compose publishes by default
