"""Prompts and their metadata from a file, and the order in which training takes them.

Formats, by the file's ending: ``.txt`` (one prompt a line), ``.jsonl``, ``.json`` (a list of texts or objects, or
one object a line, as T2I-R1's ``geneval_and_t2i_data_final.json`` is), ``.csv`` (with a header) and ``.parquet``.
In an object, the prompt is under ``prompt``, ``text`` or ``caption``; everything else is metadata and reaches the
rewards unchanged: GenEval's and flow_grpo's ``tag``, ``include``, ``exclude``; T2I-R1's ``nouns``, ``attr_nouns``,
``spatial_info``, ``numeracy_info``, ``task_type``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TEXT_KEYS = ("prompt", "text", "caption")


class PromptError(ValueError):
    """A prompt file is wrong: the message names the file, the line (or entry) and the key."""


@dataclass(frozen=True)
class Prompt:
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)
    """JSON values by key: what a reward may need besides the text"""


def load_prompts(path: str | Path, text_key: str | None = None) -> list[Prompt]:
    """All prompts of a file, in its order; blank lines are passed over.

    Args:
        text_key: the key or column of the prompt; the first of ``prompt``, ``text``, ``caption`` when None.

    Raises:
        PromptError: no such file, an unknown format, a malformed line, a missing or empty prompt, or no prompts.
    """
    path = Path(path)
    readers = {".txt": _txt, ".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise PromptError(f"{path}: unknown format {path.suffix!r}; known are {', '.join(readers)}")
    if not path.is_file():
        raise PromptError(f"{path}: no such file")
    try:
        prompts = [_prompt(entry, where, text_key) for where, entry in reader(path)]
    except UnicodeDecodeError as error:
        raise PromptError(f"{path}: not UTF-8 text: {error}") from error
    if not prompts:
        raise PromptError(f"{path}: holds no prompts")
    return prompts


def _prompt(entry: Any, where: str, text_key: str | None) -> Prompt:
    if isinstance(entry, str):
        entry = {text_key or TEXT_KEYS[0]: entry}
    if not isinstance(entry, dict):
        raise PromptError(f"{where}: expected a text or an object, got {type(entry).__name__}")
    keys = [text_key] if text_key is not None else [key for key in TEXT_KEYS if key in entry]
    if not keys or keys[0] not in entry:
        wanted = " or ".join(map(repr, [text_key] if text_key is not None else TEXT_KEYS))
        raise PromptError(f"{where}: no key {wanted} for the prompt; there are {', '.join(map(str, entry)) or 'none'}")
    text = entry[keys[0]]
    if not isinstance(text, str) or not text.strip():
        raise PromptError(f"{where}: key {keys[0]!r} is {text!r}, expected a text that is not empty")
    metadata = {key: value for key, value in entry.items() if key != keys[0]}
    for key, value in metadata.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise PromptError(f"{where}: key {key!r} is not a JSON value ({error}): rewards cannot get it") from error
    return Prompt(text, metadata)


# Each reader yields (where, entry): the place for messages, and a text or an object.


def _txt(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            yield f"{path} line {number}", line.strip()


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    for where, line in _txt(path):
        try:
            yield where, json.loads(line)
        except json.JSONDecodeError as error:
            raise PromptError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise PromptError(f"{path} line {error.lineno}: not JSON: {error.msg} at column {error.colno}") from error
        yield from _jsonl(path)  # one object a line under a .json name
        return
    if isinstance(entries, dict) and any(key in entries for key in TEXT_KEYS):
        entries = [entries]  # a single line of that kind
    if not isinstance(entries, list):
        raise PromptError(f"{path}: expected a list of texts or objects, got {type(entries).__name__}")
    for index, entry in enumerate(entries):
        yield f"{path} entry {index}", entry


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    """Values stay text; empty cells are left out."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                where = f"{path} line {reader.line_num}"
                if None in row or None in row.values():
                    wanted = len(reader.fieldnames or ())
                    raise PromptError(f"{where}: the header names {wanted} columns, this row has another number")
                yield where, {key: value for key, value in row.items() if value != ""}
        except csv.Error as error:
            raise PromptError(f"{path} after line {reader.line_num}: not CSV: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    """Nulls, also within objects, are what a row lacks, and are left out."""
    try:
        from pyarrow import ArrowInvalid, parquet  # an optional dependency
    except ImportError as error:
        raise PromptError(f"{path}: reading .parquet needs pyarrow: pip install 'mar-grpo[parquet]'") from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise PromptError(f"{path}: not Parquet: {error}") from error
    for index, row in enumerate(rows):
        yield f"{path} row {index}", _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


class PromptSampler:
    """The prompts of every training step: one random permutation of all prompts after another.

    ``indices(step)`` and ``batch(step)`` depend on the step and the seed alone, so that a resumed run needs nothing
    but the step's number, and any number of processes sees the same global batch.
    """

    def __init__(self, prompts: Sequence[Prompt], per_step: int, seed: int) -> None:
        if not prompts or per_step < 1:
            raise ValueError(f"{len(prompts)} prompts, {per_step} a step: at least one of each is needed")
        self._prompts = prompts
        self._per_step = per_step
        self._seed = seed

    def indices(self, step: int) -> list[int]:
        """Places in ``prompts`` of the step's prompts, ``per_step`` of them; ``step`` counts from 0."""
        count = len(self._prompts)
        places = range(step * self._per_step, (step + 1) * self._per_step)
        orders = {epoch: self._order(epoch) for epoch in {place // count for place in places}}
        return [int(orders[place // count][place % count]) for place in places]

    def batch(self, step: int) -> list[Prompt]:
        """The step's prompts, ``per_step`` of them."""
        return [self._prompts[index] for index in self.indices(step)]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))
