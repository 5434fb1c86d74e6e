"""A reward that another server computes: of flow_grpo, OpenRLHF, slime, Flow-Factory, UniRL, cosmos-rl or this project.

Nothing is computed here: images are sent in the form that the server's own clients send, its answers
are checked (length, finite numbers), and what it cannot score is null with its reason. See docs/remote.md.

A batch that fails is null as a whole, and is not halved and sent again as the worker does with models that raise:
the server would receive it many times over.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reward_server.contract import Image
from reward_server.rewards import _remote_native as native
from reward_server.rewards._remote_http import Caller, RemoteError, RemoteTokenError
from reward_server.rewards._remote_protocols import PROTOCOLS, Batch, Reply, Wanted
from reward_server.rewards.base import RewardLoadError, Score, Scored

ASKS: dict[str, Callable[[Caller, Wanted, Batch], Reply]] = {"native": native.native, **PROTOCOLS}
NAMED = {"native", "unirl", "cosmos"}
"""Protocols whose servers hold several rewards, so that ``reward`` must say which"""
FORMATS = {"flow_grpo": "jpeg", "unirl": "jpeg-95"}
"""What the protocol's own clients send, where it is not PNG"""
BATCHES = {"flow_grpo": 64}
"""Images that the protocol's own clients send at once, where they limit that"""

START_PAUSE_S = 0.5
"""Between looking whether the server has come up"""


class Model:
    """The ``remote`` reward. Its needs, and whether scores are relative, are the server's own where it tells."""

    name = "remote"
    description = "a reward that another project's reward server computes"
    needs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.revision = "unknown"
        self.relative = False
        self.provenance: dict[str, str] = {}

    def setup(
        self,
        device: str,
        *,
        protocol: str,
        url: str,
        reward: str = "",
        key: str = "",
        timeout_s: float = 120.0,
        retries: int = 2,
        wait_s: float = 0.0,
        max_batch: int = 0,
        image_format: str = "",
        token_env: str = "",
        allow_pickle: bool = False,
        only_strict: bool = True,
        numpy_prompts: bool = False,
        concurrency: int = 8,
    ) -> None:
        """Check the options and ask the server what it serves, where its protocol can.

        Args:
            device: unused.
            protocol: native, flow_grpo, openrlhf, slime, flow_factory, unirl or cosmos.
            url: of the server; for openrlhf and slime with the path, as their users give it.
            reward: which of the server's rewards (native, unirl, cosmos).
            key: which entry of its reply is the score, ``a.b`` of nested ones; default: the protocol's usual one.
            timeout_s: longest wait for a reply, seconds; with native and cosmos for the score itself.
            retries: further tries of a request that failed.
            wait_s: longest wait, now, for the server to come up and serve ``reward``, seconds.
            max_batch: most images a request; 0: what the protocol's own clients send.
            image_format: png, jpeg or jpeg-QUALITY; default: what the protocol's own clients send.
            token_env: environment variable whose value is sent as the bearer token.
            allow_pickle: needed for flow_grpo, whose servers run whatever a request's pickle says, and whose replies
                are pickles, too (they are read by a restricted unpickler that runs nothing).
            only_strict: flow_grpo's GenEval: leave out the benchmark's own verdict.
            numpy_prompts: flow_grpo: send prompts as a numpy array, for servers that use one's methods.
            concurrency: slime: requests at once.

        Raises:
            RewardLoadError: an option is wrong, the server does not answer, or does not serve ``reward``.
        """
        if protocol not in ASKS:
            raise RewardLoadError(f"protocol {protocol!r} is none of {', '.join(sorted(ASKS))}")
        if protocol == "flow_grpo" and not allow_pickle:
            raise RewardLoadError("protocol flow_grpo speaks in pickles: allow it with the option allow_pickle: true")
        if protocol in NAMED and not reward:
            raise RewardLoadError(f"option reward: which reward of {url} (protocol {protocol} serves several)")
        if not url.startswith(("http://", "https://")):
            raise RewardLoadError(f"option url: {url!r} is no http:// or https:// URL")
        if timeout_s <= 0 or retries < 0 or max_batch < 0 or concurrency < 1:
            raise RewardLoadError("timeout_s and concurrency must be positive, retries and max_batch at least 0")
        self._wanted = Wanted(
            reward=reward,
            key=key,
            image_format=_image_format(image_format or FORMATS.get(protocol, "png")),
            only_strict=only_strict,
            numpy_prompts=numpy_prompts,
            concurrency=concurrency,
        )
        self._ask, self._max_batch = ASKS[protocol], max_batch or BATCHES.get(protocol, 0)
        self._caller = Caller(url, timeout_s=timeout_s, retries=retries, token=_token(token_env))
        sent = "raw" if protocol in ("native", "cosmos") else self._wanted.image_format
        self.provenance = {"remote": self._caller.url, "protocol": protocol, "preprocessing": f"remote-{sent}/1"}
        identity = "|".join([protocol, self._caller.url, reward, key, sent])
        self.revision = f"unknown-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        deadline = time.monotonic() + wait_s
        while True:
            try:
                self._introduce(protocol)
                return
            except RemoteError as error:
                if isinstance(error, RemoteTokenError) or time.monotonic() > deadline:
                    self.close()
                    raise RewardLoadError(str(error)) from error
            time.sleep(START_PAUSE_S)

    def close(self) -> None:
        """Let go of the connections."""
        self._caller.close()

    def _introduce(self, protocol: str) -> None:
        """What the server says about itself before it scores anything; raises :class:`RemoteError`."""
        if protocol == "native":
            info = native.info(self._caller, self._wanted.reward)
            self.revision, self.needs, self.relative = info.revision, tuple(info.needs), info.relative
            self.description = f"{info.description} (remote)"
            self.provenance |= {f"remote.{name}": value for name, value in info.provenance.items()}
            self._revision: str | None = info.revision
            return
        self._revision = None
        if protocol == "unirl":
            answer = self._caller.json("GET", "/health")
            served = answer.get("rewards") if isinstance(answer, dict) else None
            if not isinstance(served, dict) or self._wanted.reward not in served:
                has = ", ".join(served) if isinstance(served, dict) else "no rewards"
                raise RemoteError(f"{self._caller.url} serves no {self._wanted.reward!r} but {has} (option reward)")
        elif protocol == "flow_factory":
            self._caller.request("GET", "/health")
        elif protocol == "cosmos":
            self._caller.request("POST", "/api/reward/ping", data={"info_data": "{}"})

    def score(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Scored]:
        """The server's scores; null with a reason where it has none, or answered none in time.

        ``details``: ``raw``, and every other list or sub-metric of its reply.
        """
        size = len(images) if self.relative or not self._max_batch else self._max_batch
        scores: list[Scored] = []
        for start in range(0, len(images), max(1, size)):
            part = slice(start, start + size)
            batch = Batch(images[part], prompts[part], metadata[part])
            try:
                reply = self._ask(self._caller, self._wanted, batch)
                self._recognise(reply.about)
                scores += reply.scores
            except RemoteError as error:
                scores += [Score(None, reason=str(error))] * len(batch)
        return scores

    def _recognise(self, about: Mapping[str, str]) -> None:
        """Refuse scores of other weights than those before: they must not be mixed under one revision."""
        revision = about.get("revision")
        if revision is None:
            return
        if self._revision is None:
            self._revision = self.provenance["remote.revision"] = revision
        if revision != self._revision:
            raise RemoteError(
                f"{self._caller.url} now scores with revision {revision}, and before with {self._revision}: "
                "restart this worker to accept that"
            )


def _image_format(text: str) -> str:
    name, _, quality = text.partition("-")
    if name not in ("png", "jpeg") or (
        quality and not (name == "jpeg" and quality.isdigit() and 1 <= int(quality) <= 95)
    ):
        raise RewardLoadError(f"option image_format: {text!r} is none of png, jpeg, jpeg-1 .. jpeg-95")
    return text


def _token(variable: str) -> str | None:
    if not variable:
        return None
    token = os.environ.get(variable)
    if not token:
        raise RewardLoadError(f"option token_env: the environment variable {variable} is not set")
    return token
