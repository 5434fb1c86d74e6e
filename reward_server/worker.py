"""A worker: one process, one reward model; take a batch across jobs and clients, score it, store the results.

Batching is continuous: a free worker takes what is queued, up to ``max_batch`` images. Waiting up to ``max_wait_ms``
for a fuller batch pays only when several clients are about, so it waits only after a batch that joined several jobs;
a lone client never waits. A part that was delivered before is scored alone, so that images which kill the process
cannot take those of other jobs with them; so is every part (a whole job) of a reward that scores images relative to
one another.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

import redis
from redis.exceptions import RedisError

from reward_server.contract import RewardResult, Timings
from reward_server.payloads import Item, PayloadGoneError, PayloadReader, PayloadUnreachableError
from reward_server.queue import PREFIX, Part, Task, WorkerInfo, WorkQueue
from reward_server.rewards.base import (
    Reward,
    Score,
    is_relative,
    load,
    loaded_libraries,
    prepare,
    provenance,
    warm_up,
)
from reward_server.scoring import Scorer
from reward_server.settings import WorkerSettings, without_password

BLOCK_MS = 500
"""Longest wait in Redis for a part, which bounds how long stopping takes, milliseconds"""
MAX_BACKOFF_S = 5.0

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Held:
    """A part that this worker has begun: its images, and the scores so far."""

    task: Task
    items: list[Item]
    scores: list[Score] = field(default_factory=list)
    busy_ms: float = 0.0

    @property
    def left(self) -> int:
        return len(self.items) - len(self.scores)


class Worker:
    """Serves ``reward`` until :meth:`stop`; :meth:`run` blocks, and may be called in any thread."""

    def __init__(self, settings: WorkerSettings, reward: Reward, *, prefix: str = PREFIX) -> None:
        self.settings = settings
        self.stopping = threading.Event()
        self._scorer = Scorer(reward, settings.max_batch)
        self._relative = is_relative(reward)
        self._client = redis.Redis.from_url(settings.redis_url, decode_responses=True, socket_timeout=10)
        self._binary = redis.Redis.from_url(settings.redis_url, socket_timeout=60)
        host = socket.gethostname()
        self.id = f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
        self._queue = WorkQueue(self._client, reward.name, self.id, claim_idle_ms=settings.claim_idle_ms, prefix=prefix)
        self._payloads = PayloadReader(self._binary, settings.gateway_url, settings.bearer_token())
        self._info = WorkerInfo(
            reward=reward.name,
            revision=reward.revision,
            description=reward.description,
            needs=tuple(reward.needs),
            max_batch=settings.max_batch,
            heartbeat_s=settings.heartbeat_s,
            host=host,
            pid=os.getpid(),
            relative=self._relative,
            provenance={**provenance(reward), "device": settings.device, "libraries": loaded_libraries()},
        )
        self._held: deque[Held] = deque()
        self._claimed: dict[str, Part] = {}  # what the heartbeat keeps ours
        self._lock = threading.Lock()
        self._next_reclaim = 0.0
        self._joined_jobs = False
        self._part_size = settings.max_batch

    def stop(self) -> None:
        """Finish the batch in hand, give back the rest, and return from :meth:`run`."""
        self.stopping.set()

    def run(self) -> None:
        """Take, score, finish, until stopped. Redis may be away at any time; its return is awaited."""
        heartbeat = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        try:
            self._retrying(self._queue.join)
            self._retrying(lambda: self._queue.heartbeat(self._info))
            heartbeat.start()
            while not self.stopping.is_set():
                self._retrying(self._fill)
                if self._held and not self.stopping.is_set():
                    self._score_batch()
        finally:
            self.stopping.set()
            if heartbeat.is_alive():
                heartbeat.join()
            self._leave()

    def _retrying(self, step: Callable[[], object]) -> None:
        """Run ``step`` until Redis lets it through, or this worker is stopped."""
        pause = 0.1
        while True:
            try:
                step()
                return
            except RedisError as error:
                where = without_password(self.settings.redis_url)
                log.warning("Redis (--redis-url %s) is away (%s); trying again in %.1f s", where, error, pause)
                if self.stopping.wait(pause):
                    return
                pause = min(2 * pause, MAX_BACKOFF_S)

    def _beat(self) -> None:
        """The heartbeat thread: this worker lives, and the parts it holds stay its own however long they take."""
        while not self.stopping.wait(self.settings.heartbeat_s):
            with self._lock:
                parts = list(self._claimed.values())
            try:
                self._queue.heartbeat(self._info)
                self._queue.hold(parts)
            except RedisError as error:
                log.warning("no sign of life given: %s", error)

    def _leave(self) -> None:
        try:
            while self._held:
                self._queue.give_back(self._held.popleft().task.part)
            self._queue.leave(self._info)
        except RedisError as error:
            log.warning("left without a word, Redis is away (%s): others will reclaim what was held", error)
        self._payloads.close()
        self._client.close()
        self._binary.close()

    def _images_held(self) -> int:
        return sum(held.left for held in self._held)

    def _fill(self) -> None:
        """Begin parts until a batch is full, the queue is empty, or a part must be scored alone."""
        deadline: float | None = None
        while (missing := self.settings.max_batch - self._images_held()) > 0 and not self.stopping.is_set():
            if self._held and self._alone(self._held[0]):
                return
            parts = self._reclaim()
            if not parts:
                if not self._held:
                    block = BLOCK_MS
                elif self._joined_jobs:
                    deadline = deadline or time.monotonic() + self.settings.max_wait_ms / 1000
                    block = max(0, round((deadline - time.monotonic()) * 1000))
                else:
                    block = 0
                parts = self._queue.take(max(1, missing // self._part_size), block)
            if not parts:
                if not self._held:
                    self._payloads.forget()
                return
            for part in parts:
                self._begin(part)

    def _alone(self, held: Held) -> bool:
        """Whether a part must not share its batch with others."""
        return self._relative or held.task.tries > 1

    def _reclaim(self) -> list[Part]:
        """Parts of dead workers, looked for a few times per ``claim_idle_ms``."""
        now = time.monotonic()
        if now < self._next_reclaim:
            return []
        self._next_reclaim = now + self.settings.claim_idle_ms / 4000
        parts = self._queue.reclaim(1)
        if parts:
            self._next_reclaim = now  # there may be more
            log.warning("took over images %d..%d of job %s", parts[0].start, parts[0].stop - 1, parts[0].job)
        return parts

    def _begin(self, part: Part) -> None:
        """Make a part ours, and get its images in hand."""
        self._part_size = part.stop - part.start
        with self._lock:
            if part.entry in self._claimed:
                return  # our own, reclaimed after our heartbeat stalled
            self._claimed[part.entry] = part
        held = None
        try:
            if task := self._queue.begin(part):
                held = self._open(task)
        finally:
            if held is None:  # done with, or left pending to be delivered again
                self._release(part)
        if held is not None and held.task.tries > 1:
            self._held.appendleft(held)
        elif held is not None:
            self._held.append(held)

    def _open(self, task: Task) -> Held | None:
        """The part with its images; None if they cannot be had, or if it is given up after ``max_tries``."""
        tries = self.settings.max_tries
        if task.tries > tries:
            self._give_up(task, f"gave up after {tries} tries: each worker that took it died or could not answer")
            return None
        try:
            return Held(task, self._payloads.items(task))
        except PayloadGoneError as error:
            self._give_up(task, str(error))
        except PayloadUnreachableError as error:
            log.warning("job %s, try %d of %d: %s", task.part.job, task.tries, tries, error)
            if task.tries == tries:
                self._give_up(task, f"gave up after {tries} tries: {error}")
        return None

    def _release(self, part: Part) -> None:
        with self._lock:
            self._claimed.pop(part.entry, None)

    def _give_up(self, task: Task, reason: str) -> None:
        part = task.part
        log.error("images %d..%d of job %s: %s", part.start, part.stop - 1, part.job, reason)
        scores = [Score(None, reason=reason)] * (part.stop - part.start)
        self._queue.finish(part, self._result(task, scores, 0.0), gave_up=reason)

    def _result(self, task: Task, scores: list[Score], busy_ms: float) -> RewardResult:
        names = dict.fromkeys(name for score in scores for name in score.details)
        return RewardResult(
            revision=self._info.revision,
            scores=[score.value for score in scores],
            reasons=[score.reason for score in scores],
            details={name: [score.details.get(name) for score in scores] for name in names},
            provenance=self._info.provenance,
            timings=Timings(queued_ms=task.queued_ms, scored_ms=busy_ms),
        )

    def _score_batch(self) -> None:
        """Score one batch from the parts in hand, and finish those that are complete."""
        alone = self._alone(self._held[0])
        batch: list[tuple[Held, int]] = []
        room = self._scorer.limit
        for held in list(self._held)[: 1 if alone else None]:
            count = min(room, held.left)
            if count:
                batch.append((held, count))
            room -= count
        items = [item for held, count in batch for item in held.items[len(held.scores) :][:count]]
        started = time.monotonic()
        scores = iter(self._scorer.score(items))
        busy_ms = (time.monotonic() - started) * 1000
        self._joined_jobs = len({held.task.part.job for held, _ in batch}) > 1
        for held, count in batch:
            held.scores += [next(scores) for _ in range(count)]
            held.busy_ms += busy_ms
            if not held.left:
                self._held.remove(held)
                self._finish(held)

    def _finish(self, held: Held) -> None:
        result = self._result(held.task, held.scores, held.busy_ms)
        self._retrying(lambda: self._queue.finish(held.task.part, result))
        self._release(held.task.part)


def run(settings: WorkerSettings) -> None:
    """Load the reward, score one image to warm it up, and serve it until SIGTERM or SIGINT.

    Raises:
        RewardLoadError: no such reward, it lacks a package, or an option is wrong.
        ValueError: the token is empty or its file cannot be read.
    """
    reward = load(settings.reward)
    started = time.monotonic()
    if settings.name is not None:
        reward.name = settings.name
    prepare(reward, settings.device, settings.options)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(settings.threads)
    warm_up(reward)
    worker = Worker(settings, reward)

    def stop(number: int, frame: FrameType | None) -> None:
        worker.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    took = time.monotonic() - started
    log.info("serving %s (revision %s) on %s, loaded in %.1f s", reward.name, reward.revision, settings.device, took)
    worker.run()
