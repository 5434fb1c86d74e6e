"""The protocols of other projects' reward servers: one function each, which scores a batch.

Read from the clients and servers of flow_grpo and its reward-server (ac4c86e, 92ac29f), OpenRLHF (3c3be62), slime
(624b824), Flow-Factory (a0b2bc5), UniRL (1a7b501, and the later protocol version "1") and cosmos-rl (89f2e5b).
OpenRLHF and slime score text: there the image stands where the model's response does, as a data URL.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import reprlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import PIL.Image

from reward_server.contract import Image
from reward_server.rewards import _remote_pickle
from reward_server.rewards._remote_http import Caller, RemoteError, parse_json
from reward_server.rewards.base import Score

NOT_APPLICABLE = -10.0
"""What GenEval's servers answer for a group of prompts that an image does not belong to: not a score"""
FIRST_POLL_S, LAST_POLL_S = 0.05, 1.0


@dataclass(frozen=True)
class Wanted:
    """What is asked of the server, and how."""

    reward: str
    """The reward's name there; empty where the protocol has none"""
    key: str
    """Which entry of the reply is the score, ``a.b`` of nested ones; empty: the protocol's own"""
    image_format: str
    """``png``, ``jpeg`` (quality 75, Pillow's default, as flow_grpo's clients send) or ``jpeg-95``"""
    only_strict: bool
    """GenEval's servers: whether to leave out the benchmark's own, laxer verdict"""
    numpy_prompts: bool
    """flow_grpo's family: prompts as a numpy array of strings instead of a list"""
    concurrency: int
    """slime: requests at once"""


@dataclass(frozen=True)
class Batch:
    images: Sequence[Image]
    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class Reply:
    scores: list[Score]
    """One per image"""
    about: dict[str, str] = field(default_factory=dict)
    """What the server said about itself"""


def encode(image: Image, image_format: str) -> bytes:
    """An image file of [H, W, 3] uint8 pixels."""
    name, _, quality = image_format.partition("-")
    buffer = io.BytesIO()
    PIL.Image.fromarray(image).save(buffer, format=name, **({"quality": int(quality)} if quality else {}))
    return buffer.getvalue()


def _base64(image: Image, image_format: str) -> str:
    return base64.b64encode(encode(image, image_format)).decode()


def _data_url(image: Image, image_format: str) -> str:
    return f"data:image/{image_format.partition('-')[0]};base64,{_base64(image, image_format)}"


def number(value: Any, *, lacking: float | None = None) -> float | None:
    """A finite number, or None: for null, NaN, infinity, ``lacking``, and for what is no number at all."""
    if not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) and result != lacking else None


def flatten(value: Any, prefix: str = "", depth: int = 4) -> dict[str, Any]:
    """The leaves of nested objects by dotted path; what lies deeper than any protocol has it is a leaf, too."""
    if not isinstance(value, dict) or not depth:
        return {prefix: value}
    leaves: dict[str, Any] = {}
    for name, inner in value.items():
        leaves |= flatten(inner, f"{prefix}.{name}" if prefix else str(name), depth - 1)
    return leaves


def _told(value: Any) -> str:
    """What a server answered, for a reason."""
    if isinstance(value, str):
        return value[:100]
    try:
        return reprlib.repr(value)
    except ValueError:  # a whole number too long to be written
        return f"an odd {type(value).__name__}"


def columns(reply: Any, count: int, keys: Sequence[str], *, lacking: float | None = None) -> list[Score]:
    """Scores from a reply of lists, one entry per image: the first of ``keys`` that it has; other lists are details.

    Raises:
        RemoteError: it has none of the keys, or not one entry per image there.
    """
    lists = {name: value for name, value in flatten(reply).items() if isinstance(value, list | tuple)}
    key = next((key for key in keys if key in lists), None)
    if key is None:
        raise RemoteError(
            f"the reply has no list {' or '.join(keys)}; it has: {', '.join(lists) or 'none'} (option key)"
        )
    if len(lists[key]) != count:
        raise RemoteError(f"the reply has {len(lists[key])} {key} for {count} images")
    fitting = {
        name: [number(v, lacking=lacking) for v in values] for name, values in lists.items() if len(values) == count
    }
    scores = []
    for i, given in enumerate(lists[key]):
        details = {name: values[i] for name, values in fitting.items()}
        reason = None if details[key] is not None else f"the server answered {_told(given)} for {key}"
        if reason and number(given) == lacking:
            reason += ", which means that it does not apply"
        scores.append(Score(details[key], {"raw": details[key], **details}, reason))
    return scores


def flow_grpo(caller: Caller, wanted: Wanted, batch: Batch) -> Reply:
    """``POST /`` of a pickle. All fields that any server of the family reads are sent; each takes its own."""
    prompts: Any = np.array(batch.prompts) if wanted.numpy_prompts else list(batch.prompts)
    request = {
        "images": [encode(image, wanted.image_format) for image in batch.images],
        "prompts": prompts,
        "meta_datas": [{"prompt": p, **m} for p, m in zip(batch.prompts, batch.metadata, strict=True)],
        "only_strict": wanted.only_strict,
    }
    _, body = caller.request("POST", "/", content=_remote_pickle.dumps(request))
    keys = [wanted.key] if wanted.key else ["outputs", "scores"]
    return Reply(columns(_remote_pickle.loads(body), len(batch), keys, lacking=NOT_APPLICABLE))


def openrlhf(caller: Caller, wanted: Wanted, batch: Batch) -> Reply:
    """``POST URL`` (its users give the whole URL, with ``/get_reward``): query is prompt and response."""
    urls = [_data_url(image, wanted.image_format) for image in batch.images]
    request = {
        "query": [prompt + "\n" + url for prompt, url in zip(batch.prompts, urls, strict=True)],
        "prompts": list(batch.prompts),
        "labels": [metadata.get("label") for metadata in batch.metadata],
    }
    reply = caller.json("POST", "", json=request)
    return Reply(columns(reply, len(batch), [wanted.key] if wanted.key else ["rewards", "scores"]))


def slime(caller: Caller, wanted: Wanted, batch: Batch) -> Reply:
    """``POST URL``, a request an image; the reply is the reward, or an object that holds it under ``key``."""

    def ask(image: Image, prompt: str, metadata: Mapping[str, Any]) -> Score:
        response = _data_url(image, wanted.image_format)
        request = {"prompt": prompt, "response": response, "label": metadata.get("label")}
        try:
            leaves = flatten(caller.json("POST", "", json=request))
            if wanted.key not in leaves:
                had = ", ".join(leaves) or "nothing"
                raise RemoteError(f"the reply is no {wanted.key or 'bare number'}; it has: {had} (option key)")
        except RemoteError as error:
            return Score(None, reason=str(error))
        details = {name: number(value) for name, value in leaves.items() if name}
        value = number(leaves[wanted.key])
        reason = None if value is not None else f"the server answered {_told(leaves[wanted.key])}"
        return Score(value, {"raw": value, **details}, reason)

    with ThreadPoolExecutor(min(wanted.concurrency, len(batch))) as pool:
        return Reply(list(pool.map(ask, batch.images, batch.prompts, batch.metadata)))


def flow_factory(caller: Caller, wanted: Wanted, batch: Batch) -> Reply:
    """``POST /compute``."""
    request = {
        "prompt": list(batch.prompts),
        "image": [_base64(image, wanted.image_format) for image in batch.images],
        **dict.fromkeys(("video", "condition_images", "condition_videos")),
    }
    reply = caller.json("POST", "/compute", json=request)
    if isinstance(reply, dict) and reply.get("error"):
        raise RemoteError(f"the server answered: {_told(reply['error'])}")
    return Reply(columns(reply, len(batch), [wanted.key or "rewards"]))


def unirl(caller: Caller, wanted: Wanted, batch: Batch) -> Reply:
    """``POST /score``. Fields of protocol version "1" that an older server does not know are ignored by it."""
    requests = []
    for image, prompt, metadata in zip(batch.images, batch.prompts, batch.metadata, strict=True):
        history = [{"text": prompt, "image_b64": _base64(image, wanted.image_format)}]
        item = {"history": history, "required_rewards": [wanted.reward], "metadata": dict(metadata) or None}
        digest = hashlib.sha256(json.dumps(item, sort_keys=True).encode()).hexdigest()
        requests.append({**item, "request_id": str(uuid.uuid4()), "idempotency_key": digest})
    reply = caller.json("POST", "/score", json={"protocol_version": "1", "requests": requests})
    if not isinstance(reply, dict):
        raise RemoteError("the reply is no object with results")
    if reply.get("protocol_version") not in (None, "1"):
        raise RemoteError(f"the server speaks version {reply['protocol_version']!r} of the protocol, not '1'")
    results, errors, identities = (_objects(reply, name) for name in ("results", "errors", "identities"))
    errors = errors or [{}] * len(batch)
    if not len(results) == len(errors) == len(batch):
        raise RemoteError(f"the reply has {len(results)} results and {len(errors)} errors for {len(batch)} images")
    if identities:
        keys = ("request_id", "idempotency_key")
        if [[i.get(k) for k in keys] for i in identities] != [[r[k] for k in keys] for r in requests]:
            raise RemoteError("the reply's identities are not those of the request, in its order")
    versions = sorted({str(i["scorer_version"]) for i in identities if i.get("scorer_version")})
    about = {"revision": "+".join(versions)} if versions else {}
    return Reply([_unirl_score(r, e, wanted) for r, e in zip(results, errors, strict=True)], about)


def _objects(reply: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    values = reply.get(name) or []
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise RemoteError(f"the reply's {name} are no list of objects")
    return values


def _unirl_score(result: Mapping[str, Any], error: Mapping[str, Any], wanted: Wanted) -> Score:
    """The first sub-metric, as UniRL's client takes by default, or the one named ``key``."""
    metrics, told = result.get(wanted.reward), error.get(wanted.reward)
    if not isinstance(metrics, dict) or not metrics:
        reason = f"the server answered: {_told(told)}" if told else f"the reply has no {wanted.reward}, and no error"
        return Score(None, reason=reason)
    key = wanted.key or next(iter(metrics))
    details = {name: number(value) for name, value in metrics.items()}
    if broken := [name for name, value in details.items() if value is None]:  # as its client: one spoils all
        return Score(None, details, f"the server answered {_told(metrics[broken[0]])} for {broken[0]}")
    if key not in metrics:
        return Score(None, details, f"the reply has no {key}; it has: {', '.join(metrics)} (option key)")
    return Score(details[key], {"raw": details[key], **details})


def cosmos(caller: Caller, wanted: Wanted, batch: Batch) -> Reply:
    """``POST /api/reward/enqueue`` and, until it is ready, ``/api/reward/pull``; a request per size of image."""
    scores: list[Score] = [Score(None, reason="not asked")] * len(batch)
    sizes: dict[tuple[int, ...], list[int]] = {}
    for i, image in enumerate(batch.images):
        sizes.setdefault(image.shape, []).append(i)
    for indices in sizes.values():
        pixels = io.BytesIO()
        np.save(pixels, np.stack([batch.images[i] for i in indices]), allow_pickle=False)
        header = {
            "media_type": "image",
            "prompts": [batch.prompts[i] for i in indices],
            "reward_fn": {wanted.reward: 1.0},
            # what its GenEval reads
            "geneval_tags": [batch.metadata[i].get("tag") for i in indices],
            "geneval_includes": [batch.metadata[i].get("include") for i in indices],
            "geneval_only_strict": wanted.only_strict,
        }
        try:
            reply = _cosmos_ask(caller, wanted, json.dumps(header).encode() + b"\n" + pixels.getvalue())
            keys = [wanted.key] if wanted.key else _only_list(reply)
            group = columns(reply, len(indices), keys, lacking=NOT_APPLICABLE)
        except RemoteError as error:
            group = [Score(None, reason=str(error))] * len(indices)
        for i, score in zip(indices, group, strict=True):
            scores[i] = score
    return Reply(scores)


def _cosmos_ask(caller: Caller, wanted: Wanted, body: bytes) -> Any:
    """The scores by name. Status 400 means "not yet", and, for a batch that the server dropped, for ever."""
    binary = {"Content-Type": "application/octet-stream"}
    ticket = caller.json("POST", "/api/reward/enqueue", content=body, headers=binary)
    if not isinstance(ticket, dict) or not isinstance(ticket.get("uuid"), str):
        raise RemoteError("the reply of /api/reward/enqueue has no uuid")
    form = {"uuid": ticket["uuid"], "type": wanted.reward}
    replica = ticket.get("replica_id")
    headers = {"X-Lepton-Replica-Target": str(replica)} if replica else {}
    deadline, pause = time.monotonic() + caller.timeout_s, FIRST_POLL_S
    while True:
        status, answer = caller.request(
            "POST", "/api/reward/pull", data=form, headers=headers, refused=frozenset({400})
        )
        if status != 400:
            break
        if time.monotonic() + pause > deadline:
            raise RemoteError(
                f"no score of {wanted.reward} within {caller.timeout_s:g} s: the server is slow, has no such "
                "reward, or has dropped the batch (it keeps the newest 60)"
            )
        time.sleep(pause)
        pause = min(1.5 * pause, LAST_POLL_S)
    reply = parse_json(answer, "/api/reward/pull")
    if not isinstance(reply, dict) or not isinstance(reply.get("scores"), dict):
        error = reply.get("error") if isinstance(reply, dict) else None
        raise RemoteError(f"the server answered: {error or 'no scores'}")
    return reply["scores"]


def _only_list(scores: Any) -> list[str]:
    names = [name for name, value in flatten(scores).items() if isinstance(value, list)]
    if len(names) != 1:
        raise RemoteError(f"the reply has several scores, {', '.join(names)}: choose one (option key)")
    return names


PROTOCOLS: dict[str, Callable[[Caller, Wanted, Batch], Reply]] = {
    "cosmos": cosmos,
    "flow_factory": flow_factory,
    "flow_grpo": flow_grpo,
    "openrlhf": openrlhf,
    "slime": slime,
    "unirl": unirl,
}
"""All but ``native``, which knows more about itself: see _remote_native.py"""
