"""A reward's weights: where they are, whether they are whole, and their fingerprint.

Weights are never downloaded by a worker, so that its start is quick or fails with a reason: ``reward-server prefetch
NAME`` does that. Files are read as safetensors or by ``torch.load(weights_only=True)``; every key must be used and
every parameter filled. Importing this module loads neither torch nor the hub's client.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reward_server.rewards.base import RewardLoadError

if TYPE_CHECKING:
    import torch

MAX_KEYS = 5
"""Keys of a state dict that an error names"""


@dataclass(frozen=True)
class Source:
    """Files that belong together: of a repository on the Hugging Face hub, or of a local folder in its layout."""

    repo: str
    """Hub id such as ``xswu/HPSv2``, or the path of a folder"""
    files: tuple[str, ...]
    """Each a file name, a pattern (``model-*.safetensors``), or alternatives, best first: ``a.safetensors|a.bin``"""
    licence: str = ""
    """For people, before they download"""
    revision: str = "main"
    """Branch, tag or commit on the hub"""

    @property
    def is_local(self) -> bool:
        return self.repo.startswith(("/", "./", "../", "~")) or self.repo.count("/") > 1 or Path(self.repo).is_dir()


def locate(source: Source, *, reward: str) -> Path:
    """The folder that holds the files of ``source``: a local one, or the snapshot in the hub's cache.

    Args:
        reward: whose weights they are, for the message.

    Raises:
        RewardLoadError: a file is missing; the message says how to get it.
    """
    if source.is_local:
        folder = Path(source.repo).expanduser()
        if not folder.is_dir():
            raise RewardLoadError(f"weights of {reward}: {folder} is not a folder (seen from {Path.cwd()})")
        missing = _missing(folder, source)
        if missing:
            raise RewardLoadError(f"weights of {reward}: {folder} lacks {', '.join(missing)}")
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(source.repo, revision=source.revision, local_files_only=True))
        missing = _missing(folder, source)
    except LocalEntryNotFoundError:
        missing = list(source.files)
    if missing:
        licence = f" (licence: {source.licence})" if source.licence else ""
        raise RewardLoadError(
            f"weights of {reward} are not on this machine: {', '.join(missing)} of {source.repo}{licence}. "
            f"Download them with: reward-server prefetch {reward} (and the --options that it is served with)"
        )
    return folder


def download(source: Source) -> Path:
    """Download what is missing of ``source`` into the hub's cache, of alternatives the first; the folder that holds it.

    A local source is only checked. ``HF_HUB_OFFLINE``, ``HF_TOKEN``, ``HF_HOME``, ``HF_ENDPOINT`` work as everywhere.

    Raises:
        RewardLoadError: no network, no such repository or file, or no access.
    """
    if source.is_local:
        return locate(source, reward=source.repo)
    from huggingface_hub import model_info, snapshot_download

    if not any("*" in entry for entry in source.files):  # of a pattern, more may be missing than one can see
        try:
            return locate(source, reward=source.repo)
        except RewardLoadError:
            pass  # there is something to download
    try:
        there = [entry.rfilename for entry in model_info(source.repo, revision=source.revision).siblings or []]
        wanted = [next((n for n in e.split("|") if fnmatch.filter(there, n)), e) for e in source.files]
        folder = Path(snapshot_download(source.repo, revision=source.revision, allow_patterns=wanted))
    except Exception as error:  # of the hub's client, or of its HTTP library, which differs by version
        text = " ".join(str(error).split())
        raise RewardLoadError(f"{source.repo} cannot be downloaded: {type(error).__name__}: {text}") from error
    missing = _missing(folder, source)
    if missing:
        raise RewardLoadError(f"{source.repo} at {source.revision} has no {', '.join(missing)}")
    return folder


def find(folder: Path, entry: str) -> Path:
    """The first file of ``folder`` that matches an entry of ``Source.files``: of alternatives, the first there is.

    Raises:
        RewardLoadError: none does.
    """
    for name in entry.split("|"):
        if matches := sorted(folder.glob(name)):
            return matches[0]
    raise RewardLoadError(f"{folder} lacks {entry.replace('|', ' or ')}")


def _missing(folder: Path, source: Source) -> list[str]:
    return [
        entry.replace("|", " or ")
        for entry in source.files
        if not any(path.exists() for name in entry.split("|") for path in folder.glob(name))
    ]


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """Tensors by name, on the CPU, mapped from the file where its format allows that.

    A dict with one entry ``state_dict`` (open_clip's training checkpoints keep it beside the optimizer's) is unwrapped.

    Raises:
        RewardLoadError: the file is damaged, holds other things than tensors, or is no such file.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if _is_lfs_pointer(path):
        raise RewardLoadError(
            f"{path} is a pointer of git LFS, not the weights: run `git lfs pull` there, or download the file itself"
        )
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about pickle protocols; what cannot be read is an error
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except (OSError, SafetensorError, EOFError, ValueError, RuntimeError) as error:
        raise RewardLoadError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}") from error
    except Exception as error:  # pickle.UnpicklingError: code where data was expected
        code = re.search(r"GLOBAL (\S+)", str(error))
        holds = f"it refers to the code {code[1]}" if code else "it holds more than tensors"
        raise RewardLoadError(f"{path} is not a plain file of weights, and is not run: {holds}") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise RewardLoadError(f"{path} does not hold a state dict (tensors by name)")
    return state


def _is_lfs_pointer(path: Path) -> bool:
    """Whether a clone without git LFS left its few lines of text in the place of the file."""
    try:
        with path.open("rb") as file:
            return file.read(24) == b"version https://git-lfs."
    except OSError:  # told by whoever reads it
        return False


def _is_zip(path: Path) -> bool:
    """Whether torch wrote it in its format since 1.6, which can be mapped."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def load_strictly(module: torch.nn.Module, state: Mapping[str, torch.Tensor], what: str) -> None:
    """Fill every parameter and buffer of ``module`` from ``state``, leaving nothing over on either side.

    Args:
        what: the file or model, for the message.

    Raises:
        RewardLoadError: a key is missing or unexpected, or a shape differs; the message names the first few.
    """
    own = module.state_dict()
    problems = []
    if missing := sorted(own.keys() - state.keys()):
        problems.append(f"{len(missing)} missing: {_first(missing)}")
    if unexpected := sorted(state.keys() - own.keys()):
        problems.append(f"{len(unexpected)} unexpected: {_first(unexpected)}")
    shapes = [key for key in own.keys() & state.keys() if own[key].shape != state[key].shape]
    if shapes:
        key = min(shapes)
        problems.append(f"{len(shapes)} of another shape: {key} {list(state[key].shape)}, not {list(own[key].shape)}")
    if problems:
        raise RewardLoadError(f"{what} does not fit the model; keys " + "; ".join(problems))
    module.load_state_dict(dict(state))


def rename(state: Mapping[str, torch.Tensor], name: Callable[[str], str | None]) -> dict[str, torch.Tensor]:
    """``state`` under new names; a key whose new name is None is left out on purpose (unused by the score)."""
    renamed = ((name(key), value) for key, value in state.items())
    return {key: value for key, value in renamed if key is not None}


def _first(keys: list[str]) -> str:
    return ", ".join(keys[:MAX_KEYS]) + (", ..." if len(keys) > MAX_KEYS else "")


def sha256(*paths: Path) -> str:
    """Hex digest of a file; of several, of their names and digests in order of name, one a line as ``sha256sum``."""
    digests = []  # files of several folders can have one name
    for path in paths:
        with path.open("rb") as file:
            digests.append((path.name, hashlib.file_digest(file, "sha256").hexdigest()))
    if len(digests) == 1:
        return digests[0][1]
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()
