"""A whole reward server as child processes: Redis, gateway and workers, with nothing to install or to configure.

    with EmbeddedServer(EmbeddedSettings(rewards={"shapes": RewardSettings()})) as server:
        client = RewardClient(server.url, server.token, ["shapes"])

A supervisor (:mod:`reward_server.supervisor`) owns the children. It ends with this process, however that ends: at
the end of the ``with``, on an exception, on Ctrl-C (which reaches this process alone) and on SIGKILL. Importing this
module loads neither FastAPI nor Redis nor torch.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from reward_server.settings import ENV_PREFIX, EmbeddedSettings, ServerSettings

log = logging.getLogger(__name__)

_STOP_S = 10.0
"""Longest wait for the supervisor to take its children down, seconds"""


class EmbeddedServerError(RuntimeError):
    """The server could not start, or went down for good; the message holds the last lines of the log at fault."""


class EmbeddedServerMistake(EmbeddedServerError):  # noqa: N818
    """It could not start with these settings: an unknown reward, a port in use ...; the message says what to change."""


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class EmbeddedServer:
    """A reward server that lives as long as the ``with`` block.

    Attributes:
        url: of the gateway.
        token: bearer token; random when the settings have none, unless ``open_access``.
        names: the name that requests use for each key of ``settings.rewards`` (``module:Class`` -> the class's
            ``name``); empty before the server is ready.
        given_up: why, for each key of ``settings.rewards`` that is no longer served, since its workers crashed again
            and again; the other rewards are.
        failure: why the server went down for good, or None. Crashed processes are started again before that.
        trainer_threads: CPU threads that the server's models leave to this process, at least 1.
    """

    def __init__(self, settings: ServerSettings | None = None, *, open_access: bool = False) -> None:
        """
        Args:
            settings: ``EmbeddedSettings()`` when None: the shapes reward on a free port of loopback.
            open_access: without a token in the settings, ask for none (loopback only), instead of a random one.

        Raises:
            ValueError: the token is empty or its file cannot be read.
        """
        self.settings = settings or EmbeddedSettings()
        self.url = ""
        self.names: dict[str, str] = {}
        self.token = self.settings.bearer_token()
        if self.token is None and not open_access:
            self.token = secrets.token_urlsafe(24)
        self.given_up: dict[str, str] = {}
        self.failure: str | None = None
        self._mistake = False
        self._folders: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._events: threading.Thread | None = None
        self._ready = threading.Event()
        self._down = threading.Event()

    @property
    def trainer_threads(self) -> int:
        used = sum(reward.workers * reward.threads for reward in self.settings.rewards.values())
        return max(1, (self.settings.cores or available_cores()) - used)

    def __enter__(self) -> Self:
        """Start everything, and return when every worker is ready.

        Raises:
            EmbeddedServerMistake: a setting is at fault.
            EmbeddedServerError: a process could not start, or it took longer than ``start_timeout_s``.
        """
        environment = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}
        package = str(Path(__file__).resolve().parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
        if self.token is not None:
            environment[f"{ENV_PREFIX}TOKEN"] = self.token  # never an argument: those are visible to everybody
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "reward_server.supervisor"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C is for this process; the children follow it in order
        )
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(
                self.settings.model_dump_json(include=ServerSettings.model_fields.keys() - {"token", "token_file"})
                + "\n"
            )
            self._process.stdin.flush()
            self._events = threading.Thread(target=self._listen, name="reward server", daemon=True)
            self._events.start()
            self._ready.wait()
            self.check()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """
        Raises:
            EmbeddedServerError: the server is down for good, or has given up one of its rewards.
        """
        if self.failure is not None:
            raise (EmbeddedServerMistake if self._mistake else EmbeddedServerError)(self.failure)
        for message in self.given_up.values():
            raise EmbeddedServerError(f"reward server: {message}")

    def wait(self) -> None:
        """Block until the server is down for good (see ``failure``)."""
        while not self._down.wait(1.0):
            pass

    def close(self) -> None:
        """Take everything down; returns when no process is left. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            log.warning("the reward server's supervisor did not end within %g s and is killed", _STOP_S)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._events is not None:
            self._events.join()
        process.stdout.close()
        for folder in self._folders:  # still there only if the supervisor was killed
            shutil.rmtree(folder, ignore_errors=True)

    def _listen(self) -> None:
        """The thread that reads the supervisor's events."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "started":
                self._folders = event["folders"]
            elif event["event"] == "ready":
                self.url, self.names = event["url"], event["names"]
                self._ready.set()
            elif event["event"] == "restarted":
                log.warning("reward server: %s", event["message"])
            elif event["event"] == "given_up":
                if event["reward"]:
                    self.given_up[event["reward"]] = event["message"]
                log.error("reward server: %s", event["message"])
            else:
                self._mistake = event["mistake"]
                problem = "cannot start" if self._mistake else "is down"
                self.failure = f"the reward server {problem}: {event['message']}"
        if self.failure is None and self._process is not None:  # nobody asked for it
            self.failure = "the reward server is down: its supervisor ended unexpectedly"
        if self.failure is not None and self._ready.is_set():
            log.error("%s", self.failure)
        self._ready.set()
        self._down.set()
