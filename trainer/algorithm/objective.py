"""The MAR-GRPO objective: which transitions of a rollout are scored, with what weight, and the loss of their scores.

For each chosen AR step k of K' and its chosen diffusion steps s of D, with r the likelihood ratio, A the advantage::

    J_k  =  1/P_k  sum over images with signal, tokens kept by the masks  1/D sum_s w_s  mean over channels of
                r A                       where the token is certain (the rollout's own trajectory)
                mean over S of r_i A      where it is uncertain (multi-trajectory expectation, MTE)
    KL_k =  1/M_k  sum over images, tokens of the completion mask         1/D sum_s w_s  mean over channels of kl
    loss =  1/K'   sum_k -(J_k - beta KL_k)

P_k and M_k count (image, token) pairs of the *global* batch: count first (:func:`counts`), sum over micro-batches and
processes, and any split of the images then gives the same gradient, as a sum over the parts (a DDP wrapper averages:
multiply by the number of processes). Only rows with a weight are ever built: masks come before the head.

Against MAR-GRPO's code (arXiv 2604.06966): it pools each AR step's sum over the elements of its mask, images, channels
and diffusion steps, as here, but on each process by itself; it adds the AR steps up where we average (only gradient
clipping can tell); it counts images of groups with equal rewards in P_k; its masks are per latent pixel.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.algorithm.seeds import generator
from trainer.algorithm.selection import (
    TokenScope,
    Which,
    completion_mask,
    consistency_mask,
    uncertain_mask,
    uncertainty,
)
from trainer.algorithm.transitions import Schedule, gaussian_log_prob
from trainer.algorithm.types import Gaussian, Queries, Trajectory


@dataclass(frozen=True)
class Objective:
    """The settings of the loss; the defaults are MAR-GRPO's. Raises ValueError for values that make no sense."""

    mte_trajectories: int = 3
    """S; 0 turns MTE off: every token is scored on the rollout's own trajectory."""
    mte_source: Literal["fresh", "bridged"] = "fresh"
    """``fresh`` (published): trajectories from new noise and the same condition. ``bridged``: draws of
    q(x_s, x_{s+1} | x_0) of the token that was kept, whose average log-probability is its ELBO."""
    bridge_target: Literal["mean", "sample"] = "mean"
    """The bridge's x_{s+1}: the posterior's mean, which gives the ELBO's gradient without the posterior's noise, or
    a sample of it."""
    top_fraction: float = 0.3
    """Share of each image's tokens that MTE applies to; 1: all."""
    which: Which = "most"
    """Take that share from the most or the least uncertain."""
    consistency: bool = True
    consistency_threshold: float = 0.0
    token_scope: TokenScope = "unknown"
    """The completion mask: all tokens unknown at the AR step (published), or only those it predicts and keeps."""
    clip_range: tuple[float, float] | None = None
    """(low, high): the ratio is clipped to [1 - low, 1 + high]; None: not at all (published, one update a rollout)."""
    ratio: Literal["element", "token"] = "element"
    """One ratio per channel, averaged (published), or one per token: exp of the sum over channels. On policy the
    latter's gradient is C times the former's."""
    kl_beta: float = 0.01
    kl_form: Literal["means", "gaussian"] = "means"
    """``means`` (published): exp(d) - d - 1 of d = reference mean - mean. ``gaussian``: KL(policy || reference)."""

    def __post_init__(self) -> None:
        if self.mte_trajectories < 0:
            raise ValueError(f"mte_trajectories must not be negative, got {self.mte_trajectories}")
        if not 0 < self.top_fraction <= 1:
            raise ValueError(f"top_fraction must be in (0, 1], got {self.top_fraction}; mte_trajectories=0 is MTE off")
        if self.needs_uncertainty and self.mte_trajectories < 2:
            raise ValueError("choosing uncertain tokens needs mte_trajectories >= 2; or set top_fraction=1")
        if self.clip_range is not None and not (0 < self.clip_range[0] <= 1 and self.clip_range[1] > 0):
            raise ValueError(f"clip_range must be (low in (0, 1], high > 0), got {self.clip_range}")
        if not self.kl_beta >= 0:
            raise ValueError(f"kl_beta must not be negative, got {self.kl_beta}")

    @property
    def needs_uncertainty(self) -> bool:
        return self.mte_trajectories > 0 and self.top_fraction < 1

    @property
    def fresh_trajectories(self) -> int:
        """How many extra trajectories the rollout must draw: bridges replace them, but uncertainty needs them."""
        return self.mte_trajectories if self.mte_source == "fresh" or self.needs_uncertainty else 0

    def full_chains_at(self, ar_steps: Collection[int]) -> list[int]:
        """The AR steps at which the rollout must record the chains of all unknown tokens."""
        mte_only = self.mte_trajectories > 0 and self.top_fraction == 1 and self.kl_beta == 0
        return [] if self.token_scope == "predicted" or mte_only else sorted(ar_steps)

    def full_latents_at(self, ar_steps: Collection[int]) -> list[int]:
        """The AR steps at which the rollout must record the latent map: k and k-1 for consistency at k >= 2."""
        if not self._checks_consistency:
            return []
        return sorted({step for k in ar_steps if k >= 2 for step in (k - 1, k)})

    @property
    def _checks_consistency(self) -> bool:
        # tokens predicted at this very step are always kept: with that scope there is nothing to check
        return self.consistency and self.token_scope == "unknown"


@dataclass(frozen=True)
class StepQueries:
    """The rows of one AR step: one call of the policy's forward scores ``rows``."""

    rows: Queries
    policy_weight: Tensor
    """(Q,) float32: weight in P_k J_k; 0 for rows that only the KL needs."""
    kl_weight: Tensor
    """(Q,) float32: weight in M_k KL_k; 0 for MTE rows, and for all when beta is 0."""

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, index: Tensor | slice) -> StepQueries:
        return StepQueries(self.rows.select(index), self.policy_weight[index], self.kl_weight[index])

    def with_signal(self, signal_B: Tensor) -> tuple[StepQueries, Tensor]:
        """Without the policy rows of images that carry no signal (B,) bool; and the (Q',) index of the rows that
        remain, to pick log-probabilities recorded before the scores were known."""
        policy_weight = self.policy_weight * signal_B.to(self.policy_weight.device)[self.rows.image]
        index = ((policy_weight > 0) | (self.kl_weight > 0)).nonzero().squeeze(1)
        return StepQueries(self.rows, policy_weight, self.kl_weight).select(index), index

    def kl_rows(self) -> Tensor:
        """Index of the rows that the KL needs: the only ones that the reference policy must score."""
        return (self.kl_weight > 0).nonzero().squeeze(1)

    def kl_queries(self) -> Queries:
        """What the reference policy must score."""
        return self.rows.select(self.kl_rows())


@dataclass(frozen=True)
class Counts:
    """The denominators of one AR step, in (image, token) pairs. Sums over splits add up."""

    policy: int
    """P_k: kept tokens of images with signal."""
    kl: int
    """M_k: completion-mask tokens of all images."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.policy + other.policy, self.kl + other.kl)


@dataclass(frozen=True)
class StepLoss:
    """One AR step's loss for one split of the images: ``loss``, ``policy``, ``kl`` add up over splits and AR steps."""

    loss: Tensor
    """Scalar with gradient: -(policy - beta kl)."""
    policy: Tensor
    """Scalar: this split's part of the mean surrogate J / K'. Its size says little: on policy it is a mean of A."""
    kl: Tensor
    """Scalar: this split's part of KL / K'; 0 when beta is 0."""
    ratio_mean: Tensor
    """Scalar over the elements (or tokens) of the policy rows; 1 when there are none."""
    ratio_max: Tensor
    clip_fraction: Tensor
    """Scalar in [0, 1]: share of ratios whose gradient the clip took away."""
    policy_rows: int


def plan(trajectory: Trajectory, objective: Objective) -> Tensor:
    """(B, N) bool: the tokens that MTE applies to. Once per rollout, image by image."""
    if objective.mte_trajectories == 0:
        return torch.zeros_like(trajectory.predicted_at, dtype=torch.bool)
    if not objective.needs_uncertainty:
        return torch.ones_like(trajectory.predicted_at, dtype=torch.bool)
    final_BSNC = _extra_chains(trajectory)[:, :, :, -1]
    return uncertain_mask(uncertainty(final_BSNC), objective.top_fraction, objective.which)


def token_masks(trajectory: Trajectory, ar_step: int, objective: Objective) -> tuple[Tensor, Tensor]:
    """(B, N) bool each: the completion mask, and the tokens of it that the policy term keeps."""
    completion_BN = completion_mask(trajectory.predicted_at, ar_step, objective.token_scope)
    if ar_step not in objective.full_latents_at([ar_step]):
        return completion_BN, completion_BN
    consistent_BN = consistency_mask(
        _recorded(trajectory.full_latents, ar_step, "full_latents_at"),
        _recorded(trajectory.full_latents, ar_step - 1, "full_latents_at"),
        trajectory.tokens,
        trajectory.predicted_at,
        ar_step,
        objective.consistency_threshold,
    )
    return completion_BN, completion_BN & consistent_BN


def counts(trajectory: Trajectory, ar_step: int, objective: Objective, signal_B: Tensor) -> Counts:
    """The denominators of these images' part; sum them over the global batch before :func:`loss`."""
    completion_BN, kept_BN = token_masks(trajectory, ar_step, objective)
    return Counts(int((kept_BN & signal_B.to(kept_BN.device)[:, None]).sum()), int(completion_BN.sum()))


def queries(
    trajectory: Trajectory,
    ar_step: int,
    diffusion_steps: Sequence[int],
    uncertain_BN: Tensor,
    objective: Objective,
    *,
    schedule: Schedule,
    step_weights_T: Tensor,
    seeds: Sequence[int],
) -> StepQueries:
    """The transitions to score at an AR step, for all images whatever their advantage.

    ``uncertain_BN`` is :func:`plan`'s. ``step_weights_T``: see
    :func:`trainer.algorithm.schedule.diffusion_step_weights`; steps of weight 0 make no rows.
    ``seeds``: one per image; the noise of an image's bridges depends on its seed and the AR step alone.
    Raises ValueError where the rollout did not record what the objective needs.
    """
    completion_BN, kept_BN = token_masks(trajectory, ar_step, objective)
    device = trajectory.tokens.device
    steps_D = torch.tensor([s for s in diffusion_steps if step_weights_T[s] > 0], dtype=torch.int64, device=device)
    weights_D = step_weights_T.to(device)[steps_D] / len(diffusion_steps)

    policy_BN = kept_BN & ~uncertain_BN
    single_BN = completion_BN if objective.kl_beta > 0 else policy_BN
    image_P, token_P = single_BN.nonzero(as_tuple=True)
    if objective.token_scope == "predicted" or len(image_P) == 0:
        chain_BNTC = trajectory.chain
    else:
        chain_BNTC = _recorded(trajectory.full_chains, ar_step, "full_chains_at")
    image_P1, token_P1 = image_P[:, None], token_P[:, None]
    x_PDC = chain_BNTC[image_P1, token_P1, steps_D]
    target_PDC = chain_BNTC[image_P1, token_P1, steps_D + 1]
    single = _flatten(image_P, token_P, steps_D, x_PDC[:, None], target_PDC[:, None])
    single_weight_PD = weights_D.expand(len(image_P), -1)
    policy_weight = (single_weight_PD * policy_BN[image_P, token_P][:, None]).flatten()
    kl_weight = single_weight_PD.flatten() * (objective.kl_beta > 0)

    mte_BN = kept_BN & uncertain_BN
    if not bool(mte_BN.any()):
        return StepQueries(single, policy_weight, kl_weight)
    if objective.mte_source == "fresh":
        mte = _fresh(trajectory, mte_BN, steps_D)
    else:
        mte = _bridged(
            trajectory, mte_BN, steps_D, objective, schedule, [generator(s, "bridge", ar_step) for s in seeds]
        )
    mte_weight = weights_D.repeat(len(mte) // max(len(steps_D), 1)) / objective.mte_trajectories
    return StepQueries(
        Queries.cat([single, mte]),
        torch.cat([policy_weight, mte_weight]),
        torch.cat([kl_weight, torch.zeros_like(mte_weight)]),
    )


def _fresh(trajectory: Trajectory, mte_BN: Tensor, steps_D: Tensor) -> Queries:
    """Rows of the recorded extra trajectories."""
    chains_BSNTC = _extra_chains(trajectory)
    image_P, token_P = mte_BN.nonzero(as_tuple=True)
    image_P11, token_P11 = image_P[:, None, None], token_P[:, None, None]
    s_S1 = torch.arange(chains_BSNTC.shape[1], device=steps_D.device)[:, None]
    x_PSDC = chains_BSNTC[image_P11, s_S1, token_P11, steps_D]
    target_PSDC = chains_BSNTC[image_P11, s_S1, token_P11, steps_D + 1]
    return _flatten(image_P, token_P, steps_D, x_PSDC, target_PSDC)


def _bridged(
    trajectory: Trajectory,
    mte_BN: Tensor,
    steps_D: Tensor,
    objective: Objective,
    schedule: Schedule,
    generators: Sequence[torch.Generator],
) -> Queries:
    """Rows drawn from q(x_s, x_{s+1} | x_0) of the final tokens."""
    image_P, token_P = mte_BN.nonzero(as_tuple=True)
    channels = trajectory.tokens.shape[-1]
    per_token = (objective.mte_trajectories, len(steps_D), 2, channels)
    noise_PSD2C = torch.cat(
        [
            torch.randn(count, *per_token, generator=source)
            for count, source in zip(mte_BN.sum(dim=1).tolist(), generators, strict=True)
        ]
    ).to(trajectory.tokens)
    noise_a_PSDC, noise_b_PSDC = noise_PSD2C.unbind(dim=-2)
    if objective.bridge_target == "mean":
        noise_b_PSDC = torch.zeros_like(noise_b_PSDC)
    x0_PSDC = trajectory.tokens[image_P, token_P][:, None, None].expand_as(noise_a_PSDC)
    step_Q = steps_D.expand(x0_PSDC.shape[:-1]).flatten()
    x_QC, target_QC = schedule.bridge(
        x0_PSDC.flatten(0, 2), step_Q, noise_a_PSDC.flatten(0, 2), noise_b_PSDC.flatten(0, 2)
    )
    return _flatten(image_P, token_P, steps_D, x_QC.view_as(x0_PSDC), target_QC.view_as(x0_PSDC))


def _flatten(image_P: Tensor, token_P: Tensor, steps_D: Tensor, x_PSDC: Tensor, target_PSDC: Tensor) -> Queries:
    """(image, token) pairs x trajectories x diffusion steps -> rows, in that order."""
    pairs, trajectories, steps = x_PSDC.shape[:3]
    return Queries(
        image=image_P.repeat_interleave(trajectories * steps),
        token=token_P.repeat_interleave(trajectories * steps),
        step=steps_D.repeat(pairs * trajectories),
        x=x_PSDC.flatten(0, 2),
        target=target_PSDC.flatten(0, 2),
    )


def _extra_chains(trajectory: Trajectory) -> Tensor:
    if trajectory.extra_chains is None:
        raise ValueError("the objective needs extra trajectories; set trajectory.extra_chains after the rollout")
    return trajectory.extra_chains


def _recorded(maps: dict[int, Tensor], ar_step: int, argument: str) -> Tensor:
    if ar_step not in maps:
        raise ValueError(f"the rollout recorded nothing at AR step {ar_step}; name it in the rollout's {argument}")
    return maps[ar_step]


def loss(
    step: StepQueries,
    new: Gaussian,
    advantages_B: Tensor,
    denominators: Counts,
    ar_steps: int,
    objective: Objective,
    *,
    old_log_prob: Tensor | None = None,
    reference: Gaussian | None = None,
) -> StepLoss:
    """The AR step's part of the loss for these rows.

    ``new``: the policy's Gaussians of ``step.rows``, with gradient; ``denominators``: :func:`counts` of the global
    batch; ``ar_steps``: K', the number of AR steps trained; ``old_log_prob``: (Q, C) of ``step.rows`` under the policy
    that sampled, None for on-policy (ratio 1, with gradient); ``reference``: the frozen policy's Gaussians of
    ``step.kl_queries()``, needed when beta > 0. Raises ValueError when it is missing or a step without noise is scored.
    """
    in_policy = step.policy_weight > 0
    log_prob_QC = gaussian_log_prob(step.rows.target, new)[in_policy]
    old_QC = log_prob_QC.detach() if old_log_prob is None else old_log_prob[in_policy]
    log_ratio = log_prob_QC - old_QC
    ratio = (log_ratio if objective.ratio == "element" else log_ratio.sum(dim=-1, keepdim=True)).exp()
    advantage_Q1 = advantages_B.to(ratio)[step.rows.image[in_policy]].unsqueeze(-1)
    surrogate, clipped = ratio * advantage_Q1, torch.zeros_like(ratio, dtype=torch.bool)
    if objective.clip_range is not None:
        low, high = objective.clip_range
        bounded = ratio.clamp(1 - low, 1 + high) * advantage_Q1
        clipped = bounded < surrogate
        surrogate = torch.minimum(surrogate, bounded)
    policy = (step.policy_weight[in_policy] * surrogate.mean(dim=-1)).sum() / max(denominators.policy, 1) / ar_steps

    kl = torch.zeros_like(policy)
    if objective.kl_beta > 0:
        if reference is None:
            raise ValueError("kl_beta > 0 needs the reference policy's Gaussians of step.kl_queries()")
        rows = step.kl_rows()
        kl_QC = divergence(Gaussian(new.mean[rows], new.std[rows]), reference, objective.kl_form)
        kl = (step.kl_weight[rows] * kl_QC.mean(dim=-1)).sum() / max(denominators.kl, 1) / ar_steps

    seen = ratio.detach() if ratio.numel() else torch.ones_like(advantages_B[:1])
    return StepLoss(
        loss=objective.kl_beta * kl - policy,
        policy=policy.detach(),
        kl=kl.detach(),
        ratio_mean=seen.mean(),
        ratio_max=seen.max(),
        clip_fraction=clipped.float().sum() / max(clipped.numel(), 1),
        policy_rows=int(in_policy.sum()),
    )


def divergence(new: Gaussian, reference: Gaussian, form: Literal["means", "gaussian"]) -> Tensor:
    """(Q, C) >= 0, element by element, with gradient to ``new``; see :attr:`Objective.kl_form`.

    ``gaussian`` is KL(new || reference); of equal variances it is (difference of means)^2 / (2 variance).
    """
    difference = reference.mean.detach() - new.mean
    if form == "means":
        return difference.exp() - difference - 1
    variance, reference_variance = new.std**2, reference.std.detach() ** 2
    return (
        (reference_variance / variance).log() / 2 + (variance + difference**2) / (2 * reference_variance) - 0.5
    ).expand_as(difference)
