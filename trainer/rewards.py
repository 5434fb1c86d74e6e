"""Scores over HTTP: the reward server's client. Of ``reward_server`` it knows the contract and nothing else.

A rollout's images are submitted and scored while the next rollout runs; ``submit(...).result()`` gives the scores.
A server that goes away, is busy or restarts pauses the job with one clear message and is asked again with the same
job id, so that no image is scored twice; past a limit the run stops. A missing score is never a number.
"""

from __future__ import annotations

import difflib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

import httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from reward_server.contract import (
    CONTENT_TYPE,
    ContractError,
    ErrorResponse,
    Images,
    JobState,
    RewardList,
    RewardResult,
    ScoreRequest,
    ScoreResponse,
    encode_request,
    parse_model,
)

M = TypeVar("M", RewardList, ScoreResponse)
logger = logging.getLogger(__name__)

_PIECE = 1 << 20
"""Bytes handed to the socket at a time: httpcore copies what a send leaves over, so 12 MiB in one piece cost 12 ms of
CPU, in these pieces 4"""
_POLL_S = 5.0
"""Length of one long poll; also the longest that :meth:`RewardClient.close` waits."""
_RETRY_S = (0.1, 5.0)
"""First and longest pause before a server that is away is asked again"""


class RewardError(RuntimeError):
    """Scores cannot be had; the message says why."""


class RewardServerLost(RewardError):  # noqa: N818
    """The server stayed away, or a job unfinished, for longer than the limit."""


class RewardRefused(RewardError):  # noqa: N818
    """The server will not do this (wrong token, unknown reward, malformed request ...); asking again is no use."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status: 401, 404, 409, 413 or 422"""


@dataclass(frozen=True)
class RewardScores:
    """Scores of B images by reward name."""

    scores: dict[str, NDArray[np.float64]]
    """[B] each; NaN where ``valid`` is False, so that a failure that slips through is seen"""
    valid: dict[str, NDArray[np.bool_]]
    """[B] each: whether there is a score"""
    reasons: dict[str, list[str | None]]
    """Why there is no score, one per image"""
    details: dict[str, dict[str, NDArray[np.float64]]]
    """Sub-scores: reward -> name -> [B], NaN where missing"""
    revisions: dict[str, str]
    """Of the weights that scored"""
    provenance: dict[str, dict[str, str]]
    """What each reward's scores came from: weights (sha256), preprocessing, dtype, device, libraries"""
    seconds: float
    """From submission to scores"""
    away_s: float
    """The part of it in which the server was away or busy"""

    @property
    def reason(self) -> str | None:
        """Why the first image without a score has none; None if all have one."""
        return next((r for reasons in self.reasons.values() for r in reasons if r is not None), None)


class RewardClient:
    """Client of one reward server; use as a context manager or call :meth:`close`."""

    def __init__(
        self,
        url: str,
        token: str | None,
        rewards: Iterable[str],
        *,
        timeout_s: float = 600.0,
        give_up_after_s: float = 600.0,
        max_jobs: int = 4,
        while_away: Callable[[], object] = lambda: None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """
        Args:
            url: of the gateway, ``http://host:port``.
            token: bearer token; None where the server asks for none.
            rewards: names to score by (a mapping to weights will do).
            timeout_s: longest time for one job that the server has taken, without outages, seconds.
            give_up_after_s: longest outage, seconds.
            max_jobs: jobs in flight; more wait in this process.
            while_away: called now and then during an outage; what it raises ends the job at once
                (``EmbeddedServer.check``: a server that is down for good need not be waited for).
            transport: stands in for the network in tests.
        """
        self.url = url.rstrip("/")
        self.rewards = list(rewards)
        self.provenance: dict[str, dict[str, str]] = {}
        self.relative: list[str] = []
        self._timeout_s = timeout_s
        self._give_up_after_s = give_up_after_s
        self._while_away = while_away
        self._http = httpx.Client(
            base_url=self.url,
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(60.0, connect=5.0, read=_POLL_S + 60.0),
            transport=transport,
            trust_env=False,  # a proxy for the internet is none for a server next door
        )
        self._pool = ThreadPoolExecutor(max_jobs, thread_name_prefix="rewards")
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._served = False  # whether the server has ever served all our rewards

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up jobs in flight (within 5 s) and close connections."""
        self._closed.set()
        self._pool.shutdown(cancel_futures=True)
        self._http.close()

    def check(self, wait_s: float = 30.0) -> dict[str, str]:
        """Revision of each of our rewards, as served now.

        Then :attr:`provenance` says more about them, and :attr:`relative` names those that score an image relative to
        the others of its group, and so need all of a group in one request.

        Raises:
            RewardServerLost: no answer within ``wait_s``.
            RewardRefused: wrong token (401), or a reward that is not served (404), naming the nearest that is.
        """
        answer = self._parse(RewardList, self._ask("GET", "/v1/rewards", wait_s=wait_s)[0])
        served = {info.name: info.revision for info in answer.rewards}
        ours = [info for info in answer.rewards if info.name in self.rewards]
        self.provenance = {info.name: info.provenance for info in ours}
        self.relative = [info.name for info in ours if info.relative]
        for name in self.rewards:
            if name not in served:
                near = difflib.get_close_matches(name, served, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                listed = ", ".join(served) or "none"
                raise RewardRefused(f"{self.url} does not serve {name!r}{hint} (served: {listed})", 404)
        self._served = True
        return {name: served[name] for name in self.rewards}

    def submit(
        self,
        images: Images,
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]] | None = None,
        job_id: str | None = None,
    ) -> Future[RewardScores]:
        """Send images to be scored and return at once; the images must not be changed until the result is there.

        Args:
            images: uint8 [B, H, W, 3], or B arrays [H, W, 3] whose sizes differ.
            prompts: one per image.
            metadata: JSON values by key, one mapping per image.
            job_id: letters, digits and ``._-``, unique to this content; the same id again gives the same job and
                scores. Random when None.

        Raises (here or from ``result()``):
            ContractError: the images are not what is described above.
            RewardRefused, RewardServerLost, RewardError: see there.
        """
        try:
            request = ScoreRequest(
                id=job_id or uuid.uuid4().hex,
                rewards=self.rewards,
                prompts=list(prompts),
                metadata=None if metadata is None else [dict(m) for m in metadata],
                wait=_POLL_S,
            )
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ContractError(first["msg"], ".".join(map(str, first["loc"]))) from error
        body = encode_request(request, images)
        return self._pool.submit(self._score, request, body, time.monotonic())

    # --- one job, in a thread of the pool

    def _score(self, request: ScoreRequest, body: list[bytes | memoryview], started: float) -> RewardScores:
        away_s = 0.0
        job: ScoreResponse | None = None
        deadline = time.monotonic() + self._timeout_s
        while job is None or job.state in (JobState.QUEUED, JobState.RUNNING):
            if job is None:
                response, away = self._ask("POST", "/v1/score", body)
            else:
                response, away = self._ask("GET", f"/v1/jobs/{request.id}?wait={_POLL_S}")
            away_s += away
            deadline += away
            forgotten = response.status_code == 404  # by a server that was restarted: send the job again
            job = None if forgotten else self._parse(ScoreResponse, response)
            if time.monotonic() > deadline:
                raise RewardServerLost(f"{self.url}: job {request.id} is unfinished after {self._timeout_s:g} s")
        if job.state is JobState.CANCELLED:
            raise RewardError(f"{self.url}: job {request.id} was cancelled")
        self._served = True
        return self._scores(job, len(request.prompts), time.monotonic() - started, away_s)

    def _scores(self, job: ScoreResponse, count: int, seconds: float, away_s: float) -> RewardScores:
        results: dict[str, RewardResult] = {}
        for name in self.rewards:
            result = job.results.get(name)
            if result is None or len(result.scores) != count:
                got = "no result" if result is None else f"{len(result.scores)} scores"
                raise RewardError(f"{self.url}: job {job.id} has {got} of {name!r} for {count} images")
            results[name] = result
        scores = {name: np.array(r.scores, dtype=np.float64) for name, r in results.items()}
        return RewardScores(
            scores=scores,
            valid={name: np.isfinite(values) for name, values in scores.items()},
            reasons={name: r.reasons for name, r in results.items()},
            details={
                name: {key: np.array(column, dtype=np.float64) for key, column in r.details.items()}
                for name, r in results.items()
            },
            revisions={name: r.revision for name, r in results.items()},
            provenance={name: r.provenance for name, r in results.items()},
            seconds=seconds,
            away_s=away_s,
        )

    # --- one question

    def _ask(
        self, method: str, path: str, body: Sequence[bytes | memoryview] = (), wait_s: float | None = None
    ) -> tuple[httpx.Response, float]:
        """The server's answer, and how many seconds it was away before; a job's 404 is an answer.

        Raises:
            RewardServerLost: it stayed away longer than ``wait_s`` (``give_up_after_s`` when None).
            RewardRefused: it refused the request.
        """
        limit = self._give_up_after_s if wait_s is None else wait_s
        started, pause = time.monotonic(), _RETRY_S[0]
        while not self._closed.is_set():
            retry_after = None
            try:
                response = self._send(method, path, body)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
            else:
                if self._is_answer(response, path):
                    return response, self._back(started)
                reason, retry_after = self._message(response), response.headers.get("Retry-After")
            self._away(reason, limit)
            self._while_away()
            hint = float(retry_after) if retry_after and retry_after.isdecimal() else 0.0
            self._closed.wait(min(max(pause, hint), max(limit, 0.01)))
            pause = min(2 * pause, _RETRY_S[1])
        raise RewardError("the reward client was closed")

    def _send(self, method: str, path: str, body: Sequence[bytes | memoryview]) -> httpx.Response:
        if not body:
            return self._http.request(method, path)
        headers = {"Content-Type": CONTENT_TYPE, "Content-Length": str(sum(map(len, body)))}
        return self._http.request(method, path, content=cast(Iterable[bytes], _pieces(body)), headers=headers)

    def _is_answer(self, response: httpx.Response, path: str) -> bool:
        """Whether to go on with this response (True) or to ask again later (False).

        Raises:
            RewardRefused: asking again is no use.
        """
        status = response.status_code
        if status in (200, 202) or (status == 404 and path.startswith("/v1/jobs/")):
            return True
        # a reward that was served before and is not now: a server that is starting again
        if status == 429 or status >= 500 or (status == 404 and self._served):
            return False
        raise RewardRefused(f"{self.url} {self._message(response)}", status)

    def _away(self, reason: str, limit: float) -> None:
        """Note an outage; say so once."""
        with self._lock:
            now = time.monotonic()
            if self._away_since is None:
                self._away_since = now
                logger.warning("reward server at %s is away (%s); waiting up to %g s", self.url, reason, limit)
            if now - self._away_since >= limit:
                raise RewardServerLost(f"reward server at {self.url} stayed away for {limit:g} s ({reason})")

    def _back(self, started: float) -> float:
        """End an outage, if there was one; its seconds since ``started``."""
        with self._lock:
            if self._away_since is None:
                return 0.0
            now = time.monotonic()
            logger.warning("reward server at %s is back after %.1f s", self.url, now - self._away_since)
            away = now - max(started, self._away_since)
            self._away_since = None
            return away

    @staticmethod
    def _message(response: httpx.Response) -> str:
        """What the server answered, in its own words if it is a reward server."""
        try:
            error = parse_model(ErrorResponse, response.content, "error").error
        except ContractError:
            return _no_reward_server(response)
        where = f" (at {error.where})" if error.where else ""
        return f"answered {response.status_code}: {error.message}{where}"

    def _parse(self, model: type[M], response: httpx.Response) -> M:
        try:
            return parse_model(model, response.content, "answer")
        except ContractError as error:
            if not response.headers.get("Content-Type", "").startswith("application/json"):
                raise RewardError(f"{self.url} {_no_reward_server(response)}") from error
            raise RewardError(f"{self.url} answered what this client cannot read: {error.where}: {error}") from error


def _no_reward_server(response: httpx.Response) -> str:
    kind = response.headers.get("Content-Type", "no content type")
    return f"does not answer like a reward server (HTTP {response.status_code}, {kind})"


def _pieces(body: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The body in small pieces, without copying."""
    for chunk in body:
        view = memoryview(chunk)
        for start in range(0, len(view), _PIECE):
            yield view[start : start + _PIECE]
