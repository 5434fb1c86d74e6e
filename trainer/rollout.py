"""One rollout: this process's share of a step's images, what the objective needs of them, and their scores.

A rollout is a function of the policy, the run's seed and the step's number alone: the same images come out for any
number of processes and any batch size, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from trainer.algorithm.objective import Objective, StepQueries, plan, queries
from trainer.algorithm.schedule import choose_ar_steps, choose_diffusion_steps, diffusion_step_weights
from trainer.algorithm.seeds import derive_seed, generator
from trainer.algorithm.transitions import Schedule, gaussian_log_prob
from trainer.algorithm.types import Gaussian, Trajectory
from trainer.checkpoints import Pending
from trainer.config import AlgorithmConfig, Config
from trainer.evaluate import Flags, Floats, columns, share
from trainer.policies.base import Policy
from trainer.prompts import Prompt, PromptSampler
from trainer.rewards import RewardClient, RewardScores


@dataclass(frozen=True)
class Sampler:
    """Makes rollouts: the policy and everything that they depend on."""

    config: Config
    objective: Objective
    policy: Policy
    prompts: PromptSampler
    client: RewardClient
    accelerator: Accelerator

    def sample(self, index: int) -> Rollout:
        """Sample the rollout of step ``index`` and send its images to be scored.

        Which AR steps will be trained is settled first, so that full maps are recorded there and nowhere else.
        """
        rollout = self._empty(index)
        batch, extra = self.config.train.rollout_batch, self.objective.fresh_trajectories
        parts = []
        with torch.no_grad(), self.accelerator.autocast():
            for start in range(0, len(rollout.prompts), batch):
                texts = [p.text for p in rollout.prompts[start : start + batch]]
                seeds = rollout.seeds[start : start + batch]
                part = self.policy.rollout(
                    texts,
                    seeds,
                    full_chains_at=self.objective.full_chains_at(rollout.ar_steps),
                    full_latents_at=self.objective.full_latents_at(rollout.ar_steps),
                )
                if extra:
                    part = replace(part, extra_chains=self.policy.extra_trajectories(part, extra, seeds))
                part = replace(part, stitched=part.stitched[..., :0])  # has served: extra trajectories start from it
                parts.append(part.to(self.home))
        self.keep(rollout, Trajectory.cat(parts))
        self.submit(rollout)
        if self.config.off_policy:
            self._record_log_probs(rollout)
        return rollout

    def submit(self, rollout: Rollout) -> None:
        """Send the images to the reward server; their scores are computed while this process goes on.

        In one request: a relative reward compares the images of a group, and whole groups are what a process has.
        """
        batch, tokens = self.config.train.rollout_batch, rollout.trajectory.tokens
        parts = [tokens[i : i + batch].to(self.accelerator.device) for i in range(0, len(tokens), batch)]
        images = np.concatenate([self.policy.decode(part) for part in parts])
        texts = [p.text for p in rollout.prompts]
        rollout.job = self.client.submit(images, texts, [p.metadata for p in rollout.prompts])

    @property
    def home(self) -> torch.device:
        """Where rollouts wait."""
        return torch.device("cpu") if self.config.train.offload_rollouts else self.accelerator.device

    def keep(self, rollout: Rollout, trajectory: Trajectory) -> None:
        """Let the rollout have its trajectory, and choose the tokens that MTE applies to."""
        pin = self.home.type == "cpu" and self.accelerator.device.type == "cuda"
        rollout.trajectory = trajectory.pinned() if pin else trajectory
        rollout.uncertain = plan(rollout.trajectory, self.objective)

    def part(self, rollout: Rollout, images: slice, ar_step: int) -> tuple[Trajectory, Tensor]:
        """What scoring some images at an AR step reads, on the device: their trajectory and their uncertain tokens."""
        device = self.accelerator.device
        trajectory = rollout.trajectory.at(ar_step).select(images)
        return trajectory.to(device), rollout.uncertain[images].to(device)

    def restore(self, pending: Pending) -> Rollout:
        """A rollout as :meth:`Rollout.pending` saved it; images whose scores had not come are sent again."""
        rollout = self._empty(pending.values["index"])
        groups: dict[str, dict[str, Any]] = {"trajectory": {}, "old": {}, "std": {}, "score": {}, "valid": {}}
        for name, tensor in pending.tensors.items():
            group, _, rest = name.partition(":")
            groups[group][rest] = tensor.to(self.accelerator.device)
        self.keep(rollout, Trajectory.from_tensors(groups["trajectory"]).to(self.home))
        rollout.old_log_probs, rollout.old_stds = groups["old"], groups["std"]
        if groups["score"]:
            scores, valid = ({k: v.cpu().numpy() for k, v in groups[g].items()} for g in ("score", "valid"))
            rollout.scores = (scores, valid)
        else:
            self.submit(rollout)
        return rollout

    def passes(self, rollout: Rollout, ar_step: int) -> Iterator[tuple[int, slice, Trajectory, StepQueries]]:
        """The micro-batches of one AR step: number, images, their trajectory, and the transitions to score."""
        train, schedule = self.config.train, self.policy.schedule
        steps = choose_diffusion_steps(
            schedule,
            self.config.algorithm.diffusion_steps,
            generator(train.seed, "diffusion steps", rollout.index, ar_step),
        )
        weights = step_weights(schedule, self.config.algorithm)
        for number, start in enumerate(range(0, len(rollout.seeds), train.micro_batch)):
            images = slice(start, start + train.micro_batch)
            part, uncertain = self.part(rollout, images, ar_step)
            rows = queries(
                part,
                ar_step,
                steps,
                uncertain,
                self.objective,
                schedule=schedule,
                step_weights_T=weights,
                seeds=rollout.seeds[images],
            )
            yield number, images, part, rows

    def scored(self, new: Gaussian, recorded_std: Tensor | None = None) -> Gaussian:
        """The distribution whose log-probabilities count: with ``policy.variance: recorded``, its std is that of the
        policy that sampled (``recorded_std``; None: the two are the same still), and no gradient goes through it."""
        if self.config.policy.variance == "current":
            return new
        return replace(new, std=new.std.detach() if recorded_std is None else recorded_std)

    @property
    def guided(self) -> bool:
        """Whether log-probabilities are computed with classifier-free guidance."""
        return self.config.algorithm.score_guidance == "as_sampled"

    def _empty(self, index: int) -> Rollout:
        """Prompts, seeds and AR steps of this process's groups: what follows from the step's number."""
        train = self.config.train
        batch = self.prompts.batch(index)
        members = [(g, m) for g in share(len(batch), self.accelerator) for m in range(train.group_size)]
        chosen = self.config.algorithm.ar_steps_per_update
        return Rollout(
            index=index,
            ar_steps=choose_ar_steps(self.policy.ar_steps, chosen, generator(train.seed, "AR steps", index)),
            prompts=[batch[g] for g, _ in members],
            seeds=[derive_seed(train.seed, "rollout", index, g, m) for g, m in members],
        )

    @torch.no_grad()
    def _record_log_probs(self, rollout: Rollout) -> None:
        """Log-probabilities under the policy that sampled, before any update changes it."""
        for ar_step in rollout.ar_steps:
            for number, _, part, step in self.passes(rollout, ar_step):
                with self.accelerator.autocast():
                    gaussian = self.policy.forward(part, ar_step, step.rows, self.guided)
                rollout.old_log_probs[f"{ar_step}/{number}"] = gaussian_log_prob(step.rows.target, gaussian)
                if gaussian.std.shape[-1] > 1 and self.config.policy.variance == "recorded":
                    rollout.old_stds[f"{ar_step}/{number}"] = gaussian.std


@dataclass
class Rollout:
    """This process's images of one step: groups of G consecutive ones share a prompt."""

    index: int
    """The training step that it is for, from 0"""
    ar_steps: list[int]
    """The AR steps to be trained"""
    prompts: list[Prompt]
    seeds: list[int]
    trajectory: Trajectory = field(init=False)
    uncertain: Tensor = field(init=False)
    """(B, N) bool: tokens that MTE applies to"""
    old_log_probs: dict[str, Tensor] = field(default_factory=dict)
    """``AR step/micro-batch`` -> (Q, C); empty when updates are strictly on-policy"""
    old_stds: dict[str, Tensor] = field(default_factory=dict)
    """The same of the std, where the head predicts it and ``policy.variance`` is recorded"""
    job: Future[RewardScores] | None = None
    scores: tuple[dict[str, Floats], dict[str, Flags]] | None = None
    """(B,) numbers and validity by name (see :func:`trainer.evaluate.columns`), once received"""
    reason: str | None = None
    """Why the first image without a score has none"""
    revisions: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, dict[str, str]] = field(default_factory=dict)
    """Of the reward models that scored, as the scores came with them"""

    def collect(self, weights: dict[str, float]) -> tuple[dict[str, Floats], dict[str, Flags]]:
        """The scores, waiting for them if need be. Raises RewardError if they cannot be had."""
        if self.scores is None:
            assert self.job is not None
            answer = self.job.result()
            self.scores = columns(answer, weights)
            self.revisions, self.provenance = answer.revisions, answer.provenance
            self.reason = answer.reason
        return self.scores

    def pending(self, weights: dict[str, float]) -> Pending:
        """For a checkpoint. Scores are kept if they have come and none is missing; else the images go out again."""
        tensors = {f"trajectory:{k}": v for k, v in self.trajectory.tensors().items()}
        tensors |= {f"old:{k}": v for k, v in self.old_log_probs.items()}
        tensors |= {f"std:{k}": v for k, v in self.old_stds.items()}
        if self.job is not None and self.job.done() and self.job.exception() is None:
            self.collect(weights)
        if self.scores is not None and all(valid.all() for valid in self.scores[1].values()):
            tensors |= {f"score:{k}": _tensor(v) for k, v in self.scores[0].items()}
            tensors |= {f"valid:{k}": _tensor(v) for k, v in self.scores[1].items()}
        return Pending({"index": self.index}, tensors)


def _tensor(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def step_weights(schedule: Schedule, algorithm: AlgorithmConfig) -> Tensor:
    """(T,) weight of each diffusion step, mean 1 over those that may be trained."""
    chosen = algorithm.diffusion_steps
    allowed = chosen if isinstance(chosen, list) else schedule.stochastic_steps
    return diffusion_step_weights(schedule, algorithm.diffusion_weights, allowed)


def build_objective(algorithm: AlgorithmConfig) -> Objective:
    """The settings of the loss as the pure functions take them."""
    return Objective(
        mte_trajectories=algorithm.mte_trajectories if algorithm.mte else 0,
        mte_source=algorithm.mte_source,
        bridge_target=algorithm.bridge_target,
        top_fraction=algorithm.top_fraction,
        which=algorithm.which,
        consistency=algorithm.consistency,
        consistency_threshold=algorithm.consistency_threshold,
        token_scope=algorithm.token_scope,
        clip_range=None if algorithm.clip is None else (algorithm.clip, algorithm.clip),
        ratio=algorithm.ratio,
        kl_beta=algorithm.kl_beta,
        kl_form=algorithm.kl_form,
    )
