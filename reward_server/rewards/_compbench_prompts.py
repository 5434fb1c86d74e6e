"""What a T2I-CompBench prompt claims: noun phrases, a relation of two objects, or numbers of objects.

The benchmark parses prompts with spaCy's ``en_core_web_sm``, a model that is not on PyPI. Where it is installed it
finds the noun phrases here, too. Without it a rule stands in that reads the benchmark's simple forms ("a blue bench and
leather gloves") and refuses the rest. Relations and numbers are always read by rules: all of the benchmark's
``spatial`` and ``3d_spatial`` prompts have one form.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

SPACY_MODEL = "en_core_web_sm"
NUMBERS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8}
_NO_PHRASES = ("top", "the side", "the left", "the right")
_JOINTS = re.compile(r"\s*(?:,\s*and\s+|,|\sand\s)\s*", re.IGNORECASE)
_ARTICLE = re.compile(r"^(?:an?|the)\s+", re.IGNORECASE)
_NOT_IN_A_PHRASE = re.compile(
    r"\b(?:with|of|on|in|at|to|by|from|for|under|over|near|is|are|was|were|has|have|and|that|its|their)\b",
    re.IGNORECASE,
)
_MAX_WORDS = 4
_IRREGULAR = {"men": "man", "women": "woman", "people": "person", "children": "child", "knives": "knife",
              "loaves": "loaf", "mice": "mouse", "geese": "goose", "sheep": "sheep", "fish": "fish", "deer": "deer",
              "shoes": "shoe", "goldfish": "goldfish", "glasses": "glasses", "scissors": "scissors"}  # fmt: skip


@dataclass(frozen=True)
class Relation:
    """``first`` is said to be in ``name`` to ``second``."""

    first: str
    name: str
    second: str


def phrases_by_rule(prompt: str) -> list[str] | None:
    """Noun phrases of a prompt that is nothing but phrases joined by "and" and commas; None for any other prompt."""
    phrases = _JOINTS.split(prompt.strip().rstrip("."))
    for phrase in phrases:
        words = _ARTICLE.sub("", phrase)
        if not words or len(words.split()) > _MAX_WORDS or _NOT_IN_A_PHRASE.search(words):
            return None
    return phrases


def phrase_finder() -> tuple[Callable[[str], list[str] | None], str]:
    """The function that finds noun phrases (None: it cannot), and what it is, for provenance."""
    try:
        spacy: Any = importlib.import_module("spacy")
        nlp = spacy.load(SPACY_MODEL)
    except (ImportError, OSError):
        return phrases_by_rule, "rule/1"

    def by_spacy(prompt: str) -> list[str] | None:
        return [chunk.text for chunk in nlp(prompt).noun_chunks if chunk.text not in _NO_PHRASES]

    return by_spacy, f"spacy/{SPACY_MODEL}-{nlp.meta['version']}"


def relation(prompt: str, relations: tuple[str, ...]) -> Relation | None:
    """The relation in "a wallet on the left of a giraffe", "a chair hidden by a rabbit"; None if there is none."""
    text = prompt.strip().rstrip(".")
    for name in relations:
        form = rf"^(?:an?|the)\s+(.+?)\s+(?:is\s+)?{name}(?:\s+by)?\s+(?:an?|the)\s+(.+)$"
        if match := re.match(form, text, re.IGNORECASE):
            # of a name of several words the benchmark takes the first noun on the left, and the last on the right
            return Relation(match[1].split()[0].lower(), name, match[2].split()[-1].lower())
    return None


def counts(prompt: str) -> dict[str, int] | None:
    """Numbers by singular noun in "two dogs and a cat slept"; None if there is no number."""
    words = re.findall(r"\w+", prompt.lower())
    numbers: dict[str, int] = {}
    for word, noun in pairwise(words):
        if word in NUMBERS:
            numbers[singular(noun) if NUMBERS[word] > 1 else noun] = NUMBERS[word]
    return numbers or None


def singular(noun: str) -> str:
    """Of an English plural; the last word counts."""
    *others, last = noun.split()
    if last in _IRREGULAR:
        last = _IRREGULAR[last]
    elif last.endswith("ies") and len(last) > 4:
        last = last[:-3] + "y"
    elif last.endswith(("ches", "shes", "sses", "xes", "toes")):
        last = last[:-2]
    elif last.endswith("s") and not last.endswith("ss"):
        last = last[:-1]
    return " ".join([*others, last])
