"""Settings from YAML files, the environment and the command line, for any pydantic model; later ones win.

A nested model is a group: ``gateway.max_depth`` is ``gateway: {max_depth: 512}`` in YAML,
``PREFIX_GATEWAY__MAX_DEPTH=512`` in the environment and ``--gateway.max-depth 512`` (or ``max_depth``) on the
command line. A value given as text means:

- number, string, path, choice: the text itself; ``null`` or ``none`` where a setting may be unset
- boolean: ``true`` or ``false``; ``--flag`` alone means true
- list: ``a,b`` or YAML/JSON, ``[a, b]``; mapping: YAML/JSON, ``{a: 1}``, or key by key, ``--rewards.a.workers 2``

A list or mapping given whole replaces the one given before; groups are merged.

YAML and environment are read by pydantic-settings' sources. Its command-line source is not used: it neither
names the flag, the nearest key and the expected type in its errors, nor takes a mapping's text as the model
means it, nor shows defaults that are computed. Its environment source passes over unknown names, hence the check here.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

M = TypeVar("M", bound=BaseModel)
Key = tuple[str, ...]
_CONTAINERS = (list, tuple, set, dict, Sequence, Mapping)


class OptionsError(ValueError):
    """The user's settings are wrong; every line of the message names the source, the key and what was expected."""


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
        positionals: dotted keys that may also be given by position; the last may be a list.
        env_siblings: models of other programs that share ``env_prefix``: their variables are passed over.

    Raises:
        SystemExit: 0 after ``--help``; 2 after a mistake of the user, which is printed, one line each.
    """
    parser = _parser(model, prog, description, env_prefix, aliases or {}, positionals)
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        from_command_line = _from_command_line(model, parser, arguments, aliases or {})
        files = [str(g.value) for g in from_command_line if g.key == ("config",)]
        files = files or [f for f in [os.environ.get(f"{env_prefix}CONFIG")] if f]
        given = [g for file in files for g in _from_yaml(model, Path(file))]
        given += _from_environment(model, env_prefix, env_siblings)
        given += [g for g in from_command_line if g.key != ("config",)]
        return _validate(model, given)
    except OptionsError as error:
        print("\n".join(f"{prog}: error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        raise SystemExit(2) from None


def dump(settings: BaseModel) -> str:
    """Settings as YAML that ``--config`` can read again; secrets and passwords within URLs are replaced by stars."""
    text: str = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return re.sub(r"(://[^\s/@]*:)[^\s/@]+@", r"\1**********@", text)


# --- the tree of keys


def _group(annotation: Any) -> type[BaseModel] | None:
    """The nested model that a field's type stands for, or None for a leaf."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _leaves(model: type[BaseModel], prefix: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Every setting that is not a group, with its key."""
    for name, info in model.model_fields.items():
        nested = _group(info.annotation)
        if nested is None:
            yield (*prefix, name), info
        else:
            yield from _leaves(nested, (*prefix, name))


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, flattened; a type alone is its own only member."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(m for arg in get_args(annotation) for m in _members(arg))
    return (annotation,)


def _takes(annotation: Any, *kinds: type) -> bool:
    return any((get_origin(m) or m) in kinds for m in _members(annotation))


def _leaf_of(model: type[BaseModel], key: Key) -> tuple[Key, FieldInfo] | None:
    """The setting that ``key`` names, or whose mapping it reaches into; None when there is no such setting."""
    for leaf, info in _leaves(model):
        if key == leaf or (key[: len(leaf)] == leaf and _takes(info.annotation, dict, Mapping)):
            return leaf, info
    return None


def _unknown(model: type[BaseModel], key: Key, origin: str) -> str:
    """The message for a key that does not exist, with the nearest that does."""
    wrong = ".".join(key)
    known = {".".join(leaf): leaf for leaf, _ in _leaves(model)}
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6)
    if not near:  # the right name in the wrong group
        last = difflib.get_close_matches(key[-1], [leaf[-1] for leaf in known.values()], n=1, cutoff=0.7)
        near = [name for name, leaf in known.items() if last and leaf[-1] == last[0]][:1]
    hint = f"did you mean {near[0]!r}?" if near else "see --help for all settings"
    return f"{origin}: unknown setting {wrong!r}; {hint}"


def _type_name(annotation: Any) -> str:
    """A type in a user's words: ``integer``, ``none|path``, ``list of number``."""
    plain = {int: "integer", float: "number", bool: "true|false", str: "text", Path: "path", SecretStr: "secret"}
    names = []
    for member in _members(annotation):
        origin, args = get_origin(member), get_args(member)
        if origin is Literal:
            names.append("|".join(map(str, args)))
        elif origin in (list, tuple, set, Sequence):
            names.append(f"list of {_type_name(args[0])}" if args else "list")
        elif (origin or member) in (dict, Mapping):
            names.append("mapping")
        elif member is NoneType:
            names.append("none")
        else:
            names.append(plain.get(member, getattr(member, "__name__", str(member))))
    return "|".join(names)


# --- the three sources


def _decode(info: FieldInfo, text: str) -> Any:
    """A value given as text: see the module's docstring."""
    annotation = info.annotation
    if text.lower() in ("null", "none") and _takes(annotation, NoneType):
        return None
    if text[:1] in ("[", "{") and _takes(annotation, *_CONTAINERS):
        return yaml.safe_load(text)
    if _takes(annotation, list, tuple, set, Sequence) and not _takes(annotation, str):
        parts = [part.strip() for part in text.split(",") if part.strip()]
        only_list = all((get_origin(m) or m) in (*_CONTAINERS, NoneType) for m in _members(annotation))
        return parts if only_list or len(parts) > 1 else text
    return text


def _text(model: type[BaseModel], key: Key, text: str, origin: str) -> _Given:
    """A value that was given as text, decoded as its setting (or as YAML, when inside a mapping)."""
    found = _leaf_of(model, key)
    if found is None:
        raise OptionsError(_unknown(model, key, origin))
    leaf, info = found
    try:
        return _Given(key, _decode(info, text) if key == leaf else yaml.safe_load(text), origin)
    except yaml.YAMLError:
        wanted = _type_name(info.annotation)
        raise OptionsError(f"{origin}: {'.'.join(key)} is {text!r}, which is not YAML; expected: {wanted}") from None


def _flatten(model: type[BaseModel], values: Mapping[str, Any], origin: str, prefix: Key = ()) -> Iterator[_Given]:
    """Nested values as one entry per setting; a mapping's content stays together."""
    for name, value in values.items():
        key = (*prefix, str(name))
        info = model.model_fields.get(str(name))
        nested = None if info is None else _group(info.annotation)
        if nested is not None and value is None:  # a group whose lines are all commented out
            continue
        if nested is not None and isinstance(value, Mapping):
            yield from _flatten(nested, value, origin, key)
        else:
            yield _Given(key, value, origin)


def _settings_class(model: type[BaseModel], prefix: str = "") -> type[BaseSettings]:
    """``model`` as pydantic-settings' sources want it; text stays text, for :func:`_decode`."""
    config = SettingsConfigDict(env_prefix=prefix, env_nested_delimiter="__", enable_decoding=False)
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
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionsError(f"{path}: not valid YAML: {error}") from None
    except (TypeError, ValueError, AttributeError):
        raise OptionsError(f"{path}: expected a mapping of settings, one 'name: value' a line") from None
    return list(_flatten(model, values, str(path)))


def _from_environment(model: type[BaseModel], prefix: str, siblings: Sequence[type[BaseModel]]) -> list[_Given]:
    for name in sorted(os.environ):
        key = tuple(name.removeprefix(prefix).lower().split("__"))
        if name.startswith(prefix) and not any(_leaf_of(m, key) for m in (model, *siblings)) and key != ("config",):
            raise OptionsError(_unknown(model, key, f"environment {name}"))
    given = []
    for g in _flatten(model, EnvSettingsSource(_settings_class(model, prefix))(), ""):
        origin = f"environment {prefix}{'__'.join(g.key).upper()}"
        given.append(
            _text(model, g.key, g.value, origin) if isinstance(g.value, str) else _Given(g.key, g.value, origin)
        )
    return given


def _from_command_line(
    model: type[BaseModel], parser: argparse.ArgumentParser, argv: Sequence[str], aliases: Mapping[str, str]
) -> list[_Given]:
    """Flags and positionals; keys inside a mapping (``--rewards.null.workers 2``) are taken out before argparse."""
    rest: list[str] = []
    given: list[_Given] = []
    arguments = iter(argv)
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if not flag.startswith("--") or flag == "--":
            rest.append(argument)
            continue
        key = tuple(flag[2:].replace("-", "_").split("."))
        found = _leaf_of(model, key)
        if found is None or found[0] == key:
            rest.append(flag.replace("_", "-") + equals + value)
            continue
        given_value = value if equals else next(arguments, None)
        if given_value is None:
            raise OptionsError(f"{flag}: expected a value")
        given.append(_text(model, key, given_value, flag))
    known, unknown = parser.parse_known_args(rest)
    for argument in unknown:
        flag = argument.partition("=")[0]
        if flag.startswith("-"):
            raise OptionsError(_unknown(model, tuple(flag.lstrip("-").replace("-", "_").split(".")), flag))
        raise OptionsError(f"{argument!r}: unexpected argument")
    for dest, value in vars(known).items():
        key, origin = tuple(dest.split(".")), f"--{dest.replace('_', '-')}"
        if dest == "config":
            given = [_Given(("config",), file, origin) for file in value] + given
        elif isinstance(value, list):
            given.insert(0, _Given(key, [v for text in value for v in _text(model, key, text, origin).value], origin))
        else:
            given.insert(0, _text(model, key, value, origin))
    return given


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionsError(message)


def _parser(
    model: type[BaseModel],
    prog: str,
    description: str,
    env_prefix: str,
    aliases: Mapping[str, str],
    positionals: Sequence[str],
) -> argparse.ArgumentParser:
    """One argparse group per nested model; no defaults, so that what was not given stays away."""
    parser = _Parser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"Every setting may also stand in a YAML file (--config) or the environment ([{env_prefix}...]);\n"
        "the command line wins over the environment, which wins over files.",
    )
    groups: dict[Key, Any] = {(): parser.add_argument_group("settings")}
    groups[()].add_argument(
        "--config",
        action="append",
        metavar="PATH",
        help=f"YAML file of settings; of several the later win [{env_prefix}CONFIG]",
    )
    for dotted in positionals:
        info = dict(_leaves(model))[tuple(dotted.split("."))]
        many = _takes(info.annotation, list, tuple, Sequence)
        parser.add_argument(dotted, nargs="*" if many else "?", metavar=dotted.upper(), help=info.description)
    for key, info, default, title in _described(model):
        group = groups.get(key[:-1])
        if group is None:
            group = groups[key[:-1]] = parser.add_argument_group(".".join(key[:-1]), title)
        dotted = ".".join(key)
        shorts = [f"--{alias}" for alias, target in aliases.items() if target == dotted]
        boolean = {"nargs": "?", "const": "true"} if info.annotation is bool else {}
        wanted = _type_name(info.annotation)
        group.add_argument(
            *shorts,
            f"--{dotted.replace('_', '-')}",
            dest=dotted,
            metavar=wanted.upper() if wanted.isalpha() else f"{{{wanted}}}",
            help=f"{info.description or ''} (default: {default}) [{env_prefix}{'__'.join(key).upper()}]".replace(
                "%", "%%"
            ),
            **boolean,
        )
    return parser


def _described(
    model: type[BaseModel], prefix: Key = (), parent: BaseModel | None = None, title: str | None = None
) -> Iterator[tuple[Key, FieldInfo, str, str | None]]:
    """Every setting with its default as text and its group's description; a group's own default counts."""
    for name, info in model.model_fields.items():
        default = getattr(parent, name) if parent is not None else info.get_default(call_default_factory=True)
        nested = _group(info.annotation)
        if nested is not None:
            inner = default if isinstance(default, nested) else None
            yield from _described(nested, (*prefix, name), inner, info.description or nested.__doc__)
        else:
            yield (*prefix, name), info, _default_text(info, default), title


def _default_text(info: FieldInfo, default: Any) -> str:
    if info.is_required():
        return "required"
    if isinstance(default, BaseModel | dict | list | tuple):
        plain = create_model("_", value=(Any, ...))(value=default).model_dump(mode="json", exclude_unset=True)["value"]
        return yaml.safe_dump(plain, default_flow_style=True, width=10_000).strip()
    return "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


# --- validation


def _merge(given: Sequence[_Given]) -> dict[str, Any]:
    """One nested mapping; a key given later replaces what was there, a key inside a mapping joins it."""
    merged: dict[str, Any] = {}
    for g in given:
        node = merged
        for name in g.key[:-1]:
            inner = node.get(name)
            node[name] = dict(inner) if isinstance(inner, dict) else dict.fromkeys(inner or ())
            node = node[name]
        node[g.key[-1]] = g.value
    return merged


def _validate(model: type[M], given: Sequence[_Given]) -> M:
    try:
        return model.model_validate(_merge(given))
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            key = tuple(str(part) for part in problem["loc"])
            lines.append(_explain(model, key, problem["type"], problem["msg"], problem.get("input"), given))
        raise OptionsError("\n".join(dict.fromkeys(lines))) from None


def _explain(model: type[BaseModel], key: Key, kind: str, message: str, value: Any, given: Sequence[_Given]) -> str:
    """One line about one validation error: where the value came from, the key, and what was expected."""
    origins = [g.origin for g in given if g.key[: len(key)] == key or key[: len(g.key)] == g.key]
    origin = origins[-1] if origins else "settings"
    if kind == "extra_forbidden":
        return _unknown(model, key, origin)
    dotted = ".".join(key)
    if kind == "missing":
        return f"{dotted} is required: give it in --config, the environment or as --{dotted.replace('_', '-')}"
    message = message.removeprefix("Value error, ").removeprefix("Input ")
    found = _leaf_of(model, key)
    if found is None:  # a rule over several settings
        return f"{origin}: {dotted + ': ' if dotted else ''}{message}"
    secret = _takes(found[1].annotation, SecretStr)
    return f"{origin}: {dotted} is {'**********' if secret else repr(value)} but {message}; expected: {_type_name(found[1].annotation)}"
