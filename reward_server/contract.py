"""What travels between a trainer and the reward server: version, requests, results, and the image codec.

The fast body of ``POST /v1/score`` is one safetensors file (https://huggingface.co/docs/safetensors): an 8-byte
little-endian header length, a JSON header, raw pixels. ``__metadata__.request`` holds the request as JSON; the pixels
are either one uint8 tensor ``images`` of shape [B, H, W, 3] or, where sizes differ, tensors ``images.0`` ..
``images.B-1`` of shape [H, W, 3]. The header is written and read by hand, so that pixels are sent from where they lie
and read where they arrived: no copy on either side. The gateway spools the very same bytes for the workers.

Needs numpy and pydantic only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, ValidationError, model_validator

VERSION: Literal["1"] = "1"
CONTENT_TYPE = "application/vnd.safetensors"
MAX_HEADER_BYTES = 16 << 20
"""Bound of the JSON header: prompts and metadata of one request, bytes."""

Image: TypeAlias = NDArray[np.uint8]
"""[H, W, 3], RGB, 0..255"""
Images: TypeAlias = Image | Sequence[Image]
"""One array [B, H, W, 3], or a sequence of [H, W, 3] whose sizes differ"""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
M = TypeVar("M", bound=BaseModel)


class ContractError(ValueError):
    """A message that breaks the contract: ``str(error)`` says what is wrong, ``where`` names the part."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message)
        self.where = where


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ScoreRequest(Message):
    """Score each image, with its prompt, by every one of ``rewards``."""

    version: Literal["1"] = VERSION
    id: Name | None = None
    """Job id chosen by the client: sending the same request again under it gives the same job, scored once."""
    rewards: list[Name] = Field(min_length=1)
    prompts: list[str] = Field(min_length=1)
    """One per image"""
    metadata: list[dict[str, JsonValue]] | None = None
    """One per image; what each reward needs is listed by ``GET /v1/rewards``"""
    wait: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    """Longest time to wait for the result before the answer is 202 and the job's id, seconds"""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.rewards)) != len(self.rewards):
            raise ValueError(f"a reward is named twice: {', '.join(self.rewards)}")
        if self.metadata is not None and len(self.metadata) != len(self.prompts):
            raise ValueError(f"{len(self.metadata)} metadata for {len(self.prompts)} prompts: one per image is needed")
        return self


class Timings(Message):
    queued_ms: float
    """Longest time that a part of the job waited until a worker began with it, milliseconds"""
    scored_ms: float
    """Time that the batches which held the job's images took, milliseconds (of the slowest part)"""


class RewardResult(Message):
    """Scores of one reward, one entry per image; ``scores[i]`` is null exactly where ``reasons[i]`` says why."""

    revision: str
    """Of the weights that scored; revisions joined by "+" if workers with different ones shared the job"""
    scores: list[FiniteFloat | None]
    reasons: list[str | None]
    details: dict[str, list[FiniteFloat | None]] = Field(default_factory=dict)
    """Sub-scores by name"""
    provenance: dict[str, str] = Field(default_factory=dict)
    """What the scores came from: weights (sha256), preprocessing, dtype, device, libraries; joined like ``revision``"""
    timings: Timings

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        count = len(self.scores)
        if len(self.reasons) != count or any(len(column) != count for column in self.details.values()):
            raise ValueError("scores, reasons and details differ in length")
        if any((score is None) != bool(reason) for score, reason in zip(self.scores, self.reasons, strict=True)):
            raise ValueError("a score is null exactly where a reason is given")
        return self


def join_results(parts: Sequence[RewardResult]) -> RewardResult:
    """One result out of those of consecutive images; a sub-score that a part lacks is null there."""
    if len(parts) == 1:
        return parts[0]

    def joined(values: Iterable[str | None]) -> str:
        return "+".join(dict.fromkeys(value for value in values if value is not None))

    names = dict.fromkeys(name for part in parts for name in part.details)
    keys = dict.fromkeys(key for part in parts for key in part.provenance)
    return RewardResult(
        revision=joined(part.revision for part in parts),
        scores=[score for part in parts for score in part.scores],
        reasons=[reason for part in parts for reason in part.reasons],
        details={
            name: [value for part in parts for value in part.details.get(name, [None] * len(part.scores))]
            for name in names
        },
        provenance={key: joined(part.provenance.get(key) for part in parts) for key in keys},
        timings=Timings(
            queued_ms=max(part.timings.queued_ms for part in parts),
            scored_ms=max(part.timings.scored_ms for part in parts),
        ),
    )


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    """Every image has, per reward, a score or a reason"""
    FAILED = "failed"
    """Finished, and not one image got a score"""
    CANCELLED = "cancelled"


class ScoreResponse(Message):
    version: Literal["1"] = VERSION
    id: Name
    state: JobState
    results: dict[str, RewardResult] = Field(default_factory=dict)
    """By reward; while the job runs, those that are finished"""


class RewardInfo(Message):
    """One reward that is served."""

    name: Name
    revision: str
    description: str = ""
    needs: list[str] = Field(default_factory=list)
    """Metadata keys that an image must have to be scored"""
    relative: bool = False
    """Images are scored relative to the others of their request, which must therefore hold whole groups"""
    provenance: dict[str, str] = Field(default_factory=dict)
    """As in its results"""
    workers: int = Field(ge=0)
    """Live worker processes; 0 while all of them restart"""
    max_batch: int = Field(ge=1)
    depth: int = Field(ge=0)
    """Images that wait or are being scored"""


class RewardList(Message):
    version: Literal["1"] = VERSION
    rewards: list[RewardInfo]


class ErrorDetail(Message):
    code: str
    """Stable, for programs: unknown_reward, malformed, too_large, busy, ..."""
    message: str
    where: str | None = None
    """The part of the request that is at fault"""


class ErrorResponse(Message):
    error: ErrorDetail


@dataclass(frozen=True)
class Header:
    """A parsed header: the request, and where each tensor lies in the data section that follows the header."""

    request: ScoreRequest
    shapes: list[tuple[int, ...]]
    """[(B, H, W, 3)] of one stacked tensor, or (H, W, 3) per image"""
    offsets: list[tuple[int, int]]
    """(begin, end) of each tensor, bytes"""
    data_bytes: int

    @property
    def stacked(self) -> bool:
        return len(self.shapes[0]) == 4

    @property
    def largest_image(self) -> int:
        """Pixels of the largest image."""
        return max(shape[-3] * shape[-2] for shape in self.shapes)


def parse_model(model: type[M], text: str | bytes, where: str) -> M:
    """Read ``text`` (JSON) as ``model``.

    Raises:
        ContractError: naming the first field at fault as a path below ``where``.
    """
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ContractError(first["msg"], ".".join([where, *map(str, first["loc"])])) from error


def encode_request(request: ScoreRequest, images: Images) -> list[bytes | memoryview]:
    """The fast body as chunks to be sent one after the other; pixels are views of ``images``, not copies.

    ``sum(map(len, chunks))`` is the body's length, :data:`CONTENT_TYPE` its type.

    Raises:
        ContractError: an image is not uint8 [H, W, 3], or there is not one prompt per image.
    """
    if isinstance(images, np.ndarray):
        tensors, names, rank = [images], ["images"], 4
        count = len(images)
    else:
        tensors, rank = list(images), 3
        names = [f"images.{i}" for i in range(len(tensors))]
        count = len(tensors)
    if count != len(request.prompts):
        raise ContractError(f"{count} images for {len(request.prompts)} prompts", "images")
    header: dict[str, Any] = {"__metadata__": {"request": request.model_dump_json()}}
    end = 0
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype != np.uint8 or tensor.ndim != rank or tensor.shape[-1] != 3 or tensor.size == 0:
            wanted = "[B, H, W, 3]" if rank == 4 else "[H, W, 3]"
            raise ContractError(f"expected uint8 {wanted}, got {tensor.dtype} {list(tensor.shape)}", name)
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "U8", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ContractError(f"prompts and metadata take {len(text)} bytes, at most {MAX_HEADER_BYTES}", "request")
    return [len(text).to_bytes(8, "little") + text, *(np.ascontiguousarray(t).data.cast("B") for t in tensors)]


def header_length(prefix: bytes | bytearray | memoryview) -> int:
    """Length of the JSON header, from the first 8 bytes of a body.

    Raises:
        ContractError: fewer than 8 bytes, or a length that is 0 or above :data:`MAX_HEADER_BYTES`.
    """
    if len(prefix) < 8:
        raise ContractError("the body ends within the 8-byte header length", "header")
    length = int.from_bytes(prefix[:8], "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise ContractError(
            f"header length {length} is not within 2..{MAX_HEADER_BYTES}: not a safetensors body?", "header"
        )
    return length


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ContractError("a key appears twice", "header")
    return keys


def _extent(entry: Any, where: str, rank: int) -> tuple[tuple[int, ...], tuple[int, int]]:
    """(shape, (begin, end)) of one tensor of the header, checked on its own."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ContractError("expected an object with dtype, shape and data_offsets", where)
    if entry["dtype"] != "U8":
        raise ContractError(f"expected U8, got {entry['dtype']!r}", f"{where}.dtype")
    for key, length in (("shape", rank), ("data_offsets", 2)):
        values = entry[key]
        if not isinstance(values, list) or len(values) != length or any(type(v) is not int or v < 0 for v in values):
            raise ContractError(f"expected {length} non-negative integers, got {values!r}", f"{where}.{key}")
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if shape[-1] != 3 or 0 in shape:
        wanted = "[B, H, W, 3]" if rank == 4 else "[H, W, 3]"
        raise ContractError(f"expected {wanted} without empty axes, got {list(shape)}", f"{where}.shape")
    size = 1
    for axis in shape:
        size *= axis
    if end - begin != size:
        raise ContractError(f"shape {list(shape)} needs {size} bytes, data_offsets span {end - begin}", where)
    return shape, (begin, end)


def parse_header(text: bytes | bytearray | memoryview) -> Header:
    """Read the JSON header alone (without its 8-byte length); no pixel is needed.

    Raises:
        ContractError: not JSON, not a valid request, or tensors whose names, type, shape, length or place are wrong:
            they must fill the data section without gaps or overlaps, in any order.
    """
    try:
        header = json.loads(bytes(text), object_pairs_hook=_no_duplicates)
    except ContractError:
        raise
    except (ValueError, RecursionError) as error:
        raise ContractError(f"not JSON: {error}", "header") from error
    if not isinstance(header, dict):
        raise ContractError("expected a JSON object", "header")
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get("request"), str):
        raise ContractError('the request (JSON text) is missing: "__metadata__": {"request": "..."}', "header")
    request = parse_model(ScoreRequest, metadata["request"], "request")

    stacked = "images" in header
    count = len(request.prompts)
    names = ["images"] if stacked else [f"images.{i}" for i in range(count)]
    if header.keys() != set(names):
        wanted = f"one tensor images, or images.0 .. images.{count - 1}, one per prompt"
        raise ContractError(f"expected {wanted}; got {', '.join(sorted(header)[:5]) or 'none'}", "header")
    extents = [_extent(header[name], f"header.{name}", 4 if stacked else 3) for name in names]
    if stacked and extents[0][0][0] != count:
        raise ContractError(f"{extents[0][0][0]} images for {count} prompts", "header.images.shape")
    filled = 0
    for name, (_, (begin, end)) in sorted(zip(names, extents, strict=True), key=lambda item: item[1][1]):
        if begin != filled:
            raise ContractError(
                f"starts at byte {begin}, expected {filled}: overlap or gap", f"header.{name}.data_offsets"
            )
        filled = end
    return Header(request, [shape for shape, _ in extents], [offset for _, offset in extents], filled)


def decode_request(body: bytes | bytearray | memoryview) -> tuple[ScoreRequest, Images]:
    """The request and its images, as views of ``body`` (read-only if ``body`` is).

    Raises:
        ContractError: the header is wrong (:func:`parse_header`), or the body is shorter or longer than it says.
    """
    view = memoryview(body)
    start = 8 + header_length(view)
    if len(view) < start:
        raise ContractError(f"the header has {start - 8} bytes, the body ends after {max(0, len(view) - 8)}", "header")
    header = parse_header(view[8:start])
    if len(view) - start != header.data_bytes:
        raise ContractError(
            f"the header describes {header.data_bytes} bytes of pixels, got {len(view) - start}", "images"
        )
    arrays = [
        np.frombuffer(view, np.uint8, end - begin, start + begin).reshape(shape)
        for shape, (begin, end) in zip(header.shapes, header.offsets, strict=True)
    ]
    return header.request, arrays[0] if header.stacked else arrays
