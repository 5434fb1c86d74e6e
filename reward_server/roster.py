"""The supervisor's look into the queue: which of its processes serve which reward, and the end of one that none serves.

Needs Redis's client, so the supervisor imports it only when its children have been started.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Collection
from typing import Any

import redis
from redis.exceptions import AuthenticationError, RedisError

from reward_server import scripts
from reward_server.contract import RewardResult, Timings
from reward_server.queue import GRACE_S, PREFIX, WorkerInfo, WorkQueue


def wait_for_redis(url: str, timeout_s: float) -> None:
    """Return as soon as the Redis at ``url`` answers.

    Raises:
        RedisError: it did not within ``timeout_s`` (or, at once, it refuses us).
    """
    deadline = time.monotonic() + timeout_s
    with redis.Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2) as client:
        while True:
            try:
                client.ping()
                return
            except AuthenticationError:
                raise
            except RedisError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


class Roster:
    """Workers that have given a sign of life."""

    def __init__(self, redis_url: str, prefix: str = PREFIX) -> None:
        self._client = redis.Redis.from_url(redis_url, decode_responses=True, socket_timeout=5)
        self._prefix = prefix
        self._host = socket.gethostname()
        self._workers = self._client.register_script(scripts.WORKERS)

    def close(self) -> None:
        self._client.close()

    def names(self) -> dict[int, str]:
        """The served name of the reward of each living worker on this host, by process id; none while Redis is away."""
        try:
            return {worker.pid: worker.reward for worker in self._living() if worker.host == self._host}
        except RedisError:
            return {}

    def retire(self, reward: str, pids: Collection[int], reason: str) -> bool:
        """Serve ``reward`` (its served name) no longer: requests are 404, what waits becomes null with ``reason``.

        Does nothing while a living worker serves it other than those of ``pids`` on this host, which are dead.
        False if Redis is away: to be called again.
        """
        try:
            if all(w.reward != reward or (w.host == self._host and w.pid in pids) for w in self._living()):
                self._finish_all(reward, self._forget(reward), reason)
        except RedisError:
            return False
        return True

    def _forget(self, reward: str) -> str:
        """Forget the reward's workers; their revisions."""
        infos: Any = self._client.hgetall(f"{self._prefix}info")
        workers = {worker_id: WorkerInfo(**json.loads(text)) for worker_id, text in infos.items()}
        of_reward = [worker_id for worker_id, worker in workers.items() if worker.reward == reward]
        with self._client.pipeline() as pipe:
            pipe.zrem(f"{self._prefix}served", reward)
            for worker_id in of_reward:
                pipe.zrem(f"{self._prefix}seen", worker_id)
                pipe.hdel(f"{self._prefix}info", worker_id)
            pipe.execute()
        return "+".join(dict.fromkeys(workers[worker_id].revision for worker_id in of_reward))

    def _finish_all(self, reward: str, revision: str, reason: str) -> None:
        queue = WorkQueue(self._client, reward, "supervisor", claim_idle_ms=0, prefix=self._prefix)
        while parts := queue.unfinished(100):
            for part in parts:
                count = part.stop - part.start
                result = RewardResult(
                    revision=revision,
                    scores=[None] * count,
                    reasons=[reason] * count,
                    timings=Timings(queued_ms=0.0, scored_ms=0.0),
                )
                queue.finish(part, result, gave_up=reason)

    def _living(self) -> list[WorkerInfo]:
        rows: Any = self._workers(keys=[self._prefix], args=[round(GRACE_S * 1000)])
        workers = [(WorkerInfo(**json.loads(text)), float(silent_ms)) for text, silent_ms, _ in rows]
        return [worker for worker, silent_ms in workers if silent_ms < worker.silence_ms]
