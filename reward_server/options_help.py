"""The command line of a model of settings, and its ``--help``: every setting, under headings."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from pydantic import BaseModel

from reward_server.options_tree import LISTS, Key, Leaf, OptionsError, leaves, model_in, takes, type_name, value_type

EPILOG = """\
Every setting can stand in a YAML file, in the environment (the name in brackets) or on the command
line; later ones win. Lists: a,b or [a, b]. Mappings: a=1,b=2 or {a: 1, b: 2}."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionsError(message.removeprefix("argument "))


def build_parser(
    model: type[BaseModel],
    prog: str,
    description: str,
    env_prefix: str,
    aliases: Mapping[str, str],
    positionals: Sequence[str],
) -> argparse.ArgumentParser:
    """One argparse group per heading of each nested model; no defaults, so that what was not given stays away."""
    parser = _Parser(
        prog=prog,
        usage=" ".join([prog, *(f"[{p.upper()}]" for p in positionals), "[--config FILE] [--setting value ...]"]),
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
    )
    about = f"YAML file of settings; of several the later win [{env_prefix}CONFIG]"
    parser.add_argument("--config", action="append", metavar="FILE", help=about)
    groups: dict[tuple[Key, str], Any] = {}
    for leaf in _in_order(model):
        dotted, wanted, place = ".".join(leaf.key), type_name(leaf.annotation), leaf.key[:-1]
        if (place, leaf.heading) not in groups:
            title = ": ".join(filter(None, [".".join(place), leaf.heading])) or "settings"
            is_first = all(place != other for other, _ in groups)
            groups[place, leaf.heading] = parser.add_argument_group(title, leaf.about if is_first else None)
        text = f"{leaf.description} (default: {leaf.default}) [{env_prefix}{'__'.join(leaf.key).upper()}]"
        if dotted in positionals:
            many = takes(leaf.annotation, *LISTS)
            parser.add_argument(dotted, nargs="*" if many else "?", metavar=dotted.upper(), help=leaf.description)
        groups[place, leaf.heading].add_argument(
            *(f"--{alias}" for alias, target in aliases.items() if target == dotted),
            f"--{dotted.replace('_', '-')}",
            dest=dotted,
            metavar=wanted.upper() if wanted.isalpha() else f"{{{wanted}}}",
            nargs="?" if leaf.annotation is bool else None,
            const="true" if leaf.annotation is bool else None,
            help=text.strip().replace("%", "%%"),
        )
    return parser


def _in_order(model: type[BaseModel]) -> list[Leaf]:
    """Every setting, those of a nested model together and what has no heading first."""
    found = list(_with_entries(model))
    places = list(dict.fromkeys([(), *(leaf.key[:-1] for leaf in found)]))
    return sorted(found, key=lambda leaf: (places.index(leaf.key[:-1]), leaf.heading != ""))


def _with_entries(model: type[BaseModel]) -> Iterator[Leaf]:
    """Every setting, and after a mapping of models those of its entries, under the key ``NAME``."""
    for leaf in leaves(model):
        yield leaf
        entry = model_in(value_type(leaf.annotation))
        for inner in leaves(entry) if entry else ():
            about = inner.about or f"of each entry of {'.'.join(leaf.key)}, by its name"
            yield replace(inner, key=(*leaf.key, "NAME", *inner.key), about=about)
