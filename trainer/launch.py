"""Put a run together: build the parts, go on from a checkpoint if asked, train, write the report."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from reward_server import options
from trainer import checkpoints, parts
from trainer.config import Config
from trainer.evaluate import TOTAL, Interval, spread
from trainer.loop import Run, train, training_states
from trainer.prompts import PromptSampler
from trainer.report import RunFolder, choose_folder, sha256, versions
from trainer.rewards import RewardClient
from trainer.rollout import Sampler, build_objective


def launch(config: Config, stop: Callable[[], bool]) -> None:
    """Train as ``config`` says. Raises UserError and parts.SHOWN_ERRORS for what the user can put right."""
    accelerator = parts.build_accelerator(config, config.report.run_dir)
    root = [config.report.run_dir]
    if accelerator.is_main_process:
        root = [choose_folder(config.report.run_dir, resume=config.checkpoint.resume != "none")]
    broadcast_object_list(root)
    accelerator.project_configuration.logging_dir = str(root[0] / "tensorboard")
    try:
        with parts.reward_client(config, accelerator) as client:
            run = build(config, accelerator, client, root[0], stop)
            restore(run, checkpoints.find(config.checkpoint.resume, run.checkpoints))
            if run.folder is not None:
                (root[0] / "config.yaml").write_text(options.dump(config))
                run.folder.write_json("versions.json", {k: v for k, v in run.manifest.items() if k != "settings"})
                print(f"{root[0]}: {accelerator.num_processes} process(es), {accelerator.device}", file=sys.stderr)
            accelerator.init_trackers(config.report.project, config=flat(run.manifest["settings"]))
            finished = train(run)
            if run.folder is not None:
                facts = {key: run.manifest[key] for key in ("rewards", "base_checkpoint", "versions")}
                summary = run.folder.finish(config.report.sheet_prompts, facts)
                print(headline(summary, None if finished else config.train.steps, root[0]))
    finally:
        accelerator.end_training()


def build(config: Config, accelerator: Accelerator, client: RewardClient, root: Path, stop: Callable[[], bool]) -> Run:
    """Every part of the run, at step 0."""
    config.check_processes(accelerator.num_processes)
    policy, weights = parts.load_policy(config)
    config.check_model(policy.ar_steps, policy.schedule.steps, policy.schedule.stochastic_steps)
    prompts = parts.read_prompts(config.prompts.train, config.prompts.text_key)
    heldout = parts.read_prompts(config.prompts.heldout, config.prompts.text_key)
    parts.check_prompts(policy, prompts, config.prompts.train)
    parts.check_prompts(policy, heldout, config.prompts.heldout)
    manifest = {
        "settings": yaml.safe_load(options.dump(config)),  # without secrets
        "versions": versions(),
        "rewards": client.check(),
        "base_checkpoint": sha256(weights),
    }
    module = parts.as_module(policy).to(accelerator.device)
    parameters = parts.freeze(policy, config.algorithm.head)
    reference = copy.deepcopy(policy) if config.algorithm.kl_beta > 0 else None
    optimizer, scheduler = parts.build_optimizer(config, parameters)
    model, prepared = accelerator.prepare(module, optimizer)
    sampler = Sampler(
        config=config,
        objective=build_objective(config.algorithm),
        policy=policy,
        prompts=PromptSampler(prompts, config.train.prompts_per_step, config.train.seed),
        client=client,
        accelerator=accelerator,
    )
    return Run(
        config=config,
        accelerator=accelerator,
        sampler=sampler,
        policy=policy,
        model=model,
        reference=reference,
        parameters=parameters,
        optimizer=prepared,
        scheduler=scheduler,
        heldout=[heldout[i] for i in spread(len(heldout), config.evaluate.prompts)],
        checkpoints=root / "checkpoints",
        manifest=manifest,
        stop=stop,
        folder=RunFolder(root) if accelerator.is_main_process else None,
    )


def restore(run: Run, checkpoint: Path | None) -> None:
    """Go on from a checkpoint, if there is one: states in place, pending rollouts, and logs cut back to its step."""
    if checkpoint is not None:
        loaded = checkpoints.load(
            checkpoint,
            accelerator=run.accelerator,
            policy=parts.as_module(run.policy),
            training=training_states(run),
        )
        check_same_run(run, checkpoint, loaded)
        run.step = loaded.step
        run.pending = deque(run.sampler.restore(pending) for pending in loaded.pending)
        run.saved_at = run.step if checkpoint.parent == run.checkpoints else None
    evaluated: list[int | None] = [None]
    if run.folder is not None:
        start = -1 if checkpoint is None else run.step
        run.folder.truncate(start)
        checkpoints.sweep(run.checkpoints, start)
        evaluated = [line["step"] for line in run.folder.evaluations.read()[-1:]] or [None]
        if checkpoint is not None:
            print(f"resuming after step {run.step} from {checkpoint}", file=sys.stderr)
    broadcast_object_list(evaluated)
    run.evaluated_at = evaluated[0]


def check_same_run(run: Run, path: Path, loaded: checkpoints.Checkpoint) -> None:
    """Raises CheckpointError if going on would mix two runs: another reference, or rollouts made for other settings."""
    if loaded.manifest["base_checkpoint"] != run.manifest["base_checkpoint"]:
        raise checkpoints.CheckpointError(
            f"{path} was trained from other weights than policy.checkpoint names (the KL's reference); name those, or "
            f"start a new run from the trained ones with --policy.checkpoint {path}"
        )
    if not loaded.pending:
        return
    old, new = (flat(manifest["settings"]) for manifest in (loaded.manifest, run.manifest))
    free = {"policy.checkpoint"}  # compared by content above
    free |= {f"train.{name}" for name in ("steps", "learning_rate", "scheduler", "warmup_steps", "threads")}
    fixed = [key for key in new if key.startswith(("algorithm.", "policy.", "train.")) and key not in free]
    changed = [f"{key} ({old.get(key)} there, {new[key]} now)" for key in fixed if old.get(key) != new[key]]
    if changed:
        raise checkpoints.CheckpointError(
            f"{path} holds rollouts that wait for their scores, made with other settings: {', '.join(changed)}; "
            "resume with the settings of the checkpoint"
        )


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys and values as text, the one form that every tracker takes."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": str(value)}
    return found


def headline(summary: dict[str, Any], stopped_before: int | None, root: Path) -> str:
    """The end of the run in a few lines; ``stopped_before``: the steps it was to make, if it was stopped."""
    lines = [f"{summary['steps']} steps, {summary['seconds_waiting_for_rewards']:.1f} s waiting for rewards"]
    if stopped_before is not None:
        lines = [f"stopped after {summary['steps']} of {stopped_before} steps; --resume auto goes on from there"]
    if TOTAL in summary["heldout"]:
        before, after, change = (Interval(**summary["heldout"][TOTAL][k]) for k in ("before", "after", "difference"))
        lines.append(f"held-out reward {before.text()} -> {after.text()}; paired difference {change.text()} (95 %)")
    lines.append(f"report: {root / 'report.md'}")
    return "\n".join(lines)
