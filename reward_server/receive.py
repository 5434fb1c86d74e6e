"""Read the body of ``POST /v1/score`` into a payload of the spool: the fast body as it streams in, or people's files.

Fast body: the header is checked as soon as it is there, then every chunk goes straight to the spool; the pixels are
never in one piece in this process. Multipart: PNG, JPEG or WebP files (fields ``image``), decoded in a thread and
spooled in the same format.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import zlib
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException

from reward_server.contract import (
    CONTENT_TYPE,
    ContractError,
    Header,
    Image,
    ScoreRequest,
    encode_request,
    header_length,
    parse_header,
    parse_model,
)
from reward_server.images import ImageError, decode_image
from reward_server.settings import GatewayLimits
from reward_server.spool import Payload, Spool

FORM_FIELDS = ("image", "prompt", "reward", "metadata", "id", "wait")


class TooLargeError(Exception):
    """The request exceeds a limit of this server, whatever the load."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message)
        self.where = where


class UnsupportedTypeError(Exception):
    """Neither a safetensors body nor multipart/form-data."""


@dataclass(frozen=True)
class Received:
    """A request whose payload is complete but not committed."""

    request: ScoreRequest
    job_id: str
    digest: str
    """Of all that the scores depend on; it tells a request repeated under its id from another one"""
    payload: Payload


async def receive(request: Request, spool: Spool, limits: GatewayLimits) -> Received:
    """Read either kind of body.

    Raises:
        ContractError: malformed. TooLargeError: above a limit. UnsupportedTypeError: another content type.
        SpoolFullError: no room now. Nothing is left in the spool.
    """
    length = int(request.headers.get("content-length") or 0)  # the HTTP parser refuses anything but digits
    if length > limits.max_body_bytes:
        raise TooLargeError(f"the body has {length} bytes, at most {limits.max_body_bytes} are accepted", "body")
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == CONTENT_TYPE:
        return await _receive_fast(request, spool, limits)
    if content_type == "multipart/form-data":
        return await _receive_form(request, spool, limits)
    raise UnsupportedTypeError(f"content type {content_type!r}: send {CONTENT_TYPE} or multipart/form-data")


async def _receive_fast(request: Request, spool: Spool, limits: GatewayLimits) -> Received:
    stream = request.stream()
    head = bytearray()
    needed = 8
    async for chunk in stream:
        head += chunk
        if needed == 8 and len(head) >= 8:
            needed += header_length(head)
        if len(head) >= needed > 8:
            break
    start = 8 + header_length(head)
    if len(head) < start:
        raise ContractError(f"the header has {start - 8} bytes, the body ends after {len(head) - 8}", "header")
    header = parse_header(memoryview(head)[8:start])
    _check_limits(header, start, limits)
    job_id = header.request.id or secrets.token_hex(12)
    payload = await spool.create(job_id, start + header.data_bytes)
    try:
        pixels = memoryview(head)[start:]
        named = header.request.id is not None  # only then can the same content come twice
        checksum, received = zlib.crc32(pixels) if named else 0, len(pixels)
        payload.write(memoryview(head)[: start + header.data_bytes])
        async for chunk in stream:
            received += len(chunk)
            if received > header.data_bytes:
                break
            if named:
                checksum = zlib.crc32(chunk, checksum)
            payload.write(chunk)
        if received != header.data_bytes:
            got = f"more than {header.data_bytes}" if received > header.data_bytes else str(received)
            raise ContractError(f"the header describes {header.data_bytes} bytes of pixels, got {got}", "images")
    except BaseException:  # also when the client goes away, which cancels this task
        await payload.discard()
        raise
    return Received(header.request, job_id, _digest(header, checksum), payload)


def _check_limits(header: Header, start: int, limits: GatewayLimits) -> None:
    images = len(header.request.prompts)
    most = min(limits.max_images, limits.max_depth)
    if images > most:
        raise TooLargeError(f"{images} images, at most {most} are accepted in one request", "images")
    if header.largest_image > limits.max_pixels:
        raise TooLargeError(f"an image has {header.largest_image} pixels, at most {limits.max_pixels}", "images")
    size = start + header.data_bytes
    if size > min(limits.max_body_bytes, limits.spool_max_bytes):
        most = min(limits.max_body_bytes, limits.spool_max_bytes)
        raise TooLargeError(f"the request takes {size} bytes, at most {most} are accepted", "body")


def _digest(header: Header, checksum: int) -> str:
    """SHA-256 of the request and shapes, and CRC-32 of the pixels: it guards against mistakes, at 2 ms for 12 MiB."""
    request = header.request.model_dump_json(exclude={"id", "wait"})
    described = json.dumps([request, header.shapes, header.offsets]).encode()
    return f"{hashlib.sha256(described).hexdigest()}-{checksum:08x}"


async def _receive_form(request: Request, spool: Spool, limits: GatewayLimits) -> Received:
    if "content-length" not in request.headers:
        raise TooLargeError("multipart/form-data needs a Content-Length", "body")
    try:
        async with request.form(max_files=limits.max_images, max_fields=3 * limits.max_images + 100) as form:
            uploads, score_request = _form_request(form.multi_items())
            files = [(await upload.read(), upload.filename or f"image {i}") for i, upload in enumerate(uploads)]
    except (MultiPartException, HTTPException) as error:
        detail = error.detail if isinstance(error, HTTPException) else error.message
        raise ContractError(f"not a multipart/form-data body: {detail}", "body") from error
    images = await asyncio.to_thread(_decode_all, files, limits)
    chunks = encode_request(score_request, images)
    start = len(chunks[0])
    header = parse_header(memoryview(chunks[0])[8:])
    _check_limits(header, start, limits)
    job_id = score_request.id or secrets.token_hex(12)
    checksum = 0
    payload = await spool.create(job_id, start + header.data_bytes)
    try:
        payload.write(chunks[0])
        for chunk in chunks[1:]:
            checksum = zlib.crc32(chunk, checksum)
            payload.write(chunk)
    except BaseException:
        await payload.discard()
        raise
    return Received(score_request, job_id, _digest(header, checksum), payload)


def _form_request(items: list[tuple[str, Any]]) -> tuple[list[UploadFile], ScoreRequest]:
    """The files and the request of a form: ``image`` and ``prompt`` pairwise, ``reward`` repeated or comma-separated,
    optional ``metadata`` (a JSON object per image), ``id`` and ``wait``."""
    fields: dict[str, list[Any]] = {name: [] for name in FORM_FIELDS}
    for name, value in items:
        if name not in fields:
            raise ContractError(f"unknown field; known are {', '.join(FORM_FIELDS)}", f"form.{name}")
        if isinstance(value, UploadFile) != (name == "image"):
            wanted = "a file (curl -F image=@file.png)" if name == "image" else "text"
            raise ContractError(f"expected {wanted}", f"form.{name}")
        fields[name].append(value)
    uploads = fields["image"]
    if not uploads:
        raise ContractError("no image: curl -F image=@file.png", "form.image")
    if len(fields["prompt"]) != len(uploads):
        raise ContractError(f"{len(fields['prompt'])} prompts for {len(uploads)} images", "form.prompt")
    rewards = [name for value in fields["reward"] for part in value.split(",") if (name := part.strip())]
    if not rewards:
        raise ContractError("field reward is missing: curl -F reward=NAME, see GET /v1/rewards", "form.reward")
    body: dict[str, Any] = {"rewards": rewards, "prompts": fields["prompt"]}
    if fields["metadata"]:
        try:
            body["metadata"] = [json.loads(text) for text in fields["metadata"]]
        except (ValueError, RecursionError) as error:
            raise ContractError(f"must be a JSON object per image: {error}", "form.metadata") from error
    if fields["wait"]:
        try:
            body["wait"] = float(fields["wait"][-1])
        except ValueError as error:
            raise ContractError(f"must be a number of seconds, got {fields['wait'][-1]!r}", "form.wait") from error
    if fields["id"]:
        body["id"] = fields["id"][-1]
    try:
        return uploads, parse_model(ScoreRequest, json.dumps(body), "form")
    except ContractError as error:  # the request's key is rewards, the form's field is reward
        raise ContractError(str(error), error.where.replace("form.rewards", "form.reward")) from error


def _decode_all(files: list[tuple[bytes, str]], limits: GatewayLimits) -> list[Image]:
    images: list[Image] = []
    room = limits.max_body_bytes
    for data, name in files:
        try:
            image = decode_image(data, max_pixels=min(limits.max_pixels, room // 3))
        except ImageError as error:
            if error.too_large:
                raise TooLargeError(str(error), f"form.image {name}") from error
            raise ContractError(str(error), f"form.image {name}") from error
        room -= image.nbytes
        images.append(image)
    return images
