"""Reading a judge's answer: a number by a rule that holds exactly, or None. Pure functions, without guessing."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from reward_server.rewards._chat import Reply, Token
from reward_server.rewards._judge_template import Template

_DECORATION = " \t\r\n*_\"'`"


@dataclass(frozen=True)
class Reading:
    """A rating in the template's scale, by axis where it has axes."""

    value: float
    axes: Mapping[str, float]
    mass: float | None = None
    """Least probability that the model gave to all valid answers together; None if read from text"""


def from_logprobs(template: Template, reply: Reply, min_mass: float) -> Reading | None:
    """Expected value over the probabilities of the answers, renormalised over the valid ones.

    None if there are no log-probabilities, if valid answers have together less than ``min_mass``, or if what the model
    wrote goes on after a valid answer (``4.5``, ``10`` of 5): the probability of its beginning is not that of a rating.
    """
    text = "".join(token.text for token in reply.tokens)
    if not template.markers:
        start = len(text) - len(text.lstrip())
        found = _expectation(template.labels, reply, text, start)
        return Reading(found[0], {}, found[1]) if found and found[1] >= min_mass else None
    axes, masses = {}, []
    for axis, marker in template.markers.items():
        places = [match.end() for match in re.finditer(_marker(marker), text)]
        found = _expectation(template.labels, reply, text, places[0]) if len(places) == 1 else None
        if found is None or found[1] < min_mass:
            return None
        axes[axis] = found[0]
        masses.append(found[1])
    return Reading(sum(axes.values()) / len(axes), axes, min(masses))


def from_json(template: Template, reply: Reply) -> Reading | None:
    """The rating of an answer that is a JSON object of :meth:`Template.schema`, no more and no less."""
    try:
        value = json.loads(reply.text)
    except (ValueError, RecursionError):
        return None
    wanted = [*template.markers] or ["answer"]
    if not isinstance(value, dict) or sorted(value) != sorted(wanted):
        return None
    if not template.markers:
        label = value["answer"].casefold() if isinstance(value["answer"], str) else ""
        return Reading(template.labels[label], {}) if label in template.labels else None
    return _of_axes(template, {axis: _number(value[axis]) for axis in wanted})


def from_text(template: Template, reply: Reply) -> Reading | None:
    """The rating of a free answer: the whole of it is one of the choices, or each marker is followed by a number.

    Numbers are plain decimals in the scale, also ``4/5`` with the scale's end. A marker whose numbers differ, and a
    number at the very end of an answer that was cut, are not read.
    """
    if not template.markers:
        label = reply.text.strip(_DECORATION).removesuffix(".").rstrip(_DECORATION).casefold()
        longer = any(other.startswith(label) and other != label for other in template.labels)
        valid = label in template.labels and not (reply.cut and longer)
        return Reading(template.labels[label], {}) if valid else None
    return _of_axes(template, {axis: _after(template, marker, reply) for axis, marker in template.markers.items()})


def _of_axes(template: Template, axes: Mapping[str, float | None]) -> Reading | None:
    low, high = template.range
    valid = {axis: value for axis, value in axes.items() if value is not None and low <= value <= high}
    return Reading(sum(valid.values()) / len(axes), valid) if len(valid) == len(axes) else None


def _number(value: Any) -> float | None:
    """NaN and infinity, which Python's JSON reads as numbers, fail the scale."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _marker(marker: str) -> str:
    return re.escape(marker) + r"[\s*]*"


def _after(template: Template, marker: str, reply: Reply) -> float | None:
    full = rf"\s*(?:/|out of)\s*{re.escape(f'{template.range[1]:g}')}"
    pattern = _marker(marker) + rf"(\d+(?:\.\d+)?)(?:{full})?(?![\w%]|[.,]\d|\s*(?:/|out of)\s*\d)"
    found = list(re.finditer(pattern, reply.text))
    if reply.cut and found and found[-1].end() == len(reply.text):
        found.pop()
    values = {float(match[1]) for match in found}
    places = len(re.findall(_marker(marker) + r"[-+.\d]", reply.text))
    return values.pop() if len(values) == 1 and places == len(found) else None


def _expectation(labels: Mapping[str, float], reply: Reply, text: str, start: int) -> tuple[float, float] | None:
    """(expected value, probability mass of all labels) where the answer begins, at character ``start``."""
    whole = re.match(r"[^\W_]+(?:[.,/]\d+)*", text[start:])
    word = whole[0].casefold() if whole else ""
    if word not in labels and any(word.startswith(label) for label in labels):
        return None
    ends = list(accumulate(len(token.text) for token in reply.tokens))
    index = bisect_right(ends, start)  # the token that holds this character
    if index == len(ends) or text[ends[index] - len(reply.tokens[index].text) : start].strip():
        return None  # none does; or it holds a part of the marker, too
    mass: dict[str, float] = {}
    _collect(mass, labels, reply.tokens[index:], "", 1.0, ended=not reply.cut)
    total = sum(mass.values())
    return (sum(labels[label] * p for label, p in mass.items()) / total, total) if total > 0 else None


def _collect(
    mass: dict[str, float], labels: Mapping[str, float], tokens: Sequence[Token], said: str, p: float, *, ended: bool
) -> None:
    """Add to ``mass`` the probability of each label, given that the answer so far is ``said``, which has p.

    ``ended``: the answer is over after ``tokens``.

    An answer of several tokens ("1", "0") is followed along the tokens that were generated. What the model would have
    said after another token is unknown: a candidate that begins a longer label counts for none.
    """
    if not tokens:
        if ended and said in labels:
            mass[said] = mass.get(said, 0.0) + p
        return
    for text, probability in tokens[0].candidates.items():
        word = text.casefold().rstrip() if said else text.casefold().strip()
        now = said + word
        if said and (not word or not now[len(said)].isalnum()):  # white space, punctuation, the end: it was said
            if said in labels:
                mass[said] = mass.get(said, 0.0) + p * probability
        elif word and any(label.startswith(now) and label != now for label in labels):
            if text == tokens[0].text:
                _collect(mass, labels, tokens[1:], now, p * probability, ended=ended)
        elif now in labels:
            mass[now] = mass.get(now, 0.0) + p * probability
