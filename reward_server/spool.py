"""Where the images of unfinished jobs are kept: one payload per job, the safetensors body that the client sent.

Payloads do not go through Redis by default: the gateway writes each once to a shared directory (shared memory where
there is one) and workers map the file. ``redis`` keeps them in Redis instead, so that they outlive a gateway's host.
A payload is referred to by text: ``file:<path>`` or ``redis:<key>``; :mod:`reward_server.payloads` opens it.

A payload is deleted when its job ends. What a crash leaves behind is swept: only this server's own payloads (same
directory and name pattern), older than ``SWEEP_AGE_S`` so that one still being sent is not touched, of jobs that are
finished, cancelled or unknown to Redis.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import redis.asyncio

SUFFIX = ".payload"
PARTIAL = ".partial"
SWEEP_AGE_S = 60.0
SHARED_MEMORY = Path("/dev/shm")

Unfinished = Callable[[Iterable[str]], Awaitable[set[str]]]
"""Of these job ids, those whose payload is still needed"""


class SpoolFullError(Exception):
    """The payload does not fit beside those that are there; room comes back as jobs end."""


class Payload(Protocol):
    """A payload being written: ``write`` its bytes in order, then ``commit``, or ``discard`` at any time."""

    def write(self, chunk: bytes | memoryview) -> None: ...

    async def commit(self) -> str:
        """Make the payload visible to workers; returns its reference."""

    async def discard(self) -> None:
        """Delete it, whether committed or not."""


class Spool(Protocol):
    async def create(self, job_id: str, size: int) -> Payload:
        """Begin a payload of ``size`` bytes.

        Raises:
            SpoolFullError: it would exceed the bound of all payloads together.
        """

    async def read(self, ref: str) -> memoryview | None:
        """The committed payload, read-only; None if this spool does not have it."""

    async def delete(self, ref: str) -> None: ...

    async def used(self) -> int:
        """Size of all payloads together, bytes."""

    async def sweep(self, unfinished: Unfinished) -> int:
        """Delete payloads that nobody needs; how many there were."""


def _check_room(used: int, size: int, bound: int) -> None:
    if used + size > bound:
        raise SpoolFullError(f"{size} bytes do not fit: {used} of {bound} bytes are taken by unfinished jobs")


class FilePayload:
    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._partial = path.with_suffix(PARTIAL)
        # write() fills fresh pages twice as fast as storing through a mapping does, which has them zeroed first
        self._file = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._open = True
        os.truncate(self._file, size)  # counts towards the bound from now on

    def write(self, chunk: bytes | memoryview) -> None:
        view = memoryview(chunk)
        while view:
            view = view[os.write(self._file, view) :]

    def _close(self) -> None:
        if self._open:
            self._open = False
            os.close(self._file)

    async def commit(self) -> str:
        self._close()
        self._partial.rename(self._path)
        return f"file:{self._path}"

    async def discard(self) -> None:
        self._close()
        self._partial.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)


class DirectorySpool:
    """Payloads as files (mode 0600) of one directory (0700), which gateways and workers share."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self._max_bytes = max_bytes
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.is_symlink() or directory.stat().st_uid != os.getuid():
            raise PermissionError(f"spool directory {directory} is not this user's own: choose one with spool_dir")

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.name.endswith((SUFFIX, PARTIAL)):
                    try:
                        found.append((Path(entry.path), entry.stat(follow_symlinks=False)))
                    except FileNotFoundError:
                        continue  # its job just ended
        return found

    async def used(self) -> int:
        return sum(stat.st_size for _, stat in self._files())

    async def create(self, job_id: str, size: int) -> FilePayload:
        _check_room(await self.used(), size, self._max_bytes)
        return FilePayload(self.directory / f"{job_id}.{secrets.token_hex(4)}{SUFFIX}", size)

    async def read(self, ref: str) -> memoryview | None:
        return map_file(ref) if self._own(ref) else None

    async def delete(self, ref: str) -> None:
        if self._own(ref):
            Path(ref.removeprefix("file:")).unlink(missing_ok=True)

    def _own(self, ref: str) -> bool:
        return ref.startswith("file:") and Path(ref.removeprefix("file:")).parent == self.directory

    async def sweep(self, unfinished: Unfinished) -> int:
        limit = time.time() - SWEEP_AGE_S
        old = [path for path, stat in self._files() if stat.st_mtime < limit]
        jobs = {path: path.name.rsplit(".", 2)[0] for path in old}
        needed = await unfinished(jobs.values())
        swept = [path for path in old if jobs[path] not in needed]
        for path in swept:
            path.unlink(missing_ok=True)
        return len(swept)


class RedisPayload:
    def __init__(self, spool: RedisSpool, key: str, size: int) -> None:
        self._spool, self._key = spool, key
        self._buffer = memoryview(bytearray(size))
        self._filled = 0

    def write(self, chunk: bytes | memoryview) -> None:
        self._buffer[self._filled : self._filled + len(chunk)] = chunk
        self._filled += len(chunk)

    async def commit(self) -> str:
        spool = self._spool
        async with spool.client.pipeline(transaction=True) as pipe:
            pipe.set(self._key, self._buffer, px=round(spool.ttl_s * 1000))
            pipe.hset(spool.index, self._key, f"{len(self._buffer)}:{time.time()}")
            await pipe.execute()
        return f"redis:{self._key}"

    async def discard(self) -> None:
        await self._spool.delete(f"redis:{self._key}")


class RedisSpool:
    """Payloads as Redis strings with a time to live; a hash lists them with their sizes."""

    def __init__(self, client: redis.asyncio.Redis, max_bytes: int, ttl_s: float, prefix: str = "rs:") -> None:
        """``client`` must not decode responses."""
        self.client = client
        self.ttl_s = ttl_s
        self.index = f"{prefix}payloads"
        self._prefix = f"{prefix}payload:"
        self._max_bytes = max_bytes

    async def _entries(self) -> dict[str, tuple[int, float]]:
        """(bytes, time of writing) by key."""
        entries: Any = await self.client.hgetall(self.index)
        pairs = ((key.decode(), value.decode().split(":")) for key, value in entries.items())
        return {key: (int(size), float(written)) for key, (size, written) in pairs}

    async def used(self) -> int:
        return sum(size for size, _ in (await self._entries()).values())

    async def create(self, job_id: str, size: int) -> RedisPayload:
        _check_room(await self.used(), size, self._max_bytes)
        return RedisPayload(self, f"{self._prefix}{job_id}.{secrets.token_hex(4)}", size)

    async def read(self, ref: str) -> memoryview | None:
        value: Any = await self.client.get(ref.removeprefix("redis:"))
        return None if value is None else memoryview(value)

    async def delete(self, ref: str) -> None:
        key = ref.removeprefix("redis:")
        async with self.client.pipeline(transaction=True) as pipe:
            pipe.delete(key)
            pipe.hdel(self.index, key)
            await pipe.execute()

    async def sweep(self, unfinished: Unfinished) -> int:
        limit = time.time() - SWEEP_AGE_S
        old = [key for key, (_, written) in (await self._entries()).items() if written < limit]
        jobs = {key: key.removeprefix(self._prefix).rsplit(".", 1)[0] for key in old}
        needed = await unfinished(jobs.values())
        swept = [key for key in old if jobs[key] not in needed]
        for key in swept:
            await self.delete(f"redis:{key}")
        return len(swept)


def map_file(ref: str) -> memoryview | None:
    """The file behind ``file:<path>`` as a read-only mapping; None if it is not there (or not for us to read)."""
    try:
        with Path(ref.removeprefix("file:")).open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError:
        return None


def default_directory(redis_url: str) -> Path:
    """This server's directory in shared memory (or the temporary folder): one per user and Redis."""
    parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return parent / f"reward-server-{os.getuid()}-{hashlib.sha256(redis_url.encode()).hexdigest()[:12]}"
