"""Settings from YAML files, the environment and the command line, for any pydantic model; later ones win.

A nested model is a group: ``gateway.max_depth`` is ``gateway: {max_depth: 512}`` in YAML,
``PREFIX_GATEWAY__MAX_DEPTH=512`` in the environment (an empty variable counts as not set) and
``--gateway.max-depth 512`` on the command line (``max_depth`` works too). A value given as text means:

- number, text, path, choice: the text itself; ``null`` or ``none`` where a setting may be unset
- boolean: ``true`` or ``false``; ``--flag`` alone means true
- list: ``a,b`` or YAML/JSON, ``[a, b]``
- mapping: YAML/JSON, ``{a: 1, b: 2}``, or ``a=1,b=2``, or key by key: ``--rewards.a.workers 2``; any other text is
  left to the model, which may take names, ``a,b``

A list or mapping given whole replaces the one given before; groups are merged key by key.

YAML and environment are read by pydantic-settings' sources. Its command-line source is not used: its errors name
neither the nearest key nor the expected type, it splits a mapping's text before the model sees it, and its help
shows no defaults that are computed. Its environment source passes over unknown names, hence the check here.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, SecretStr, ValidationError, create_model
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

from reward_server.options_help import build_parser
from reward_server.options_tree import (
    LISTS,
    MAPPINGS,
    Key,
    OptionsError,
    leaves,
    members,
    model_in,
    takes,
    type_at,
    type_name,
    unknown_setting,
    value_type,
)

M = TypeVar("M", bound=BaseModel)

_STARS = "**********"


@dataclass(frozen=True)
class _Given:
    """One value that the user gave, and where: a file, an environment variable or a flag."""

    key: Key
    value: Any
    origin: str


def load(
    model: type[M],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str,
    env_prefix: str,
    aliases: Mapping[str, str] | None = None,
    positionals: Sequence[str] = (),
    env_siblings: Sequence[type[BaseModel]] = (),
) -> M:
    """Settings from ``--config`` files, then the environment, then the command line, validated by ``model``.

    Args:
        argv: arguments without the program's name; ``sys.argv[1:]`` when None.
        aliases: short flag (without dashes) -> dotted key, ``{"reward-url": "reward.url"}``.
        positionals: dotted keys that may also be given by position; a list takes all that remain.
        env_siblings: models of other programs that share ``env_prefix``: their variables are passed over.

    Raises:
        SystemExit: 0 after ``--help``; 2 after a mistake of the user, which is printed, one line each.
    """
    parser = build_parser(model, prog, description, env_prefix, aliases or {}, positionals)
    try:
        flags = _from_command_line(model, parser, sys.argv[1:] if argv is None else argv)
        files = [str(g.value) for g in flags if g.key == ("config",)] or [os.environ.get(f"{env_prefix}CONFIG", "")]
        given = [g for file in files if file for g in _from_yaml(model, Path(file))]
        given += _from_environment(model, env_prefix, env_siblings)
        given += [g for g in flags if g.key != ("config",)]
        return _validate(model, given)
    except OptionsError as error:
        print("\n".join(f"{prog}: error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        raise SystemExit(2) from None


def dump(settings: BaseModel) -> str:
    """Settings as YAML that ``--config`` can read again; secrets and passwords within URLs become stars."""
    text: str = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return re.sub(r"(://[^\s/@]*:)[^\s/@]+@", rf"\1{_STARS}@", text)


# --- the three sources


def _decode(annotation: Any, text: str) -> Any:
    """A value given as text: see the module's docstring."""
    if text.lower() in ("null", "none") and takes(annotation, NoneType):
        return None
    if annotation is Any or (text[:1] in ("[", "{") and takes(annotation, *LISTS, *MAPPINGS)):
        return yaml.safe_load(text)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if takes(annotation, *MAPPINGS) and parts and all("=" in part for part in parts):
        pairs = [part.partition("=") for part in parts]
        return {name.strip(): yaml.safe_load(value) for name, _, value in pairs}
    if takes(annotation, *LISTS) and not takes(annotation, str):
        alone = len([m for m in members(annotation) if m is not NoneType]) == 1
        return parts if alone or len(parts) > 1 else text
    return text


def _from_text(model: type[BaseModel], key: Key, text: str, origin: str) -> _Given:
    annotation = type_at(model, key)
    if annotation is None:
        raise unknown_setting(model, key, origin)
    try:
        return _Given(key, _decode(annotation, text), origin)
    except yaml.YAMLError:
        wanted = type_name(annotation)
        raise OptionsError(f"{origin}: {'.'.join(key)} is {text!r}, which is not YAML; expected: {wanted}") from None


def _flatten(model: type[BaseModel], values: Mapping[str, Any], origin: str, prefix: Key = ()) -> Iterator[_Given]:
    """Nested values as one entry per setting; what a mapping holds stays together."""
    for name, value in values.items():
        info = model.model_fields.get(str(name))
        group = None if info is None else model_in(info.annotation)
        if group is not None and isinstance(value, Mapping):
            yield from _flatten(group, value, origin, (*prefix, str(name)))
        elif group is None or value is not None:  # a group whose lines are all commented out is null
            yield _Given((*prefix, str(name)), value, origin)


def _settings_class(model: type[BaseModel], prefix: str = "") -> type[BaseSettings]:
    """``model`` as pydantic-settings' sources want it; text stays text, for :func:`_decode`."""
    config = SettingsConfigDict(env_prefix=prefix, env_nested_delimiter="__", env_ignore_empty=True)
    config["enable_decoding"] = False
    base = type("_Base", (model, BaseSettings), {"model_config": config, "__module__": __name__})
    return create_model(model.__name__, __base__=base)


def _from_yaml(model: type[BaseModel], path: Path) -> list[_Given]:
    if not path.is_file():
        raise OptionsError(f"--config {path}: no such file")
    try:
        values = YamlConfigSettingsSource(_settings_class(model), yaml_file=path).yaml_data
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" line {error.problem_mark.line + 1}"
        raise OptionsError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionsError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    except (TypeError, ValueError, AttributeError):
        raise OptionsError(f"{path}: expected a mapping of settings, one 'name: value' a line") from None
    return list(_flatten(model, values, str(path)))


def _from_environment(model: type[BaseModel], prefix: str, siblings: Sequence[type[BaseModel]]) -> list[_Given]:
    for name in sorted(n for n in os.environ if n.startswith(prefix) and n != f"{prefix}CONFIG"):
        key = tuple(name.removeprefix(prefix).lower().split("__"))
        if all(type_at(m, key) is None for m in (model, *siblings)):
            raise unknown_setting(model, key, f"environment {name}")
    given = []
    for g in _flatten(model, EnvSettingsSource(_settings_class(model, prefix))(), ""):
        origin = f"environment {prefix}{'__'.join(g.key).upper()}"
        text = isinstance(g.value, str)
        given.append(_from_text(model, g.key, g.value, origin) if text else _Given(g.key, g.value, origin))
    return given


def _key_of(model: type[BaseModel], flag: str) -> Key:
    """``--max-batch`` is the setting max_batch; the names in a mapping (of rewards, say) stay as they are."""
    key: Key = ()
    for part in flag[2:].split("."):
        at = type_at(model, key)
        named = at is Any or (takes(at, *MAPPINGS) and value_type(at) is not Any)
        key = (*key, part if key and named else part.replace("-", "_"))
    return key


def _from_command_line(model: type[BaseModel], parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[_Given]:
    """Positionals and flags; flags that reach into a mapping, whose names argparse cannot know, are taken out first."""
    declared = {leaf.key for leaf in leaves(model)}
    rest: list[str] = []
    inside: list[_Given] = []
    arguments = iter(argv)
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        key = _key_of(model, flag)
        if not flag.startswith("--") or key in declared or type_at(model, key) is None:
            rest.append(flag.replace("_", "-") + equals + value if flag.startswith("--") else argument)
            continue
        text = value if equals else next(arguments, None)
        if text is None:
            raise OptionsError(f"{flag}: expected a value")
        inside.append(_from_text(model, key, text, flag))
    known, unknown = parser.parse_known_intermixed_args(rest)
    for argument in unknown:
        flag = argument.partition("=")[0]
        if flag.startswith("--"):
            raise unknown_setting(model, _key_of(model, flag), flag)
        raise OptionsError(f"unexpected argument {argument!r}; a setting is given as --name value")
    given = []
    for dotted, value in vars(known).items():
        key, origin = tuple(dotted.split(".")), f"--{dotted.replace('_', '-')}"
        if dotted == "config":
            given += [_Given(key, file, origin) for file in value]
        elif isinstance(value, list):  # positionals are taken as they are: a file's name may hold commas
            given.append(_Given(key, value, origin))
        else:
            given.append(_from_text(model, key, value, origin))
    return given + inside


# --- validation


def _merge(given: Sequence[_Given]) -> dict[str, Any]:
    """One nested mapping; a later value replaces what its key held, a key inside a mapping joins it."""
    merged: dict[str, Any] = {}
    for g in given:
        node = merged
        for name in g.key[:-1]:
            held = node.get(name)
            if isinstance(held, str):  # names, which stand for a mapping
                held = [part.strip() for part in held.split(",") if part.strip()]
            node[name] = dict(held) if isinstance(held, Mapping) else dict.fromkeys(held or ())
            node = node[name]
        node[g.key[-1]] = g.value
    return merged


def _validate(model: type[M], given: Sequence[_Given]) -> M:
    try:
        return model.model_validate(_merge(given))
    except ValidationError as error:
        lines = [_explain(model, problem, given) for problem in error.errors(include_url=False)]
        raise OptionsError("\n".join(dict.fromkeys(lines))) from None


def _explain(model: type[BaseModel], problem: Mapping[str, Any], given: Sequence[_Given]) -> str:
    """One line about one validation error: where the value came from, the key, and what was expected."""
    key: Key = tuple(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    origins = [g.origin for g in given if g.key[: len(key)] == key or key[: len(g.key)] == g.key]
    if problem["type"] == "extra_forbidden":
        return str(unknown_setting(model, key, origins[-1]))
    dotted = ".".join(key)
    if problem["type"] == "model_type":
        return f"{origins[-1]}: {dotted} is {problem['input']!r}; expected: a mapping of settings"
    if problem["type"] == "missing":
        return f"{dotted} is required: give it in --config, in the environment or as --{dotted.replace('_', '-')}"
    while key and type_at(model, key) is None:  # a list's index or a union's member
        key = key[:-1]
    if not key:  # a rule over several settings
        return f"{dotted}: {message}" if dotted else message
    annotation = type_at(model, key)
    if len(members(annotation)) > 1 and problem["type"] != "value_error":
        message = "does not fit"
    value = _STARS if takes(annotation, SecretStr) else repr(problem["input"])
    return f"{origins[-1]}: {'.'.join(key)} is {value}: {message}; expected: {type_name(annotation)}"
