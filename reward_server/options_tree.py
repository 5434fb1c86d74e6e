"""The tree of settings that a pydantic model spans: its keys, their types, defaults, and the nearest to a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr, TypeAdapter

Key = tuple[str, ...]

LISTS = (list, tuple, set, Sequence)
MAPPINGS = (dict, Mapping)


@dataclass(frozen=True)
class Heading:
    """Under which ``--help`` shows a setting: ``port: Annotated[int, Heading("address")]``."""

    title: str


class OptionsError(ValueError):
    """The user's settings are wrong; every line of the message names the source, the key and what was expected."""


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, flattened; any other type is its own only member."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(m for arg in get_args(annotation) for m in members(arg))
    return (annotation,)


def takes(annotation: Any, *kinds: Any) -> bool:
    return any((get_origin(m) or m) in kinds for m in members(annotation))


def model_in(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def value_type(annotation: Any) -> Any:
    """The type of a mapping's values."""
    arguments = [get_args(m) for m in members(annotation) if (get_origin(m) or m) in MAPPINGS]
    return arguments[0][1] if arguments and len(arguments[0]) == 2 else Any


def type_at(model: type[BaseModel], key: Key) -> Any:
    """The type of the setting at ``key``, which may reach into a mapping; None when there is none or it is a group."""
    if not key or key[0] not in model.model_fields:
        return None
    annotation, rest = model.model_fields[key[0]].annotation, key[1:]
    while rest and model_in(annotation) is None and takes(annotation, *MAPPINGS):
        annotation, rest = value_type(annotation), rest[1:]
    group = model_in(annotation)
    if group is not None:
        return type_at(group, rest)
    return annotation if not rest or annotation is Any else None


@dataclass(frozen=True)
class Leaf:
    """A setting that is not a group."""

    key: Key
    annotation: Any
    description: str
    default: str
    heading: str
    """Of ``--help``; empty when the setting names none"""
    about: str
    """Describes the group that the setting is in"""


def leaves(model: type[BaseModel], key: Key = (), defaults: Any = None, about: str = "") -> Iterator[Leaf]:
    """Every setting, in order; a group's own default (an instance) wins over its fields' defaults."""
    for name, info in model.model_fields.items():
        default = getattr(defaults, name) if defaults else info.get_default(call_default_factory=True)
        description = info.description or ""
        group = model_in(info.annotation)
        if group is not None:
            inner = default if isinstance(default, group) else None
            yield from leaves(group, (*key, name), inner, description or group.__doc__ or "")
        else:
            text = "required" if info.is_required() else _default_text(default)
            heading = next((entry.title for entry in info.metadata if isinstance(entry, Heading)), "")
            yield Leaf((*key, name), info.annotation, description, text, heading, about)


def _default_text(default: Any) -> str:
    plain = TypeAdapter(Any).dump_python(default, mode="json", exclude_unset=True)
    if isinstance(plain, str):
        return plain or "''"
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    return "none" if plain is None else text


def unknown_setting(model: type[BaseModel], key: Key, origin: str) -> OptionsError:
    """The error for a key that does not exist, with the nearest that does."""
    known: list[Key] = []
    for leaf in leaves(model):
        value_model = model_in(value_type(leaf.annotation))
        inside = len(key) > len(leaf.key) + 1 and key[: len(leaf.key)] == leaf.key
        prefix = key[: len(leaf.key) + 1]
        known += [(*prefix, *inner.key) for inner in leaves(value_model)] if inside and value_model else [leaf.key]
    names = sorted({".".join(k[:depth]) for k in known for depth in range(1, len(k) + 1)})  # settings and groups
    near = difflib.get_close_matches(".".join(key), names, n=1, cutoff=0.75)
    if not near:  # the right name in the wrong group
        last = difflib.get_close_matches(key[-1], [k[-1] for k in known], n=1, cutoff=0.7)
        near = [".".join(k) for k in known if last and k[-1] == last[0]][:1]
    hint = f"did you mean {near[0]!r}?" if near else "see --help for all settings"
    if inside_it := [name for name in names if name.startswith(f"{'.'.join(key)}.")]:
        hint = f"that is a group of settings: {', '.join(inside_it)}"
    return OptionsError(f"{origin}: unknown setting {'.'.join(key)!r}; {hint}")


def type_name(annotation: Any) -> str:
    """A type in a user's words: ``integer``, ``path|none``, ``list of number``."""
    plain = {int: "integer", float: "number", bool: "true|false", str: "text", Path: "path", SecretStr: "secret"}
    names = []
    for member in members(annotation):
        origin, args = get_origin(member) or member, get_args(member)
        if origin is Literal:
            names.append("|".join(map(str, args)))
        elif origin in LISTS:
            names.append(f"list of {type_name(args[0])}" if args else "list")
        elif origin in MAPPINGS or model_in(member):
            names.append("mapping")
        else:
            names.append("none" if member is NoneType else plain.get(member, getattr(member, "__name__", str(member))))
    return "|".join(names)
