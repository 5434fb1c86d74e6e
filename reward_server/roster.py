"""The supervisor's look into the queue: which of its processes serve which reward.

Needs Redis's client, so the supervisor imports it only when its children have been started.
"""

from __future__ import annotations

import json
import socket
from typing import Any

import redis

from reward_server import scripts
from reward_server.queue import GRACE_S, PREFIX, WorkerInfo


class Roster:
    """Workers that have given a sign of life."""

    def __init__(self, redis_url: str, prefix: str = PREFIX) -> None:
        self._client = redis.Redis.from_url(redis_url, decode_responses=True, socket_timeout=5)
        self._prefix = prefix
        self._workers = self._client.register_script(scripts.WORKERS)

    def close(self) -> None:
        self._client.close()

    def names(self) -> dict[int, str]:
        """The served name of the reward of each living worker on this host, by process id.

        Raises:
            redis.RedisError: Redis is away.
        """
        rows: Any = self._workers(keys=[self._prefix], args=[round(GRACE_S * 1000)])
        workers = [(WorkerInfo(**json.loads(text)), float(silent_ms)) for text, silent_ms, _ in rows]
        host = socket.gethostname()
        return {w.pid: w.reward for w, silent_ms in workers if w.host == host and silent_ms < w.silence_ms}
