"""The queue between gateway and workers, on Redis Streams: one stream per reward, one consumer group.

A job is cut into parts of at most one batch, unless its images are scored relative to one another; a part is one
stream entry, and carries no pixels: only where they lie.
A worker acknowledges a part in the same atomic step that stores its result, so a part is delivered again until it has
one (:mod:`reward_server.scripts` has these steps). What a dead worker held goes to another after ``claim_idle_ms``;
a slow but living one keeps it, since its heartbeat resets that clock.

:class:`JobQueue` is the gateway's side (asyncio), :class:`WorkQueue` a worker's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from reward_server import scripts
from reward_server.contract import JobState, RewardInfo, RewardResult, ScoreResponse, join_results

PREFIX = "rs:"
GROUP = "workers"
GRACE_S = 300.0
"""A reward stays served this long after its last worker's sign of life, so that a restart is no 404, seconds"""
RECHECK_S = 1.0
"""A waiting request looks at its job this often in case the message that it is done was missed, seconds"""
SILENCE_S = 5.0
"""A listening connection on which nothing came for this long is asked whether it lives, seconds"""
FINISHED = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED})

log = logging.getLogger(__name__)


class UnknownRewardError(Exception):
    """Nobody serves the reward, and nobody did within the grace period."""

    def __init__(self, reward: str) -> None:
        super().__init__(reward)
        self.reward = reward


class QueueFullError(Exception):
    """The images would exceed the depth that one reward may have."""

    def __init__(self, reward: str, depth: int) -> None:
        super().__init__(f"{depth} images already wait for {reward}")
        self.reward, self.depth = reward, depth


class IdConflictError(Exception):
    """The job id is taken by a request with other content."""


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker says of itself with each sign of life."""

    reward: str
    revision: str
    description: str
    needs: tuple[str, ...]
    max_batch: int
    heartbeat_s: float
    host: str
    pid: int
    relative: bool = False
    provenance: dict[str, str] = field(default_factory=dict)

    @property
    def silence_ms(self) -> float:
        """After this long without a sign of life a worker counts as dead, milliseconds."""
        return 3000 * self.heartbeat_s


@dataclass(frozen=True)
class Part:
    """Images ``start`` .. ``stop - 1`` of a job, to be scored by one reward."""

    entry: str
    job: str
    start: int
    stop: int


@dataclass(frozen=True)
class Task:
    """A part that a worker has begun: where the payload is, its deliveries (1 = first), how long it waited."""

    part: Part
    ref: str
    tries: int
    queued_ms: float


@dataclass(frozen=True)
class Total:
    """A count over all workers of a reward: images ``scored`` or ``failed``, parts ``delivered`` or ``given_up``."""

    reward: str
    what: str
    count: int


def _response(job_id: str, fields: dict[str, str]) -> ScoreResponse:
    """The answer about a job, from its hash."""
    images = int(fields["images"])
    parts: dict[str, list[tuple[int, RewardResult]]] = {reward: [] for reward in json.loads(fields["rewards"])}
    for key, text in fields.items():
        kind, _, rest = key.partition(":")
        if kind == "result":
            reward, _, start = rest.rpartition(":")
            parts[reward].append((int(start), RewardResult.model_validate_json(text)))
    results = {}
    for reward, found in parts.items():
        ordered = [result for _, result in sorted(found, key=lambda item: item[0])]
        if sum(len(result.scores) for result in ordered) == images:
            results[reward] = join_results(ordered)
    state = JobState(fields["state"])
    if state is JobState.DONE and all(score is None for result in results.values() for score in result.scores):
        state = JobState.FAILED
    return ScoreResponse(id=job_id, state=state, results=results)


class JobQueue:
    """The gateway's side: submit, wait, cancel, list."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        *,
        max_depth: int,
        job_ttl_s: float,
        result_ttl_s: float,
        grace_s: float = GRACE_S,
        prefix: str = PREFIX,
    ) -> None:
        """``client`` must decode responses. Unfinished jobs are forgotten after ``job_ttl_s``."""
        self.client = client
        self.prefix = prefix
        self._max_depth = max_depth
        self._job_ttl_ms = round(job_ttl_s * 1000)
        self._result_ttl_ms = round(result_ttl_s * 1000)
        self._grace_ms = round(grace_s * 1000)
        self._submit = client.register_script(scripts.SUBMIT)
        self._cancel = client.register_script(scripts.CANCEL)
        self._workers = client.register_script(scripts.WORKERS)
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._stopping = False

    async def submit(self, job_id: str, digest: str, images: int, ref: str, rewards: Sequence[str]) -> bool:
        """Queue a job for all of ``rewards`` or none; False if it was queued before under this id and digest.

        Then the payload of that time is used, not ``ref``.

        Raises:
            IdConflictError, UnknownRewardError, QueueFullError: nothing was queued.
            redis.RedisError: Redis is away; the job may have been queued or not.
        """
        limits = (self._job_ttl_ms, self._result_ttl_ms, self._max_depth, self._grace_ms)
        arguments: list[str | int] = [job_id, digest, images, ref, *limits, *rewards]
        outcome, *details = await self._submit(keys=[self.prefix], args=arguments)
        if outcome == "conflict":
            raise IdConflictError(job_id)
        if outcome == "unknown":
            raise UnknownRewardError(details[0])
        if outcome == "full":
            raise QueueFullError(details[0], int(details[1]))
        return bool(outcome == "new" or details[0] == ref)  # the second if redis-py sent it twice

    async def status(self, job_id: str) -> ScoreResponse | None:
        """The job as it is now; None if there is none of this id (any more)."""
        fields: Any = await self.client.hgetall(f"{self.prefix}job:{job_id}")
        return _response(job_id, fields) if fields else None

    async def wait(self, job_id: str, timeout: float) -> ScoreResponse | None:
        """The job once it is finished, or as it is after ``timeout`` seconds; None if there is none of this id.

        Times out at once after :meth:`stop_waiting`.

        Raises:
            redis.RedisError: Redis was away at the end of the time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        event = asyncio.Event()
        self._waiting.setdefault(job_id, set()).add(event)
        try:
            while True:
                event.clear()
                try:
                    response = await self.status(job_id)
                    if response is None or response.state in FINISHED or self._stopping or loop.time() >= deadline:
                        return response
                except RedisError:
                    if self._stopping or loop.time() >= deadline:
                        raise
                pause = max(0.0, min(RECHECK_S, deadline - loop.time()))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), pause)
        finally:
            self._waiting[job_id].discard(event)
            if not self._waiting[job_id]:
                del self._waiting[job_id]

    def stop_waiting(self) -> None:
        """Let every waiting request answer at once, since the server shuts down."""
        self._stopping = True
        for events in self._waiting.values():
            for event in events:
                event.set()

    async def cancel(self, job_id: str) -> JobState | None:
        """Cancel an unfinished job, or forget a finished one; its state before, None if there is none."""
        state = await self._cancel(keys=[self.prefix], args=[job_id])
        return None if state is None else JobState(state)

    async def payload_ref(self, job_id: str) -> str | None:
        """Where an unfinished job's payload is; None if the job is finished or unknown."""
        fields: Any = await self.client.hmget(f"{self.prefix}job:{job_id}", ["state", "ref"])
        state, ref = fields
        return ref if state in (JobState.QUEUED, JobState.RUNNING) else None

    async def unfinished(self, job_ids: Iterable[str]) -> set[str]:
        """Those of ``job_ids`` whose payload is still needed."""
        ids = list(job_ids)
        async with self.client.pipeline(transaction=False) as pipe:
            for job_id in ids:
                pipe.hget(f"{self.prefix}job:{job_id}", "state")
            states = await pipe.execute()
        return {i for i, state in zip(ids, states, strict=True) if state in (JobState.QUEUED, JobState.RUNNING)}

    async def rewards(self) -> list[RewardInfo]:
        """The rewards that are served, by name; those without a live worker are within the grace period."""
        found: dict[str, RewardInfo] = {}
        rows = await self._workers(keys=[self.prefix], args=[self._grace_ms])
        for text, silent_ms, depth in rows:  # the freshest sign of life comes last and describes the reward
            worker = WorkerInfo(**json.loads(text))
            earlier = found.get(worker.reward)
            found[worker.reward] = RewardInfo(
                name=worker.reward,
                revision=worker.revision,
                description=worker.description,
                needs=list(worker.needs),
                relative=worker.relative,
                provenance=worker.provenance,
                workers=(earlier.workers if earlier else 0) + (float(silent_ms) < worker.silence_ms),
                max_batch=worker.max_batch,
                depth=max(0, int(depth)),
            )
        return [found[name] for name in sorted(found)]

    async def totals(self) -> list[Total]:
        """What the workers counted since Redis began."""
        counts: Any = await self.client.hgetall(f"{self.prefix}totals")
        split = ((key.rsplit(":", 1), count) for key, count in sorted(counts.items()))
        return [Total(reward, what, int(count)) for (reward, what), count in split]

    async def listen(self, on_done: Callable[[str], Awaitable[None]]) -> None:
        """Wake waiting requests and call ``on_done`` with the id of each job that ends, for ever; survives Redis."""
        while True:
            try:
                async for job_id in self._messages():
                    for event in self._waiting.get(job_id, ()):
                        event.set()
                    await on_done(job_id)
            except RedisError as error:
                log.warning("Redis is away (%s); listening again in %g s", error, RECHECK_S)
                await asyncio.sleep(RECHECK_S)

    async def _messages(self) -> AsyncIterator[str]:
        """Ids of the jobs that end, as Redis tells.

        A connection that is silent is asked for a sign of life: one whose host went away need not ever end, and of one
        that timed out redis-py's ``listen()`` makes an endless loop that lets nothing else run.

        Raises:
            redis.RedisError: Redis is away.
        """
        async with self.client.pubsub() as pubsub:
            await pubsub.subscribe(f"{self.prefix}done")
            asked = False
            while True:
                message: Any = await pubsub.get_message(timeout=SILENCE_S)
                if message is None:
                    if asked:
                        raise RedisTimeoutError(f"no sign of life for {2 * SILENCE_S:g} s")
                    await pubsub.ping()
                asked = message is None
                if message is not None and message["type"] == "message":
                    yield message["data"]


class WorkQueue:
    """A worker's side: take, begin, finish, give back; and its signs of life."""

    def __init__(
        self,
        client: redis.Redis,
        reward: str,
        worker_id: str,
        *,
        claim_idle_ms: int,
        prefix: str = PREFIX,
    ) -> None:
        """``client`` must decode responses."""
        self.client = client
        self.reward = reward
        self.worker_id = worker_id
        self._prefix = prefix
        self._stream = f"{prefix}stream:{reward}"
        self._claim_idle_ms = claim_idle_ms
        self._cursor = "0-0"  # where reclaiming goes on among the parts that others hold
        self._begin = client.register_script(scripts.BEGIN)
        self._finish = client.register_script(scripts.FINISH)
        self._give_back = client.register_script(scripts.GIVE_BACK)
        self._heartbeat = client.register_script(scripts.HEARTBEAT)

    def _run(self, script: Callable[..., Any], *arguments: str | int | float) -> Any:
        return script(keys=[self._prefix], args=[self.reward, *arguments])

    def join(self) -> None:
        """Create the stream and its consumer group unless they exist."""
        try:
            self.client.xgroup_create(self._stream, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def take(self, count: int, block_ms: int) -> list[Part]:
        """Up to ``count`` new parts, waiting up to ``block_ms`` for the first (0: do not wait).

        Raises:
            redis.RedisError: Redis is away.
        """
        try:
            reply: Any = self.client.xreadgroup(
                GROUP, self.worker_id, {self._stream: ">"}, count=count, block=block_ms or None
            )
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self.join()  # Redis came back empty
            return []
        return [_part(*entry) for _, entries in reply or [] for entry in entries]

    def reclaim(self, count: int) -> list[Part]:
        """Up to ``count`` parts whose worker showed no sign of life for ``claim_idle_ms``; they are ours now."""
        reply: Any = self.client.xautoclaim(
            self._stream, GROUP, self.worker_id, self._claim_idle_ms, start_id=self._cursor, count=count
        )
        self._cursor = reply[0]
        return [_part(*entry) for entry in reply[1] if entry[1]]

    def unfinished(self, count: int) -> list[Part]:
        """The ``count`` oldest parts without a result, whoever holds them."""
        entries: Any = self.client.xrange(self._stream, count=count)
        return [_part(*entry) for entry in entries]

    def begin(self, part: Part) -> Task | None:
        """Count this delivery; None if nobody waits for the part any more (it is dropped)."""
        reply = self._run(self._begin, part.entry, part.job, part.start, part.stop)
        return Task(part, reply[0], int(reply[1]), float(reply[2])) if reply else None

    def finish(self, part: Part, result: RewardResult, gave_up: str = "") -> bool:
        """Store the result and acknowledge, in one step; with ``gave_up``, a dead letter is kept too.

        False if the part had a result already (the first one stays) or its job is gone.
        """
        text = result.model_dump_json()
        failed = sum(score is None for score in result.scores)
        return bool(self._run(self._finish, part.entry, part.job, part.start, part.stop, text, gave_up, failed))

    def give_back(self, part: Part) -> None:
        """Hand a part that was begun to the other workers at once; the delivery does not count."""
        self._run(self._give_back, part.entry, part.job, part.start, part.stop)

    def hold(self, parts: Iterable[Part]) -> None:
        """Show that we still work on these parts, so that nobody reclaims them."""
        entries: Any = [part.entry for part in parts]
        if entries:
            self.client.xclaim(self._stream, GROUP, self.worker_id, 0, entries, justid=True)

    def heartbeat(self, info: WorkerInfo, *, leaving: bool = False) -> None:
        """Show that this worker lives, or that it left."""
        silence = info.silence_ms if leaving else 0
        largest_part = 0 if info.relative else info.max_batch
        self._run(self._heartbeat, self.worker_id, json.dumps(info.__dict__), largest_part, GRACE_S * 1000, silence)

    def leave(self, info: WorkerInfo) -> None:
        """Say goodbye; the group forgets this worker, unless it would forget a part with it."""
        self.heartbeat(info, leaving=True)
        if not self.client.xpending_range(self._stream, GROUP, "-", "+", 1, self.worker_id):
            self.client.xgroup_delconsumer(self._stream, GROUP, self.worker_id)


def _part(entry: str, fields: dict[str, str]) -> Part:
    return Part(entry, fields["job"], int(fields["start"]), int(fields["stop"]))
