"""Make the CLIP model of the drawn shapes from scratch: ``python trainer/pretrain_clip.py``.

A CLIPModel of transformers, trained with CLIP's contrastive loss (Radford et al., arXiv 2103.00020) on scenes of
:mod:`trainer.shapes`, drawn on the fly. Both sides get hard negatives: an image must prefer its caption to captions
with one attribute changed (NegCLIP, arXiv 2210.01936), and a caption must prefer its image to one with an object
missing, added, recoloured, reshaped or moved. The second is what a reward needs: to compare images of one prompt.
Half of the images pass through the small policy's linear code with noise on the latents, so that they look like its
samples. No held-out prompt, nor its mirror ("A left of B" is "B right of A"), is drawn or read in training.

The same seed and thread count give the same weights on the same machine.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

if __name__ == "__main__":  # run as a script: make `trainer` the package, not this folder a source of modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from tqdm import tqdm
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from trainer.policies.small import WORDS, SmallPolicy
from trainer.pretrain import draw_scenes
from trainer.shapes import COLOURS, COUNTS, RELATIONS, SHAPES, SIZE, Scene, all_scenes, render, split_scenes

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""Of CLIP's images, per channel, for pixels 0..1"""
CONTEXT = 77
HARD_CAPTIONS = 2
"""Changed captions per image"""
CODEC = Path(__file__).parent / "policies" / "weights" / "small.safetensors"
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
Kinds = tuple[tuple[str, str], ...]


# ---- captions and scenes ---------------------------------------------------------------------------------------------


def key(scene: Scene) -> Hashable:
    """Equal for scenes that show the same: mirrored pairs, and the same objects anywhere."""
    if scene.relation in ("right of", "below"):
        return (*reversed(scene.kinds), OPPOSITE[scene.relation])
    return (*(scene.kinds if scene.relation else sorted(scene.kinds)), scene.relation)


CAPTIONED = {(s.kinds, s.relation): s for s in all_scenes()}
HELD_OUT = {key(s) for s in split_scenes()[1]}


def training_scenes() -> list[Scene]:
    """The training scenes whose mirror is not held out either."""
    return [scene for scene in split_scenes()[0] if key(scene) not in HELD_OUT]


def _other_kinds(kind: tuple[str, str], attribute: str) -> list[tuple[str, str]]:
    if attribute == "colour":
        return [(c, kind[1]) for c in COLOURS if c != kind[0]]
    return [(kind[0], s) for s in SHAPES if s != kind[1]]


def changed_captions(scene: Scene) -> dict[str, list[Scene]]:
    """Scenes with a prompt that differ from ``scene`` in one attribute, by attribute; none of them shows the same."""
    changed: dict[str, list[tuple[Kinds, str | None]]] = {}
    for attribute in ("colour", "shape"):
        if scene.relation is None:
            swaps = [(other,) * len(scene.kinds) for other in _other_kinds(scene.kinds[0], attribute)]
        else:
            a, b = scene.kinds
            swaps = [(other, b) for other in _other_kinds(a, attribute)]
            swaps += [(a, other) for other in _other_kinds(b, attribute)]
        changed[attribute] = [(kinds, scene.relation) for kinds in swaps]
    if scene.relation is None:
        changed["count"] = [((scene.kinds[0],) * n, None) for n in COUNTS.values() if n != len(scene.kinds)]
    else:
        changed["relation"] = [(scene.kinds, r) for r in RELATIONS if r != scene.relation]
    # a pair of equal kinds has no prompt
    return {name: [CAPTIONED[s] for s in scenes if s in CAPTIONED] for name, scenes in changed.items()}


def spoilt(scene: Scene, fault: str, rng: np.random.Generator) -> Scene:
    """A scene, with or without a prompt of its own, that does not show what ``scene`` claims.

    ``fault``: "missing", "extra", "colour", "shape" (of one object), or "relation". A count of one has no object
    to spare, nor a relation: its colour changes instead.
    """
    kinds = list(scene.kinds)
    which = int(rng.integers(len(kinds)))
    if fault == "relation" and scene.relation is not None:
        others = [r for r in RELATIONS if r != scene.relation]
        return replace(scene, relation=others[int(rng.integers(len(others)))])
    if fault == "missing" and len(kinds) > 1:
        del kinds[which]
        return Scene("", tuple(kinds))
    if fault == "extra":
        return Scene("", (*kinds, kinds[which]))
    options = _other_kinds(kinds[which], "shape" if fault == "shape" else "colour")
    kinds[which] = options[int(rng.integers(len(options)))]
    return Scene("", tuple(kinds), scene.relation)


FAULTS = ("missing", "extra", "colour", "shape", "relation")


def _draw_spoilt(scene: Scene, rng: np.random.Generator) -> Scene:
    while True:
        drawn = spoilt(scene, FAULTS[int(rng.integers(len(FAULTS)))], rng)
        if key(drawn) not in HELD_OUT:
            return drawn


def _draw_captions(scene: Scene, rng: np.random.Generator) -> list[Scene]:
    """At most HARD_CAPTIONS changed captions of ``scene``, each of another attribute, none held out."""
    lists = changed_captions(scene)
    drawn = []
    for name in rng.permutation(sorted(lists))[:HARD_CAPTIONS]:
        choices = [changed for changed in lists[name] if key(changed) not in HELD_OUT]
        if choices:
            drawn.append(choices[int(rng.integers(len(choices)))])
    return drawn


# ---- images and text -------------------------------------------------------------------------------------------------


def roughen(images: NDArray[np.uint8], codec: SmallPolicy, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Make (B, 48, 48, 3) images imperfect: half through the policy's code with noise; all with noise and a cast."""
    images = images.copy()
    coded = rng.random(len(images)) < 0.5
    latents = codec.encode(images[coded])
    strength = rng.uniform(0, 0.25, size=(len(latents), 1, 1))
    noise = strength * rng.standard_normal(latents.shape)
    images[coded] = codec.decode(latents + torch.from_numpy(noise).float())
    pixels = images + rng.uniform(0, 10, size=(len(images), 1, 1, 1)) * rng.standard_normal(images.shape)
    pixels += rng.uniform(-10, 10, size=(len(images), 1, 1, 3))
    return pixels.round().clip(0, 255).astype(np.uint8)


def pixel_values(images: NDArray[np.uint8]) -> Tensor:
    """(B, 48, 48, 3) uint8 -> (B, 3, 48, 48), as CLIP normalises."""
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def write_tokenizer(folder: Path) -> None:
    """vocab.json and merges.txt of CLIP's byte-level BPE: every byte, and one token for each word of the shapes.

    Ids are in CLIP's order: bytes, bytes that end a word, merges, start, end (the highest: pooling by argmax works).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [256 + n for n in range(256 - len(printable))]
    alphabet = [chr(code) for code in printable + others]
    words = {word: [*word[:-1], word[-1] + "</w>"] for word in WORDS if not word.startswith("<")}
    merges: list[tuple[str, str]] = []
    while pairs := Counter(pair for pieces in words.values() for pair in pairwise(pieces)):
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append((left, right))
        for pieces in words.values():
            for i in range(len(pieces) - 1, 0, -1):
                if pieces[i - 1 : i + 1] == [left, right]:
                    pieces[i - 1 : i + 1] = [left + right]
    tokens = alphabet + [letter + "</w>" for letter in alphabet] + [left + right for left, right in merges]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False) + "\n", encoding="utf-8")
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": CONTEXT}
    settings |= {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    settings |= {"pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_preprocessor(folder: Path) -> None:
    """preprocessor_config.json of CLIP for 48 x 48 pixels, which leaves the policy's images as they are."""
    settings = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": SIZE},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": SIZE, "width": SIZE},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": MEAN,
        "image_std": STD,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def build_model(tokenizer: CLIPTokenizer) -> CLIPModel:
    """The untrained model. Heads of 64 channels and the exact GELU: also expressible in open_clip's layout."""
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": CONTEXT,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "hidden_act": "gelu",
        "pad_token_id": tokenizer.pad_token_id,
        **ids,
    }
    vision = {
        "image_size": SIZE,
        "patch_size": 12,
        "hidden_size": 192,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "hidden_act": "gelu",
    }
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=128))


def embed_images(model: CLIPModel, images: NDArray[np.uint8]) -> Tensor:
    """(B, P) unit vectors of 48 x 48 images."""
    return normalize(model.get_image_features(pixel_values(images)).pooler_output, dim=-1)


def embed_texts(model: CLIPModel, tokenizer: CLIPTokenizer, texts: Sequence[str]) -> Tensor:
    """(B, P) unit vectors of prompts."""
    ids = tokenizer(list(texts), padding=True, return_tensors="pt")["input_ids"]
    return normalize(model.get_text_features(ids).pooler_output, dim=-1)


# ---- training --------------------------------------------------------------------------------------------------------


def _but_own(logits: Tensor, own: Sequence[Hashable], candidates: Sequence[Hashable]) -> Tensor:
    """``logits`` (B, M) without the candidates that show the same as row i, except candidate i, which is its own."""
    same = torch.tensor([[a == b for b in candidates] for a in own])
    same[range(len(own)), range(len(own))] = False
    return logits.masked_fill(same, -math.inf)


def contrastive_loss(
    model: CLIPModel, tokenizer: CLIPTokenizer, codec: SmallPolicy, scenes: Sequence[Scene], rng: np.random.Generator
) -> Tensor:
    """CLIP's loss on one batch, with hard captions on one side and spoilt images on the other."""
    captions = [*scenes, *(c for scene in scenes for c in _draw_captions(scene, rng))]
    shown = [*scenes, *(_draw_spoilt(scene, rng) for scene in scenes)]
    image = embed_images(model, roughen(render(shown, rng), codec, rng))
    text = embed_texts(model, tokenizer, [c.prompt for c in captions])
    logits = model.logit_scale.exp() * image @ text.T  # (2 B, B + at most B * HARD_CAPTIONS)
    count, target = len(scenes), torch.arange(len(scenes))
    caption_keys, image_keys = [key(c) for c in captions], [key(s) for s in shown]
    of_image = _but_own(logits[:count], image_keys[:count], caption_keys)
    of_caption = _but_own(logits[:, :count].T, caption_keys[:count], image_keys)
    return (cross_entropy(of_image, target) + cross_entropy(of_caption, target)) / 2


def train(tokenizer: CLIPTokenizer, steps: int, batch: int, learning_rate: float, seed: int) -> CLIPModel:
    """Train from random weights."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = build_model(tokenizer)
    codec = SmallPolicy.load(CODEC)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98))
    scenes = training_scenes()
    progress = tqdm(range(steps), desc="pretrain", mininterval=5)
    for step in progress:
        rate = min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        loss = contrastive_loss(model, tokenizer, codec, draw_scenes(scenes, batch, rng), rng)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(100))  # as CLIP was trained
        if step % 50 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")
    return model


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("reward_server/rewards/weights/shapes_clip"))
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=96, help="scenes per step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak, AdamW (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; part of reproducibility (default: 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(arguments.out)
    write_preprocessor(arguments.out)
    started = time.monotonic()
    model = train(
        CLIPTokenizer.from_pretrained(arguments.out),
        arguments.steps,
        arguments.batch,
        arguments.learning_rate,
        arguments.seed,
    )
    model.half().save_pretrained(arguments.out)  # type: ignore[no-untyped-call]
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{arguments.out}: {parameters:,} parameters; {(time.monotonic() - started) / 60:.1f} min")


if __name__ == "__main__":
    main()
