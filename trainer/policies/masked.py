"""Sampling and scoring that all masked autoregressive (MAR) families share: a family gives its model alone.

Rollout and scoring both go through :meth:`MaskedPolicy.transition`, chains and transition maths stay in float32, and
the backbone runs under the caller's autocast. Shapes: see :mod:`trainer.algorithm.types`; M tokens of all images
denoised together, W the width of the head's condition.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.algorithm.schedule import predicted_at, tokens_per_ar_step
from trainer.algorithm.seeds import generator, normal
from trainer.algorithm.transitions import Schedule, sample
from trainer.algorithm.types import Gaussian, Queries, Trajectory

HeadPrecision = Literal["float32", "autocast"]


def checked(precision: HeadPrecision) -> HeadPrecision:
    """``precision``. Raises ValueError if there is none of that name."""
    if precision not in typing.get_args(HeadPrecision):
        raise ValueError(f"policy.options.head_precision must be float32 or autocast, not {precision!r}")
    return precision


class MaskedPolicy(nn.Module):
    """A policy (:class:`trainer.policies.base.Policy`) but for its model.

    A family sets the attributes below and gives :meth:`encode_prompts`, :meth:`context`, :meth:`conditions`,
    :meth:`head_condition` and :meth:`head_output`, beside ``decode``, ``head_parameters``, ``backbone_parameters``,
    ``load`` and ``save`` of the protocol. It may replace :meth:`tokens_per_step` and :meth:`guidance_at`.
    """

    tokens: int
    """N"""
    channels: int
    """C"""
    ar_steps: int
    """K: AR steps that keep at least one token, ``len(tokens_per_step())``"""
    guidance: float
    """classifier-free guidance scale; 1: none, the unconditional half is not computed"""
    schedule: Schedule
    head_precision: HeadPrecision = "float32"
    """Of the head under autocast. A step multiplies the prediction by up to 10^3 and divides by a small std, and so the
    rounding of bfloat16; measured in ``docs/decisions.md``. ``autocast``: as the backbone, faster and rougher."""
    head_rows: int = 8192
    """Transitions that the head scores at once with gradient; of more, activations are recomputed in the backward
    pass, part by part: there are 10^5 of them in a micro-batch, and the head keeps up to 1 MB of each."""

    # ---- what a family gives ---------------------------------------------------------------------------------

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        """(B, L) int64 on the CPU. Raises ValueError naming the first prompt that the model cannot read, and why."""
        raise NotImplementedError

    def context(self, prompt_ids: Tensor, guided: bool) -> Any:
        """What the backbone needs of the text, for :meth:`halves` (conditional, then unconditional) of every image.

        Computed once per rollout, and once per :meth:`forward`, with gradient where the text path is trained.
        """
        raise NotImplementedError

    def conditions(self, context: Any, tokens_BNC: Tensor, known_BN: Tensor, guided: bool) -> Tensor:
        """z (H, B, N, D): one backbone pass over all halves. Latents of unknown tokens must not be read; z of known
        tokens is not used. All images have the same number of known tokens."""
        raise NotImplementedError

    def head_condition(self, z: Tensor) -> Tensor:
        """(..., D) -> (..., W): what the head needs of z at every diffusion step, worked out once."""
        return z

    def head_output(self, x_QC: Tensor, time_Q: Tensor, condition_QW: Tensor) -> Tensor:
        """The head's prediction, (Q, C) or, with a learned range, (Q, 2C). ``time``: (Q,), or (1,) if all are at the
        same one, in the schedule's ``timesteps``."""
        raise NotImplementedError

    def tokens_per_step(self) -> list[int]:
        """How many tokens each of the K AR steps keeps; sums to N."""
        return tokens_per_ar_step(self.tokens, self.ar_steps)

    def guidance_at(self, ar_step: int) -> float:
        """The guidance scale of an AR step; :attr:`guidance` is its largest."""
        return self.guidance

    def saved_module(self) -> nn.Module:
        """What ``save`` writes the state dict of: all but the frozen parts that come from elsewhere."""
        return self

    # ---- scoring ---------------------------------------------------------------------------------------------

    def halves(self, guided: bool) -> int:
        """H: 2 if the unconditional half is needed, too."""
        return 2 if guided and self.guidance != 1.0 else 1

    def _condition(self, z: Tensor) -> Tensor:
        """:meth:`head_condition` in :attr:`head_precision`."""
        if self.head_precision == "float32":
            z = z.to(next(self.head_parameters()).dtype)
        with self._head_context(z):
            return self.head_condition(z)

    def _head_context(self, like: Tensor) -> AbstractContextManager[Any]:
        return nullcontext() if self.head_precision == "autocast" else torch.autocast(like.device.type, enabled=False)

    def transition(
        self, condition_HQW: Tensor, x_QC: Tensor, step_Q: Tensor, guidance: float | Tensor | None = None
    ) -> Gaussian:
        """One head step: the distribution of the next diffusion state. Sampling and scoring both come here.

        ``step``: (Q,), or (1,) if all are at the same one. ``guidance``: one scale, or (Q, 1); None: the policy's.
        Guidance applies to the prediction; a learned range is the conditional half's, as in LTH14's MAR.
        """
        H, Q, _ = condition_HQW.shape
        time = self.schedule.timesteps.to(x_QC.device)[step_Q]
        time = time.repeat(H) if len(time) == Q else time
        with self._head_context(x_QC):
            output = self.head_output(x_QC.repeat(H, 1), time, condition_HQW.flatten(0, 1)).to(x_QC.dtype)
        if H == 2:
            conditional, unconditional = output.chunk(2)
            mean_part, other_part = conditional[:, : self.channels], unconditional[:, : self.channels]
            scale = self.guidance if guidance is None else guidance
            guided = other_part + scale * (mean_part - other_part)
            output = torch.cat([guided, conditional[:, self.channels :]], dim=-1)
        return self.schedule.transition(output, x_QC, step_Q)

    def forward(self, trajectory: Trajectory, ar_step: int, queries: Queries, guided: bool) -> Gaussian:
        """Score transitions of one AR step; see :meth:`trainer.policies.base.Policy.forward`."""
        known = trajectory.predicted_at < ar_step
        context = self.context(trajectory.prompt_ids, guided)
        condition = self._condition(self.conditions(context, trajectory.tokens, known, guided))
        scale = self.guidance_at(ar_step)
        if len(queries) <= self.head_rows or not torch.is_grad_enabled():
            return self._score(condition, queries.image, queries.token, queries.x, queries.step, scale)
        parts = []
        for start in range(0, len(queries), self.head_rows):
            q = queries.select(slice(start, start + self.head_rows))
            parts.append(checkpoint(self._score, condition, q.image, q.token, q.x, q.step, scale, use_reentrant=False))
        means, stds = [p.mean for p in parts], [p.std for p in parts]
        return Gaussian(torch.cat(means), torch.cat(stds))

    def _score(
        self, condition_HBNW: Tensor, image_Q: Tensor, token_Q: Tensor, x_QC: Tensor, step_Q: Tensor, guidance: float
    ) -> Gaussian:
        return self.transition(condition_HBNW[:, image_Q, token_Q], x_QC, step_Q, guidance)

    def restore(self, path: Path) -> None:
        """Read a file of ``save`` in place, configuration and frozen parts aside; see
        :meth:`trainer.policies.base.Policy.restore`."""
        self.saved_module().load_state_dict(load_file(path))

    # ---- sampling --------------------------------------------------------------------------------------------

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Raises ValueError naming the first prompt that the model cannot read, and why."""
        self.encode_prompts(prompts)

    @property
    def device(self) -> torch.device:
        """Where the diffusion head is, and so the latents."""
        return next(self.head_parameters()).device

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the diffusion head."""
        raise NotImplementedError

    @torch.no_grad()
    def rollout(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        full_chains_at: Collection[int] = (),
        full_latents_at: Collection[int] = (),
    ) -> Trajectory:
        """Sample one image per prompt; see :meth:`trainer.policies.base.Policy.rollout`."""
        N, noise_shape = self.tokens, (self.tokens, self.schedule.steps + 1, self.channels)
        return self.sample_from(
            self.encode_prompts(prompts).to(self.device),
            torch.stack([torch.randperm(N, generator=generator(seed, "order")) for seed in seeds]).to(self.device),
            normal(seeds, noise_shape, "kept").to(self.device),
            lambda step: normal(seeds, noise_shape, "unknown", step).to(self.device),
            full_chains_at=full_chains_at,
            full_latents_at=full_latents_at,
        )

    @torch.no_grad()
    def sample_from(
        self,
        prompt_ids: Tensor,
        order_BN: Tensor,
        noise_BNTC: Tensor,
        other_noise: Callable[[int], Tensor],
        *,
        full_chains_at: Collection[int] = (),
        full_latents_at: Collection[int] = (),
    ) -> Trajectory:
        """The rollout of given random numbers, in their precision: a function of its arguments and the weights alone.

        ``order_BN[b, i]``: the token of image b that comes i-th. ``noise``: (B, N, T+1, C) of each token at the AR
        step that keeps it: [..., 0, :] starts the chain, [..., t + 1, :] is drawn in step t. ``other_noise(k)``: the
        same for the tokens that are not kept at AR step k, where the maps are recorded.
        """
        B, N, T, C = len(prompt_ids), self.tokens, self.schedule.steps, self.channels
        device = noise_BNTC.device
        counts = self.tokens_per_step()
        kept_at = predicted_at(order_BN, counts)
        context = self.context(prompt_ids, True)
        tokens, chain = noise_BNTC.new_zeros(B, N, C), torch.zeros_like(noise_BNTC)
        image_B1 = torch.arange(B, device=device)[:, None]
        stitched: Tensor | None = None
        full_chains, full_latents = {}, {}
        done = 0
        for step, count in enumerate(counts):
            records_chains, records_latents = step in full_chains_at, step in full_latents_at
            z = self.conditions(context, tokens, kept_at < step, guided=True)  # (H, B, N, D)
            if stitched is None:
                stitched = z.new_zeros(B, len(z), N, z.shape[-1])
            kept = order_BN[:, done : done + count].sort(dim=1).values  # (B, n)
            stitched[image_B1, :, kept] = z[:, image_B1, kept].permute(1, 2, 0, 3)
            wanted, noise = kept, noise_BNTC
            if records_chains or records_latents:
                wanted = order_BN[:, done:].sort(dim=1).values
                noise = torch.where((kept_at == step)[..., None, None], noise_BNTC, other_noise(step))
            states = self._denoise(
                self._condition(z[:, image_B1, wanted].flatten(1, 2)),
                noise[image_B1, wanted].flatten(0, 1),
                self.guidance_at(step),
            ).reshape(B, -1, T + 1, C)
            if records_chains or records_latents:
                full = torch.zeros_like(chain)
                full[image_B1, wanted] = states
                if records_chains:
                    full_chains[step] = full
                if records_latents:
                    full_latents[step] = torch.where((kept_at < step)[..., None], tokens, full[:, :, -1])
                states = full[image_B1, kept]
            chain[image_B1, kept] = states
            tokens[image_B1, kept] = states[:, :, -1]
            done += count
        assert stitched is not None
        return Trajectory(prompt_ids, tokens, kept_at, chain, stitched, full_chains, full_latents)

    @torch.no_grad()
    def extra_trajectories(self, trajectory: Trajectory, count: int, seeds: Sequence[int]) -> Tensor:
        """(B, S, N, T+1, C) fresh chains from z*; see :meth:`trainer.policies.base.Policy.extra_trajectories`."""
        B, N, T, C = len(trajectory), self.tokens, self.schedule.steps, self.channels
        condition = self._condition(trajectory.stitched.transpose(0, 1).flatten(1, 2))  # (H, B * N, W)
        scale_K = torch.tensor([self.guidance_at(step) for step in range(self.ar_steps)], device=condition.device)
        scale_M1 = scale_K[trajectory.predicted_at].flatten()[:, None]
        noises = [normal(seeds, (N, T + 1, C), "extra", s).to(condition.device).flatten(0, 1) for s in range(count)]
        chains = [self._denoise(condition, noise, scale_M1).reshape(B, N, T + 1, C) for noise in noises]
        return torch.stack(chains, dim=1)

    def _denoise(self, condition_HMW: Tensor, noise_MTC: Tensor, guidance: float | Tensor) -> Tensor:
        """Run the chain from ``noise[:, 0]``; step t draws with ``noise[:, t + 1]``. Returns (M, T+1, C) states."""
        x = noise_MTC[:, 0]
        chain = [x]
        for step in range(self.schedule.steps):
            at = torch.tensor([step], device=x.device)
            x = sample(self.transition(condition_HMW, x, at, guidance), noise_MTC[:, step + 1])
            chain.append(x)
        return torch.stack(chain, dim=1)
