"""A container engine for the tests: the one that runs, or one started for them, which leaves nothing behind.

Where no image registry is reachable, stand-ins are made: a minimal Debian with Python from a package mirror in place of
the Python image, and its Redis in place of Redis'. Prometheus, Grafana and vLLM have none.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PYTHON = re.search(r"^ARG BASE_IMAGE=(.*)$", (ROOT / "docker/gateway.Dockerfile").read_text(), re.M)[1]
"""The pinned base of our images"""
PACKAGES = "ca-certificates,python3,python3-venv"
REDIS = """
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN apt-get update && apt-get install --yes --no-install-recommends redis-server && install -d -o redis -g redis /data
"""


class NoEngineError(Exception):
    """There is no engine and none can be started; the message says why."""


def told(*command, timeout=900, check=True, quiet=False, **options):
    """Run a command, for the transcript: it, its outcome and its time go to stdout."""
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    if not quiet:
        name = [Path(command[0]).name.replace("docker-compose", "docker compose"), *command[1:]]
        outcome = "" if done.returncode == 0 else f", exit code {done.returncode}"
        print(f"$ {' '.join(name)}   # {time.monotonic() - started:.1f} s{outcome}", flush=True)
    if check and done.returncode:
        raise AssertionError(f"{command}: exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout.strip()


def answers():
    return subprocess.run(["docker", "version"], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def engine():
    """An engine that ``docker`` reaches.

    One that is started keeps its data in a temporary folder; when it ends, so do its bridge and its firewall rules, and
    what it set of the machine is put back.

    Raises:
        NoEngineError: with the reason.
    """
    if shutil.which("docker") is None:
        raise NoEngineError("docker is not installed")
    if answers():
        yield
        return
    lacking = [name for name in ("dockerd", "iptables", "iptables-save", "iptables-restore") if not shutil.which(name)]
    if lacking or os.geteuid() != 0:
        why = f"{', '.join(lacking)} not installed" if lacking else "only root may start one"
        raise NoEngineError(f"no container engine runs here, and {why}")
    with tempfile.TemporaryDirectory(prefix="engine-", ignore_cleanup_errors=True) as folder, _put_back():
        yield from _started(Path(folder))


def _started(folder):
    socket = f"unix://{folder}/docker.sock"
    options = [f"--{name}={folder / name}" for name in ("data-root", "exec-root")]
    command = ["dockerd", f"--host={socket}", f"--pidfile={folder}/pid", *options]
    policy = _forward_policy()
    before, os.environ["DOCKER_HOST"] = os.environ.get("DOCKER_HOST"), socket
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not answers():
            if process.poll() is not None or time.monotonic() > deadline:
                raise NoEngineError(f"dockerd cannot be started here:\n{(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.5)
        _policy(policy)  # the engine would drop what this machine forwards for others
        yield
    finally:
        process.terminate()
        process.wait(60)
        if before is None:
            del os.environ["DOCKER_HOST"]
        else:
            os.environ["DOCKER_HOST"] = before


def _forward_policy():
    return re.search(r"^-P FORWARD (\w+)", told("iptables", "-S", "FORWARD", quiet=True), re.M)[1]


def _policy(wanted):
    if _forward_policy() != wanted:
        told("iptables", "-P", "FORWARD", wanted, quiet=True)


@contextlib.contextmanager
def _put_back():
    """Forwarding, its policy and the bridge as they were; of the firewall only the engine's own rules go."""
    forwarding, had_bridge = Path("/proc/sys/net/ipv4/ip_forward"), Path("/sys/class/net/docker0").exists()
    before, policy = forwarding.read_text(), _forward_policy()
    try:
        yield
    finally:
        if not had_bridge:
            rules = told("iptables-save", quiet=True).splitlines()
            ours = re.compile(r"DOCKER|docker0|\bbr-[0-9a-f]{12}\b")
            kept = "\n".join(rule for rule in rules if not ours.search(rule)) + "\n"
            told("iptables-restore", input=kept, quiet=True)
            told("ip", "link", "delete", "docker0", check=False, quiet=True)
        _policy(policy)
        forwarding.write_text(before)


def images(prefix):
    """BASE_IMAGE and REDIS_IMAGE: as they are set, else empty for the pinned ones if they can be had, else stand-ins.

    Raises:
        NoEngineError: none of them can be had.
    """
    given = {name: os.environ.get(name, "") for name in ("BASE_IMAGE", "REDIS_IMAGE")}
    if all(given.values()):
        return given
    if subprocess.run(["docker", "pull", "--quiet", PYTHON], capture_output=True, check=False).returncode == 0:
        return {"BASE_IMAGE": "", "REDIS_IMAGE": ""}
    print(f"# {PYTHON} cannot be pulled here; a stand-in is made", flush=True)
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise NoEngineError("no image registry is reachable, and a stand-in needs debootstrap and root")
    made = {"BASE_IMAGE": f"{prefix}/stand-in-python", "REDIS_IMAGE": f"{prefix}/stand-in-redis"}
    with tempfile.TemporaryDirectory(prefix="stand-in-") as folder:
        root = Path(folder) / "root"
        told("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root))
        told("chroot", str(root), "/usr/bin/python3", "-m", "venv", "/usr/local", quiet=True)
        environment = ["PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"]
        if CERTIFICATES.is_file():  # those of this machine's package mirror among them
            shutil.copyfile(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
            environment += [f"PIP_CERT={CERTIFICATES}", f"SSL_CERT_FILE={CERTIFICATES}"]
        archive = Path(folder) / "root.tar"
        told("tar", "-C", str(root), "-cf", str(archive), ".", quiet=True)
        told("docker", "import", "-c", f"ENV {' '.join(environment)}", str(archive), made["BASE_IMAGE"])
    build = ["docker", "build", "--build-arg", f"BASE_IMAGE={made['BASE_IMAGE']}", "-t", made["REDIS_IMAGE"], "-"]
    told(*build, input=REDIS, env=os.environ | {"DOCKER_BUILDKIT": "0"})
    return made


def compose_tool():
    return str(Path(sys.executable).parent / "docker-compose")
