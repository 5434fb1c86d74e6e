"""The HTTP API in front of the queue.

    POST   /v1/score              score images; 200 with the result, or 202 with the job's id after ``wait`` seconds
    GET    /v1/jobs/{id}?wait=s   the result, waiting for it up to ``wait`` seconds
    DELETE /v1/jobs/{id}          cancel an unfinished job, forget a finished one
    GET    /v1/jobs/{id}/images   the images of an unfinished job (for workers on other hosts)
    GET    /v1/rewards            what is served
    GET    /healthz, /readyz, /metrics

Every error is JSON: {"error": {"code", "message", "where"}}. A bearer token guards all but /healthz and /readyz.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

import redis.asyncio
import uvicorn
from fastapi import FastAPI, Query, Request, Response
from pydantic import BaseModel
from redis.exceptions import RedisError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reward_server.access import BearerAuth, check_exposure
from reward_server.contract import (
    CONTENT_TYPE,
    ErrorResponse,
    JobState,
    RewardList,
    ScoreResponse,
    decode_request,
    encode_request,
)
from reward_server.errors import ApiError, come_back, handlers, no_job
from reward_server.metrics import Metrics
from reward_server.queue import FINISHED, PREFIX, IdConflictError, JobQueue, QueueFullError, UnknownRewardError
from reward_server.receive import Received, receive
from reward_server.settings import GatewaySettings
from reward_server.spool import DirectorySpool, RedisSpool, Spool, SpoolFullError, default_directory

SWEEP_EVERY_S = 30.0

log = logging.getLogger(__name__)


def _json(model: BaseModel, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(model.model_dump_json(), status, headers, media_type="application/json")


class Instrument:
    """Counts answers by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._requests = metrics.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                self._requests.labels(scope["method"], route, message["status"]).inc()
            await send(message)

        await self._app(scope, receive, counting_send if scope["type"] == "http" else send)


class Gateway:
    """The handlers, and what they share."""

    def __init__(self, settings: GatewaySettings, prefix: str = PREFIX) -> None:
        self.settings = settings
        self.metrics = Metrics()
        url = settings.redis_url
        self._client = redis.asyncio.Redis.from_url(url, decode_responses=True, socket_timeout=10)
        self._binary = redis.asyncio.Redis.from_url(url, socket_timeout=60)
        self.queue = JobQueue(
            self._client,
            max_depth=settings.max_depth,
            job_ttl_s=settings.spool_ttl_s,
            result_ttl_s=settings.result_ttl_s,
            prefix=prefix,
        )
        self.spool: Spool
        if settings.spool == "redis":
            self.spool = RedisSpool(self._binary, settings.spool_max_bytes, settings.spool_ttl_s, prefix)
        else:
            if settings.spool == "directory" and settings.spool_dir is None:
                raise ValueError("spool is 'directory', so spool_dir must name one")
            directory = settings.spool_dir or default_directory(url)
            self.spool = DirectorySpool(directory, settings.spool_max_bytes)
        self._refs: dict[str, str] = {}  # payloads of the unfinished jobs that came in here, by job id

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.queue.listen(self._job_ended)), asyncio.create_task(self._sweep())]
        yield
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self._client.aclose()
        await self._binary.aclose()

    async def _job_ended(self, job_id: str) -> None:
        if ref := self._refs.pop(job_id, None):
            try:
                await self.spool.delete(ref)
            except OSError as error:
                log.warning("payload of job %s left to the sweep: %s", job_id, error)

    async def _sweep(self) -> None:
        """At start and every now and then: payloads that a crash or a missed message left behind."""
        while True:
            try:
                if swept := await self.spool.sweep(self.queue.unfinished):
                    log.info("removed %d payloads of jobs that have ended", swept)
                known = set(self._refs)
                for job_id in known - await self.queue.unfinished(known):
                    self._refs.pop(job_id, None)
            except (RedisError, OSError) as error:
                log.warning("payloads not swept: %s", error)
            await asyncio.sleep(SWEEP_EVERY_S)

    async def score(self, request: Request) -> Response:
        """Score images: a safetensors body (reward_server/contract.py), or a form for people:

        curl -F image=@cat.png -F prompt="a cat" -F reward=shapes http://127.0.0.1:8000/v1/score
        """
        started = time.monotonic()
        try:
            received = await receive(request, self.spool, self.settings)
        except SpoolFullError as error:
            # 429 and not 507: room comes back as jobs end, so clients should wait as they do for a full queue
            raise come_back(429, "spool_full", str(error)) from error
        queued = time.monotonic()
        self.metrics.receive_seconds.observe(queued - started)
        await self._submit(received)
        response = await self.queue.wait(received.job_id, min(received.request.wait, self.settings.max_wait_s))
        if response is None:
            raise come_back(
                503, "job_lost", f"Redis lost job {received.job_id} (restarted without its data?): send it again"
            )
        if response.state in FINISHED:
            self.metrics.job_seconds.observe(time.monotonic() - queued)
        return self._answer(response)

    async def _submit(self, received: Received) -> None:
        """Commit the payload and queue the job; the payload stays only if the job is new."""
        job_id, request = received.job_id, received.request
        ref = await received.payload.commit()
        self._refs.setdefault(job_id, ref)  # before the job can end
        refused: ApiError | None = None
        new = False
        try:
            new = await self.queue.submit(job_id, received.digest, len(request.prompts), ref, request.rewards)
        except UnknownRewardError as error:
            served = ", ".join(info.name for info in await self.queue.rewards()) or "none at the moment"
            message = f"no worker serves {error.reward!r}; served: {served}"
            refused = ApiError(404, "unknown_reward", message, "request.rewards")
        except QueueFullError as error:
            refused = come_back(429, "queue_full", f"{error}, at most {self.settings.max_depth} may")
        except IdConflictError:
            refused = ApiError(409, "id_conflict", f"job {job_id} exists with other content", "request.id")
        # a RedisError leaves the payload to the sweep, since the job may have been queued all the same
        if not new:
            if self._refs.get(job_id) == ref:
                del self._refs[job_id]
            await received.payload.discard()
        if refused is not None:
            raise refused
        self.metrics.images.inc(len(request.prompts))

    def _answer(self, response: ScoreResponse) -> Response:
        return _json(response, 200 if response.state in FINISHED else 202)

    async def job(self, job_id: str, wait: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0) -> Response:
        """The job's result; waits for it up to ``wait`` seconds, then 202."""
        response = await self.queue.wait(job_id, min(wait, self.settings.max_wait_s))
        if response is None:
            raise no_job(job_id)
        return self._answer(response)

    async def delete_job(self, job_id: str) -> Response:
        """Cancel an unfinished job (images not scored yet will not be), or forget a finished one."""
        response = await self.queue.status(job_id)
        state = await self.queue.cancel(job_id)
        if response is None or state is None:
            raise no_job(job_id)
        if state not in FINISHED:
            response.state = JobState.CANCELLED
        return _json(response)

    async def job_images(
        self, job_id: str, start: Annotated[int, Query(ge=0)] = 0, stop: Annotated[int | None, Query(ge=1)] = None
    ) -> Response:
        """Images ``start`` .. ``stop - 1`` of an unfinished job with prompts and metadata, as a safetensors body."""
        ref = await self.queue.payload_ref(job_id)
        body = await self.spool.read(ref) if ref else None
        if body is None:
            raise ApiError(404, "no_images", f"no images of job {job_id} here: it has ended, or is unknown", "path.id")
        request, images = decode_request(body)
        chosen = slice(start, stop)
        if not request.prompts[chosen]:
            raise ApiError(422, "malformed", f"no images {start}..{stop}: the job has {len(images)}", "query")
        part = request.model_copy(
            update={"prompts": request.prompts[chosen], "metadata": request.metadata and request.metadata[chosen]}
        )
        return Response(b"".join(encode_request(part, images[chosen])), media_type=CONTENT_TYPE)

    async def rewards(self) -> Response:
        """The rewards that are served, with revision, needed metadata, live workers and queue depth."""
        return _json(RewardList(rewards=await self.queue.rewards()))

    async def healthz(self) -> Response:
        """200 while the process answers."""
        return Response('{"status":"ok"}', media_type="application/json")

    async def readyz(self) -> Response:
        """200 when Redis answers and a worker lives; else 503 that says what is missing."""
        try:
            served = [info.name for info in await self.queue.rewards() if info.workers]
        except RedisError as error:
            raise come_back(503, "not_ready", f"Redis is away: {error}") from error
        if not served:
            raise come_back(503, "not_ready", "no worker is alive: start one with reward-server worker NAME")
        return _json(Ready(rewards=served))

    async def metrics_text(self) -> Response:
        """Prometheus metrics."""
        try:
            observed = await self.queue.rewards(), await self.queue.totals(), await self.spool.used()
        except RedisError:
            observed = None
        return Response(self.metrics.render(observed), media_type="text/plain; version=0.0.4")


class Ready(BaseModel):
    ready: bool = True
    rewards: list[str]


def create_app(settings: GatewaySettings, *, prefix: str = PREFIX) -> FastAPI:
    """The gateway as an ASGI application; connects to Redis when it is started, and survives its absence.

    Raises:
        ValueError: the token is empty or its file cannot be read, or spool settings do not fit together.
    """
    gateway = Gateway(settings, prefix)
    app = FastAPI(title="Reward server", lifespan=gateway.lifespan, exception_handlers=handlers())
    app.state.gateway = gateway
    results: dict[int | str, dict[str, Any]] = {200: {"model": ScoreResponse}, 202: {"model": ScoreResponse}}
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorResponse} for status in (401, 404, 409, 413, 415, 422, 429, 503)
    }
    add = app.add_api_route
    add("/v1/score", gateway.score, methods=["POST"], responses={**results, **errors})
    add("/v1/jobs/{job_id}", gateway.job, methods=["GET"], responses={**results, **errors})
    add("/v1/jobs/{job_id}", gateway.delete_job, methods=["DELETE"], responses={200: results[200], **errors})
    add("/v1/jobs/{job_id}/images", gateway.job_images, methods=["GET"])
    add("/v1/rewards", gateway.rewards, methods=["GET"], responses={200: {"model": RewardList}})
    add("/healthz", gateway.healthz, methods=["GET"])
    add("/readyz", gateway.readyz, methods=["GET"])
    add("/metrics", gateway.metrics_text, methods=["GET"])
    if token := settings.bearer_token():
        app.add_middleware(BearerAuth, token=token)
    app.add_middleware(Instrument, metrics=gateway.metrics)
    return app


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None], on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)


def run(settings: GatewaySettings, on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGTERM or SIGINT; ``on_ready`` gets the URL once requests are accepted (port 0: a free port).

    Raises:
        ValueError: settings that :func:`create_app` or :func:`check_exposure` refuse.
        OSError: the address is taken or not ours.
    """
    check_exposure(settings.host, settings.bearer_token())
    # Freeing one large block makes glibc keep the memory of a body's chunks instead of returning it to the system
    # after each: 16 ms of CPU to receive and spool 12 MiB become 10.
    bytearray(31 << 20)
    app = create_app(settings)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.create_server((settings.host, settings.port), family=family, backlog=1024) as listener:
        host = f"[{settings.host}]" if family == socket.AF_INET6 else settings.host
        url = f"http://{host}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            app, log_config=None, log_level=settings.log_level, access_log=False, timeout_graceful_shutdown=5
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(
                number, lambda *_: None
            )  # uvicorn raises them again once it has shut down: that is no failure
        _Server(config, lambda: on_ready(url), app.state.gateway.queue.stop_waiting).run(sockets=[listener])
