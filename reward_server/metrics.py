"""Prometheus metrics of one gateway, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from reward_server.contract import RewardInfo
from reward_server.queue import Total

Observed: TypeAlias = tuple[Sequence[RewardInfo], Sequence[Total], int]
"""The rewards that are served, the workers' totals, and the size of the spool, bytes"""


class Metrics(Collector):
    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self.requests = Counter(
            "reward_server_requests", "Answers to requests", ["method", "route", "status"], registry=registry
        )
        self.images = Counter("reward_server_images", "Images accepted for scoring", registry=registry)
        self.receive_seconds = Histogram(
            "reward_server_receive_seconds", "Time to receive and spool a request's body", registry=registry
        )
        self.job_seconds = Histogram(
            "reward_server_job_seconds",
            "Time from a queued job to its result, as far as POST /v1/score waited for it",
            registry=registry,
        )
        self._observed: Observed | None = None
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """What lives in Redis, as it was last observed (called by the registry)."""
        yield GaugeMetricFamily("reward_server_redis_up", "1 if Redis answers", float(self._observed is not None))
        if self._observed is None:
            return
        rewards, totals, spool_bytes = self._observed
        yield GaugeMetricFamily("reward_server_spool_bytes", "Payloads of unfinished jobs", spool_bytes)
        depth = GaugeMetricFamily(
            "reward_server_queue_depth_images", "Images waiting or being scored", labels=["reward"]
        )
        workers = GaugeMetricFamily("reward_server_workers", "Live workers", labels=["reward"])
        for reward in rewards:
            depth.add_metric([reward.name], reward.depth)
            workers.add_metric([reward.name], reward.workers)
        images = CounterMetricFamily(
            "reward_server_scores", "Images scored and failed, by all workers", labels=["reward", "outcome"]
        )
        parts = CounterMetricFamily(
            "reward_server_parts", "Parts of jobs delivered and given up, by all workers", labels=["reward", "outcome"]
        )
        for total in totals:
            family = images if total.what in ("scored", "failed") else parts
            family.add_metric([total.reward, total.what], total.count)
        yield from (depth, workers, images, parts)

    def render(self, observed: Observed | None) -> bytes:
        """The exposition text; ``observed`` is None when Redis is away."""
        self._observed = observed
        return generate_latest(self._registry)
