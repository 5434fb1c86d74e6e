"""Put a run together: build the parts, go on from a checkpoint if asked, train, write the report."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn

from reward_server import options
from trainer import checkpoints, families, lora, parts, sharding
from trainer.config import Config, LoraSettings, UserError
from trainer.evaluate import TOTAL, Interval, spread
from trainer.loop import Run, exchanged, train, training_states
from trainer.policies.base import Policy, Reference
from trainer.prompts import PromptSampler
from trainer.report import RunFolder, choose_folder, versions
from trainer.rewards import RewardClient
from trainer.rollout import Sampler, build_objective


def launch(config: Config, stop: Callable[[], bool]) -> None:
    """Train as ``config`` says. Raises UserError and parts.SHOWN_ERRORS for what the user can put right."""
    accelerator = parts.build_accelerator(config, config.report.run_dir)
    config.check_processes(accelerator.num_processes)
    root = run_folder(config, accelerator)
    checkpoint = checkpoints.find(config.checkpoint.resume, root / "checkpoints")
    accelerator.project_configuration.logging_dir = str(root / "tensorboard")
    try:
        with parts.reward_client(config, accelerator) as client:
            run = build(parts.with_served_names(config, client), accelerator, client, root, stop)
            run.manifest["settings"] = settings_of(config)  # as they were given, to be given again
            restore(run, checkpoint)
            if run.folder is not None:
                (root / "config.yaml").write_text(options.dump(config))
                run.folder.write_json("versions.json", {k: v for k, v in run.manifest.items() if k != "settings"})
                print(f"{root}: {accelerator.num_processes} process(es), {accelerator.device}", file=sys.stderr)
            accelerator.init_trackers(config.report.project, config=flat(run.manifest["settings"]))
            finished = train(run)
            if run.folder is not None:
                facts = {k: run.manifest[k] for k in ("rewards", "provenance", "base_checkpoint", "versions")}
                summary = run.folder.finish(config.report.sheet_prompts, facts)
                print(headline(summary, None if finished else config.train.steps, root))
    finally:
        accelerator.end_training()


def run_folder(config: Config, accelerator: Accelerator) -> Path:
    """The folder that the main process chose. Raises UserError on all processes if nothing can be written there."""
    found: list[Path | str] = [""]
    if accelerator.is_main_process:
        try:
            found = [choose_folder(config.report.run_dir, resume=config.checkpoint.resume != "none")]
        except OSError as error:
            found = [unwritable(error)]
    broadcast_object_list(found)
    if isinstance(found[0], str):
        raise UserError(found[0])
    return found[0]


def unwritable(error: OSError) -> str:
    return f"report.run_dir cannot be used: {error.strerror}: {error.filename}"


def settings_of(config: Config) -> dict[str, Any]:
    """All settings as plain values, without secrets."""
    settings: dict[str, Any] = yaml.safe_load(options.dump(config))
    return settings


def build(config: Config, accelerator: Accelerator, client: RewardClient, root: Path, stop: Callable[[], bool]) -> Run:
    """Every part of the run, at step 0."""
    policy, weights = families.load_policy(config)
    config.check_model(policy.ar_steps, policy.schedule.steps, policy.schedule.stochastic_steps)
    prompts = parts.read_prompts(config.prompts.train, config.prompts.text_key)
    heldout = parts.read_prompts(config.prompts.heldout, config.prompts.text_key)
    parts.check_prompts(policy, prompts, config.prompts.train)
    parts.check_prompts(policy, heldout, config.prompts.heldout)
    manifest = {
        "settings": settings_of(config),
        "versions": versions(),
        "rewards": client.check(),
        "provenance": client.provenance,
        "base_checkpoint": families.fingerprint(weights),
    }
    parts.check_relative(config, client, accelerator)
    policy.head_rows = config.train.head_rows
    module = families.as_module(policy).to(accelerator.device)
    families.prepare_prompts(policy, [prompt.text for prompt in [*prompts, *heldout]])
    parameters, reference = trained_and_reference(policy, config)
    twin = sharding.ShardedTwin(policy, accelerator) if sharding.asked_for(config) else None
    if twin is not None:
        parameters = twin.parameters_like(parameters)
    optimizer, scheduler = parts.build_optimizer(config, parameters)
    if twin is not None:
        model, prepared = twin.module, sharding.ShardedOptimizer(optimizer, keeps=accelerator.is_main_process)
    else:
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
        saved=lora.Merged(policy) if config.policy.lora.rank else policy,
        model=model,
        twin=twin,
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


def trained_and_reference(policy: Policy, config: Config) -> tuple[list[nn.Parameter], Reference | None]:
    """What is trained, all else frozen; and the policy as it is now, if there is a KL to it."""
    if config.policy.lora.rank:
        parameters = lora.add_adapters(policy, config.policy.lora, config.train.seed)
        return parameters, lora.WithoutAdapters(policy) if config.algorithm.kl_beta > 0 else None
    parameters = families.freeze(policy, config.algorithm.head)
    return parameters, families.reference_of(policy) if config.algorithm.kl_beta > 0 else None


def restore(run: Run, checkpoint: Path | None) -> None:
    """Go on from a checkpoint, if there is one: states in place, pending rollouts, and logs cut back to its step."""
    changed: list[str] = []
    exchanges: list[str] = []
    if checkpoint is not None:
        manifest = checkpoints.read_manifest(checkpoint)
        check_same_run(run, checkpoint, manifest)
        loaded = checkpoints.load(
            checkpoint,
            accelerator=run.accelerator,
            policy=run.saved,
            training=training_states(run),
        )
        if loaded.pending:
            check_same_rollouts(run, checkpoint, manifest)
        if run.twin is not None:
            run.twin.adopt()
        parts.renew_settings(run.config, run.optimizer, run.scheduler)
        changed = [f"{k} {old} -> {new}" for k, (old, new) in changes(run, manifest).items()]
        exchanges = exchanged(manifest, run.manifest)
        run.step = loaded.step
        run.pending = deque(run.sampler.restore(pending) for pending in loaded.pending)
        run.saved_at = run.step if checkpoint.parent == run.checkpoints else None
    evaluated: list[int | None] = [None]
    if run.folder is not None:
        start = -1 if checkpoint is None else run.step
        try:
            run.folder.create()
        except OSError as error:
            raise UserError(unwritable(error)) from error
        run.folder.truncate(start)
        checkpoints.sweep(run.checkpoints, start)
        now = [prompt.text for prompt in run.heldout]
        evaluated = [line["step"] for line in run.folder.evaluations.read()[-1:] if line["prompts"] == now] or [None]
        if checkpoint is not None:
            print(f"resuming after step {run.step} from {checkpoint}", file=sys.stderr)
            done = run.step == run.config.train.steps
            print("all train.steps are done: nothing to train\n" if done else "", end="", file=sys.stderr)
        if changed:
            print(f"settings changed since the checkpoint: {', '.join(changed)}", file=sys.stderr)
        for line in exchanges:
            print(f"since the checkpoint, {line}", file=sys.stderr)
    broadcast_object_list(evaluated)
    run.evaluated_at = evaluated[0]


def check_same_run(run: Run, path: Path, manifest: dict[str, Any]) -> None:
    """Raises CheckpointError if going on from the checkpoint would mix two runs, or there is nothing to go on to."""
    if manifest["base_checkpoint"] != run.manifest["base_checkpoint"]:
        raise checkpoints.CheckpointError(
            f"{path} was trained from other weights than policy.checkpoint names (the KL's reference); name those, or "
            f"start a new run from the trained ones with --policy.checkpoint {path}"
        )
    then, now = manifest["settings"], run.manifest["settings"]
    plain = LoraSettings().model_dump(mode="json")
    for name, old, new in (
        ("algorithm.head", then["algorithm"]["head"], now["algorithm"]["head"]),
        ("policy.lora", then["policy"].get("lora", plain), now["policy"]["lora"]),
    ):
        if old != new:
            raise checkpoints.CheckpointError(
                f"{path} was trained with {name} {old}, not {new}: the optimizer's state is of other parameters; "
                f"resume with {name} as it was, or start a new run with --policy.checkpoint {path}"
            )
    if manifest["step"] > run.config.train.steps:
        raise checkpoints.CheckpointError(
            f"{path} is of step {manifest['step']}, and train.steps is {run.config.train.steps}: nothing is left to "
            "train; raise --steps, or resume from an older checkpoint"
        )


def check_same_rollouts(run: Run, path: Path, manifest: dict[str, Any]) -> None:
    """Raises CheckpointError if rollouts that wait for their scores were made for other settings."""
    free = {"policy.checkpoint"}  # compared by content
    free |= {f"train.{name}" for name in ("steps", "learning_rate", "betas", "weight_decay", "max_grad_norm")}
    free |= {f"train.{name}" for name in ("scheduler", "warmup_steps", "threads")}
    changed = [
        f"{key} ({old} there, {new} now)"
        for key, (old, new) in changes(run, manifest).items()
        if key.startswith(("algorithm.", "policy.", "train.")) and key not in free
    ]
    if changed:
        raise checkpoints.CheckpointError(
            f"{path} holds rollouts that wait for their scores, made with other settings: {', '.join(changed)}; "
            "resume with the settings of the checkpoint"
        )


def changes(run: Run, manifest: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The settings that differ from the checkpoint's: what they were, what they are."""
    old, new = (flat(m["settings"]) for m in (manifest, run.manifest))
    keys = [key for key in dict.fromkeys((*old, *new)) if key != "checkpoint.resume"]
    pairs = {key: (old.get(key, "unset"), new.get(key, "unset")) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


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
