"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685) on the backbone's linear layers, through peft.

The adapters are what is trained; the weights under them stay as they are, so that the reference policy of the KL is
the same module with the adapters switched off. Saved weights are merged: they load anywhere. A checkpoint keeps the
adapters beside them, to go on from.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.algorithm.seeds import derive_seed
from trainer.algorithm.types import Gaussian, Queries, Trajectory
from trainer.config import LoraSettings, UserError
from trainer.families import as_module
from trainer.policies.base import Policy

ADAPTER = "default"


def add_adapters(policy: Policy, settings: LoraSettings, seed: int) -> list[nn.Parameter]:
    """Put adapters on the linear layers that ``targets`` name, freeze everything else, and return the adapters.

    A layer is a target if it is in the backbone and its name ends with a target, or if there are none. B starts at
    zero, so that the policy is what it was; A depends on ``seed`` alone. Raises UserError without peft, or if a target
    names no linear layer of the backbone.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise UserError('policy.lora needs peft, which is not installed: pip install "mar-grpo[lora]"') from error
    module = as_module(policy)
    backbone = {id(parameter) for parameter in policy.backbone_parameters()}
    linear = [n for n, m in module.named_modules() if isinstance(m, nn.Linear) and id(m.weight) in backbone]
    for target in settings.targets:
        if not any(_matches(name, target) for name in linear):
            kinds = sorted({re.sub(r"^.*\.\d+\.", "", name) for name in linear})
            raise UserError(f"policy.lora.targets: no linear layer's name ends with {target!r}; ends: {kinds}")
    chosen = [n for n in linear if not settings.targets or any(_matches(n, target) for target in settings.targets)]
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=chosen, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "adapters"))
        inject_adapter_in_model(config, module, adapter_name=ADAPTER)
    module.requires_grad_(False)
    adapters = [parameter for _, parameter in _adapters(module)]
    for parameter in adapters:
        parameter.requires_grad_(True)
    return adapters


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _layers(module: nn.Module) -> list[tuple[str, Any]]:
    """The adapted layers: name and layer."""
    return [(name, layer) for name, layer in module.named_modules() if hasattr(layer, "lora_A")]


def _adapters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in module.named_parameters() if ".lora_A." in n or ".lora_B." in n]


class WithoutAdapters:
    """The policy that the adapters started from, as a reference: no second copy of the weights."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def forward(self, trajectory: Trajectory, ar_step: int, queries: Queries, guided: bool) -> Gaussian:
        """As :meth:`trainer.policies.base.Policy.forward`, adapters switched off."""
        with _scaled(as_module(self.policy), 0.0):
            return self.policy.forward(trajectory, ar_step, queries, guided)


@contextmanager
def _scaled(module: nn.Module, scale: float) -> Iterator[None]:
    """peft's own switch would change ``requires_grad``, which a wrapper for several processes must not see."""
    layers = [layer for _, layer in _layers(module)]
    for layer in layers:
        layer.set_scale(ADAPTER, scale)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


class Adapters:
    """The adapters as a part of a checkpoint (:class:`trainer.checkpoints.Stateful`)."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def state_dict(self) -> dict[str, Any]:
        return {name: parameter.detach() for name, parameter in _adapters(as_module(self.policy))}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Raises KeyError or RuntimeError if the state is of other adapters."""
        own = dict(_adapters(as_module(self.policy)))
        if own.keys() != state.keys():
            raise KeyError("adapters of other layers: policy.lora was another then")
        for name, parameter in own.items():
            parameter.copy_(state[name])


class Merged:
    """The policy as it is saved: adapters added to the weights under them."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def save(self, path: Path, note: dict[str, str] | None = None) -> None:
        """Write weights that the family's ``load`` reads, without peft."""
        merged(self.policy).save(path, note)

    def restore(self, path: Path) -> None:
        """Nothing: the weights under the adapters are those that the run starts from, and a checkpoint keeps the
        adapters themselves (:class:`Adapters`)."""


@torch.no_grad()
def merged(policy: Policy) -> Policy:
    """A plain policy of the same function; it shares the weights that have no adapter."""
    module = as_module(policy)
    shared = [*module.parameters(), *module.buffers()]
    plain = copy.deepcopy(policy, {id(tensor): tensor for tensor in shared})
    plain_module = as_module(plain)
    for name, layer in _layers(plain_module):
        linear = layer.get_base_layer()
        weight = linear.weight + layer.get_delta_weight(ADAPTER)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        plain_module.set_submodule(name, linear)
    return plain
