"""Write trained weights in the family's official layout: ``python trainer/export.py runs/nova exported/nova``.

The result loads wherever the official checkpoint does, ``policy.checkpoint`` included. Adapters (LoRA) are merged.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: make `trainer` the package, not this folder a source of modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pydantic import Field

from reward_server import options
from trainer.config import ENV_PREFIX, Command, Config, PolicyConfig, Section, UserError

PROG = "trainer/export.py"


class ExportCommand(Section):
    """Write trained weights in the family's official layout."""

    source: str = Field(description="a run's folder (its newest checkpoint), a checkpoint's folder, or a file")
    out: Path = Field(description="folder to write; must be empty or new")
    policy: PolicyConfig = Field(
        default=PolicyConfig(), description="what to read the weights with, in place of the checkpoint's own settings"
    )


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status: 0, or 2 after a user's mistake."""
    command = options.load(
        ExportCommand,
        argv,
        prog=PROG,
        description=str(ExportCommand.__doc__),
        env_prefix=ENV_PREFIX,
        positionals=["source", "out"],
        env_siblings=[Command],
    )
    try:
        name, source = export(command)
    except UserError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    print(f"{source} -> {command.out}, in the official layout of {name}")
    return 0


def export(command: ExportCommand) -> tuple[str, str]:
    """Write ``out``; returns the family and the file that the weights came from.

    Raises UserError if the source holds no trained weights, if they cannot be read, or if ``out`` is not empty.
    """
    from trainer import families

    if command.out.exists() and (not command.out.is_dir() or any(command.out.iterdir())):
        raise UserError(f"{command.out} is there and not an empty folder; name another")
    source = families.policy_source(command.source, command.policy.name)
    if not Path(source).is_file():
        raise UserError(
            f"{source} holds no trained weights: name a run's folder, a checkpoint's, or policy.safetensors"
        )
    settings = _settings_of(Path(source)) | command.policy.model_dump(exclude_unset=True)
    settings["name"] = families.family_in(Path(source))
    policy, source = families.load_policy(Config(policy=PolicyConfig(**settings)), source)
    try:
        policy.export(command.out)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot export {source}: {error}") from error
    return settings["name"], source


def _settings_of(weights: Path) -> dict[str, Any]:
    """The ``policy`` settings of the checkpoint that the weights lie in, if they do."""
    manifest = weights.with_name("manifest.json")
    if not manifest.is_file():
        return {}
    settings: dict[str, Any] = json.loads(manifest.read_text())["settings"]["policy"]
    return settings


if __name__ == "__main__":
    sys.exit(main())
