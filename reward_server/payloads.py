"""How a worker gets at the images of its parts: map the file, ask Redis, or fetch them from the gateway."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import httpx
import redis

from reward_server.contract import ContractError, Image, ScoreRequest, decode_request
from reward_server.queue import Task
from reward_server.spool import map_file

KEPT = 2
"""Payloads kept open, since consecutive parts are often of one job"""


class PayloadGoneError(Exception):
    """The images do not exist any more; trying again cannot help."""


class PayloadUnreachableError(Exception):
    """The images could not be fetched now; another try or another worker may succeed."""


@dataclass(frozen=True)
class Item:
    """One image to score."""

    image: Image
    prompt: str
    metadata: dict[str, Any]


class PayloadReader:
    """Opens payloads by reference. Files that this host does not have come over HTTP, only the images needed."""

    def __init__(self, client: redis.Redis, gateway_url: str | None, token: str | None) -> None:
        """``client`` must not decode responses."""
        self._redis = client
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=gateway_url, headers=headers, timeout=60.0) if gateway_url else None
        self._opened: OrderedDict[str, tuple[ScoreRequest, Any]] = OrderedDict()

    def forget(self) -> None:
        """Close what is kept open, so that memory of jobs that have ended is freed."""
        self._opened.clear()

    def close(self) -> None:
        self.forget()
        if self._http is not None:
            self._http.close()

    def items(self, task: Task) -> list[Item]:
        """The images of a part with prompts and metadata.

        Raises:
            PayloadGoneError, PayloadUnreachableError: with the reason.
        """
        part = task.part
        opened = self._open_here(task.ref)
        if opened is None:
            request, images = self._fetch(task)
            chosen = range(len(request.prompts))
        else:
            request, images = opened
            chosen = range(part.start, part.stop)
        metadata = request.metadata or [{}] * len(request.prompts)
        return [Item(images[i], request.prompts[i], dict(metadata[i])) for i in chosen]

    def _open_here(self, ref: str) -> tuple[ScoreRequest, Any] | None:
        if ref in self._opened:
            self._opened.move_to_end(ref)
            return self._opened[ref]
        if ref.startswith("redis:"):
            value: Any = self._redis.get(ref.removeprefix("redis:"))
            if value is None:
                raise PayloadGoneError("the images are gone from Redis (their time to live ended?)")
            body = memoryview(value)
        else:
            mapped = map_file(ref)
            if mapped is None:
                return None
            body = mapped
        try:
            self._opened[ref] = decode_request(body)
        except ContractError as error:
            raise PayloadGoneError(f"the images in {ref} are damaged: {error}") from error
        if len(self._opened) > KEPT:
            self._opened.popitem(last=False)
        return self._opened[ref]

    def _fetch(self, task: Task) -> tuple[ScoreRequest, Any]:
        part = task.part
        if self._http is None:
            raise PayloadUnreachableError(f"{task.ref} is not on this host and no gateway_url is set to fetch it from")
        try:
            reply = self._http.get(f"/v1/jobs/{part.job}/images", params={"start": part.start, "stop": part.stop})
            if reply.status_code == httpx.codes.NOT_FOUND:
                raise PayloadGoneError("the gateway does not have the images any more")
            reply.raise_for_status()
            return decode_request(reply.content)
        except (httpx.HTTPError, ContractError) as error:
            raise PayloadUnreachableError(f"images not fetched from {self._http.base_url}: {error}") from error
