"""An HTTP server of another project: requests with bounded tries, ``Retry-After`` honoured, replies of bounded size."""

from __future__ import annotations

import email.utils
import json
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import httpx

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 64 << 20
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
"""Pause before the second try, and the longest, where the server does not say how long to wait"""
BUSY = frozenset({429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed; flow_grpo's clients, too, repeat after a 500"""


class RemoteError(Exception):
    """The server did not answer, refused, or answered something else than its protocol says; in words for people."""


class RemoteTokenError(RemoteError):
    """The server wants another token, or any: waiting does not help."""


class Caller:
    """Requests to ``url``; at most ``1 + retries`` tries each, whatever goes wrong. May be used by several threads.

    A read timeout leaves the server at work on a batch whose answer nobody reads; every further try adds another, so
    it counts as a try like any other failure.

    Args:
        timeout_s: of each step of a try (connecting, sending, waiting, receiving); the longest ``Retry-After``, too.
        token: sent as ``Authorization: Bearer``, if any.
    """

    def __init__(self, url: str, *, timeout_s: float, retries: int, token: str | None) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.tries = 1 + retries
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0)), headers=headers)

    def close(self) -> None:
        self._client.close()

    def request(
        self, method: str, path: str, *, refused: frozenset[int] = frozenset(), **content: Any
    ) -> tuple[int, bytes]:
        """Status and body of the reply.

        Args:
            path: appended to the URL.
            refused: statuses outside 200..299 that are returned instead of raised.
            content: what ``httpx.Client.request`` takes: json, content, data, headers, params, timeout.

        Raises:
            RemoteError: no try succeeded, or the server refused.
        """
        url, pause = self.url + path, FIRST_PAUSE_S
        for attempt in range(1, self.tries + 1):
            wait = None
            try:
                with self._client.stream(method, url, **content) as response:
                    status, body = response.status_code, self._read(response)
                    wait = _retry_after(response.headers)
                if response.is_success or status in refused:
                    return status, body
                problem = f"{method} {url} answered {status}: {_excerpt(body)}"
                if status in (401, 403):
                    raise RemoteTokenError(f"{problem}; name the environment variable of its token: option token_env")
                if status not in BUSY:
                    raise RemoteError(problem)
            except httpx.TimeoutException as error:
                problem = f"{method} {url}: no answer within {self.timeout_s:g} s ({type(error).__name__})"
            except httpx.HTTPError as error:
                problem = f"{method} {url}: {type(error).__name__}: {error}"
            if wait is not None and wait > self.timeout_s:
                raise RemoteError(f"{problem} (it asks to wait {wait:g} s, longer than timeout_s)")
            if attempt < self.tries:
                log.warning("%s; try %d of %d", problem, attempt, self.tries)
                time.sleep(pause if wait is None else wait)
                pause = min(2 * pause, MAX_PAUSE_S)
        raise RemoteError(f"{problem} ({self.tries} tries)" if self.tries > 1 else problem)

    def json(self, method: str, path: str, **content: Any) -> Any:
        """The reply's JSON, NaN and Infinity (which Python's servers write) as None.

        Raises:
            RemoteError: as :meth:`request`, or it is not JSON.
        """
        return parse_json(self.request(method, path, **content)[1], self.url + path)

    def _read(self, response: httpx.Response) -> bytes:
        body, deadline = bytearray(), time.monotonic() + self.timeout_s
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) > MAX_REPLY_BYTES:
                raise RemoteError(f"the reply of {response.url} is longer than {MAX_REPLY_BYTES} bytes")
            if time.monotonic() > deadline:
                raise httpx.ReadTimeout("the reply comes too slowly")
        return bytes(body)


def parse_json(body: bytes, where: str) -> Any:
    """As :meth:`Caller.json`."""
    try:
        return json.loads(body, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise RemoteError(f"the reply of {where} is not JSON: {_excerpt(body)}") from error


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that ``Retry-After`` (RFC 9110: seconds or a date) asks to wait; None if it is absent or unreadable."""
    text = headers.get("retry-after", "")
    if text.isdigit():
        return float(text)
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


def _excerpt(body: bytes) -> str:
    """The end of a traceback, or the start of anything else, in one line."""
    lines = body.decode(errors="replace").strip().splitlines() or ["(empty)"]
    text = lines[-1] if lines[0].startswith("Traceback") else " ".join(lines)
    return text[:200]
