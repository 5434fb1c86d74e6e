"""A client of OpenAI-compatible servers (vLLM, SGLang, llama.cpp, ``transformers serve``): what a judge needs of them.

``GET {base_url}/models`` and ``POST {base_url}/chat/completions``. Every wait is bounded: connecting, silence, the
whole answer, the number of tries, and the pause that a server may ask for. May be used by several threads at once.
"""

from __future__ import annotations

import email.utils
import ipaddress
import json
import logging
import math
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx

from reward_server.rewards.base import RewardLoadError

log = logging.getLogger(__name__)

DEFAULT_KEY_ENV = "OPENAI_API_KEY"
MAX_ANSWER_BYTES = 4 << 20
MAX_TOLD = 300
"""Characters of a server's words that go into a reason"""
_RETRIED = {408, 429, 500, 502, 503, 504}
_MAX_BACKOFF_S = 8.0


class ChatError(Exception):
    """No answer could be had; ``status`` is the HTTP status if there was one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Token:
    """One generated token, and the probabilities of the likeliest candidates at its place, by their text."""

    text: str
    candidates: Mapping[str, float]


@dataclass(frozen=True)
class Reply:
    """A completion. ``tokens`` is empty if the server gave no log-probabilities."""

    text: str
    tokens: tuple[Token, ...] = ()
    cut: bool = False
    """``max_tokens`` ended it"""


def told(text: str) -> str:
    """``text`` of a stranger, for a message: on one line, bounded, control characters escaped."""
    short = text if len(text) <= MAX_TOLD else text[:MAX_TOLD] + "..."
    return json.dumps(short, ensure_ascii=not short.isprintable())


class ChatClient:
    """Talks to one server.

    Args:
        base_url: with the version, e.g. ``http://127.0.0.1:8000/v1``.
        api_key_env: environment variable that holds the key. None: ``OPENAI_API_KEY`` if it is set and the way is
            safe (https or loopback); a key named here must be set and is sent over plain http, too.
        connect_timeout_s: longest wait for a connection, seconds.
        timeout_s: longest wait for one whole answer, seconds.
        retries: further tries after a broken connection, a time-out or a status that passes (408, 429, 5xx).
        max_retry_after_s: longest pause that the server may ask for; one that asks for more is given up.

    A ``deadline`` is an instant of :func:`time.monotonic`: all tries and pauses end by then.

    Raises:
        RewardLoadError: the URL is not one, holds secrets, or the key is not in the environment.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key_env: str | None,
        connect_timeout_s: float,
        timeout_s: float,
        retries: int,
        max_retry_after_s: float,
    ) -> None:
        url = _checked_url(base_url)
        self.url = str(url).rstrip("/")
        self._key = _key(api_key_env, url)
        self._timeout_s, self._retries, self._max_retry_after_s = timeout_s, retries, max_retry_after_s
        self._connect_timeout_s = connect_timeout_s
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=not _is_loopback(url.host),  # a proxy for the internet is none for a server next door
        )

    def close(self) -> None:
        self._http.close()

    def models(self, deadline: float = math.inf) -> list[dict[str, Any]]:
        """Entries of the server's list of models, each with a string ``id``; empty if it keeps no list.

        Raises:
            ChatError: the server cannot be reached, refuses, or does not answer as such a server does.
        """
        try:
            answer = self._ask("GET", "/models", None, deadline)
        except ChatError as error:
            if error.status in (404, 405, 501):
                return []
            raise
        entries = answer.get("data")
        if not isinstance(entries, list) or any(not isinstance(_at(entry, "id"), str) for entry in entries):
            raise ChatError(f"{self.url}/models is not a list of models: is it an OpenAI-compatible server?")
        return entries

    def complete(self, body: Mapping[str, Any], deadline: float = math.inf) -> Reply:
        """One completion.

        Raises:
            ChatError: no answer after all tries, or what came is not a completion.
        """
        answer = self._ask("POST", "/chat/completions", json.dumps(body).encode(), deadline)
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise ChatError(f"the server's answer is no completion: {told(json.dumps(answer))}") from error
        cut = choice.get("finish_reason") == "length"
        return Reply(text if isinstance(text, str) else "", _tokens(choice.get("logprobs")), cut)

    def _ask(self, method: str, path: str, body: bytes | None, deadline: float) -> dict[str, Any]:
        """Send until an answer comes; the JSON object that it holds."""
        for attempt in range(self._retries + 1):
            pause = min(0.5 * 2.0**attempt, _MAX_BACKOFF_S) * random.uniform(0.5, 1.0)
            try:
                status, headers, content = self._send(method, path, body, deadline)
            except httpx.TransportError as error:
                problem = ChatError(f"{self.url}{path}: {_in_words(error)}")
            else:
                if status == 200:
                    return _object(content, headers.get("content-type", ""), self._redacted)
                said = told(self._redacted(content.decode("utf-8", "replace")))
                problem = ChatError(f"{self.url}{path} answered {status}: {said}", status)
                if status not in _RETRIED:
                    raise problem
                asked = _retry_after(headers.get("retry-after"))
                if asked > self._max_retry_after_s:
                    raise ChatError(f"{problem}; it asks to wait {asked:.0f} s, longer than this judge does", status)
                pause = max(pause, asked)
            if attempt == self._retries or time.monotonic() + pause >= deadline:
                break
            log.info("%s; trying again in %.1f s", problem, pause)
            time.sleep(pause)
        raise ChatError(f"{problem} (tried {attempt + 1} times)", problem.status)

    def _send(self, method: str, path: str, body: bytes | None, deadline: float) -> tuple[int, httpx.Headers, bytes]:
        """One exchange. Reads in pieces, so that a server which drips or floods is left in time."""
        left = max(0.001, min(self._timeout_s, deadline - time.monotonic()))
        timeout = httpx.Timeout(left, connect=min(left, self._connect_timeout_s))
        end = time.monotonic() + left
        headers = {"Content-Type": "application/json"} if body is not None else {}
        content = bytearray()
        with self._http.stream(method, self.url + path, content=body, headers=headers, timeout=timeout) as response:
            for piece in response.iter_bytes():
                content += piece
                if len(content) > MAX_ANSWER_BYTES:
                    raise ChatError(f"{self.url}{path} answers with more than {MAX_ANSWER_BYTES} bytes")
                if time.monotonic() > end:
                    raise httpx.ReadTimeout("the answer is not complete", request=response.request)
        return response.status_code, response.headers, bytes(content)

    def _redacted(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _at(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _checked_url(base_url: str) -> httpx.URL:
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError) as error:
        raise RewardLoadError(f"base_url is not a URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise RewardLoadError(f"base_url must be http://host:port/v1 or https://..., not {url.scheme or 'no scheme'}")
    if url.userinfo or url.query or url.fragment:
        raise RewardLoadError("base_url must hold no user, query or fragment: a key belongs into the environment")
    return url


def _key(name: str | None, url: httpx.URL) -> str | None:
    key = os.environ.get(name or DEFAULT_KEY_ENV, "").strip()
    if key:
        if not (key.isascii() and key.isprintable()):
            raise RewardLoadError(f"the environment variable {name or DEFAULT_KEY_ENV} holds no API key")
        if name is None and url.scheme == "http" and not _is_loopback(url.host):
            log.warning("%s is not sent to %s over plain http; api_key_env: NAME would", DEFAULT_KEY_ENV, url.host)
            return None
        return key
    if name is not None:
        raise RewardLoadError(f"api_key_env names {name}, which is not set in the worker's environment")
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _in_words(error: httpx.TransportError) -> str:
    if isinstance(error, httpx.ConnectTimeout):
        return "no connection in time"
    if isinstance(error, httpx.TimeoutException):
        return "no complete answer in time"
    return " ".join(str(error).split()) or type(error).__name__


def _object(content: bytes, content_type: str, redacted: Any) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        said = told(redacted(content.decode("utf-8", "replace")))
        raise ChatError(f"the server's answer ({content_type or 'no content type'}) is not JSON: {said}") from error
    if not isinstance(value, dict):
        raise ChatError(f"the server's answer is not a JSON object: {told(redacted(json.dumps(value)))}")
    return value


def _retry_after(header: str | None) -> float:
    """Seconds of a Retry-After header (RFC 9110: seconds, or a date); 0 if there is none or it says nothing."""
    if not header:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            date = email.utils.parsedate_to_datetime(header)
        except ValueError:
            return 0.0
        now = datetime.now(UTC)
        seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now.timestamp()
    return max(0.0, seconds) if not math.isnan(seconds) else 0.0


def _tokens(logprobs: Any) -> tuple[Token, ...]:
    """The tokens of a choice's ``logprobs``; empty if there are none, or if they are not as OpenAI defines them."""
    try:
        return tuple(_token(entry) for entry in logprobs["content"])
    except (KeyError, TypeError, ValueError):
        return ()


def _token(entry: Any) -> Token:
    text = _text(entry["token"])
    candidates: dict[str, float] = {}
    for candidate in entry.get("top_logprobs") or []:
        other = _text(candidate["token"])
        candidates[other] = candidates.get(other, 0.0) + _probability(candidate["logprob"])
    if text not in candidates:
        candidates[text] = _probability(entry["logprob"])
    return Token(text, candidates)


def _text(token: Any) -> str:
    if not isinstance(token, str):
        raise ValueError(f"a token must be text, not {token!r}")
    return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").replace("\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}", " ")


def _probability(logprob: Any) -> float:
    """exp(logprob), for a log-probability that can be one: servers stand in -9999 or -inf for 'never'."""
    value = float(logprob)
    if math.isnan(value) or value > 1e-3:
        raise ValueError(f"{logprob} is no log-probability")
    return min(1.0, math.exp(value))
