"""A reward of another ``reward-server``: this project's own protocol (docs/protocol.md), so nothing is lost."""

from __future__ import annotations

import time
import uuid

from reward_server.contract import (
    CONTENT_TYPE,
    ContractError,
    RewardInfo,
    RewardList,
    RewardResult,
    ScoreRequest,
    ScoreResponse,
    encode_request,
    parse_model,
)
from reward_server.rewards._remote_http import Caller, RemoteError
from reward_server.rewards._remote_protocols import Batch, Reply, Wanted
from reward_server.rewards.base import Score

LONGEST_POLL_S = 30.0


def info(caller: Caller, reward: str) -> RewardInfo:
    """What the server says about its reward.

    Raises:
        RemoteError: no answer, or it serves no such reward (the message lists those it does).
    """
    _, body = caller.request("GET", "/v1/rewards")
    try:
        served = {entry.name: entry for entry in parse_model(RewardList, body, "rewards").rewards}
    except ContractError as error:
        raise RemoteError(f"{caller.url} is no reward-server of this version: {error.where}: {error}") from error
    if reward not in served:
        raise RemoteError(f"{caller.url} serves no {reward!r} but {', '.join(served) or 'nothing'} (option reward)")
    return served[reward]


def native(caller: Caller, wanted: Wanted, batch: Batch) -> Reply:
    """``POST /v1/score`` under an id, so that a repeated request is scored once; then wait for the job's end."""
    deadline = time.monotonic() + caller.timeout_s
    request = ScoreRequest(
        id=str(uuid.uuid4()),
        rewards=[wanted.reward],
        prompts=list(batch.prompts),
        metadata=[dict(metadata) for metadata in batch.metadata],
        wait=min(LONGEST_POLL_S, caller.timeout_s / 2),
    )
    body = b"".join(encode_request(request, batch.images))
    status, answer = caller.request("POST", "/v1/score", content=body, headers={"Content-Type": CONTENT_TYPE})
    while status == 202:
        left = deadline - time.monotonic()
        if left <= 0:
            caller.request("DELETE", f"/v1/jobs/{request.id}", refused=frozenset({404}))
            raise RemoteError(f"{caller.url}: job {request.id} was not finished within {caller.timeout_s:g} s")
        wait = min(LONGEST_POLL_S, left, caller.timeout_s / 2)
        status, answer = caller.request("GET", f"/v1/jobs/{request.id}", params={"wait": wait})
    try:
        job = parse_model(ScoreResponse, answer, "reply")
    except ContractError as error:
        raise RemoteError(f"{caller.url} answered what no reward-server answers: {error.where}: {error}") from error
    result = job.results.get(wanted.reward)
    if result is None or len(result.scores) != len(batch):
        count = 0 if result is None else len(result.scores)
        raise RemoteError(f"{caller.url}: job {request.id} is {job.state}, with {count} scores for {len(batch)} images")
    return Reply([_score(result, i) for i in range(len(batch))], {"revision": result.revision})


def _score(result: RewardResult, i: int) -> Score:
    value = result.scores[i]
    return Score(value, {"raw": value, **{name: v[i] for name, v in result.details.items()}}, result.reasons[i])
