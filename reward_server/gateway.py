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
import hmac
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

import redis.asyncio
import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reward_server.contract import (
    CONTENT_TYPE,
    ContractError,
    ErrorDetail,
    ErrorResponse,
    JobState,
    RewardList,
    ScoreResponse,
    decode_request,
    encode_request,
)
from reward_server.metrics import Metrics
from reward_server.queue import FINISHED, PREFIX, IdConflictError, JobQueue, QueueFullError, UnknownRewardError
from reward_server.receive import Received, TooLargeError, UnsupportedTypeError, receive
from reward_server.settings import GatewaySettings
from reward_server.spool import DirectorySpool, RedisSpool, Spool, SpoolFullError, default_directory

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
SWEEP_EVERY_S = 30.0
RETRY_AFTER_S = 1

log = logging.getLogger(__name__)


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self, status: int, code: str, message: str, where: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.where, self.headers = status, code, message, where, headers

    def response(self) -> Response:
        detail = ErrorDetail(code=self.code, message=self.message, where=self.where)
        return _json(ErrorResponse(error=detail), self.status, self.headers)


def _json(model: BaseModel, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(model.model_dump_json(), status, headers, media_type="application/json")


def _busy(status: int, code: str, message: str) -> ApiError:
    return ApiError(status, code, message, headers={"Retry-After": str(RETRY_AFTER_S)})


class BearerAuth:
    """Refuses requests without the right token before their body is read."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                headers = {"WWW-Authenticate": "Bearer"}
                error = ApiError(401, "unauthorized", "a bearer token is needed", "header Authorization", headers)
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


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
            await self.spool.delete(ref)

    async def _sweep(self) -> None:
        """At start and every now and then: payloads that a crash or a missed message left behind."""
        while True:
            try:
                if swept := await self.spool.sweep(self.queue.unfinished):
                    log.info("removed %d payloads of jobs that have ended", swept)
                needed = await self.queue.unfinished(self._refs)
                self._refs = {job_id: ref for job_id, ref in self._refs.items() if job_id in needed}
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
            raise _busy(429, "spool_full", str(error)) from error
        queued = time.monotonic()
        self.metrics.receive_seconds.observe(queued - started)
        await self._submit(received)
        response = await self.queue.wait(received.job_id, min(received.request.wait, self.settings.max_wait_s))
        if response is None:
            raise _busy(
                503, "job_lost", f"Redis lost job {received.job_id} (restarted without its data?): send it again"
            )
        if response.state in FINISHED:
            self.metrics.job_seconds.observe(time.monotonic() - queued)
        return self._answer(response)

    async def _submit(self, received: Received) -> None:
        """Commit the payload and queue the job; the payload stays only if the job is new."""
        job_id, request = received.job_id, received.request
        new = False
        ref = await received.payload.commit()
        self._refs.setdefault(job_id, ref)  # before the job can end
        try:
            new = await self.queue.submit(job_id, received.digest, len(request.prompts), ref, request.rewards)
        except UnknownRewardError as error:
            served = ", ".join(info.name for info in await self.queue.rewards()) or "none at the moment"
            raise ApiError(
                404, "unknown_reward", f"no worker serves {error.reward!r}; served: {served}", "request.rewards"
            ) from error
        except QueueFullError as error:
            raise _busy(429, "queue_full", f"{error}, at most {self.settings.max_depth} may") from error
        except IdConflictError as error:
            raise ApiError(409, "id_conflict", f"job {job_id} exists with other content", "request.id") from error
        finally:
            if not new:
                if self._refs.get(job_id) == ref:
                    del self._refs[job_id]
                await received.payload.discard()
        self.metrics.images.inc(len(request.prompts))

    def _answer(self, response: ScoreResponse) -> Response:
        return _json(response, 200 if response.state in FINISHED else 202)

    async def job(self, job_id: str, wait: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0) -> Response:
        """The job's result; waits for it up to ``wait`` seconds, then 202."""
        response = await self.queue.wait(job_id, min(wait, self.settings.max_wait_s))
        if response is None:
            raise _no_job(job_id)
        return self._answer(response)

    async def delete_job(self, job_id: str) -> Response:
        """Cancel an unfinished job (images not scored yet will not be), or forget a finished one."""
        response = await self.queue.status(job_id)
        state = await self.queue.cancel(job_id)
        if response is None or state is None:
            raise _no_job(job_id)
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
            raise _busy(503, "not_ready", f"Redis is away: {error}") from error
        if not served:
            raise _busy(503, "not_ready", "no worker is alive: start one with reward-server worker NAME")
        return _json(Ready(rewards=served))

    async def metrics_text(self) -> Response:
        """Prometheus metrics."""
        try:
            rewards, spool_bytes = await self.queue.rewards(), await self.spool.used()
        except RedisError:
            rewards, spool_bytes = None, None
        return Response(self.metrics.render(rewards, spool_bytes), media_type="text/plain; version=0.0.4")


class Ready(BaseModel):
    ready: bool = True
    rewards: list[str]


def _no_job(job_id: str) -> ApiError:
    return ApiError(
        404, "unknown_job", f"no job {job_id!r}: never sent, forgotten after its time, or deleted", "path.id"
    )


def _handlers() -> dict[Any, Callable[[Request, Any], Coroutine[Any, Any, Response]]]:
    """By exception: the answer that it becomes."""

    def answer(make: Callable[[Any], ApiError]) -> Callable[[Request, Any], Coroutine[Any, Any, Response]]:
        async def handler(request: Request, error: Any) -> Response:
            return make(error).response()

        return handler

    def invalid_query(error: RequestValidationError) -> ApiError:
        first = error.errors()[0]
        return ApiError(422, "malformed", first["msg"], ".".join(map(str, first["loc"])))

    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    return {
        ApiError: answer(lambda error: error),
        ContractError: answer(lambda error: ApiError(422, "malformed", str(error), error.where)),
        TooLargeError: answer(lambda error: ApiError(413, "too_large", str(error), error.where)),
        UnsupportedTypeError: answer(
            lambda error: ApiError(415, "unsupported_type", str(error), "header Content-Type")
        ),
        RequestValidationError: answer(invalid_query),
        HTTPException: answer(lambda error: ApiError(error.status_code, "http", str(error.detail))),
        RedisError: answer(lambda error: _busy(503, "redis_away", f"the queue is away: {error}")),
        ClientDisconnect: gone,
    }


def create_app(settings: GatewaySettings, *, prefix: str = PREFIX) -> FastAPI:
    """The gateway as an ASGI application; connects to Redis when it is started, and survives its absence.

    Raises:
        ValueError: the token is empty or its file cannot be read, or spool settings do not fit together.
    """
    gateway = Gateway(settings, prefix)
    app = FastAPI(title="Reward server", lifespan=gateway.lifespan, exception_handlers=_handlers())
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


def check_exposure(host: str, token: str | None) -> None:
    """Refuse to serve other machines without a token.

    Raises:
        ValueError: ``token`` is None and ``host`` is, or may resolve to, an address that is not loopback.
    """
    if token is not None:
        return
    try:
        addresses = [ipaddress.ip_address(host or "0.0.0.0")]  # an empty host means all addresses
    except ValueError:
        try:
            addresses = [ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, None)]
        except OSError as error:
            raise ValueError(f"host {host!r} cannot be resolved: {error}") from error
    if not all(address.is_loopback for address in addresses):
        raise ValueError(
            f"host {host!r} can be reached from other machines, and no token is set: set token (or token_file), "
            "or listen on 127.0.0.1"
        )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def run(settings: GatewaySettings, on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGTERM or SIGINT; ``on_ready`` gets the URL once requests are accepted (port 0: a free port).

    Raises:
        ValueError: settings that :func:`create_app` or :func:`check_exposure` refuse.
        OSError: the address is taken or not ours.
    """
    check_exposure(settings.host, settings.bearer_token())
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
        _Server(config, lambda: on_ready(url)).run(sockets=[listener])
