"""Make the base checkpoint of the small policy from scratch: ``python trainer/pretrain.py``.

Denoising training on freshly rendered scenes, as LTH14's MAR is trained: mask a random part of the tokens (the
ratios that sampling meets), predict the rest through the diffusion head, drop the prompt one time in ten for
guidance. The base is stopped early on purpose: an imperfect base leaves room for reinforcement learning.
The same seed and thread count give the same checkpoint on the same machine.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # run as a script: make `trainer` the package, not this folder a source of modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from trainer.policies.small import MAX_WORDS, NULL, PAD, SmallConfig, SmallPolicy, encode_prompts
from trainer.shapes import Scene, render, split_scenes

HEAD_REPEATS = 4
"""Noise levels per token and backbone pass: the head is cheap beside the backbone (LTH14's diffusion_batch_mul)."""
COUNT_SHARE = 0.4
"""Part of the training images whose prompt is a count; there are far fewer such prompts than pairs."""


def draw_scenes(scenes: list[Scene], count: int, rng: np.random.Generator) -> list[Scene]:
    """``count`` random scenes: a fixed share of counts, the rest pairs, and few objects as often as many."""
    singles = [s for s in scenes if s.relation is None]
    pairs = [s for s in scenes if s.relation is not None]
    is_single = rng.random(count) < COUNT_SHARE
    which = rng.random(count)
    return [
        (singles if one else pairs)[int(u * len(singles if one else pairs))]
        for one, u in zip(is_single, which, strict=True)
    ]


def denoising_loss(policy: SmallPolicy, prompt_ids: Tensor, tokens: Tensor, rng: torch.Generator) -> Tensor:
    """Mean squared error of the head's prediction on the masked tokens of a batch (B, N, C)."""
    B, N, _ = tokens.shape
    dropped = torch.rand(B, generator=rng) < 0.1
    null = torch.tensor([NULL] + [PAD] * (MAX_WORDS - 1))
    prompt_ids = torch.where(dropped[:, None], null, prompt_ids)
    masked_count = (N * torch.cos(torch.rand(B, generator=rng) * math.pi / 2)).ceil().clamp(1, N)
    rank = torch.rand(B, N, generator=rng).argsort(dim=1).argsort(dim=1)
    known = rank >= masked_count[:, None]
    z = policy.conditions(policy.context(prompt_ids, guided=False), tokens, known, guided=False)[0]
    x0 = tokens[~known].repeat(HEAD_REPEATS, 1)
    z = z[~known].repeat(HEAD_REPEATS, 1)
    timestep = torch.randint(policy.config.train_timesteps, (len(x0),), generator=rng)
    noise = torch.randn(x0.shape, generator=rng)
    predicted = policy.head(policy.schedule.add_noise(x0, timestep, noise), timestep, z)
    return torch.nn.functional.mse_loss(predicted, policy.schedule.training_target(x0, timestep, noise))


def pretrain(steps: int, batch: int, learning_rate: float, seed: int, config: SmallConfig) -> tuple[SmallPolicy, float]:
    """Train the small policy; returns the averaged (EMA) weights and the codec's kept variance."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)  # the initial weights
    noise = torch.Generator().manual_seed(seed)
    scenes, _ = split_scenes()
    policy = SmallPolicy(config)
    kept = policy.fit_codec(render(draw_scenes(scenes, 8000, rng), rng))
    average = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.02)
    progress = tqdm(range(steps), desc="pretrain", mininterval=5)
    for step in progress:
        rate = min(1.0, (step + 1) / 500) * min(1.0, (steps - step) / (0.2 * steps))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        drawn = draw_scenes(scenes, batch, rng)
        prompt_ids = encode_prompts([s.prompt for s in drawn])
        loss = denoising_loss(policy, prompt_ids, policy.encode(render(drawn, rng)), noise)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            decay = min(0.999, (step + 1) / (step + 10))
            for mean, now in zip(average.parameters(), policy.parameters(), strict=True):
                mean.lerp_(now, 1 - decay)
        if step % 100 == 0:
            progress.set_postfix(loss=f"{loss.item():.4f}")
    return average, kept


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("trainer/policies/weights/small.safetensors"))
    parser.add_argument("--steps", type=int, default=5000, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="images per step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak, AdamW (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; part of reproducibility (default: 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    started = time.monotonic()
    policy, kept = pretrain(arguments.steps, arguments.batch, arguments.learning_rate, arguments.seed, SmallConfig())
    minutes = (time.monotonic() - started) / 60
    command = (
        f"python trainer/pretrain.py --steps {arguments.steps} --batch {arguments.batch} "
        f"--learning-rate {arguments.learning_rate} --seed {arguments.seed} --threads {arguments.threads}"
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    policy.save(arguments.out, {"command": command, "torch": torch.__version__})
    parameters = sum(p.numel() for p in policy.parameters())
    print(
        f"{arguments.out}: {parameters:,} parameters, {arguments.out.stat().st_size / 1e6:.1f} MB, "
        f"{SmallPolicy.revision(arguments.out)}\ncodec keeps {kept:.1%} of the variance; {minutes:.1f} min\n{command}"
    )


if __name__ == "__main__":
    main()
