"""A judge's template: what is asked about an image, and what counts as an answer.

Templates are YAML files: those of ``reward_server/templates/judges`` by name, others by path. An image's prompt is
*data* in a template: it stands in a block whose end it cannot forge, and without the characters of which chat
templates make their control tokens (``<|im_start|>``, ``</s>``, ``[INST]``, ``<image>``).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from reward_server.rewards.base import RewardLoadError

FOLDER = Path(__file__).resolve().parent.parent / "templates" / "judges"
PLACEHOLDER = "{prompt}"
_CONTROL = "<>[]"
_BRACKETS = str.maketrans({"<": "‹", ">": "›", "[": "(", "]": ")"})

Way: TypeAlias = Literal["logprobs", "json", "text"]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Template(BaseModel):
    """One question, as a file says it; a key that is not listed here is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["rating", "yes_no", "pairwise"]
    user: str
    """The text after the image or images; ``{prompt}``, once, is where the image's prompt is quoted"""
    system: str = ""
    quote: Literal["json", "brackets"] = "json"
    """How the prompt is quoted: as a JSON string with its quotes; or bare, for templates with ``[{prompt}]``"""
    scale: tuple[Finite, Finite] | None = None
    """Least and greatest rating (of kind rating; the others' is 0 to 1)"""
    choices: dict[str, Finite] = Field(default_factory=dict)
    """Value of each answer. Default: the whole numbers of ``scale``; yes 1, no 0; of a pair "1" (the first) 1, "2" 0"""
    markers: dict[str, str] = Field(default_factory=dict)
    """By axis, the words before its number in a longer answer (``Final Score:``); the rating is the axes' mean.
    Empty: the whole answer is one of ``choices``"""
    read: tuple[Way, ...] = ("logprobs", "json", "text")
    """How an answer may be read, where the server offers it: text alone for judges trained to write decimals"""
    max_tokens: int = Field(default=16, gt=0)
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.user.count(PLACEHOLDER) != 1 or PLACEHOLDER in self.system:
            raise ValueError(f"user must hold {PLACEHOLDER} exactly once, and system not at all")
        if self.quote == "brackets" and f"[{PLACEHOLDER}]" not in self.user:
            raise ValueError(f"quote: brackets needs [{PLACEHOLDER}] in user")
        if (self.kind == "rating") != (self.scale is not None):
            raise ValueError("scale: [least, greatest] belongs to kind rating, and to no other")
        if self.markers and self.kind != "rating":
            raise ValueError("markers belong to kind rating")
        low, high = self.range
        if not low < high:
            raise ValueError("scale: the least rating must be below the greatest")
        if not self.read:
            raise ValueError("read: at least one of logprobs, json, text")
        if not self.markers or "logprobs" in self.read:
            if len(self.labels) < 2 or any(not label.strip() or label != label.strip() for label in self.labels):
                raise ValueError("choices: at least two answers are needed, none with spaces around it")
            if any(not low <= value <= high for value in self.labels.values()):
                raise ValueError(f"choices: a value is outside {low:g}..{high:g}")
        return self

    @property
    def range(self) -> tuple[float, float]:
        return self.scale or (0.0, 1.0)

    @property
    def labels(self) -> dict[str, float]:
        """Value of each answer, by its text in lower case."""
        if self.choices:
            return {label.casefold(): value for label, value in self.choices.items()}
        if self.scale is not None:
            low, high = math.ceil(self.scale[0]), math.floor(self.scale[1])
            return {str(rating): float(rating) for rating in range(low, min(high, low + 100) + 1)}
        return {"yes": 1.0, "no": 0.0} if self.kind == "yes_no" else {"1": 1.0, "2": 0.0}

    def messages(self, image_urls: Sequence[str], quoted: str) -> list[dict[str, Any]]:
        """The messages of a request: ``system`` if there is one, then one of the user: images first, then text."""
        before, _, after = self.user.partition(PLACEHOLDER)  # not str.format: braces in a prompt mean nothing
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in image_urls]
        content.append({"type": "text", "text": before + quoted + after})
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": content}]

    def answer_schema(self) -> dict[str, Any]:
        """JSON schema of an answer: ``{"answer": label}``, or a number by axis."""
        low, high = self.range
        number = {"type": "number", "minimum": low, "maximum": high}
        label = {"type": "string", "enum": [*(self.choices or self.labels)]}
        properties = dict.fromkeys(self.markers, number) if self.markers else {"answer": label}
        return {
            "type": "object",
            "properties": properties,
            "required": [*properties],
            "additionalProperties": False,
        }


@dataclass(frozen=True)
class Named:
    """A template, what it is called, and the sha256 of its file."""

    template: Template
    name: str
    sha256: str


def load(name: str) -> Named:
    """The template ``name`` of this package, or of the file ``name`` (a path with a slash, or ``*.yaml``).

    Raises:
        RewardLoadError: there is none, or its file is not a template; the message says what is wrong with which key.
    """
    path = Path(name).expanduser() if "/" in name or name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    try:
        content = path.read_bytes()
    except OSError as error:
        names = sorted(file.stem for file in FOLDER.glob("*.yaml"))
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise RewardLoadError(
            f"judge template {name!r} cannot be read ({error.strerror}); {hint}there are {', '.join(names)}, or a file"
        ) from error
    try:
        template = Template.model_validate(yaml.safe_load(content))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RewardLoadError(f"judge template {path}: not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'file'}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors()
        )
        raise RewardLoadError(f"judge template {path}: {problems} (quote words such as yes and no)") from error
    return Named(template, path.stem, hashlib.sha256(content).hexdigest())


def quoted(prompt: str, how: Literal["json", "brackets"], max_chars: int) -> tuple[str, bool]:
    """``prompt`` as data, and whether it was cut to ``max_chars`` characters.

    json: a JSON string with its quotes, whose value is the prompt; characters of control tokens, and those that
    cannot be printed, are ``\\uXXXX``. brackets: as it is, for the templates of trained judges, but brackets become
    round or single guillemets, and white space and unprintable characters a space.
    """
    kept = prompt[:max_chars]
    if how == "json":
        text = '"' + "".join(map(_in_json, kept)) + '"'
    else:
        text = "".join(c if c.isprintable() else " " for c in kept).translate(_BRACKETS)
    return text, len(kept) < len(prompt)


def _in_json(character: str) -> str:
    if character in _CONTROL:
        return f"\\u{ord(character):04x}"
    return character if character.isprintable() and character not in '"\\' else json.dumps(character)[1:-1]
