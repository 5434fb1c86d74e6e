"""What the CLIP model of the drawn shapes tells apart, on prompts that its training never saw, as Markdown tables.

    python benchmarks/shapes_clip.py

Held-out prompts are those of ``configs/prompts/shapes_heldout.txt``; intervals are 95 %, by bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from transformers import CLIPModel, CLIPTokenizer

from reward_server.rewards.shapes import parse, verify
from trainer.algorithm.seeds import derive_seed
from trainer.evaluate import bootstrap
from trainer.policies.small import SmallPolicy
from trainer.pretrain_clip import (
    CODEC,
    FAULTS,
    changed_captions,
    embed_images,
    embed_texts,
    key,
    roughen,
    spoilt,
)
from trainer.shapes import Scene, all_scenes, render, split_scenes

Values = Mapping[str, Sequence[float]]


def captions_told_apart(texts: torch.Tensor, images: torch.Tensor, scenes: Sequence[Scene]) -> Values:
    """Per prompt, the share of its images that prefer its caption to all captions with one attribute changed.

    ``texts``: vectors of all_scenes(); ``images`` (P, M, D): of M images for each of ``scenes``.
    """
    everything = all_scenes()
    row = {scene.prompt: i for i, scene in enumerate(everything)}
    keys = np.array([hash(key(scene)) for scene in everything])
    shares: dict[str, list[float]] = defaultdict(list)
    for scene, vectors in zip(scenes, images, strict=True):
        cosine = vectors @ texts.T  # (M, all captions)
        own = cosine[:, row[scene.prompt]]
        for attribute, changed in changed_captions(scene).items():
            rivals = cosine[:, [row[c.prompt] for c in changed]]
            name = attribute if scene.relation else f"{attribute} (of a count)"
            shares[name].append((own > rivals.amax(dim=1)).float().mean().item())
        others = cosine[:, torch.from_numpy(keys != hash(key(scene)))]
        shares["best of all 1,296 prompts"].append((own > others.amax(dim=1)).float().mean().item())
    return shares


def images_told_apart(
    clip: CLIPModel, texts: torch.Tensor, images: torch.Tensor, scenes: Sequence[Scene], rough: bool
) -> Values:
    """Per prompt, the share of (right, spoilt) pairs of its images in which the right one scores higher, by fault."""
    rng = np.random.default_rng(2)
    codec = SmallPolicy.load(CODEC)
    shares: dict[str, list[float]] = defaultdict(list)
    for fault in FAULTS:
        chosen = [
            i
            for i, scene in enumerate(scenes)
            if not (fault == "relation" and scene.relation is None)
            and not (fault == "missing" and len(scene.kinds) < 2)
        ]
        wrong = render([spoilt(scenes[i], fault, rng) for i in chosen for _ in range(images.shape[1])], rng)
        vectors = embed_images(clip, roughen(wrong, codec, rng) if rough else wrong)
        for i, spoilt_vectors in zip(chosen, vectors.reshape(len(chosen), images.shape[1], -1), strict=True):
            right, faulty = images[i] @ texts[i], spoilt_vectors @ texts[i]
            shares[fault].append((right[:, None] > faulty[None]).float().mean().item())
    return shares


def _can_have(scene: Scene, fault: str) -> bool:
    return not (fault == "relation" and scene.relation is None) and not (fault == "missing" and len(scene.kinds) == 1)


def agreement(clip: CLIPModel, texts: torch.Tensor, scenes: Sequence[Scene], count: int) -> Values:
    """Against the programmatic reward on the small policy's own samples, at the demo's settings."""
    policy = SmallPolicy.load(CODEC)
    found: dict[str, list[float]] = defaultdict(list)
    for i, scene in enumerate(scenes):
        tokens = policy.rollout([scene.prompt] * count, [derive_seed("agreement", i, m) for m in range(count)]).tokens
        images = policy.decode(tokens)
        learned = (embed_images(clip, images) @ texts[i]).numpy()
        claim = parse(scene.prompt)
        assert claim is not None
        scores = [verify(image, claim) for image in images]
        dense = np.array([score.value for score in scores])
        strict = np.array([score.details["strict"] for score in scores])
        _pairs(found["pairs of one prompt: the one with the higher `shapes`"], learned, dense)
        _pairs(found["pairs of one prompt: the strict pass over the failure"], learned, strict)
        if dense.std() > 0:
            found["rank correlation within a prompt"].append(float(spearmanr(learned, dense).statistic))
    return found


def _pairs(shares: list[float], learned: NDArray[np.float64], truth: NDArray[np.float64]) -> None:
    """Append the share of pairs that differ in ``truth`` which ``learned`` puts in the same order, if there are any."""
    better = truth[:, None] > truth[None] + 1e-6
    if better.any():
        shares.append(float((learned[:, None] > learned[None])[better].mean()))


def table(title: str, columns: Mapping[str, Values]) -> None:
    """Print means with intervals, a row for each name."""
    print(f"\n| {title} | prompts | {' | '.join(columns)} |\n" + "|---" * (len(columns) + 2) + "|")
    for name, values in next(iter(columns.values())).items():
        cells = []
        for column in columns.values():
            interval = bootstrap(np.array(column[name]))
            cells.append(f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]")
        print(f"| {name} | {len(values)} | " + " | ".join(cells) + " |")


@torch.inference_mode()
def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=Path("reward_server/rewards/weights/shapes_clip"))
    parser.add_argument("--images", type=int, default=8, help="of each prompt (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clip = CLIPModel.from_pretrained(arguments.weights, dtype=torch.float32)  # in evaluation mode
    tokenizer = CLIPTokenizer.from_pretrained(arguments.weights)
    texts = embed_texts(clip, tokenizer, [scene.prompt for scene in all_scenes()])
    row = {scene.prompt: i for i, scene in enumerate(all_scenes())}
    scenes = split_scenes()[1]
    own = texts[[row[scene.prompt] for scene in scenes]]
    rng = np.random.default_rng(1)
    drawn = render([scene for scene in scenes for _ in range(arguments.images)], rng)
    by_caption, by_image = {}, {}
    for column, pictures in {"as drawn": drawn, "roughened": roughen(drawn, SmallPolicy.load(CODEC), rng)}.items():
        images = embed_images(clip, pictures).reshape(len(scenes), arguments.images, -1)
        by_caption[column] = captions_told_apart(texts, images, scenes)
        by_image[column] = images_told_apart(clip, own, images, scenes, rough=column == "roughened")
    table("an image prefers its prompt to all with a changed ...", by_caption)
    table("a prompt prefers its image to one with a fault: ...", by_image)
    table("agreement with `shapes`", {"samples of the small policy": agreement(clip, own, scenes, arguments.images)})


if __name__ == "__main__":
    main()
