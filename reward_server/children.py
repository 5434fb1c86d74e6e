"""A supervised child process: how it is started with its parent's life, ended, and what its log says."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_STOP_S = 2.5
"""Longest time that children have to end by themselves, seconds"""


@dataclass
class Child:
    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    reward: str | None = None
    """Of a worker: its key in the settings' rewards"""
    process: subprocess.Popen[str] | None = None
    restarts: deque[float] = field(default_factory=deque)
    start_at: float = 0.0
    """When to start it again, monotonic seconds"""


def die_with_parent() -> None:
    """In the child, on Linux: be killed when the supervisor dies (prctl PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def end(children: list[Child]) -> None:
    """SIGTERM, then SIGKILL to each child's process group."""
    running = [child.process for child in children if child.process is not None]
    for process in running:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _STOP_S
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    for child in children:
        child.process = None


def how_it_ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def tail(log: Path, lines: int) -> str:
    if not log.is_file():
        return "  (empty)"
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    return "\n".join(f"  {line}" for line in last) or "  (empty)"
