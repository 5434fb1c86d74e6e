"""Batched scoring against the one-image loop of published RL code, side by side, for CLIP models of real size.

    OMP_NUM_THREADS=1 python benchmarks/batched_scoring.py --models b32 l14

The loop does what DanceGRPO and the HPSv2 scorers of its family do for each image: preprocess it, tokenise its prompt,
one forward of both towers on that one pair (77 tokens), read the score. The others are this project's ``hpsv2`` code
path, a part of it at a time:

- ``batch``: all images in one forward, all prompts in another, each padded to 77 tokens.
- ``batch, distinct prompts``: each distinct prompt once, padded to the longest (what the reward does).
- the same in bfloat16 (the option ``dtype: bfloat16``).

All take the same pixels, weights and threads, in turn within each round; ratios are of one round. With one thread, CPU
time is what counts on a machine that has other work. Weights are random; the time does not depend on them. ``reload``
is what the package's ``hpsv2.score`` does beyond the loop: it reads its checkpoint at every call. ``bound``: how much
arithmetic the reward saves, which is the ratio to expect in the loop's dtype on a device that one image keeps busy.
bfloat16 gains only on a CPU with instructions for it (the first line says whether it has), and loses on others.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from reward_server.rewards import _clip, hpsv2

VOCABULARY = Path(__file__).parent.parent / "tests/reward_server/rewards/fixtures/clip_family"
PROMPT = "a photo of {} with many different words and colours, a red circle left of a blue square"
SUBJECTS = ("a cat with horn", "a dog", "3 mats", "a bone", "a hat", "a cat", "a square", "a circle")
MODELS = {
    "b32": {
        "embed_dim": 512,
        "vision_cfg": {"image_size": 224, "layers": 12, "width": 768, "patch_size": 32},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12},
    },
    "l14": {
        "embed_dim": 768,
        "vision_cfg": {"image_size": 224, "layers": 24, "width": 1024, "patch_size": 14},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 768, "heads": 12, "layers": 12},
    },
    "h14": hpsv2.VIT_H_14,
}


@dataclass
class Case:
    """One model, and the images and prompts that all ways score."""

    clip: _clip.Clip
    images: list[np.ndarray]
    prompts: list[str]

    def tokens(self, prompts: list[str]) -> torch.Tensor:
        rows = self.clip.tokenizer([hpsv2.clean(prompt) for prompt in prompts])["input_ids"]
        return torch.tensor([row + [0] * (77 - len(row)) for row in rows])

    def loop(self) -> list[float]:
        return [self._one(image, prompt) for image, prompt in zip(self.images, self.prompts, strict=True)]

    def _one(self, image: np.ndarray, prompt: str) -> float:
        with torch.no_grad():
            pixels = self.clip.preprocess([image])
            output = self.clip.model(input_ids=self.tokens([prompt]), pixel_values=pixels)
            return (output.image_embeds @ output.text_embeds.T)[0, 0].item()

    def batch(self) -> list[float]:
        with torch.inference_mode():
            image = _clip.encode(self.clip.model, self.clip.preprocess, self.images)
            text = self.clip.model.get_text_features(self.tokens(self.prompts)).pooler_output.float()
            return (image * functional.normalize(text, dim=-1)).sum(dim=-1).tolist()

    def reward(self) -> list[float]:
        pairs = self.clip.compare(self.images, [hpsv2.clean(prompt) for prompt in self.prompts])
        return [pair.cosine for pair in pairs if isinstance(pair, _clip.Similarity)]


def build(name: str, dtype: str) -> _clip.Clip:
    torch.manual_seed(0)
    model = _clip.CLIPModel(hpsv2.to_clip_config(MODELS[name]))
    model.eval().requires_grad_(False)
    _clip.placed(model, "cpu", dtype)
    return _clip.Clip(model, _clip.tokenizer_of(VOCABULARY), hpsv2.TensorPreprocess(224, True, model.device))


@dataclass
class Taken:
    """Seconds: what a watch shows, and what this process got of the cores, which others' work hardly changes."""

    wall: float
    cpu: float


def seconds(function: Callable[[], list[float]]) -> tuple[Taken, list[float]]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return Taken(time.perf_counter() - wall, time.process_time() - cpu), result


def bfloat16_is_native() -> bool:
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def reload_seconds(model: torch.nn.Module) -> float:
    """What reading a checkpoint into a model takes, from the page cache."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pt"
        torch.save({"state_dict": model.state_dict()}, path)
        started = time.process_time()
        model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        return time.process_time() - started


def multiply_adds(layers: int, width: int, tokens: int, mlp: int) -> int:
    """Of a transformer's matrix products for one sequence: projections, attention, MLP."""
    return layers * tokens * (4 * width**2 + 2 * tokens * width + 2 * width * mlp)


def bound(model: _clip.CLIPModel, longest: int, group: int) -> float:
    """The loop's multiply-adds over the reward's; prompts of ``longest`` tokens, one for ``group`` images."""
    vision, text = model.config.vision_config, model.config.text_config
    patches = (vision.image_size // vision.patch_size) ** 2
    image = multiply_adds(vision.num_hidden_layers, vision.hidden_size, patches + 1, vision.intermediate_size)
    image += patches * 3 * vision.patch_size**2 * vision.hidden_size
    padded, trimmed = (
        multiply_adds(text.num_hidden_layers, text.hidden_size, tokens, text.intermediate_size)
        for tokens in (77, longest)
    )
    return (image + padded) / (image + trimmed / group)


def compare(name: str, options: argparse.Namespace) -> list[str]:
    """Rows of the table for one model."""
    random = np.random.default_rng(0)
    count = options.prompts * options.group
    images = list(random.integers(0, 256, (count, options.size, options.size, 3), np.uint8))
    prompts = [PROMPT.format(SUBJECTS[i // options.group % len(SUBJECTS)]) for i in range(count)]
    full, half = (Case(build(name, dtype), images, prompts) for dtype in ("float32", "bfloat16"))
    ways = {
        "loop, one image at a time": full.loop,
        "batch": full.batch,
        "batch, distinct prompts (the reward)": full.reward,
    }
    if not options.float32:
        ways |= {"the same in bfloat16": half.reward, "loop in bfloat16": half.loop}
    times: dict[str, list[Taken]] = {way: [] for way in ways}
    scores: dict[str, list[float]] = {}
    for way in ways.values():  # warm up with a few images
        full.images, half.images, full.prompts, half.prompts = images[:2], images[:2], prompts[:2], prompts[:2]
        way()
    full.images, half.images, full.prompts, half.prompts = images, images, prompts, prompts
    for _ in range(options.rounds):
        for label, way in ways.items():
            took, scores[label] = seconds(way)
            times[label].append(took)
    first = next(iter(ways))
    rows = []
    for label, taken in times.items():
        cpu = [loop.cpu / other.cpu for loop, other in zip(times[first], taken, strict=True)]
        wall = [loop.wall / other.wall for loop, other in zip(times[first], taken, strict=True)]
        off = np.abs(np.subtract(scores[label], scores[first])).max()
        best = 1000 * min(t.cpu for t in taken) / count
        middle = 1000 * statistics.median(t.cpu for t in taken) / count
        rows.append(
            f"| {name} | {label} | {best:.0f} | {middle:.0f} | {statistics.median(cpu):.2f} "
            f"({min(cpu):.2f}..{max(cpu):.2f}) | {statistics.median(wall):.2f} | {off:.0e} |"
        )
    again = reload_seconds(full.clip.model)
    rows.append(f"| {name} | reload, added to each image of the loop by `hpsv2.score` | {1000 * again:.0f} | | | | |")
    longest = max(len(row) for row in full.clip.tokenizer(prompts)["input_ids"])
    saved = bound(full.clip.model, longest, options.group)
    rows.append(f"| {name} | bound: arithmetic saved, float32 | | | {saved:.2f} | | |")
    preprocessing = seconds(lambda: full.clip.preprocess(images).mean(dim=(1, 2, 3)).tolist())[0].cpu
    rows.append(f"| {name} | of which preprocessing, batched | {1000 * preprocessing / count:.1f} | | | | |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["b32", "l14"])
    parser.add_argument("--prompts", type=int, default=1, help="distinct prompts in a batch")
    parser.add_argument("--group", type=int, default=16, help="images a prompt")
    parser.add_argument("--size", type=int, default=512, help="side of the images, pixels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--float32", action="store_true", help="only float32")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"{options.prompts} x {options.group} images of {options.size}, {options.threads} threads, "
        f"bfloat16 instructions: {'yes' if bfloat16_is_native() else 'no'}\n"
    )
    print("| model | way | CPU ms an image, best | median | times as fast as the loop, CPU | wall | score differs by |")
    print("|---|---|---|---|---|---|---|")
    for name in options.models:
        print("\n".join(compare(name, options)), flush=True)


if __name__ == "__main__":
    main()
