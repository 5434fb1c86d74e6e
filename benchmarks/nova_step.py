"""One training step of NOVA beside that of the published trainer: time, peak memory and gradients.

    OMP_NUM_THREADS=1 python benchmarks/nova_step.py CLONE [--rounds 3]

CLONE is a clone of the MAR-GRPO repository; its code is imported from there (see ``nova_published.py``). Both sides
have the same random weights of a tiny NOVA, the same settings (G = 4, K = 64, T = 25, S = 3, 12 AR and 10 diffusion
steps, top 30 %, consistency, KL, frozen head, scoring without guidance), float32 and one thread. Text encoder, VAE and
reward are stood in for on both sides. Each side runs in a process of its own, in turn; ratios are of medians.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainer.algorithm.schedule import choose_ar_steps
from trainer.algorithm.seeds import generator
from trainer.algorithm.transitions import DDPM, spaced_timesteps
from trainer.algorithm.types import Trajectory
from trainer.config import Config
from trainer.families import freeze
from trainer.loop import global_advantages, update
from trainer.policies.nova import NovaPolicy
from trainer.policies.nova_model import NovaConfig, NovaTransformer
from trainer.prompts import Prompt, PromptSampler
from trainer.rollout import Rollout, Sampler, build_objective

TEXT_WIDTH, TEXT_LENGTH, PROMPT_TOKENS = 160, 64, 9
SIZES: dict[str, Any] = {
    "image_dim": 4,
    "image_size": 256,
    "image_stride": 8,
    "text_token_dim": TEXT_WIDTH,
    "text_token_len": TEXT_LENGTH,
    "image_base_size": [16, 16],
    "video_base_size": [1, 8, 8],
    "arch": ["vit_d4w128", "vit_d8w128", "mlp_d2w64"],
}
"""A quarter of sd512's tokens and of its context. Depths and widths are such that a pass of the image encoder costs
15 to 17 passes of the head over all tokens: what sd512's arithmetic makes it."""
SCHEDULER = {
    "num_train_timesteps": 1000,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "timestep_spacing": "leading",
    "clip_sample": False,
}
REWARDS = [0.1, 0.4, 0.3, 0.9]
DIFFUSION_STEPS = [1, 3, 5, 8, 10, 12, 15, 17, 20, 22]
"""Ten of the 24 that have noise. (The published draw includes the last step, which has none.)"""
TOP = 76 / 256
"""floor(0.3 N) tokens; as a share that is exact for N tokens and for their 4 N pixels."""
CONFIG = Config.model_validate(
    {
        "policy": {"name": "nova"},
        "algorithm": {
            "mte_trajectories": 3,
            "top_fraction": TOP,
            "ar_steps_per_update": 12,
            "diffusion_steps": DIFFUSION_STEPS,
            "clip": None,
            "score_guidance": "off",
        },
        "train": {"prompts_per_step": 1, "group_size": 4, "micro_batch": 4, "rollout_batch": 4, "max_grad_norm": 1e30},
    }
)


class Texts:
    """Stands in for the text encoder: fixed states of the one prompt, none of the empty one."""

    def __init__(self, states_LE: Tensor) -> None:
        self.states_LE = states_LE

    def tokenize(self, prompts: list[str]) -> Tensor:
        ids = torch.full((len(prompts), TEXT_LENGTH), -1)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(self.states_LE) if prompt else 0] = 0
        return ids

    def embed(self, prompt_ids: Tensor) -> list[Tensor]:
        return [self.states_LE[: int((row >= 0).sum())] for row in prompt_ids]


def write_weights(folder: Path) -> None:
    """The policy, a reference that is not quite the same (or the KL would have no gradient), and the text."""
    torch.manual_seed(0)
    transformer = NovaTransformer(NovaConfig.read(SIZES))
    for parameter in (
        transformer.mask_embed.bos_token,
        transformer.mask_embed.mask_token,
        transformer.text_embed.weight,
    ):
        nn.init.normal_(parameter, std=0.02)
    state = {name: value.contiguous() for name, value in transformer.state_dict().items()}
    save_file(state, folder / "policy.safetensors")
    other = {name: value + 0.002 * torch.randn_like(value) for name, value in state.items()}
    save_file(other, folder / "reference.safetensors")
    save_file({"text": torch.randn(PROMPT_TOKENS, TEXT_WIDTH)}, folder / "text.safetensors")


def ar_steps_trained(policy_steps: int) -> list[int]:
    """Those that our sampler draws for the first step."""
    return choose_ar_steps(policy_steps, 12, generator(CONFIG.train.seed, "AR steps", 0))


def tokens_steps() -> int:
    """AR steps that predict at least one token."""
    lengths = np.round(np.cos(0.5 * np.pi * np.arange(65) / 64) * 256)
    return int((np.diff(lengths) < 0).sum())


# ---- our side --------------------------------------------------------------------------------------------------------


def our_run(folder: Path) -> SimpleNamespace:
    """The parts of a run that sampling and updating read."""
    with torch.device("meta"):
        transformer = NovaTransformer(NovaConfig.read(SIZES))
    transformer.load_state_dict(load_file(folder / "policy.safetensors"), assign=True)
    betas = torch.linspace(SCHEDULER["beta_start"] ** 0.5, SCHEDULER["beta_end"] ** 0.5, 1000) ** 2  # type: ignore[operator]
    schedule = DDPM((1 - betas).cumprod(0), spaced_timesteps(1000, 25, "leading"))
    side = SIZES["image_size"]
    policy = NovaPolicy(
        transformer,
        Texts(load_file(folder / "text.safetensors")["text"]),  # type: ignore[arg-type]
        lambda latents: torch.zeros(len(latents), side, side, 3, dtype=torch.uint8),  # type: ignore[arg-type]
        schedule,
        ar_steps=64,
        guidance=5.0,
        base="",
    ).eval()
    parameters = freeze(policy, "frozen")
    reference = copy.deepcopy(policy)
    reference.transformer.load_state_dict(load_file(folder / "reference.safetensors"))
    accelerator = Accelerator(cpu=True)
    sampler = Sampler(
        config=CONFIG,
        objective=build_objective(CONFIG.algorithm),
        policy=policy,
        prompts=PromptSampler([Prompt("a prompt")], 1, CONFIG.train.seed),
        client=SimpleNamespace(submit=lambda *_: None),  # type: ignore[arg-type]
        accelerator=accelerator,
    )
    return SimpleNamespace(
        config=CONFIG,
        accelerator=accelerator,
        sampler=sampler,
        policy=policy,
        model=policy,
        reference=reference.requires_grad_(False),
        parameters=parameters,
        optimizer=SimpleNamespace(step=lambda: None, zero_grad=lambda **_: None),
        scheduler=SimpleNamespace(step=lambda: None, get_last_lr=lambda: [0.0]),
        twin=None,
        step=0,
    )


def our_update(run: SimpleNamespace, rollout: Rollout) -> None:
    scores, valid = {"shapes": np.array(REWARDS)}, {"shapes": np.ones(len(REWARDS), dtype=bool)}
    update(run, rollout, global_advantages(CONFIG, scores, valid))  # type: ignore[arg-type]


def our_step(folder: Path) -> dict[str, float]:
    run = our_run(folder)
    meter = Meter()
    rollout = run.sampler.sample(0)
    meter.lap("rollout")
    our_update(run, rollout)
    meter.lap("update")
    return meter.found


def our_gradient(folder: Path) -> dict[str, Any]:
    """Our gradient on the published rollout, beside the published gradients of it."""
    run, record = our_run(folder), load_file(folder / "record.safetensors")
    rollout = run.sampler._empty(0)  # prompts, seeds and AR steps
    assert rollout.ar_steps == ar_steps_trained(run.policy.ar_steps)
    run.sampler.keep(rollout, trajectory_of(record, run.policy.encode_prompts(["a prompt"] * 4), rollout.ar_steps))
    our_update(run, rollout)
    ours = {n: p.grad for n, p in run.policy.transformer.named_parameters() if p.grad is not None}
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("gradient-*.safetensors")):
        published = load_file(path)
        a = torch.cat([ours[n].flatten() for n in ours]).double() * len(
            rollout.ar_steps
        )  # theirs is a sum over AR steps
        b = torch.cat([published.get(n, torch.zeros_like(ours[n])).flatten() for n in ours]).double()
        elsewhere = torch.cat([g.flatten() for n, g in published.items() if n not in ours] + [torch.zeros(1)])
        found[path.stem.removeprefix("gradient-")] = {
            "1 - cosine": 1 - float(a @ b / a.norm() / b.norm()),
            "relative difference": float((a - b).norm() / b.norm()),
            "norm, of ours": float(b.norm() / a.norm()),
            "share on what we freeze": float(elsewhere.double().norm() / b.norm()),
        }
    return found


def trajectory_of(record: dict[str, Tensor], prompt_ids: Tensor, ar_steps: list[int]) -> Trajectory:
    """The published rollout, in our terms. Guidance in its extra trajectories is off, as theirs is."""
    predicted_at_BN, chains_KBNTC = record["predicted_at"], record["chains"]
    B, N = predicted_at_BN.shape
    image_B1, token_N = torch.arange(B)[:, None], torch.arange(N)
    chain_BNTC = chains_KBNTC[predicted_at_BN, image_B1, token_N]
    return Trajectory(
        prompt_ids=prompt_ids,
        tokens=chain_BNTC[:, :, -1],
        predicted_at=predicted_at_BN,
        chain=chain_BNTC,
        stitched=torch.zeros(B, 1, N, 1),  # not read by the update
        full_chains={k: chains_KBNTC[k] for k in ar_steps},
        full_latents=dict(enumerate(chains_KBNTC[..., -1, :])),
        extra_chains=record["extra"],
    )


# ---- the published side ----------------------------------------------------------------------------------------------


def published_run(folder: Path, clone: Path, diffusion_steps: list[int]) -> Any:
    from nova_published import PROMPT, Published

    published = Published(
        clone,
        {**SIZES, "rotary_pos_embed": False},
        SCHEDULER,
        {PROMPT: load_file(folder / "text.safetensors")["text"], "": torch.empty(0, TEXT_WIDTH)},
        rewards=REWARDS,
        ar_steps=ar_steps_trained(tokens_steps()),
        diffusion_steps=diffusion_steps,
        top_percent=TOP,
    )
    published.model.load_state_dict(load_file(folder / "policy.safetensors"))
    published.reference.load_state_dict(load_file(folder / "reference.safetensors"))
    return published


def published_step(folder: Path, clone: Path) -> dict[str, float]:
    published = published_run(folder, clone, DIFFUSION_STEPS)
    meter = Meter()
    published.step(lambda: meter.lap("rollout"))
    meter.lap("update")
    return meter.found


def published_gradient(folder: Path, clone: Path) -> dict[str, Any]:
    """One rollout and its gradients: as published, with one correction after the other, and with the last step."""
    from nova_published import CORRECTIONS

    torch.manual_seed(1)
    published = published_run(folder, clone, DIFFUSION_STEPS)
    order = list(CORRECTIONS)
    variants = {f"{i} {'+ ' + order[i - 1] if i else 'as published'}": order[:i] for i in range(len(order) + 1)}
    reuse = False
    for name, corrections in {**variants, "4 as published, last diffusion step among the ten": []}.items():
        if name.startswith("4"):
            published.diffusion_steps = [*DIFFUSION_STEPS[:-1], 24]
        published.step(lambda: None, corrections, reuse=reuse)
        reuse = True
        gradient = {n: p.grad.clone() for n, p in published.model.named_parameters() if p.grad is not None}
        published.model.zero_grad()
        save_file(gradient, folder / f"gradient-{name}.safetensors")
    save_file(published.tensors(), folder / "record.safetensors")
    return {}


# ---- measuring -------------------------------------------------------------------------------------------------------


class Meter:
    """CPU seconds of each lap, and by how many MiB its peak lies above the memory held at the start (Linux).

    CPU seconds of the one thread, because other processes on the machine delay the clock's.
    """

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self.held = self._status("VmRSS")
        self._begin()

    def lap(self, name: str) -> None:
        self.found[f"{name} s"] = time.process_time() - self.started
        self.found[f"{name} MiB"] = (self._status("VmHWM") - self.held) / 1024
        self._begin()

    def _begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        self.started = time.process_time()

    @staticmethod
    def _status(name: str) -> int:
        """kiB"""
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name + ":")).split()[1])


def run_side(side: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """In a process of its own."""
    command = [sys.executable, __file__, str(arguments.clone), "--side", side, "--folder", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_weights(folder)
        run_side("published gradient", arguments, folder)
        print("our gradient on the published rollout, beside the published gradient")
        for name, row in run_side("our gradient", arguments, folder).items():
            print(f"  {name:50} " + ", ".join(f"{what} {number:.3g}" for what, number in row.items()))
        rows: dict[str, list[dict[str, float]]] = {"published": [], "ours": []}
        for turn in range(arguments.rounds):
            for side, found in rows.items():
                found.append(run_side(side, arguments, folder))
                print(f"  round {turn + 1}, {side}: {found[-1]}", flush=True)
    for what in rows["ours"][0]:
        published, ours = (statistics.median(row[what] for row in rows[side]) for side in ("published", "ours"))
        print(f"{what:12} published {published:8.1f}  ours {ours:8.1f}  ratio {ours / published:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="a clone of the MAR-GRPO repository")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", help="what this process does (set by the benchmark itself)")
    parser.add_argument("--folder", type=Path, help="where weights and records are (set by the benchmark itself)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not (arguments.clone / "src" / "grpo" / "src" / "diffnext").is_dir():
        parser.error(f"{arguments.clone} is no clone of the MAR-GRPO repository: there is no src/grpo/src/diffnext")
    if arguments.side is None:
        compare(arguments)
        return
    sides = {
        "ours": lambda: our_step(arguments.folder),
        "our gradient": lambda: our_gradient(arguments.folder),
        "published": lambda: published_step(arguments.folder, arguments.clone),
        "published gradient": lambda: published_gradient(arguments.folder, arguments.clone),
    }
    print(json.dumps(sides[arguments.side]()))


if __name__ == "__main__":
    main()
