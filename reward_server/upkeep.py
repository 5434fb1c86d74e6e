"""``reward-server prefetch`` and ``selftest``: get a reward's weights ahead, and see that it scores as it should.

The self-test of a loaded reward has two parts. What must hold of any weights: scores do not depend on the batch, and
each image is paired with its own prompt. And the golden values, those that the model's own project prints for its own
images (``golden.yaml``), where the official weights and the images are at hand.
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from pydantic import Field

from reward_server.commands import CommandError, load_settings, table
from reward_server.contract import Image
from reward_server.environments import ROOT, python_for
from reward_server.images import ImageError, decode_image
from reward_server.rewards.base import Reward, Score, check_options, example, is_relative, load, prepare, provenance
from reward_server.settings import ENVS, Settings
from reward_server.weights import Source, download

BATCH_TOLERANCE = 1e-3
"""Most that a score may change with its batch, relative to the spread of the scores or to 1: kernels differ by size"""
MAX_PIXELS = 1 << 26


class PrefetchSettings(Settings):
    """``reward-server prefetch``"""

    reward: str = Field(default="", description="the reward: a file name of reward_server/rewards, or module:Class")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the reward, as it is served with")
    envs: Path = ENVS


class SelftestSettings(PrefetchSettings):
    """``reward-server selftest``"""

    device: str = Field(default="cpu", description="torch device of the model: cpu, cuda, cuda:1, mps")
    images: Path | None = Field(
        default=None, description="folder with the images of the golden values; fetched and kept when not set"
    )


@dataclass(frozen=True)
class Golden:
    """One published score of the reward with these options."""

    source: str
    options: Mapping[str, Any]
    prompt: str
    image: str
    value: float
    tolerance: float


def prefetch(argv: Sequence[str]) -> int:
    """Download a reward's weights ahead"""
    settings = load_settings(
        PrefetchSettings,
        argv,
        "prefetch",
        "Download the weights of a reward into the Hugging Face hub's cache (HF_HOME), so that it can be served, also\n"
        "with HF_HUB_OFFLINE=1. Where they are goes to stdout. Give the options that it will be served with,\n"
        """for instance --options '{"version": "2.0"}'.""",
        positionals=["reward"],
    )
    if (code := _elsewhere("prefetch", argv, settings)) is not None:
        return code
    for source in weights_of(load(settings.reward), settings.options):
        licence = f", licence {source.licence}" if source.licence else ""
        print(f"{source.repo}: {', '.join(source.files)}{licence}", file=sys.stderr, flush=True)
        print(download(source))
    return 0


def weights_of(reward: Reward, options: Mapping[str, Any]) -> list[Source]:
    """The files that the reward needs with these options of ``setup``; none if it brings its own.

    Raises:
        RewardLoadError: it has no such option.
    """
    check_options(reward, "cpu", options)
    sources: Callable[..., Sequence[Source]] | None = getattr(reward, "sources", None)
    return list(sources(**options)) if sources is not None else []


def selftest(argv: Sequence[str]) -> int:
    """Load a reward and compare its scores with published ones"""
    settings = load_settings(
        SelftestSettings,
        argv,
        "selftest",
        "Load a reward, see that scores depend neither on the batch nor on other images' prompts, and compare them\n"
        "with those that the model's own project prints, where its weights and images are at hand.",
        positionals=["reward"],
    )
    if (code := _elsewhere("selftest", argv, settings)) is not None:
        return code
    reward = load(settings.reward)
    goldens = golden_values(settings.reward, settings.options)
    prepare(reward, settings.device, settings.options)
    print(f"{reward.name}: {reward.description}\nrevision {reward.revision}")
    for key, value in provenance(reward).items():
        print(f"{key}: {value}")
    rows = invariants(reward)
    rows += [check_golden(reward, golden, settings.images) for golden in goldens]
    print(table(["check", "expected", "got", ""], rows))
    if not goldens:
        print("no published score is on record for this reward with these options")
    return 0 if all(row[-1] == "ok" for row in rows) else 1


def _elsewhere(command: str, argv: Sequence[str], settings: PrefetchSettings) -> int | None:
    """Run the command in the reward's own environment, if that is where it would be served; its exit code."""
    if not settings.reward:
        raise CommandError(f"which reward? reward-server {command} NAME")
    python = python_for(settings.reward, settings.envs)
    if python == Path(sys.executable):
        return None
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [python, "-P", "-m", "reward_server", command, *argv], env=environment, check=False
    ).returncode


def golden_values(reward: str, options: Mapping[str, Any]) -> list[Golden]:
    """Published scores for these options: those whose options are all given, no others; empty for other weights."""
    text = resources.files("reward_server").joinpath("golden.yaml").read_text(encoding="utf-8")
    found = []
    for entry in yaml.safe_load(text).get(reward, []):
        if entry.get("options", {}) == dict(options):
            facts = entry["source"], entry.get("options", {}), entry["prompt"]
            found += [Golden(*facts, image, value, entry["tolerance"]) for image, value in entry["images"].items()]
    return found


def invariants(reward: Reward) -> list[list[str]]:
    """What must hold of any weights, on made images: one row [check, expected, got, verdict] each."""
    prompt, metadata = example(reward)
    if any(key not in metadata for key in reward.needs):
        return []
    images, prompts = _made_images(), [prompt, "a photo of a cat", f"{prompt}, a cat", "a blue square"]
    together = _scores(reward, images, prompts, metadata)
    finite = [value for value in together if value is not None and math.isfinite(value)]
    fine = bool(finite) and len(finite) == sum(value is not None for value in together)
    rows = [["made images get scores", f"1..{len(images)}", str(len(finite)), "ok" if fine else "FAILED"]]
    if is_relative(reward) or not fine:
        return rows
    margin = BATCH_TOLERANCE * max(1.0, max(finite) - min(finite))
    alone = [_scores(reward, [image], [text], metadata)[0] for image, text in zip(images, prompts, strict=True)]
    backwards = _scores(reward, images[::-1], prompts[::-1], metadata)[::-1]
    for check, other in (("one by one as in a batch", alone), ("in reverse order", backwards)):
        missing = [a is None for a in together] != [b is None for b in other]
        largest = max((abs(a - b) for a, b in zip(together, other, strict=True) if None not in (a, b)), default=0.0)  # type: ignore[operator]
        verdict = "ok" if largest <= margin and not missing else "FAILED"
        rows.append([check, f"<= {margin:.2g} apart", f"{largest:.2g}", verdict])
    return rows


def check_golden(reward: Reward, golden: Golden, folder: Path | None) -> list[str]:
    """One row [check, expected, got, verdict]; the verdict is "ok", or says what is wrong or lacks."""
    check = f"{golden.image.rpartition('/')[2]}, {golden.prompt[:40]!r}"
    expected = f"{golden.value:g} +- {golden.tolerance:g}"
    try:
        image = golden_image(golden.image, folder)
    except (OSError, ImageError, httpx.HTTPError) as error:
        where = "" if folder is not None else "; get it by hand and name its folder with --images"
        return [check, expected, "-", f"not checked: {golden.image}: {' '.join(str(error).split())[:200]}{where}"]
    (value,) = _scores(reward, [image], [golden.prompt], {})
    if value is None:
        return [check, expected, "null", "FAILED"]
    return [check, expected, f"{value:.5g}", "ok" if abs(value - golden.value) <= golden.tolerance else "FAILED"]


def golden_image(url: str, folder: Path | None) -> Image:
    """The image of a golden value: from ``folder``, from where it was kept the last time, or from its address.

    Raises:
        OSError, httpx.HTTPError, ImageError: it cannot be had, or is no image.
    """
    if folder is not None:
        return decode_image((folder / url.rpartition("/")[2]).read_bytes(), MAX_PIXELS)
    kept = Path("~/.cache/mar-grpo/golden").expanduser() / hashlib.sha256(url.encode()).hexdigest()[:16]
    if not kept.is_file():
        answer = httpx.get(url, follow_redirects=True, timeout=60).raise_for_status()
        decode_image(answer.content, MAX_PIXELS)
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_bytes(answer.content)
        partial.replace(kept)
    return decode_image(kept.read_bytes(), MAX_PIXELS)


def _made_images() -> list[Image]:
    """Four images of different sizes: smooth colours and noise, always the same."""
    random = np.random.default_rng(0)
    images = []
    for height, width in ((224, 224), (160, 256), (300, 200), (96, 96)):
        y, x = np.mgrid[0:height, 0:width] / max(height, width)
        wave = 127 + 120 * np.sin(2 * np.pi * (x[..., None] * [1, 2, 3] + y[..., None] * random.uniform(1, 4, 3)))
        images.append(np.clip(wave + random.normal(0, 8, wave.shape), 0, 255).astype(np.uint8))
    return images


def _scores(
    reward: Reward, images: Sequence[Image], prompts: Sequence[str], metadata: Mapping[str, Any]
) -> list[float | None]:
    scored = reward.score(images, prompts, [metadata] * len(images))
    return [score.value if isinstance(score, Score) else score for score in scored]
