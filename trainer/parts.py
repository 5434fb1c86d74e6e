"""Build what the loop needs from the settings: processes, reward server and client, policy, optimizer."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list
from torch import nn

from reward_server.embedded import EmbeddedServer, EmbeddedServerError, available_cores
from reward_server.settings import EmbeddedSettings, RewardSettings
from trainer.checkpoints import CheckpointError
from trainer.config import Config, UserError
from trainer.evaluate import TOTAL
from trainer.policies.base import Policy
from trainer.prompts import Prompt, load_prompts
from trainer.rewards import RewardClient, RewardError, RewardServerLost

C = TypeVar("C", bound=Config)
logger = logging.getLogger(__name__)
SHOWN_ERRORS = (CheckpointError, RewardError, EmbeddedServerError)
"""Errors of the parts whose message tells the user all there is to know."""


def build_accelerator(config: Config, run_dir: Path | None = None) -> Accelerator:
    """Devices, processes, mixed precision and trackers. ``run_dir`` is where trackers write; None: no trackers."""
    if "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        raise UserError(
            "accelerate launch was asked for several processes, but without GPUs it starts only one; use: "
            "accelerate launch --config_file configs/accelerate/cpu.yaml --num_processes N trainer/run.py ..."
        )
    if run_dir is not None:
        _check_trackers(config.report.trackers)
    return Accelerator(
        cpu=config.policy.device == "cpu" or not torch.cuda.is_available(),
        mixed_precision=config.train.mixed_precision,
        log_with=(list(config.report.trackers) or None) if run_dir is not None else None,
        project_dir=run_dir,
        # Without guidance in scoring, nothing may reach the parameters of the unconditional half.
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=config.algorithm.score_guidance == "off")
        ],
    )


def _check_trackers(names: Sequence[str]) -> None:
    """accelerate itself passes over a tracker whose package is not installed."""
    installed = [str(tracker) for tracker in get_available_trackers()]
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(LOGGER_TYPE_TO_CLASS)
            raise UserError(f"report.trackers: there is no tracker {name!r}; there are: {known}")
        if name not in installed:
            raise UserError(f"report.trackers: {name} is not installed; pip install {name.replace('_', '-')}")


@contextmanager
def reward_client(config: Config, accelerator: Accelerator) -> Iterator[RewardClient]:
    """A client of the reward server at ``reward.url``, or of one that lives as long as this context.

    The main process starts the server and tells the others where it is. Sets torch's number of threads, too: what
    the server leaves of the cores, shared among the processes of this machine.
    """
    with ExitStack() as stack:
        found: list[Any] = [None]
        failure: Exception | None = None
        server: EmbeddedServer | None = None
        if accelerator.is_main_process:
            try:
                token = _token(config)
                if config.reward.url is None:
                    server = stack.enter_context(EmbeddedServer(_embedded_settings(config)))
                    found = [(server.url, server.token, server.trainer_threads, server.names)]
                else:
                    found = [(config.reward.url, token, available_cores(), {})]
            except Exception as error:  # told to the other processes, which wait for the address, then raised
                failure = error
        broadcast_object_list(found)
        if failure is not None:
            raise failure
        if found[0] is None:
            raise UserError("the main process could not start the reward server")
        url, token, cores, names = found[0]
        torch.set_num_threads(max(1, (config.train.threads or cores) // _local_processes()))
        client = stack.enter_context(
            RewardClient(
                url,
                token,
                {names.get(name, name): weight for name, weight in config.reward.names.items()},
                timeout_s=config.reward.timeout_s,
                give_up_after_s=config.reward.give_up_after_s,
                # a server of our own that is down for good need not be waited for
                while_away=(lambda: None) if server is None else partial(_check_up, server),
            )
        )
        yield client


def with_served_names(config: C, client: RewardClient) -> C:
    """The settings with rewards named as the server names them: ``module:Class`` is served under the class's name."""
    served = dict(zip(client.rewards, config.reward.names.values(), strict=True))
    if TOTAL in served or len(served) < len(config.reward.names):
        raise UserError(f"reward.names are served as {client.rewards}: names must differ, also from {TOTAL!r}")
    return config.model_copy(update={"reward": config.reward.model_copy(update={"names": served})})


def check_relative(config: Config, client: RewardClient, accelerator: Accelerator) -> None:
    """What rewards that compare the images of a prompt with one another mean for the held-out evaluation.

    Call it after ``client.check()``. Raises UserError where there is one image to a prompt, so that none gets a score.
    """
    if not client.relative or config.evaluate.prompts == 0:
        return
    names = ", ".join(client.relative)
    if config.evaluate.seeds == 1:
        raise UserError(
            f"evaluate.seeds is 1, but {names} compares the images of a prompt with one another: make it at least 2, "
            "or evaluate.prompts 0"
        )
    if accelerator.is_main_process:
        logger.warning(
            "%s compares the images of a prompt with one another: held-out, its mean says nothing about progress; to "
            "see that, name another reward beside it (with weight 0 if it is not to be learned)",
            names,
        )


def _token(config: Config) -> str | None:
    """Of the server that is used, as set. Raises UserError when it is empty or cannot be read."""
    section, access = ("server", config.server) if config.reward.url is None else ("reward", config.reward)
    try:
        return access.bearer_token()
    except ValueError as error:
        raise UserError(f"{section}.{error}") from error


def _check_up(server: EmbeddedServer) -> None:
    try:
        server.check()
    except EmbeddedServerError as error:
        raise RewardServerLost(str(error)) from error


def _embedded_settings(config: Config) -> EmbeddedSettings:
    """Of a server that serves just the rewards that are trained on."""
    known = config.server.rewards
    rewards = {name: known.get(name, RewardSettings()) for name in config.reward.names}
    settings: EmbeddedSettings = config.server.model_copy(update={"rewards": rewards})
    return settings


def _local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def build_optimizer(
    config: Config, parameters: list[nn.Parameter]
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW, and its learning rate: linear warm-up, then constant or a cosine to zero at the last update."""
    train = config.train
    updates = train.steps * config.algorithm.updates_per_rollout

    def factor(update: int) -> float:
        if update < train.warmup_steps:
            return (update + 1) / (train.warmup_steps + 1)
        if train.scheduler == "constant":
            return 1.0
        done = (update - train.warmup_steps) / max(1, updates - train.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    optimizer = torch.optim.AdamW(
        parameters, lr=train.learning_rate, betas=train.betas, weight_decay=train.weight_decay
    )
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def renew_settings(config: Config, optimizer: Any, scheduler: Any) -> None:
    """Put this run's settings in the place of those that came with a checkpoint's states.

    ``optimizer`` and ``scheduler`` are :func:`build_optimizer`'s, as they are or as accelerate wrapped them.
    """
    train = config.train
    rate = train.learning_rate * scheduler.lr_lambdas[0](scheduler.last_epoch)
    for group in optimizer.param_groups:
        group |= {"initial_lr": train.learning_rate, "lr": rate}
        group |= {"betas": train.betas, "weight_decay": train.weight_decay}
    scheduler.load_state_dict({**scheduler.state_dict(), "base_lrs": [train.learning_rate], "_last_lr": [rate]})


def read_prompts(path: Path, text_key: str | None) -> list[Prompt]:
    """Prompts of a file; raises UserError naming file and line when it cannot be read."""
    try:
        return load_prompts(path, text_key)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error


def check_prompts(policy: Policy, prompts: Sequence[Prompt], path: Path) -> None:
    """Raises UserError naming the file, the prompt and the reason if the policy cannot read one of them."""
    try:
        policy.check_prompts([prompt.text for prompt in prompts])
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
