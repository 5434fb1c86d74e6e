"""The ``judge`` reward: any multimodal LLM behind an OpenAI-compatible server, asked by a template.

``docs/judges.md`` says how to serve one, how an answer becomes a score, and what it costs. In short: a rating is the
expected value over the log-probabilities of the answers where the server gives those, else read from constrained
output where it offers that, else from the text by strict rules; what cannot be read is null, with the text. A pairwise
template turns a group of images of one prompt into win rates, every pair asked in both orders.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np

from reward_server.contract import Image
from reward_server.rewards import _judge_pairs
from reward_server.rewards._chat import ChatClient
from reward_server.rewards._judge_template import Template, load, quoted
from reward_server.rewards._judging import Judge, Verdict, choose_model, data_url
from reward_server.rewards.base import RewardLoadError, Score, Scored


class Model:
    """The ``judge`` reward. Scores: ``raw`` in the template's scale, ``unit`` in 0 to 1.

    ``details``: both scalings; the axes of a template that has them; ``mass`` (probability of all valid answers
    together; null if the rating was read from text); ``truncated`` (the prompt was cut); ``asks`` (requests made);
    ``unparsed`` (answers that were no rating); of a pairwise template ``comparisons`` (that count) and ``failed``.
    """

    name = "judge"
    description = "a multimodal LLM behind an OpenAI-compatible server, by a template: ratings, yes/no, or win rates"
    default_template: ClassVar[str] = "rating"
    scalings: ClassVar[Mapping[str, Callable[[Template, float], float]]] = {
        "raw": lambda template, value: value,
        "unit": lambda template, value: (value - template.range[0]) / (template.range[1] - template.range[0]),
    }

    def __init__(self) -> None:
        self.revision = "unset"
        self.needs: tuple[str, ...] = ()
        self.relative = False
        self.example: tuple[str, Mapping[str, Any]] = ("a red circle", {})
        self.provenance: dict[str, str] = {}

    def setup(
        self,
        device: str,
        *,
        base_url: str = "http://127.0.0.1:8001/v1",
        model: str = "",
        template: str = "",
        scale: str = "raw",
        mode: str = "auto",
        min_mass: float = 0.8,
        asks: int = 3,
        concurrency: int = 8,
        api_key_env: str | None = None,
        connect_timeout_s: float = 5.0,
        timeout_s: float = 120.0,
        retries: int = 3,
        max_retry_after_s: float = 60.0,
        deadline_s: float = 240.0,
        max_prompt_chars: int = 4000,
        max_pixels: int = 1 << 20,
        resize: int = 0,
        extra_body: Mapping[str, Any] | None = None,
        group_by: str = "",
        opponents: int = 0,
        seed: int = 0,
    ) -> None:
        """Find the model, and ask once in each way what the server offers.

        Args:
            device: not used; the server has its own.
            base_url: of the server, with its version: ``http://host:port/v1``.
            model: as the server names it; may be left out if it serves only one.
            template: name in ``reward_server/templates/judges``, or path of a YAML file.
            scale: which of ``scalings`` the score is; all of them are in the details.
            mode: ``auto``, or only ``logprobs``, ``json`` (constrained output) or ``text``.
            min_mass: least probability of the valid answers together for their expected value to count, 0..1.
            asks: requests for one answer while it cannot be read.
            concurrency: requests under way at once.
            api_key_env: environment variable with the API key; left out: ``OPENAI_API_KEY`` over https or loopback.
            connect_timeout_s, timeout_s: longest waits for a connection and for a whole answer, seconds.
            retries: further tries of a request that failed on the way (broken connection, time-out, 429, 5xx).
            max_retry_after_s: longest pause that the server may ask for (Retry-After), seconds.
            deadline_s: longest time for all images of one batch (of a pairwise template: of one request), and for
                this start, seconds; what has no answer by then is null.
            max_prompt_chars: longer prompts are cut, and marked as ``truncated``.
            max_pixels: larger images are scaled down to this.
            resize: scale every image to this many pixels square first; 0: do not.
            extra_body: further keys of each request, e.g. ``{chat_template_kwargs: {enable_thinking: false}}``; null
                takes a key out.
            group_by: pairwise: metadata key whose value images of one group share; left out: their prompt.
            opponents: pairwise: how many others of its group an image meets; 0: all.
            seed: pairwise: decides who meets whom.

        Raises:
            RewardLoadError: an option is wrong, the server cannot be reached, or the model is not there or cannot see.
        """
        found = load(template or self.default_template)
        if scale not in self.scalings:
            raise RewardLoadError(f"scale is {scale!r}; it can be {', '.join(self.scalings)}")
        _at_least(1, asks=asks, concurrency=concurrency, max_prompt_chars=max_prompt_chars, max_pixels=max_pixels)
        _at_least(0, resize=resize, opponents=opponents, retries=retries, max_retry_after_s=max_retry_after_s)
        _at_least(0.001, connect_timeout_s=connect_timeout_s, timeout_s=timeout_s, deadline_s=deadline_s)
        if not 0 < min_mass <= 1:
            raise RewardLoadError(f"min_mass is {min_mass}, and must be above 0 and at most 1")
        self.chat = ChatClient(
            base_url,
            api_key_env=api_key_env,
            connect_timeout_s=connect_timeout_s,
            timeout_s=timeout_s,
            retries=retries,
            max_retry_after_s=max_retry_after_s,
        )
        self._template, self._scale, self._concurrency = found.template, scale, concurrency
        self._max_prompt_chars, self._resize, self._max_pixels = max_prompt_chars, resize, max_pixels
        self._group_by, self._opponents, self._seed = group_by, opponents, seed
        self.relative = found.template.kind == "pairwise"
        self.needs = (group_by,) if self.relative and group_by else ()
        self.example = (self.example[0], dict.fromkeys(self.needs, "example"))
        self._deadline_s, deadline = deadline_s, time.monotonic() + deadline_s
        served, weights = choose_model(self.chat, model, deadline)
        self._judge = Judge(
            self.chat, served, found.template, mode=mode, asks=asks, min_mass=min_mass, extra_body=extra_body or {}
        )
        blank = data_url(np.full((64, 64, 3), 128, np.uint8), resize=resize, max_pixels=max_pixels)
        self._judge.probe([blank] * (2 if self.relative else 1), self._quoted(self.example[0])[0], deadline)
        self.provenance = {
            "weights": weights,
            "template": f"{found.name} sha256:{found.sha256}",
            "mode": self._judge.ways,
            "preprocessing": f"png-{f'{resize}x{resize}-bicubic' if resize else 'as-is'}-max{max_pixels}/1",
            "dtype": "unknown (the server's)",
        }
        facts = [served, found.sha256, self._judge.ways, min_mass, extra_body or {}, self.provenance["preprocessing"]]
        self.revision = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]

    def score(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Scored]:
        """Scores of uint8 RGB images [H, W, 3]; an image that fails has None with the reason, and fails alone."""
        deadline = time.monotonic() + self._deadline_s
        texts = {prompt: self._quoted(prompt) for prompt in set(prompts)}
        with ThreadPoolExecutor(self._concurrency) as pool:
            urls = list(pool.map(self._data_url, images))
            if self.relative:
                return self._compare(pool, urls, prompts, metadata, texts, deadline)
            verdicts = pool.map(lambda url, prompt: self._judge.ask([url], texts[prompt][0], deadline), urls, prompts)
            return [self._rated(verdict, texts[prompt][1]) for verdict, prompt in zip(verdicts, prompts, strict=True)]

    def _quoted(self, prompt: str) -> tuple[str, bool]:
        return quoted(prompt, self._template.quote, self._max_prompt_chars)

    def _data_url(self, image: Image) -> str:
        return data_url(image, resize=self._resize, max_pixels=self._max_pixels)

    def _scored(self, value: float, details: dict[str, float | None]) -> Score:
        scaled = {name: scaling(self._template, value) for name, scaling in self.scalings.items()}
        return Score(scaled[self._scale], details | scaled)  # an axis may be called raw, too

    def _rated(self, verdict: Verdict, truncated: bool) -> Score:
        details: dict[str, float | None] = {
            "truncated": float(truncated),
            "asks": float(verdict.asks),
            "unparsed": float(verdict.unparsed),
        }
        if verdict.reading is None:
            return Score(None, details, verdict.reason)
        return self._scored(verdict.reading.value, {**verdict.reading.axes, "mass": verdict.reading.mass, **details})

    def _compare(
        self,
        pool: ThreadPoolExecutor,
        urls: Sequence[str],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        texts: Mapping[str, tuple[str, bool]],
        deadline: float,
    ) -> list[Scored]:
        """Win rates: the mean over an image's comparisons of the probability that it is the better one."""
        scores: dict[int, Scored] = {}
        meetings: list[tuple[int, int]] = []
        for key, members in _judge_pairs.groups(prompts, metadata, self._group_by).items():
            problem = _no_group(members, prompts)
            if problem is None:
                meetings += _judge_pairs.pairs(members, self._opponents, f"{self._seed}:{key}")
            else:
                scores |= {index: Score(None, reason=problem) for index in members}
        orders = [order for first, second in meetings for order in ((first, second), (second, first))]

        def ask(order: tuple[int, int]) -> Verdict:
            return self._judge.ask([urls[i] for i in order], texts[prompts[order[0]]][0], deadline)

        verdicts = list(pool.map(ask, orders))
        for index in range(len(urls)):
            if index not in scores:
                own = [(m, verdicts[2 * i], verdicts[2 * i + 1]) for i, m in enumerate(meetings) if index in m]
                scores[index] = self._win_rate(index, own, texts[prompts[index]][1])
        return [scores[index] for index in range(len(urls))]

    def _win_rate(
        self, index: int, meetings: Sequence[tuple[tuple[int, int], Verdict, Verdict]], truncated: bool
    ) -> Score:
        """A comparison that failed in either order counts for neither image: one order alone would be biased."""
        wins, both = [], [verdict for _, *orders in meetings for verdict in orders]
        for (first, _), there, back in meetings:
            if there.reading is not None and back.reading is not None:
                better = (there.reading.value + 1 - back.reading.value) / 2
                wins.append(better if index == first else 1 - better)
        details: dict[str, float | None] = {
            "comparisons": float(len(wins)),
            "failed": float(len(meetings) - len(wins)),
            "truncated": float(truncated),
            "asks": float(sum(verdict.asks for verdict in both)),
            "unparsed": float(sum(verdict.unparsed for verdict in both)),
        }
        if not wins:
            reasons = "; ".join(dict.fromkeys(verdict.reason for verdict in both if verdict.reason))
            return Score(None, details, f"none of its {len(meetings)} comparisons succeeded: {reasons[:1000]}")
        return self._scored(sum(wins) / len(wins), details)


def _at_least(least: float, **options: float) -> None:
    for option, value in options.items():
        if value < least:
            raise RewardLoadError(f"{option} is {value}, and must be at least {least}")


def _no_group(members: Sequence[int], prompts: Sequence[str]) -> str | None:
    """Why these images cannot be compared; None if they can."""
    if len({prompts[index] for index in members}) > 1:
        return "the images of its group have different prompts, and cannot be compared"
    if len(members) < 2:
        return "no other image of its group is in the request: there is nothing to compare it with"
    return None
