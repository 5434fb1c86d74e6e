"""Prometheus metrics of one gateway, in a registry of their own."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from reward_server.contract import RewardInfo


class Metrics:
    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self.requests = Counter(
            "reward_server_requests", "Answers to requests", ["method", "route", "status"], registry=registry
        )
        self.images = Counter("reward_server_images", "Images accepted for scoring", registry=registry)
        self.payload_bytes = Counter("reward_server_payload_bytes", "Bytes of accepted payloads", registry=registry)
        self.receive_seconds = Histogram(
            "reward_server_receive_seconds", "Time to receive and spool a request's body", registry=registry
        )
        self.job_seconds = Histogram(
            "reward_server_job_seconds",
            "Time from a queued job to its result, as far as POST /v1/score waited for it",
            registry=registry,
        )
        self._depth = Gauge(
            "reward_server_queue_depth_images", "Images waiting or being scored", ["reward"], registry=registry
        )
        self._workers = Gauge("reward_server_workers", "Live workers", ["reward"], registry=registry)
        self._spool = Gauge("reward_server_spool_bytes", "Payloads of unfinished jobs", registry=registry)
        self._redis_up = Gauge("reward_server_redis_up", "1 if Redis answers", registry=registry)

    def render(self, rewards: Sequence[RewardInfo] | None, spool_bytes: int | None) -> bytes:
        """The exposition text; None for what Redis could not tell (then the last value is not repeated)."""
        self._redis_up.set(rewards is not None)
        self._depth.clear()
        self._workers.clear()
        for reward in rewards or ():
            self._depth.labels(reward.name).set(reward.depth)
            self._workers.labels(reward.name).set(reward.workers)
        self._spool.set(float("nan") if spool_bytes is None else spool_bytes)
        return generate_latest(self._registry)
