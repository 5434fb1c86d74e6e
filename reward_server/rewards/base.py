"""The reward plug-in: what a reward model must offer, and how one is found by name.

A reward is one file of this folder, named like the reward, with a class ``Model`` (see ``null.py`` for the shortest
one). A reward of another package is named ``module:Class``. The members of :class:`Reward` are all that one needs; it
may have these, too:

    provenance: Mapping[str, str]  "weights" (sha256), "preprocessing" (id), "dtype" ...: of setup, told with answers
    relative: bool                 True: images are scored relative to the others of a request, which is never split
    example: tuple[str, Mapping]   a prompt and metadata that it can score, for the warm-up and the self-test
    sources(**options) -> Sequence[reward_server.weights.Source]   the weights that these options of setup need
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import math
import pkgutil
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from reward_server.contract import NAME_PATTERN, Image
from reward_server.environments import cures

log = logging.getLogger(__name__)

_NOT_REWARDS = {"base"}
_LIBRARIES = {
    "ImageReward": "image-reward",
    "PIL": "pillow",
    "brisque": "brisque",
    "hpsv2": "hpsv2",
    "numpy": "numpy",
    "onnxruntime": "onnxruntime",
    "rapidocr": "rapidocr",
    "scipy": "scipy",
    "timm": "timm",
    "torch": "torch",
    "torchvision": "torchvision",
    "transformers": "transformers",
}
"""Packages whose version is told with scores, by module"""


@dataclass(frozen=True)
class Score:
    """One image's score with sub-scores, or None with the reason why there is none."""

    value: float | None
    details: Mapping[str, float | None] = field(default_factory=dict)
    reason: str | None = None


Scored: TypeAlias = float | Score | None


@runtime_checkable
class Reward(Protocol):
    """One reward model.

    The constructor takes no arguments and is quick; ``setup`` loads. Whatever ``score`` raises for a batch makes the
    worker score its halves, so one bad image fails alone; running out of memory makes it use smaller batches, too.
    """

    name: str
    """What requests call it"""
    revision: str
    """Of the weights, e.g. the start of their sha256: scores of different revisions must not be mixed"""
    description: str
    """One line for people"""
    needs: tuple[str, ...]
    """Metadata keys without which an image cannot be scored; the worker refuses such images with a reason"""

    def setup(self, device: str, **options: Any) -> None:
        """Load and warm up on a torch device such as ``cpu`` or ``cuda:1``. Options are keyword arguments."""

    def score(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Sequence[Scored]:
        """Score uint8 RGB images [H, W, 3], whose sizes may differ; one entry per image, in order.

        The arrays are read-only views of shared memory: copy before changing one. None, NaN or infinity is a
        failure, never a score; say why with ``Score(None, reason="...")``.
        """


class RewardLoadError(Exception):
    """No such reward, or its file does not offer one; the message says what to do."""


def available() -> list[str]:
    """Names of the rewards in this folder, without importing any."""
    names = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return sorted(name for name in names if name not in _NOT_REWARDS and not name.startswith("_"))


def load(name: str) -> Reward:
    """The reward ``name`` of this folder, or ``module:Class`` of another package; ``setup`` is not called yet.

    Raises:
        RewardLoadError: it does not exist, lacks a package, or is not a reward.
    """
    module_name, colon, class_name = name.partition(":")
    if not colon:
        if name not in available():
            close = difflib.get_close_matches(name, available(), n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise RewardLoadError(f"no reward {name!r}; {hint}available: {', '.join(available())}, or module:Class")
        module_name, class_name = f"reward_server.rewards.{name}", "Model"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _lacking(module_name, name, error) from error
    except Exception as error:
        raise _broken(f"{module_name} cannot be imported", error) from error
    model = getattr(module, class_name, None)
    if model is None:
        raise RewardLoadError(f"{module_name} has no class {class_name}")
    if not isinstance(model, type):
        raise RewardLoadError(
            f"{module_name}.{class_name} is not a reward: it is no class but a {type(model).__name__}"
        )
    try:
        reward = model()
    except Exception as error:
        raise _broken(f"{module_name}.{class_name} cannot be constructed without arguments", error) from error
    if not isinstance(reward, Reward):
        wanted = ("name", "revision", "description", "needs", "setup", "score")
        missing = [attribute for attribute in wanted if not hasattr(reward, attribute)]
        raise RewardLoadError(f"{module_name}.{class_name} is not a reward: it lacks {', '.join(missing)}")
    if not re.match(NAME_PATTERN, reward.name):
        raise RewardLoadError(f"{module_name}.{class_name}.name is {reward.name!r}, which must match {NAME_PATTERN}")
    return reward


def check_options(reward: Reward, device: str, options: Mapping[str, Any]) -> None:
    """
    Raises:
        RewardLoadError: an option that ``setup`` does not know, or one missing; the message lists those it has.
    """
    signature = inspect.signature(reward.setup)
    try:
        signature.bind(device, **options)
    except TypeError as error:
        known = ", ".join(name for name in signature.parameters if name != "device") or "none"
        raise RewardLoadError(f"options of reward {reward.name!r}: {error}; it has: {known}") from error


def prepare(reward: Reward, device: str, options: Mapping[str, Any]) -> None:
    """Call ``setup`` with the options of the configuration.

    Raises:
        RewardLoadError: an option that it does not know, or one missing (the message lists those it has); or ``setup``
            itself failed.
    """
    check_options(reward, device, options)
    try:
        reward.setup(device, **options)
    except RewardLoadError:  # in the reward's own words
        raise
    except ModuleNotFoundError as error:
        raise _lacking(type(reward).__module__, reward.name, error) from error
    except Exception as error:
        _check_device(device)
        raise _broken(f"reward {reward.name!r} cannot be set up", error) from error


def _check_device(device: str) -> None:
    """What a failure may come from.

    Raises:
        RewardLoadError: torch, if the reward has loaded it, does not know the device or cannot use it.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise RewardLoadError(f"device {device!r} is none that torch knows: cpu, cuda, cuda:1, mps ...") from error
    there = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}.get(kind)
    if there is not None and not there():
        raise RewardLoadError(f"device {device!r}: torch {torch.__version__} sees none here; set device: cpu")


def provenance(reward: Reward) -> dict[str, str]:
    """What the scores came from, as the reward says after ``setup``; empty if it does not say."""
    return dict(getattr(reward, "provenance", {}))


def is_relative(reward: Reward) -> bool:
    """Whether an image's score depends on the other images of its request."""
    return bool(getattr(reward, "relative", False))


def example(reward: Reward) -> tuple[str, dict[str, Any]]:
    """A prompt and metadata that the reward can score."""
    prompt, metadata = getattr(reward, "example", ("a red circle", {}))
    return prompt, dict(metadata)


def warm_up(reward: Reward) -> None:
    """Score one small image (two, by a relative reward), so that the first request need not wait for lazy set-up.

    Raises:
        RewardLoadError: ``score`` raised, or gave something else than a finite number or a reason.
    """
    prompt, extra = example(reward)
    if lacking := [key for key in reward.needs if key not in extra]:
        log.info("no warm-up of %s: its example lacks the metadata %s", reward.name, ", ".join(lacking))
        return
    count = 2 if is_relative(reward) else 1
    ramp = np.linspace(0, 255, 64).astype(np.uint8)
    image = np.stack(np.broadcast_arrays(ramp, ramp[:, None], np.uint8(128)), axis=-1)
    try:
        scored = list(reward.score([image] * count, [prompt] * count, [extra] * count))
        if len(scored) != count:
            raise ValueError(f"{len(scored)} scores for {count} images")
    except Exception as error:
        raise _broken(f"reward {reward.name!r} failed to score a first image", error) from error
    for score in scored:
        value, reason = (score.value, score.reason) if isinstance(score, Score) else (score, None)
        if value is None:
            log.warning("the warm-up of %s gave no score: %s", reward.name, reason)
        elif not math.isfinite(value):
            raise RewardLoadError(
                f"reward {reward.name!r} scores a first image {value}: its weights or dtype are wrong"
            )


def loaded_libraries() -> str:
    """Versions of Python and of those packages that decide about scores, as far as this process has loaded them."""
    loaded = {module: _LIBRARIES[module] for module in sys.modules if module in _LIBRARIES}
    versions = [f"{package} {metadata.version(package)}" for _, package in sorted(loaded.items())]
    return ", ".join([f"python {platform.python_version()}", *versions])


def _lacking(module: str, name: str, error: ModuleNotFoundError) -> RewardLoadError:
    """The error for a package that is missing, with what to do if the reward is one of this folder."""
    what = f"reward {name!r} needs the package {error.name!r}, which is not installed"
    package, _, file = module.rpartition(".")
    return RewardLoadError(f"{what}: {cures(file)}" if package == "reward_server.rewards" else what)


def _broken(what: str, error: Exception) -> RewardLoadError:
    """The error for people, in one line; the traceback, for who wrote the reward, goes to the log."""
    log.error("%s", what, exc_info=error)
    return RewardLoadError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}")
