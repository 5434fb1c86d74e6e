"""Find a model family, read its weights, and say which weights they were.

The family NAME is the class NamePolicy of ``trainer/policies/name.py``.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import inspect
import os
import typing
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, ValidationError, create_model
from safetensors import SafetensorError, safe_open
from torch import nn

from trainer.config import Config, PolicyConfig, UserError
from trainer.policies.base import Policy
from trainer.report import sha256

FOLDER = Path(__file__).parent / "policies"
EVERY_FAMILY = ("ar_steps", "diffusion_steps", "guidance")
"""Settings of ``policy`` that every family's ``load`` takes; what else it takes is in ``policy.options``."""
SAMPLE = 1 << 20
"""Bytes read from either end of a large file, to tell one folder of weights from another"""


def family_of(name: str) -> type[Policy]:
    """The class of a family. Raises UserError that lists the families if there is none of that name."""
    files = [path for path in FOLDER.glob("*.py") if path.stem != "masked"]  # what families have in common
    known = sorted(path.stem for path in files if f"class {_class_name(path.stem)}(" in path.read_text())
    if name not in known:
        raise UserError(f"policy.name: there is no policy {name!r}; there are: {', '.join(known)}")
    family: type[Policy] = getattr(importlib.import_module(f"trainer.policies.{name}"), _class_name(name))
    return family


def family_in(weights: Path) -> str:
    """The family that wrote a file of weights: it signs with its name. Raises UserError if no family did."""
    try:
        with safe_open(weights, framework="pt") as file:
            signed: list[str] = list(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{weights} is not a safetensors file: {error}") from error
    for name in signed:
        if name.isidentifier() and (FOLDER / f"{name}.py").is_file():
            return name
    raise UserError(f"{weights} was not written by this trainer: its metadata name no family")


def _class_name(name: str) -> str:
    return f"{name.capitalize()}Policy"


def load_policy(config: Config, checkpoint: str | Path | None = None) -> tuple[Policy, str]:
    """The policy that ``policy`` names, in evaluation mode on the CPU, and where its weights came from.

    ``checkpoint`` stands in for ``policy.checkpoint``. Raises UserError for what does not exist or does not fit.
    """
    family: Any = family_of(config.policy.name)
    source = policy_source(checkpoint or config.policy.checkpoint, config.policy.name)
    try:
        policy: Policy = family.load(source, **load_arguments(config.policy))
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"policy: {error}") from error
    except ModuleNotFoundError as error:
        raise UserError(
            f"policy: {config.policy.name} needs {error.name}, which is not installed: "
            f'pip install "mar-grpo[{config.policy.name}]"'
        ) from error
    as_module(policy).eval()
    return policy, source


def load_arguments(policy: PolicyConfig) -> dict[str, Any]:
    """The keyword arguments of the family's ``load``: settings of every family that were given, and its own options.

    Raises UserError for an option that the family does not have, listing those it has, or a value that does not fit.
    """
    family: Any = family_of(policy.name)
    hints = typing.get_type_hints(family.load)
    own = {
        name: (hints[name], parameter.default)
        for name, parameter in inspect.signature(family.load).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in EVERY_FAMILY
    }
    unknown = [name for name in policy.options if name not in own]
    if unknown:
        listed = ", ".join(f"{name} (default {default!r})" for name, (_, default) in own.items()) or "none at all"
        raise UserError(f"policy.options: {policy.name} has no {', '.join(unknown)}; its options: {listed}")
    fields: dict[str, Any] = own
    try:
        options = create_model("Options", __config__=ConfigDict(strict=False), **fields)(**policy.options)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"policy.options.{'.'.join(map(str, first['loc'][:1]))}: {first['msg']}, not {first['input']!r}"
        ) from error
    chosen = {name: getattr(options, name) for name in policy.options}
    return chosen | {name: value for name in EVERY_FAMILY if (value := getattr(policy, name)) is not None}


def policy_source(checkpoint: str | Path | None, name: str) -> str:
    """The weights that ``policy.checkpoint`` means: a run's newest, a checkpoint folder's, the file, folder or hub id
    that is given; None: those that come with the family.

    Raises UserError if nothing is given and the family comes without, or for a path that cannot be a hub id and is
    not there.
    """
    own = FOLDER / "weights" / f"{name}.safetensors"
    if checkpoint is None:
        if own.is_file():
            return str(own)
        raise UserError(
            f"policy.checkpoint is not set, and {name} comes without weights: name a folder in the official layout, a "
            "hub id (owner/name) that was downloaded, or a run"
        )
    path = Path(checkpoint)
    runs = sorted((path / "checkpoints").glob("step-*/policy.safetensors"))
    if runs:
        return str(runs[-1])
    if (path / "policy.safetensors").is_file():
        return str(path / "policy.safetensors")
    may_be_hub_id = len(path.parts) == 2 and path.suffix != ".safetensors" and not own.is_file()
    if not path.exists() and not may_be_hub_id:
        raise UserError(
            f"there is no checkpoint at {path}: name a file, a checkpoint's or a run's folder, a folder in the "
            "official layout, or a hub id (owner/name)"
        )
    return str(checkpoint)


def fingerprint(source: str) -> str:
    """Which weights these are: a file's sha256; of a folder, a digest over its files' names, sizes and ends, since
    the whole may be many gigabytes; of a hub id, that of its snapshot in the local cache."""
    path = Path(source)
    if path.is_file():
        return sha256(path)
    if not path.exists():
        from huggingface_hub import snapshot_download

        path = Path(snapshot_download(source, local_files_only=True))
    digest = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path).as_posix()} {size}\n".encode())
        with file.open("rb") as content:
            digest.update(content.read(SAMPLE))
            content.seek(max(SAMPLE, size - SAMPLE), os.SEEK_SET)
            digest.update(content.read(SAMPLE))
    return f"folder-sha256:{digest.hexdigest()}"


def as_module(policy: Policy) -> nn.Module:
    """The policy as the module that it is, too; a protocol cannot say so."""
    if not isinstance(policy, nn.Module):
        raise TypeError(f"a policy must be a torch.nn.Module, {type(policy).__name__} is not")
    return policy


def freeze(policy: Policy, head: str) -> list[nn.Parameter]:
    """Let gradients reach what ``algorithm.head`` trains, and return those parameters.

    ``frozen``: the backbone; gradients still flow *through* the head. ``only``: the head. ``trained``: both.
    """
    as_module(policy).requires_grad_(False)
    chosen = [] if head == "only" else list(policy.backbone_parameters())
    chosen += [] if head == "frozen" else list(policy.head_parameters())
    for parameter in chosen:
        parameter.requires_grad_(True)
    return chosen


def reference_of(policy: Policy) -> Policy:
    """The policy as it is now, frozen: a copy of what is trained, which shares all other weights with it."""
    module = as_module(policy)
    shared = [p for p in module.parameters() if not p.requires_grad] + list(module.buffers())
    reference = copy.deepcopy(policy, {id(tensor): tensor for tensor in shared})
    as_module(reference).requires_grad_(False)
    return reference


def prepare_prompts(policy: Policy, prompts: list[str]) -> None:
    """Let a family with a frozen text encoder embed all prompts of a run at once (``prepare_prompts``), if it does.

    Raises UserError if the encoder cannot be read."""
    prepare = getattr(policy, "prepare_prompts", None)
    if prepare is not None:
        try:
            with torch.no_grad():
                prepare(prompts)
        except (FileNotFoundError, ValueError) as error:
            raise UserError(f"policy: {error}") from error
