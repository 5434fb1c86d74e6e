"""The training step, from prompts to parameters. One step of MAR-GRPO (arXiv 2604.06966):

    sample a rollout, send its images to the reward server       (rollout.py)
    with depth > 0, sample the next ones while scores are computed
    receive the oldest rollout's scores -> advantages within each group
    for each chosen AR step: score its transitions with gradient, back-propagate, free the graph
    clip the gradient, step the optimizer

Losses are sums over rows divided by counts of the *global* batch, so any number of processes and any micro-batch
gives the same gradient.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from trainer import checkpoints
from trainer.algorithm.advantages import Advantages, group_advantages
from trainer.algorithm.objective import Counts, StepQueries, counts, loss
from trainer.algorithm.types import Gaussian, Trajectory
from trainer.config import Config, UserError
from trainer.diagnostics import measure_signal
from trainer.evaluate import TOTAL, Flags, Floats, evaluate, share, spread
from trainer.families import as_module
from trainer.lora import Adapters
from trainer.metrics import Totals, reward_metrics
from trainer.policies.base import Policy, Reference
from trainer.prompts import Prompt
from trainer.report import RunFolder
from trainer.rewards import RewardError
from trainer.rollout import Rollout, Sampler
from trainer.sharding import ShardedTwin
from trainer.together import Stopped, agree, wait_for_scores

logger = logging.getLogger(__name__)
SHOWN = ("reward/mean", "kl", "grad_norm", "images_per_s", "time/wait_s")
"""Metrics on the progress bar."""


@dataclass
class Run:
    """The parts of a run, built by run.py."""

    config: Config
    accelerator: Accelerator
    sampler: Sampler
    policy: Policy
    """The bare policy: sampling."""
    saved: checkpoints.SavesItself
    """What is written as the policy: itself, or itself with adapters merged."""
    model: nn.Module
    """The same policy as accelerate wrapped it: scoring with gradient."""
    twin: ShardedTwin | None
    """What holds ``model`` together with the policy when it is sharded."""
    reference: Reference | None
    """The frozen policy that KL is measured against; None when beta is 0."""
    parameters: list[nn.Parameter]
    """Those that are trained."""
    optimizer: Any
    scheduler: torch.optim.lr_scheduler.LRScheduler
    heldout: list[Prompt]
    checkpoints: Path
    """Folder of the checkpoints"""
    manifest: dict[str, Any]
    """Facts for checkpoints and the report: settings, versions, revisions."""
    stop: Callable[[], bool]
    """Whether the user asked to stop."""
    folder: RunFolder | None
    """None on all processes but the main one."""
    step: int = 0
    """Training steps done"""
    pending: deque[Rollout] = field(default_factory=deque)
    """Rollouts that wait for their scores, oldest first"""
    evaluated_at: int | None = None
    """The step of the last held-out evaluation"""
    saved_at: int | None = None


def train(run: Run) -> bool:
    """Train from ``run.step`` to ``train.steps``, or until the user asks to stop; returns whether it got to the end.

    Raises UserError when training cannot go on (no scores, missing ones with ``on_missing: stop``, a gradient that is
    not finite) and RewardError when the reward server stays away; where the state is whole it is saved first.
    """
    try:
        take_steps(run)
    except Stopped:
        save(run)
        return False
    if run.saved_at != run.step:
        save(run)
    return run.step >= run.config.train.steps


def take_steps(run: Run) -> None:
    """The steps and evaluations that are left. Raises Stopped if the user asks to while scores are waited for."""
    config = run.config
    steps, depth = config.train.steps, config.train.depth
    if run.evaluated_at is None:
        evaluate_heldout(run)
    bar = tqdm(total=steps, initial=run.step, desc="train", unit="step", disable=run.folder is None, mininterval=0.5)
    with bar:
        while run.step < steps and not agree(run.accelerator, run.stop()):
            started = time.monotonic()
            while len(run.pending) <= depth and run.step + len(run.pending) < steps:
                run.pending.append(run.sampler.sample(run.step + len(run.pending)))
            sampled = time.monotonic()

            rollout = run.pending[0]
            scores, valid = receive(run, rollout)
            received = time.monotonic()

            note_rewards(run, rollout)
            advantages = global_advantages(config, scores, valid)
            if due(run.step, config.report.snr_every) or run.step == 0:
                log_signal(run, rollout, advantages, bar)
            measured = time.monotonic()
            stats = update(run, rollout, advantages)
            run.pending.popleft()
            run.step += 1

            images = len(scores[TOTAL])
            finished = time.monotonic()
            stats |= reward_metrics(scores, valid) | {
                "signal_fraction": float(advantages.signal.float().mean()),
                "images_per_s": images / (finished - started),
                "time/step_s": finished - started,
                "time/rollout_s": sampled - started,
                "time/wait_s": received - sampled,
                "time/update_s": finished - measured,
            }
            if stats["missing"]:
                stats["missing_reason"] = rollout.reason
            log_step(run, stats, bar)
            if due(run.step, config.evaluate.every):
                evaluate_heldout(run)
            if due(run.step, config.checkpoint.every):
                save(run)
    if run.step == steps and run.evaluated_at != run.step:
        evaluate_heldout(run)


def receive(run: Run, rollout: Rollout) -> tuple[dict[str, Floats], dict[str, Flags]]:
    """The scores of the global batch, by name, on every process.

    When a process cannot have its scores, all of them save and stop together: the rollout is still pending then.
    Raises Stopped if the user asks to stop meanwhile.
    """
    # A checkpoint may have collected the scores on some processes and not on others: all of them wait, or none.
    wait_for_scores(run.accelerator, rollout.job if rollout.scores is None else None, run.stop)
    local: tuple[dict[str, Floats], dict[str, Flags]] = ({}, {})
    failure: RewardError | None = None
    try:
        local = rollout.collect(run.config.reward.names)
    except RewardError as error:
        failure = error
    parts = gather_object([(*local, failure and str(failure), rollout.reason)])
    failures = [text for _, _, text, _ in parts if text is not None]
    if failures:
        save(run)
        raise failure or RewardError(failures[0])
    names = list(dict.fromkeys(name for part in parts for name in part[0]))
    size = len(rollout.seeds)  # sub-scores that one process did not get are missing there
    nothing = np.zeros(size), np.zeros(size, dtype=bool)
    scores = {name: np.concatenate([part[0].get(name, nothing[0]) for part in parts]) for name in names}
    valid = {name: np.concatenate([part[1].get(name, nothing[1]) for part in parts]) for name in names}
    images, missing = len(valid[TOTAL]), int((~valid[TOTAL]).sum())
    rollout.reason = next((reason for *_, reason in parts if reason is not None), None)
    if missing == images or (missing and run.config.reward.on_missing == "stop"):
        save(run)
        because = "there is nothing to learn from" if missing == images else "reward.on_missing is stop"
        raise UserError(
            f"{missing} of {images} images of step {rollout.index} got no score, and {because}: {rollout.reason}; "
            "--resume auto scores them again"
        )
    return scores, valid


def global_advantages(config: Config, scores: dict[str, Floats], valid: dict[str, Flags]) -> Advantages:
    """Each image's advantage within its group, from the global batch's scores."""
    weights = config.reward.names
    return group_advantages(
        torch.from_numpy(np.stack([scores[name] for name in weights], axis=1)),
        torch.from_numpy(np.stack([valid[name] for name in weights], axis=1)),
        config.train.group_size,
        list(weights.values()),
        config.reward.mix,
    )


def note_rewards(run: Run, rollout: Rollout) -> None:
    """Say so when a reward model was exchanged during the run: from there on, rewards mean something else."""
    known = run.manifest
    provenance = {name: {**known["provenance"].get(name, {}), **new} for name, new in rollout.provenance.items()}
    now = {
        "rewards": known["rewards"] | rollout.revisions,
        "provenance": known["provenance"] | provenance,
    }
    for line in exchanged(known, now) if run.folder is not None else ():
        logger.warning("step %d: %s", rollout.index, line)
    run.manifest |= now


def exchanged(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """A line for each reward of both manifests whose revision or provenance differs; what one lacks is no change."""

    def facts(manifest: dict[str, Any], name: str) -> dict[str, str]:
        return {"revision": manifest["rewards"][name], **manifest.get("provenance", {}).get(name, {})}

    lines = []
    for name in old["rewards"].keys() & new["rewards"].keys():
        before, after = facts(old, name), facts(new, name)
        changed = [key for key in after if key in before and after[key] != before[key]]
        if changed:
            lines.append(f"reward {name} is now " + ", ".join(f"{k} {after[k]} (was {before[k]})" for k in changed))
    return sorted(lines)


def update(run: Run, rollout: Rollout, advantages: Advantages) -> dict[str, Any]:
    """All optimizer steps on one rollout; returns the metrics of the last one, its loss summed over processes."""
    images = share(len(advantages.values), run.accelerator)
    mine = slice(images.start, images.stop)
    device = run.accelerator.device
    values_B, signal_B = advantages.values[mine].to(device), advantages.signal[mine].to(device)
    denominators = global_counts(run, rollout, signal_B)
    beta = run.config.algorithm.kl_beta
    ar_steps = [k for k in rollout.ar_steps if denominators[k].policy or beta > 0]
    stats: dict[str, Any] = {"lr": run.scheduler.get_last_lr()[0]}
    for _ in range(run.config.algorithm.updates_per_rollout):
        totals = Totals(device)
        for ar_step in ar_steps:
            backward(run, rollout, ar_step, values_B, signal_B, denominators[ar_step], ar_step == ar_steps[-1], totals)
        stats |= totals.metrics(run.accelerator)
        stats["grad_norm"] = optimizer_step(run) if ar_steps else 0.0
    return stats


def backward(
    run: Run,
    rollout: Rollout,
    ar_step: int,
    values_B: Tensor,
    signal_B: Tensor,
    denominators: Counts,
    is_last: bool,
    totals: Totals,
) -> None:
    """Back-propagate one AR step's loss, micro-batch by micro-batch, so that one graph is alive at a time."""
    processes = run.accelerator.num_processes
    micro_batches = -(-len(rollout.seeds) // run.config.train.micro_batch)
    for number, images, part, whole in run.sampler.passes(rollout, ar_step):
        step, kept = whole.with_signal(signal_B[images])
        final = is_last and number == micro_batches - 1
        if len(step) == 0 and processes == 1:
            continue  # with several, all of them must take part in every pass
        old, old_std = (kinds.get(f"{ar_step}/{number}") for kinds in (rollout.old_log_probs, rollout.old_stds))
        part, step, advantages = used_images(part, step, values_B[images])
        reference = None
        if run.reference is not None:
            with torch.no_grad(), run.accelerator.autocast():
                reference = run.reference.forward(part, ar_step, step.kl_queries(), run.sampler.guided)
        # Gradients of all passes add up locally; the last one adds them up over processes. Sharded, each pass does:
        # a whole gradient is what a process has no room for.
        alone = final or run.twin is not None
        with contextlib.nullcontext() if alone else run.accelerator.no_sync(run.model):
            with run.accelerator.autocast():
                new: Gaussian = run.model(part, ar_step, step.rows, run.sampler.guided)
            result = loss(
                step,
                run.sampler.scored(new, None if old_std is None else old_std[kept]),
                advantages,
                denominators,
                len(rollout.ar_steps),
                run.sampler.objective,
                old_log_prob=None if old is None else old[kept],
                reference=reference,
            )
            run.accelerator.backward(result.loss * processes)  # DDP averages, the loss is a sum
        totals.add(result)


def used_images(
    trajectory: Trajectory, step: StepQueries, advantages_B: Tensor
) -> tuple[Trajectory, StepQueries, Tensor]:
    """Leave out the images that no row asks for (but one), so that the backbone does not read them."""
    bare = replace(trajectory, full_chains={}, full_latents={}, extra_chains=None)
    used, position = torch.unique(step.rows.image, return_inverse=True)
    if len(used) == 0:
        used = used.new_zeros(1)
    rows = replace(step.rows, image=position)
    return bare.select(used), replace(step, rows=rows), advantages_B[used]


def optimizer_step(run: Run) -> float:
    """Clip, step and clear; returns the gradient's norm before clipping. Raises UserError if it is not finite."""
    clipped = run.accelerator.clip_grad_norm_(run.parameters, run.config.train.max_grad_norm)
    norm = float(clipped.full_tensor() if isinstance(clipped, DTensor) else clipped)
    if not math.isfinite(norm) and run.accelerator.scaler is None:  # with a loss scaler, overflow is part of its search
        raise UserError(
            f"the gradient of step {run.step} is not finite (norm {norm}); lower train.learning_rate, or leave out "
            "the diffusion steps whose noise is huge in the report's signal table (algorithm.diffusion_steps)"
        )
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad(set_to_none=True)
    if run.twin is not None:
        run.twin.publish()
    return norm


def global_counts(run: Run, rollout: Rollout, signal_B: Tensor) -> dict[int, Counts]:
    """Each AR step's denominators over all processes."""
    local = [counts(rollout.trajectory, k, run.sampler.objective, signal_B) for k in rollout.ar_steps]
    pairs = torch.tensor([[c.policy, c.kl] for c in local], dtype=torch.int64, device=run.accelerator.device)
    summed = run.accelerator.reduce(pairs, "sum").tolist()
    return {k: Counts(*row) for k, row in zip(rollout.ar_steps, summed, strict=True)}


def log_step(run: Run, stats: dict[str, Any], bar: Any) -> None:
    """One line in metrics.jsonl, the trackers and the progress bar."""
    if run.folder is None:
        return
    run.folder.metrics.append(run.step, stats)
    run.accelerator.log({k: v for k, v in stats.items() if isinstance(v, int | float)}, step=run.step)
    bar.set_postfix({k.split("/")[-1 if "time" in k else 0]: f"{stats[k]:.3g}" for k in SHOWN if stats[k] is not None})
    bar.update()
    if stats["missing"]:
        bar.write(
            f"step {run.step}: {stats['missing']} images got no score and were left out ({stats['missing_reason']})"
        )


def log_signal(run: Run, rollout: Rollout, advantages: Advantages, bar: Any) -> None:
    """Measure the gradient's signal-to-noise per diffusion step and log it."""
    if run.config.report.snr_groups == 0:
        return
    bar.set_description("measuring the gradient's signal-to-noise")  # longer than a step: do not look stuck
    trained = [p for p in as_module(run.policy).parameters() if p.requires_grad]
    measured = measure_signal(run.sampler, rollout, advantages, trained)
    bar.set_description("train")
    if run.folder is not None and measured is not None:
        run.folder.signal.append(run.step, measured)


def evaluate_heldout(run: Run) -> None:
    """Score the held-out prompts, log the result and keep the images for the contact sheets."""
    if run.config.evaluate.prompts == 0:
        return
    shown = spread(len(run.heldout), run.config.report.sheet_prompts)
    try:
        result = evaluate(
            run.policy,
            run.sampler.client,
            run.heldout,
            images_per_prompt=run.config.evaluate.seeds,
            weights=run.config.reward.names,
            accelerator=run.accelerator,
            batch=run.config.train.rollout_batch,
            shown=shown,
            stop=run.stop,
        )
    except RewardError:
        save(run)
        raise
    run.evaluated_at = run.step
    if run.folder is not None:
        run.folder.add_evaluation(run.step, result, shown)
        missing = result.missing(TOTAL)
        without = (
            f"; {missing} of {result.valid[TOTAL].size} images without a score: {result.reason}" if missing else ""
        )
        tqdm.write(f"step {run.step}: held-out reward {result.interval(TOTAL).text()}{without}")
        values = {f"heldout/{name}": result.interval(name).mean for name in result.scores}
        run.accelerator.log({k: v for k, v in values.items() if v is not None}, step=run.step)


def save(run: Run) -> None:
    """Write a checkpoint. Every process calls it."""
    checkpoints.save(
        run.checkpoints,
        run.step,
        accelerator=run.accelerator,
        policy=run.saved,
        training=training_states(run),
        pending=[rollout.pending(run.config.reward.names) for rollout in run.pending],
        manifest=run.manifest,
        keep=run.config.checkpoint.keep,
    )
    run.saved_at = run.step


def training_states(run: Run) -> dict[str, checkpoints.Stateful]:
    """What is restored beside the policy's weights."""
    states: dict[str, checkpoints.Stateful] = {"optimizer": run.optimizer, "scheduler": run.scheduler}
    states |= {"adapters": Adapters(run.policy)} if run.config.policy.lora.rank else {}
    return states | ({"scaler": run.accelerator.scaler} if run.accelerator.scaler is not None else {})


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
