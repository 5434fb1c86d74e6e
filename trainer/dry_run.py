"""What a run would take, without a GPU and without weights: ``python trainer/run.py --config ... --dry-run``.

Parameters, shapes and the sizes of what is kept are exact. Activations are what autograd keeps in the forward pass of
one micro-batch, counted by running the real code on tensors without data. Not counted: temporary tensors, the
allocator's slack, the libraries' own workspaces (about 1 GB on a GPU), and the reward server.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer import families, lora
from trainer.algorithm.objective import Objective, plan, queries
from trainer.algorithm.schedule import choose_diffusion_steps, predicted_at
from trainer.algorithm.seeds import generator
from trainer.algorithm.types import Queries, Trajectory
from trainer.config import Config
from trainer.outlines import Outline, outline
from trainer.policies.base import Policy
from trainer.policies.masked import MaskedPolicy
from trainer.rollout import build_objective, step_weights

FLOAT = 4
"""Bytes of a float32: trained weights, gradients, Adam's moments, chains"""


def dry_run(config: Config) -> str:
    """The report as text. Raises UserError if the model cannot be built from its configuration, or does not fit."""
    model = outline(config)
    policy = model.policy
    policy.head_rows = config.train.head_rows
    config.check_model(policy.ar_steps, policy.schedule.steps, policy.schedule.stochastic_steps)
    if config.policy.lora.rank:
        trained = lora.add_adapters(cast(Policy, policy), config.policy.lora, config.train.seed)
    else:
        trained = families.freeze(cast(Policy, policy), config.algorithm.head)
    whole, head, learnt = count(policy.parameters()), count(policy.head_parameters()), count(trained)
    objective = build_objective(config.algorithm)
    kept, recomputed = activations(model, config, objective)

    H, D = policy.halves(True), width(model)
    lines = [
        f"{config.policy.name}: N {policy.tokens}, C {policy.channels}, K {policy.ar_steps}, "
        f"T {policy.schedule.steps}, D {D}, H {H}",
        f"parameters: {millions(whole)}, of which head {millions(head)}; trained {millions(learnt)}",
        *(f"frozen beside them: {name} {millions(count(m.parameters()))}" for name, m in model.frozen.items()),
    ]
    frozen = sum(count(m.parameters()) for name, m in model.frozen.items() if "freed" not in name)
    frozen_bytes = 4 if config.policy.options.get("frozen_dtype") == "float32" else 2
    record = record_bytes(policy, objective, config.algorithm.ar_steps_per_update)
    for processes in (1, 2, 4, 8):
        if config.train.prompts_per_step % processes == 0:
            images = config.train.prompts_per_step * config.train.group_size // processes
            waiting = images * (config.train.depth + 1) * record
            where = "CPU" if config.train.offload_rollouts else "device"
            lines.append(
                f"{processes} process(es): {images} images a step each; rollouts {gigabytes(waiting)} ({where})"
            )
    images = config.train.prompts_per_step * config.train.group_size
    waiting = 0 if config.train.offload_rollouts else images * (config.train.depth + 1) * record
    z_star = min(config.train.rollout_batch, images) * H * policy.tokens * D * FLOAT
    reference = learnt * FLOAT if config.algorithm.kl_beta > 0 and not config.policy.lora.rank else 0
    rows = []
    for split in (1, 2, 4, 8):  # processes of FSDP2; 1: whole, as with DDP
        twin = learnt * FLOAT / split if split > 1 else 0
        weights = whole * FLOAT + twin + frozen * frozen_bytes + reference
        states = learnt * FLOAT * 3 / split
        update = weights + states + waiting / split
        rows.append(
            [
                "whole, as with DDP" if split == 1 else f"FSDP2 over {split}",
                *(gigabytes(weights), gigabytes(states), gigabytes(waiting / split)),
                gigabytes(update - learnt * FLOAT / split + z_star / split),
                *(gigabytes(update + a) for a in (kept, recomputed)),
            ]
        )
    titles = ["memory of a process", "weights", "gradient, Adam", "rollouts", "rollout", "update", "update, recomputed"]
    lines += ["", *table([titles, *rows])]
    scored = min(config.train.micro_batch, images)
    lines += [
        "",
        f"activations: {gigabytes(kept)} for {scored} images at once, {gigabytes(recomputed)} recomputed "
        "(policy.options.activation_checkpointing)",
        "less: train.micro_batch scales what the backbone keeps, train.head_rows what the head does",
        "weights include the frozen parts and, with algorithm.kl_beta > 0, the reference's copy of what is trained",
    ]
    return "\n".join(lines)


def activations(model: Outline, config: Config, objective: Objective) -> tuple[float, float]:
    """Of scoring one micro-batch at the middle AR step: without and with activation checkpointing, where the one block
    that is recomputed counts, too."""
    policy = model.policy
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    modules: list[nn.Module] = [policy, *model.in_forward]
    for module in modules:
        _without_data(module, mode)
    images = min(config.train.micro_batch, config.train.prompts_per_step * config.train.group_size)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.train.mixed_precision)
    steps = choose_diffusion_steps(policy.schedule, config.algorithm.diffusion_steps, generator("dry run"))
    weights_T = step_weights(policy.schedule, config.algorithm)
    guided = config.algorithm.score_guidance == "as_sampled"
    ar_step = policy.ar_steps // 2
    trajectory = _blank(policy, objective, model.prompt_ids(images), ar_step)
    rows = queries(
        trajectory, ar_step, steps, plan(trajectory, objective), objective,
        schedule=policy.schedule, step_weights_T=weights_T, seeds=range(images),
    ).rows  # fmt: skip

    def kept(some: Queries, checkpointing: bool) -> float:
        return _kept(model, trajectory, ar_step, some, guided, dtype, checkpointing=checkpointing)

    whole, less = kept(rows, False), kept(rows, True)
    part = 0.0
    if len(rows) > policy.head_rows:  # the part of the head that is recomputed while all else is still kept
        part = kept(rows.select(slice(policy.head_rows)), True) - kept(rows.select(slice(1)), True)
    blocks = max(1, sum(len(m) for top in modules for m in top.modules() if isinstance(m, nn.ModuleList)))
    return part + whole, part + less + (whole - less) / blocks


def width(model: Outline) -> int:
    """D, which z tells."""
    policy = model.policy
    for module in (policy, *model.in_forward):
        _without_data(module, FakeTensorMode(allow_non_fake_inputs=True))
    tokens, known = torch.zeros(1, policy.tokens, policy.channels), torch.zeros(1, policy.tokens, dtype=torch.bool)
    with torch.no_grad():
        return policy.conditions(policy.context(model.prompt_ids(1), False), tokens, known, False).shape[-1]


def _kept(
    model: Outline,
    trajectory: Trajectory,
    ar_step: int,
    rows: Queries,
    guided: bool,
    dtype: torch.dtype | None,
    *,
    checkpointing: bool,
) -> float:
    """Bytes that autograd keeps of one forward pass, weights aside."""
    modules = [model.policy, *model.in_forward]
    weights = {_storage(p) for m in modules for p in m.parameters()}
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in weights:
            seen[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    _switch(modules, checkpointing)
    with (
        torch.enable_grad(),
        torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        graph = model.policy.forward(trajectory, ar_step, rows, guided)
    del graph
    _switch(modules, False)
    return float(sum(seen.values()))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _switch(modules: Iterable[nn.Module], checkpointing: bool) -> None:
    """Activation checkpointing on or off, in every module that has it."""
    for top in modules:
        for module in top.modules():
            for name in ("activation_checkpointing", "checkpointing"):
                if name in vars(module):
                    setattr(module, name, checkpointing)


def _without_data(module: nn.Module, mode: FakeTensorMode) -> None:
    """Give every parameter and buffer a tensor that has a shape and a device, but no memory."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.is_meta:
                with mode:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                part._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta:
                with mode:
                    part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


def _blank(policy: MaskedPolicy, objective: Objective, prompt_ids: Tensor, ar_step: int) -> Trajectory:
    """A rollout of zeros that has recorded what scoring at ``ar_step`` reads."""
    B, N, T, C = len(prompt_ids), policy.tokens, policy.schedule.steps, policy.channels
    order = torch.stack([torch.randperm(N, generator=generator("dry run", i)) for i in range(B)])
    chains = torch.zeros(1, 1, 1, 1).expand(B, N, T + 1, C)
    extra = objective.fresh_trajectories
    return Trajectory(
        prompt_ids=prompt_ids,
        tokens=torch.zeros(B, N, C),
        predicted_at=predicted_at(order, policy.tokens_per_step()),
        chain=chains,
        stitched=torch.zeros(B, 1, N, 0),
        full_chains={ar_step: chains},
        full_latents={k: torch.zeros(B, N, C) for k in (ar_step - 1, ar_step)},
        extra_chains=torch.zeros(1).expand(B, extra, N, T + 1, C) if extra else None,
    )


def record_bytes(policy: MaskedPolicy, objective: Objective, ar_steps: int) -> int:
    """What a rollout keeps of one image: chains, maps at the AR steps that are trained, extra trajectories."""
    chain = policy.tokens * (policy.schedule.steps + 1) * policy.channels
    latents = policy.tokens * policy.channels
    trained = range(2, 2 + ar_steps * 2, 2)  # apart from each other, as most are
    maps = len(objective.full_latents_at(trained)) * latents
    chains = 1 + len(objective.full_chains_at(trained)) + objective.fresh_trajectories
    return FLOAT * (chains * chain + maps + latents)


def count(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() for p in parameters)


def millions(number: int) -> str:
    return f"{number / 1e6:.1f} M"


def gigabytes(number: float) -> str:
    return f"{number / 1e9:.2f} GB"


def table(rows: list[list[str]]) -> list[str]:
    """Lines with aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
