"""Checkpoints: everything that a run needs to go on as if it had never stopped.

A checkpoint is a folder ``step-00000050`` with::

    policy.safetensors       the policy in its family's own format (evaluate.py and policy.checkpoint read it)
    training.pt              optimizer, scheduler and loss scaler
    process-0.pt             random states of process 0 (one file per process)
    pending-0.safetensors    rollouts of process 0 that still wait for their scores, with depth > 0
    manifest.json            step, processes, settings and versions

It is written under another name, flushed to the disk and renamed, so a folder with the final name is complete
whenever the machine stops. Nothing is unpickled: tensors are read by safetensors or ``torch.load(weights_only=True)``.
Several machines must share the run folder's file system.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

logger = logging.getLogger(__name__)
FORMAT = 1
PREFIX = "step-"
PARTIAL = ".partial-"


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or of another run; the message says what to do."""


class SavesItself(Protocol):
    """The part of a policy that checkpoints need: weights in the family's own format."""

    def save(self, path: Path, note: dict[str, str] | None = None) -> None: ...

    def restore(self, path: Path) -> None: ...


class Stateful(Protocol):
    """An optimizer, scheduler or loss scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Pending:
    """A rollout that waits for its scores, as tensors and JSON values."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """What :func:`load` returns beside the states that it restores in place."""

    step: int
    """training steps done"""
    manifest: dict[str, Any]
    pending: list[Pending] = field(default_factory=list)
    """of this process, oldest first"""


def save(
    root: Path,
    step: int,
    *,
    accelerator: Accelerator,
    policy: SavesItself,
    training: Mapping[str, Stateful],
    pending: Sequence[Pending],
    manifest: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint after ``step`` training steps, then remove all but the ``keep`` newest.

    Every process calls it. ``training`` names the optimizer and whatever else has a ``state_dict``; ``manifest`` is
    written beside the step and the number of processes.
    """
    final, partial = root / f"{PREFIX}{step:08d}", root / f"{PARTIAL}{step:08d}"
    rank = accelerator.process_index
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    torch.save(_random_states(), partial / f"process-{rank}.pt")
    _write_pending(partial / f"pending-{rank}.safetensors", pending)
    states = {name: part.state_dict() for name, part in training.items()}  # sharded ones are gathered by all
    if accelerator.is_main_process:
        policy.save(partial / "policy.safetensors", {"step": str(step)})
        torch.save(states, partial / "training.pt")
        head = {"format": FORMAT, "step": step, "processes": accelerator.num_processes}
        (partial / "manifest.json").write_text(json.dumps({**head, **manifest}, indent=1))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for file in (*partial.iterdir(), partial):
            _flush(file)
        if final.exists():  # the same step again, after a failure or a resume from an older checkpoint
            _remove(final)
        partial.rename(final)
        _flush(root)
        for old in _complete(root)[:-keep]:
            _remove(old)
    accelerator.wait_for_everyone()
    return final


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint in ``root``, or None."""
    found = _complete(root)
    return found[-1] if found else None


def find(resume: str, root: Path) -> Path | None:
    """The checkpoint that ``checkpoint.resume`` means: None for ``none``, and for ``auto`` when there is none yet.

    ``auto`` passes over damaged ones, with a warning. Raises CheckpointError for a path that is not an intact
    checkpoint, and if ``auto`` finds damaged ones alone.
    """
    if resume == "none":
        return None
    if resume != "auto":
        path = Path(resume)
        if not (path / "manifest.json").is_file():
            raise CheckpointError(f"checkpoint.resume: {path} is not a checkpoint folder (no manifest.json in it)")
        verify(path)
        return path
    damaged = []
    for path in reversed(_complete(root)):
        try:
            verify(path)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        if damaged:
            logger.warning("%s; going on from the older %s", "; ".join(damaged), path)
        return path
    if damaged:
        raise CheckpointError(f"{'; '.join(damaged)}; no older one is left: start again without --resume")
    return None


def verify(path: Path) -> None:
    """Look whether every file of a checkpoint is there to its end, reading little of them.

    Raises CheckpointError naming the first that is not.
    """
    ranks = range(read_manifest(path)["processes"])
    tensors = ["policy.safetensors", *(f"pending-{rank}.safetensors" for rank in ranks)]
    archives = ["training.pt", *(f"process-{rank}.pt" for rank in ranks)]
    for name in (*tensors, *archives):
        try:
            with safe_open(path / name, framework="pt") if name in tensors else ZipFile(path / name):
                pass
        except (OSError, SafetensorError, BadZipFile) as error:
            raise CheckpointError(
                f"checkpoint file {path / name} is damaged or missing ({error}); resume from another checkpoint"
            ) from error


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder. Raises CheckpointError if it cannot be read or is of another format."""
    try:
        manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} has no readable manifest.json: {error}") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path} has format {manifest.get('format')}; this version reads {FORMAT}")
    return manifest


def load(path: Path, *, accelerator: Accelerator, policy: SavesItself, training: Mapping[str, Stateful]) -> Checkpoint:
    """Restore policy, training states and random states in place. Every process calls it.

    Raises CheckpointError when a file is missing or does not fit, or when rollouts are pending and the number of
    processes has changed.
    """
    manifest = read_manifest(path)
    rank, processes = accelerator.process_index, manifest["processes"]
    same = processes == accelerator.num_processes
    pending = _read_pending(path / f"pending-{rank if same else 0}.safetensors")
    if pending and not same:
        raise CheckpointError(
            f"checkpoint {path} holds rollouts of {processes} process(es) that wait for scores, and this run has "
            f"{accelerator.num_processes}; resume with {processes}"
        )
    try:
        policy.restore(path / "policy.safetensors")
        states = torch.load(path / "training.pt", map_location="cpu", weights_only=True)
        for name, part in training.items():
            part.load_state_dict(states[name])
        if same:
            _restore_random_states(torch.load(path / f"process-{rank}.pt", map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"checkpoint {path} holds more than tensors and plain values; it is not loaded"
        ) from error
    except (OSError, EOFError, KeyError, RuntimeError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} does not fit this run: {error}") from error
    return Checkpoint(step=manifest["step"], manifest=manifest, pending=pending)


def sweep(root: Path, step: int) -> None:
    """Remove what a killed run left half written, and checkpoints after ``step``: training goes on from there, and
    they would belong to a future that no longer comes. For the main process, before training."""
    for leftover in root.glob(f"{PARTIAL}*"):
        shutil.rmtree(leftover)
    for path in _complete(root):
        if int(path.name.removeprefix(PREFIX)) > step:
            _remove(path)


def _complete(root: Path) -> list[Path]:
    return sorted(path for path in root.glob(f"{PREFIX}*") if (path / "manifest.json").is_file())


def _remove(path: Path) -> None:
    """Rename first: a run killed while it deletes must not leave half a checkpoint under a final name."""
    doomed = path.with_name(f"{PARTIAL}{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_pending(path: Path, pending: Sequence[Pending]) -> None:
    tensors = {f"{i}/{name}": t.detach().cpu().clone() for i, p in enumerate(pending) for name, t in p.tensors.items()}
    save_file(tensors, path, {"pending": json.dumps([p.values for p in pending])})


def _read_pending(path: Path) -> list[Pending]:
    try:
        with safe_open(path, framework="pt") as file:
            values = json.loads(file.metadata()["pending"])
            tensors: list[dict[str, Tensor]] = [{} for _ in values]
            for key in file.keys():  # noqa: SIM118 (the handle is not a mapping)
                index, _, name = key.partition("/")
                tensors[int(index)][name] = file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read: {error}") from error
    return [Pending(v, t) for v, t in zip(values, tensors, strict=True)]


def _random_states() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
    }


def _restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
