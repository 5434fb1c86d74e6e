"""Every setting of the trainer: its unit, its default, and the checks between settings.

A setting comes from the YAML file of ``--config``, the environment (``TRAINER_TRAIN__STEPS=100``) or the command line
(``--train.steps 100``), later ones winning. The paper is arXiv 2604.06966; "published" means its
released code for NOVA.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from reward_server.settings import Access, EmbeddedSettings

Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]

ENV_PREFIX = "TRAINER_"
ALIASES = {
    "reward-url": "reward.url",
    "reward": "reward.names",
    "resume": "checkpoint.resume",
    "run-dir": "report.run_dir",
    "seed": "train.seed",
    "steps": "train.steps",
}
"""Short command-line options and the settings they stand for."""


class UserError(ValueError):
    """A mistake that the user can put right: shown as one line, without a traceback."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class LoraSettings(Section):
    """Low-rank adapters on the backbone, trained in its place."""

    rank: Annotated[int, Field(ge=0)] = Field(default=0, description="rank of the adapters; 0: none, train the weights")
    alpha: Count = Field(default=32, description="adapters are scaled by alpha / rank")
    targets: list[str] = Field(
        default=[], description="ends of the names of the linear layers that get one; none: all of the backbone"
    )


class PolicyConfig(Section):
    """The image model."""

    name: str = Field(default="small", description="model family: the name of a file in trainer/policies")
    checkpoint: str | None = Field(
        default=None,
        description="weights to start from: a file, a run's or a checkpoint's folder, a folder in the official layout, "
        "or a hub id that was downloaded; none: those that come with the family",
    )
    ar_steps: Count | None = Field(default=None, description="autoregressive steps K; none: the family's default")
    diffusion_steps: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="diffusion sampling steps T; none: the family's default"
    )
    guidance: Annotated[float, Field(ge=1)] | None = Field(
        default=None, description="classifier-free guidance scale, 1 = none; none: the family's default"
    )
    options: dict[str, Any] = Field(default={}, description="what the family alone has: see its file")
    variance: Literal["recorded", "current"] = Field(
        default="recorded",
        description="std in log-probabilities where the head predicts it: the sampling policy's (published) or the "
        "current one's",
    )
    lora: LoraSettings = LoraSettings()
    device: Literal["auto", "cpu"] = Field(default="auto", description="auto: a GPU if there is one")

    @field_validator("checkpoint", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value


class PromptsConfig(Section):
    """Prompt files: .txt, .jsonl, .json, .csv or .parquet."""

    train: Path = Field(default=Path("configs/prompts/shapes_train.txt"), description="prompts to train on")
    heldout: Path = Field(default=Path("configs/prompts/shapes_heldout.txt"), description="prompts to evaluate on")
    text_key: str | None = Field(
        default=None, description="field that holds the text; none: the first of prompt, text, caption"
    )


class RewardConfig(Access):
    """Where images are scored, and what becomes of the scores."""

    url: str | None = Field(default=None, description="reward server, http://host:port; none: start one for this run")
    names: Annotated[dict[str, float], Field(min_length=1)] = Field(
        default={"shapes": 1.0},
        description="rewards and their weights: {shapes: 1.0}, or shapes, or shapes=1,other=0.5",
    )
    mix: Literal["sum", "gdpo"] = Field(
        default="sum",
        description="sum: weighted sum of raw scores; gdpo: each reward normalised within its group, then summed",
    )
    on_missing: Literal["drop", "stop"] = Field(
        default="drop", description="an image without a score: drop it from its group, or stop the run"
    )
    timeout_s: Seconds = Field(default=600.0, description="longest time to score one job, outages aside, seconds")
    give_up_after_s: Seconds = Field(
        default=600.0, description="how long to wait for a reward server that is away, seconds"
    )

    @field_validator("names", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        """``shapes``, ``shapes=1,other=0.5`` and lists of names are shorthand for a mapping."""
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, list):
            pairs = [str(part).partition("=") for part in value]
            return {name.strip(): weight or 1.0 for name, _, weight in pairs}
        return value

    @field_validator("names")
    @classmethod
    def _names_and_weights(cls, value: dict[str, float]) -> dict[str, float]:
        if "reward" in value:
            raise ValueError('"reward" names the weighted sum in logs and reports; give the reward another name')
        for name, weight in value.items():
            if not math.isfinite(weight):
                raise ValueError(f"the weight of {name} is {weight}; it must be a finite number")
        if not any(value.values()):
            raise ValueError("every weight is 0: there is nothing to learn from; give one reward another weight")
        return value

    @field_validator("url")
    @classmethod
    def _http(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"must start with http:// or https://, got {value!r}")
        return value


class AlgorithmConfig(Section):
    """MAR-GRPO and the variants that the paper compares (configs/train/variants)."""

    head: Literal["frozen", "trained", "only"] = Field(
        default="frozen",
        description="diffusion head: frozen (backbone trains), trained (both train), only (head trains alone)",
    )
    mte: bool = Field(default=True, description="multi-trajectory expectation on uncertain tokens")
    mte_trajectories: Count = Field(
        default=3, description="S, diffusion trajectories per token for MTE and uncertainty"
    )
    mte_source: Literal["fresh", "bridged"] = Field(
        default="fresh", description="MTE's transitions: fresh trajectories (published) or bridges of the kept tokens"
    )
    bridge_target: Literal["mean", "sample"] = Field(
        default="mean", description="where a bridge leads: the posterior's mean (less variance) or a sample of it"
    )
    top_fraction: Fraction = Field(default=0.3, description="share of an image's tokens that MTE applies to, 0 to 1")
    which: Literal["most", "least"] = Field(default="most", description="MTE on the most or the least uncertain tokens")
    consistency: bool = Field(
        default=True, description="keep only tokens that move towards the final image at an AR step"
    )
    consistency_threshold: float = Field(default=0.0, description="least rise in cosine similarity, -2 to 2")
    token_scope: Literal["predicted", "unknown"] = Field(
        default="unknown", description="score the tokens kept at an AR step, or all that were unknown then (published)"
    )
    kl_beta: Annotated[float, Field(ge=0)] = Field(
        default=0.01, description="weight of the KL to the reference; 0: none"
    )
    kl_form: Literal["means", "gaussian"] = Field(
        default="means", description="means: exp(d)-d-1 on the difference of means (published); gaussian: closed form"
    )
    ar_steps_per_update: Count = Field(
        default=12, description="AR steps trained per rollout, drawn at random (at most K)"
    )
    diffusion_steps: Literal["all"] | Count | list[Annotated[int, Field(ge=0)]] = Field(
        default="all",
        description="diffusion steps trained: all, a number drawn at random, or a list (0 = first after noise)",
    )
    diffusion_weights: Literal["uniform", "variance"] | list[Annotated[float, Field(ge=0)]] = Field(
        default="uniform", description="weight of each diffusion step 0..T-1; or uniform; or variance: by std^2"
    )
    clip: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=0.2, description="ratio clipped to [1 - clip, 1 + clip]; matters with depth or more than one update"
    )
    ratio: Literal["element", "token"] = Field(
        default="element", description="a probability ratio per latent channel (published) or per token"
    )
    score_guidance: Literal["as_sampled", "off"] = Field(
        default="as_sampled", description="classifier-free guidance when log-probabilities are computed"
    )
    updates_per_rollout: Count = Field(default=1, description="optimizer steps per rollout")

    @field_validator("diffusion_steps")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if isinstance(value, list) and (not value or len(set(value)) != len(value)):
            raise ValueError(f"a list of diffusion steps must hold each step once and at least one, got {value}")
        return value


class TrainConfig(Section):
    """Batches and the optimizer (AdamW)."""

    steps: Count = Field(default=1200, description="training steps (rollouts consumed)")
    prompts_per_step: Count = Field(default=16, description="prompts per step over all processes")
    group_size: Annotated[int, Field(ge=2)] = Field(default=8, description="G, images per prompt")
    depth: Annotated[int, Field(ge=0)] = Field(
        default=0, description="rollouts that may wait for scores while the next is sampled; 0: strictly on-policy"
    )
    micro_batch: Count = Field(default=64, description="images per backward pass and process (bounds memory)")
    head_rows: Count = Field(
        default=8192,
        description="transitions that the head scores at once; of more, activations are recomputed (bounds memory)",
    )
    rollout_batch: Count = Field(default=128, description="images sampled at once per process (bounds memory)")
    offload_rollouts: bool = Field(
        default=False, description="keep rollouts in the CPU's (pinned) memory; micro-batches go to the device"
    )
    learning_rate: Annotated[float, Field(gt=0)] = Field(default=2e-6, description="peak learning rate")
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), description="AdamW's betas")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.0, description="AdamW's weight decay")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(default=0, description="optimizer steps of linear warm-up")
    scheduler: Literal["constant", "cosine"] = Field(default="constant", description="learning rate after the warm-up")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(default=1.0, description="gradient norm is clipped to this")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(default=0, description="seed of prompts, samples and subsets")
    mixed_precision: Literal["no", "bf16", "fp16"] = Field(default="no", description="accelerate's mixed precision")
    threads: Count | None = Field(
        default=None, description="torch threads of all processes on a machine; none: cores left by the server"
    )


class CheckpointConfig(Section):
    """Saving and resuming."""

    every: Annotated[int, Field(ge=0)] = Field(default=50, description="steps between checkpoints; 0: at the end only")
    keep: Count = Field(default=2, description="newest checkpoints kept")
    resume: str = Field(
        default="none", description="none, auto (the run folder's newest checkpoint), or a checkpoint's path"
    )


class EvaluateConfig(Section):
    """Held-out evaluation before, during and after training."""

    every: Annotated[int, Field(ge=0)] = Field(
        default=0, description="steps between evaluations; 0: before and after only"
    )
    prompts: Annotated[int, Field(ge=0)] = Field(
        default=64, description="held-out prompts used, evenly spaced over the file; 0: no evaluation"
    )
    seeds: Count = Field(default=2, description="images per prompt")


class ReportConfig(Section):
    """The run's folder and what goes there."""

    run_dir: Path = Field(
        default=Path("runs/train"), description="run folder; a number is appended if it holds a run already"
    )
    project: str = Field(default="mar-grpo", description="project name given to the trackers")
    trackers: list[str] = Field(default=["tensorboard"], description="accelerate trackers: tensorboard, wandb, ...")
    sheet_prompts: Annotated[int, Field(ge=0)] = Field(
        default=8, description="held-out prompts on the contact sheets, with all their images; 0: no sheets"
    )
    snr_every: Annotated[int, Field(ge=0)] = Field(
        default=0, description="steps between gradient signal-to-noise measurements; 0: at the start only"
    )
    snr_groups: Annotated[int, Field(ge=0)] = Field(
        default=8, description="groups per process used to measure signal-to-noise, at least 2; 0: never measured"
    )


class Config(Section):
    """Train a masked autoregressive image model with MAR-GRPO against a reward server."""

    policy: PolicyConfig = PolicyConfig()
    prompts: PromptsConfig = PromptsConfig()
    reward: RewardConfig = RewardConfig()
    server: EmbeddedSettings = Field(
        default=EmbeddedSettings(),
        description="The reward server started for this run when reward.url is not set; it serves reward.names, each "
        "with its settings in server.rewards if there are any",
    )
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    report: ReportConfig = ReportConfig()

    @property
    def off_policy(self) -> bool:
        """Whether the policy that is updated can differ from the one that sampled."""
        return self.train.depth > 0 or self.algorithm.updates_per_rollout > 1

    @model_validator(mode="after")
    def _check(self) -> Config:
        a = self.algorithm
        if self.off_policy and a.clip is None:
            raise ValueError(
                "algorithm.clip must be a number when train.depth > 0 or algorithm.updates_per_rollout > 1: "
                "the policy then moves away from the one that sampled; set algorithm.clip, for example to 0.2"
            )
        if a.mte and a.top_fraction < 1 and a.mte_trajectories < 2:
            raise ValueError(
                "algorithm.mte_trajectories must be at least 2 when algorithm.top_fraction < 1: uncertainty is the "
                "spread between trajectories; raise it, or set algorithm.top_fraction to 1"
            )
        if self.policy.lora.rank and a.head != "frozen":
            raise ValueError(f"policy.lora trains the backbone alone: algorithm.head must be frozen, not {a.head}")
        if self.report.snr_groups == 1:
            raise ValueError("report.snr_groups must be 0 or at least 2: noise is the variance between groups")
        if os.path.isfile(self.report.run_dir):  # noqa: PTH113 (False for an impossible name)
            raise ValueError(f"report.run_dir {self.report.run_dir} is a file; name a folder")
        return self

    def check_model(self, ar_steps: int, diffusion_steps: int, stochastic_steps: Sequence[int]) -> None:
        """Checks that need the model: raises UserError if a setting names steps that it does not have.

        ``ar_steps`` is the model's K, ``diffusion_steps`` its T, ``stochastic_steps`` those of them that have noise.
        """
        a = self.algorithm
        trained = a.diffusion_steps if isinstance(a.diffusion_steps, list) else list(stochastic_steps)
        wrong = [step for step in trained if step not in stochastic_steps]
        if wrong:
            raise UserError(
                f"algorithm.diffusion_steps names {wrong}, but of the model's {diffusion_steps} diffusion steps those "
                f"with noise are {list(stochastic_steps)}: only they have a likelihood"
            )
        if isinstance(a.diffusion_weights, list) and len(a.diffusion_weights) != diffusion_steps:
            raise UserError(
                f"algorithm.diffusion_weights has {len(a.diffusion_weights)} entries, but the model has "
                f"{diffusion_steps} diffusion steps; give one weight per step"
            )
        if isinstance(a.diffusion_weights, list) and not any(a.diffusion_weights[step] for step in trained):
            raise UserError(
                f"algorithm.diffusion_weights is 0 at all trained steps, {trained}; nothing would be learnt"
            )
        if a.ar_steps_per_update > ar_steps:
            raise UserError(
                f"algorithm.ar_steps_per_update is {a.ar_steps_per_update}, but the model has {ar_steps} AR steps"
            )

    def check_processes(self, processes: int) -> None:
        """Raises UserError unless whole groups can be shared out evenly among ``processes``."""
        if self.train.prompts_per_step % processes:
            raise UserError(
                f"train.prompts_per_step is {self.train.prompts_per_step}, which {processes} processes cannot share "
                "evenly; make it a multiple of the number of processes"
            )


class Command(Config):
    """Score a checkpoint on the held-out prompts: means with 95 % intervals by bootstrap over prompts."""

    baseline: str | None = Field(
        default=None, description="another checkpoint: also report the paired difference to it"
    )
    output: Path | None = Field(default=None, description="file for everything as JSON, every score included")
