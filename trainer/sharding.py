"""FSDP2: weights that are trained, their gradients and the optimizer's state, split over the processes.

``accelerate launch --config_file configs/accelerate/fsdp2.yaml`` asks for it. Two modules stand side by side: the
policy, whole on every process, samples, evaluates and is saved; its sharded twin scores with gradient and is trained.
Frozen weights belong to both and are never split. After each optimizer step the twin's weights are gathered into the
policy: one gather a step, where sampling through the shards would gather every block at each of the K AR steps.

So a process holds P (policy) + (P + 3 P) / W bytes of float32 parameters, gradient and Adam for W processes, and
gathers one block at a time while it scores. accelerate starts the processes and talks between them; the sharding is
``torch.distributed.fsdp.fully_shard`` itself, which works without a GPU, too, and keeps all-gathered weights in float32
for autocast, so that numbers are those of one process.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.config import Config, UserError
from trainer.families import as_module
from trainer.policies.base import Policy


def asked_for(config: Config) -> bool:
    """Whether the launcher's configuration asks for FSDP. Raises UserError for what is not supported with it."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return False
    if os.environ.get("FSDP_VERSION") != "2":
        raise UserError("only FSDP2 is supported: set fsdp_version: 2 as in configs/accelerate/fsdp2.yaml")
    if config.train.mixed_precision == "fp16":
        raise UserError("train.mixed_precision fp16 does not work with FSDP2: use bf16, which needs no loss scaler")
    return True


class ShardedTwin:
    """The twin of a policy whose parameters are already frozen or not, and the parameters to optimize."""

    def __init__(self, policy: Policy, accelerator: Accelerator) -> None:
        self.policy = as_module(policy)
        frozen = {p for p in self.policy.parameters() if not p.requires_grad}
        shared: list[Tensor] = [*frozen, *self.policy.buffers()]
        self.module: nn.Module = copy.deepcopy(self.policy, {id(tensor): tensor for tensor in shared})
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        for unit in _units(self.parameters_like(list(policy.backbone_parameters())), self.module):
            fully_shard(unit, mesh=mesh, ignored_params=frozen)
        fully_shard(self.module, mesh=mesh, ignored_params=frozen)

    def parameters_like(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """The twin's own of these parameters of the policy, in their order."""
        names = {id(p): name for name, p in self.policy.named_parameters()}
        own = dict(self.module.named_parameters())
        return [own[names[id(parameter)]] for parameter in parameters]

    @torch.no_grad()
    def publish(self) -> None:
        """Gather the trained weights into the policy. Every process calls it, after each optimizer step."""
        whole = dict(self.policy.named_parameters())
        for name, parameter in self.module.named_parameters():
            if isinstance(parameter, DTensor):
                whole[name].copy_(parameter.full_tensor())

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over the policy's weights, after they were read from a checkpoint."""
        whole = dict(self.policy.named_parameters())
        for name, parameter in self.module.named_parameters():
            if isinstance(parameter, DTensor):
                parameter.copy_(distribute_tensor(whole[name].detach(), parameter.device_mesh, parameter.placements))


def _units(backbone: list[nn.Parameter], module: nn.Module) -> list[nn.Module]:
    """What is gathered and freed together: each block of the backbone's that has something to train.

    The rest, the head's blocks among it, is gathered once a pass: the head scores in as many parts as a process has
    rows for, and processes that gather differently often would wait for each other for ever.
    """
    trained = {p for p in backbone if p.requires_grad}
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    return [unit for blocks in lists for unit in blocks if not trained.isdisjoint(unit.parameters())]


class ShardedOptimizer:
    """An optimizer over sharded parameters whose saved state is that of a plain one: a checkpoint goes on with any
    number of processes, sharded or not."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, keeps: bool) -> None:
        self.optimizer, self.keeps = optimizer, keeps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def state_dict(self) -> dict[str, Any]:
        """Every process calls it; only those that ``keeps`` is true of get the tensors, on the CPU."""
        state = self.optimizer.state_dict()
        gathered = {key: {k: self._whole(v) for k, v in values.items()} for key, values in state["state"].items()}
        return {**state, "state": gathered}

    def _whole(self, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        whole = value.full_tensor()
        return whole.cpu() if self.keeps else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a plain optimizer's state, the same on every process."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        split = {
            key: {k: _split(v, parameters[key]) for k, v in values.items()} for key, values in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": split})


def _split(value: Any, parameter: Tensor) -> Any:
    """A moment like its parameter; a step's number as it is."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
