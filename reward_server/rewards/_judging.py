"""Asking a judge: which ways of answering its server offers, and one reading a question, or the reason why not."""

from __future__ import annotations

import base64
import io
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import PIL.Image

from reward_server.contract import Image
from reward_server.rewards._chat import ChatClient, ChatError, Reply, told
from reward_server.rewards._judge_reading import Reading, from_json, from_logprobs, from_text
from reward_server.rewards._judge_template import Template
from reward_server.rewards.base import RewardLoadError

log = logging.getLogger(__name__)

Mode: TypeAlias = Literal["auto", "logprobs", "json", "text"]
MODES: tuple[str, ...] = get_args(Mode)
TOP_LOGPROBS = (20, 5)
"""Candidates a token that are asked for: what OpenAI and vLLM allow by default, then what any server should"""
REASK_TEMPERATURE = 0.7
"""At least this from the second ask of a kind on: at 0, the same question has the same answer"""
JSON_TOKENS = 32
"""Room for the braces, the key and the quotes of each field"""
_REFUSED = {400, 404, 415, 422, 501}
_OWN_KEYS = {"model", "messages", "stream", "n", "logprobs", "top_logprobs", "response_format"}


@dataclass(frozen=True)
class Verdict:
    """What came of one question; ``reading`` is None exactly where ``reason`` says why."""

    reading: Reading | None
    asks: int
    """Requests that it took"""
    unparsed: int
    """Answers that were no rating"""
    reason: str | None = None


class Judge:
    """One model on one server, asked by one template. :meth:`probe` comes first; then :meth:`ask` by any thread."""

    def __init__(
        self,
        chat: ChatClient,
        model: str,
        template: Template,
        *,
        mode: str,
        asks: int,
        min_mass: float,
        extra_body: Mapping[str, Any],
    ) -> None:
        if mode not in MODES:
            raise RewardLoadError(f"mode is {mode!r}; it can be {', '.join(MODES)}")
        if mode not in ("auto", *template.read):
            raise RewardLoadError(f"mode: {mode} does not fit the template, whose answers are read by {template.read}")
        if clash := sorted(_OWN_KEYS & set(extra_body)):
            raise RewardLoadError(f"extra_body must not hold {', '.join(clash)}")
        self._chat, self._model, self._template = chat, model, template
        self._mode, self._asks, self._min_mass, self._extra = mode, asks, min_mass, dict(extra_body)
        self._reads_text = mode in ("auto", "text") and "text" in template.read
        self._top = TOP_LOGPROBS[0]
        self.stages: tuple[str, ...] = ("text",)

    @property
    def ways(self) -> str:
        """How answers are read, in this order."""
        return ", then ".join(dict.fromkeys((*self.stages, "text") if self._reads_text else self.stages))

    def probe(self, image_urls: Sequence[str], quoted: str, deadline: float) -> None:
        """Ask once in each way to find out what the server offers, so that one way is used from then on.

        A server may refuse what it does not offer (400, 422), or ignore it: then there are no log-probabilities in the
        answer, or it is not of the JSON schema.

        Raises:
            RewardLoadError: it cannot answer about an image at all, or does not offer the ``mode`` that was set.
        """
        wanted = [way for way in ("logprobs", "json") if way in self._template.read and self._mode in ("auto", way)]
        offered = [way for way in wanted if self._offers(way, image_urls, quoted, deadline)]
        if not offered and not self._reads_text:
            raise RewardLoadError(f"{self._chat.url} does not offer {' or '.join(wanted)} for {self._model}")
        if not offered:
            try:
                self._complete("text", image_urls, quoted, deadline)
            except ChatError as error:
                raise RewardLoadError(f"the judge {self._model} does not answer: {error}") from error
        self.stages = tuple(offered) or ("text",)
        log.info("judge %s at %s: read by %s", self._model, self._chat.url, self.ways)

    def _offers(self, way: str, image_urls: Sequence[str], quoted: str, deadline: float) -> bool:
        for top in TOP_LOGPROBS if way == "logprobs" else (self._top,):
            self._top = top
            try:
                reply = self._complete(way, image_urls, quoted, deadline)
            except ChatError as error:
                if error.status not in _REFUSED:
                    raise RewardLoadError(f"the judge {self._model} does not answer: {error}") from error
                log.info("the judge's server refuses %s: %s", way, error)
            else:
                return bool(reply.tokens) if way == "logprobs" else from_json(self._template, reply) is not None
        return False

    def ask(self, image_urls: Sequence[str], quoted: str, deadline: float) -> Verdict:
        """One question, asked again while the answer cannot be read: ``asks`` times, none after ``deadline``."""
        asked, reply = 0, Reply("")
        while asked < self._asks and time.monotonic() < deadline:
            way = self.stages[min(asked, len(self.stages) - 1)]
            again = max(0, asked - len(self.stages) + 1)
            asked += 1
            try:
                reply = self._complete(way, image_urls, quoted, deadline, again)
            except ChatError as error:
                return Verdict(None, asked, asked - 1, str(error))
            if reading := self._read(way, reply):
                return Verdict(reading, asked, asked - 1)
        if asked == 0:
            return Verdict(None, 0, 0, "not asked: the time for the images of this batch (deadline_s) was over")
        kept = f"no rating in {asked} answers; the last: {told(reply.text)}{' (cut)' if reply.cut else ''}"
        return Verdict(None, asked, asked, kept)

    def _read(self, way: str, reply: Reply) -> Reading | None:
        """Log-probabilities before constrained output before strict parsing; a fixed mode is that one alone."""
        reading = None
        if way == "logprobs":
            reading = from_logprobs(self._template, reply, self._min_mass)
        elif way == "json":
            reading = from_json(self._template, reply)
        strictly = way == self.stages[-1] and self._reads_text
        return reading or (from_text(self._template, reply) if strictly else None)

    def _complete(self, way: str, image_urls: Sequence[str], quoted: str, deadline: float, again: int = 0) -> Reply:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": self._template.messages(image_urls, quoted),
            "max_tokens": self._template.max_tokens,
            "temperature": self._template.temperature,
        }
        if again:
            body |= {"temperature": max(REASK_TEMPERATURE, self._template.temperature), "seed": again}
        if way == "logprobs":
            body |= {"logprobs": True, "top_logprobs": self._top}
        elif way == "json":
            body["max_tokens"] += JSON_TOKENS * len(self._template.answer_schema()["properties"])
            schema = {"name": "rating", "strict": True, "schema": self._template.answer_schema()}
            body |= {"response_format": {"type": "json_schema", "json_schema": schema}}
        body |= self._extra
        return self._chat.complete({key: value for key, value in body.items() if value is not None}, deadline)


def data_url(image: Image, *, resize: int, max_pixels: int) -> str:
    """An image [H, W, 3] as a PNG (lossless) in a data URL.

    Args:
        resize: scaled to this many pixels square (bicubic) if not 0, as the field does for UnifiedReward.
        max_pixels: scaled down (Lanczos), keeping its shape, if it has more.
    """
    picture = PIL.Image.fromarray(image)
    if resize:
        picture = picture.resize((resize, resize), PIL.Image.Resampling.BICUBIC)
    if picture.width * picture.height > max_pixels:
        factor = math.sqrt(max_pixels / (picture.width * picture.height))
        size = (max(1, int(picture.width * factor)), max(1, int(picture.height * factor)))
        picture = picture.resize(size, PIL.Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def choose_model(chat: ChatClient, named: str, deadline: float) -> tuple[str, str]:
    """(model id, what is known of its weights): ``named``, or the only one that the server lists.

    Raises:
        RewardLoadError: the server cannot be reached, does not list ``named``, or lists none or several to choose from.
    """
    try:
        listed = {entry["id"]: entry for entry in chat.models(deadline)}
    except ChatError as error:
        raise RewardLoadError(f"the judge's server: {error}. Is it running, and is base_url right?") from error
    if not named and len(listed) != 1:
        serves = ", ".join(sorted(listed)) or "none that it lists"
        raise RewardLoadError(f"model must be named; {chat.url} serves {serves}")
    model = named or next(iter(listed))
    if listed and model not in listed:
        raise RewardLoadError(f"{chat.url} does not serve {model!r} but {', '.join(sorted(listed))}")
    entry = listed.get(model, {})
    facts = [f"{word} {entry[key]}" for key, word in (("root", "from"), ("owned_by", "by")) if entry.get(key)]
    return model, f"unknown (served as {model} at {chat.url}{''.join(', ' + fact for fact in facts)})"
