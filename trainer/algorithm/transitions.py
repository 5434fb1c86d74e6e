"""Diffusion transitions: the Gaussian of one head step, its log-probability, and bridges from a clean token.

Every schedule here is linear in the head's prediction, so a step is a row of a table::

    x_{s+1} | x_s        ~ N(x_coef[s] x_s + prediction_coef[s] prediction, std[s]^2)      transition (the policy)
    x_s | x_0            ~ N(signal[s] x_0, noise[s]^2)                                    marginal   (bridge, 1)
    x_{s+1} | x_s, x_0   ~ N(bridge_x0[s] x_0 + bridge_x[s] x_s, bridge_std[s]^2)          posterior  (bridge, 2)

with s = 0..T-1 in sampling order (see :mod:`trainer.algorithm.types`). Tables are worked out in float64 and
applied in the precision of x. Sampling and scoring share :meth:`Schedule.transition`, so the log-probability
of what was sampled cannot drift from what is trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from trainer.algorithm.types import Gaussian

Prediction = Literal["epsilon", "v", "sample"]
Variance = Literal["fixed_small", "fixed_large", "learned_range"]
Spacing = Literal["trailing", "leading", "linspace"]


class Schedule(Protocol):
    """What rollout and objective need to know of a head's diffusion."""

    @property
    def steps(self) -> int:
        """T"""
        ...

    @property
    def timesteps(self) -> Tensor:
        """(T,) float32: the time that the head is given at each step."""
        ...

    @property
    def std(self) -> Tensor:
        """(T,) float64: noise of each transition; 0 where a step is deterministic."""
        ...

    @property
    def stochastic_steps(self) -> tuple[int, ...]:
        """The steps whose noise is not 0: only they have a log-probability."""
        ...

    def transition(self, prediction_QC: Tensor, x_QC: Tensor, step_Q: Tensor) -> Gaussian:
        """The next state's distribution, given the head's prediction at state x and step."""
        ...

    def bridge(self, x0_QC: Tensor, step_Q: Tensor, noise_a_QC: Tensor, noise_b_QC: Tensor) -> tuple[Tensor, Tensor]:
        """One draw of (x_s, x_{s+1}) given the clean token: both (Q, C)."""
        ...


def sample(gaussian: Gaussian, noise_QC: Tensor) -> Tensor:
    """(Q, C): the draw that standard normal ``noise_QC`` stands for."""
    return gaussian.mean + gaussian.std * noise_QC


def gaussian_log_prob(x_QC: Tensor, gaussian: Gaussian) -> Tensor:
    """(Q, C): log N(x; mean, std^2) of each element, in nats.

    Raises ValueError where a std is not positive: a deterministic step has no density and must not be scored.
    """
    if not bool((gaussian.std > 0).all()):
        raise ValueError("log-probability of a step whose std is not positive; score schedule.stochastic_steps only")
    return -0.5 * (((x_QC - gaussian.mean) / gaussian.std) ** 2 + math.log(2 * math.pi)) - gaussian.std.log()


@dataclass(frozen=True)
class _Tables:
    """The rows of the module's docstring, each (T,) float64."""

    x_coef: Tensor
    prediction_coef: Tensor
    std: Tensor
    signal: Tensor
    noise: Tensor
    bridge_x0: Tensor
    bridge_x: Tensor
    bridge_std: Tensor


def _rows(table_T: Tensor, step_Q: Tensor, like: Tensor) -> Tensor:
    """(Q, 1): a table's value at each step, in the precision and on the device of ``like``."""
    return table_T.to(like.dtype).to(like.device)[step_Q].unsqueeze(-1)


class _LinearSchedule:
    """A schedule given by its tables."""

    def __init__(self, tables: _Tables, timesteps: Tensor) -> None:
        self.tables = tables
        self.timesteps = timesteps.float()
        self.std = tables.std
        self.steps = len(timesteps)
        self.stochastic_steps = tuple(i for i, std in enumerate(tables.std.tolist()) if std > 0)

    def transition(self, prediction_QC: Tensor, x_QC: Tensor, step_Q: Tensor) -> Gaussian:
        t = self.tables
        mean = _rows(t.x_coef, step_Q, x_QC) * x_QC + _rows(t.prediction_coef, step_Q, x_QC) * prediction_QC.to(
            x_QC.dtype
        )
        return Gaussian(mean, _rows(t.std, step_Q, x_QC))

    def bridge(self, x0_QC: Tensor, step_Q: Tensor, noise_a_QC: Tensor, noise_b_QC: Tensor) -> tuple[Tensor, Tensor]:
        """One draw of (x_s, x_{s+1}) ~ q(. | x_0): ``noise_a`` makes x_s, ``noise_b`` the step from it.

        With ``noise_b`` = 0 the target is the posterior's mean, which is what the likelihood's gradient needs
        on average: the expectation of the score over noise_b, without its variance.
        """
        t = self.tables
        x_QC = _rows(t.signal, step_Q, x0_QC) * x0_QC + _rows(t.noise, step_Q, x0_QC) * noise_a_QC
        mean_QC = _rows(t.bridge_x0, step_Q, x0_QC) * x0_QC + _rows(t.bridge_x, step_Q, x0_QC) * x_QC
        return x_QC, mean_QC + _rows(t.bridge_std, step_Q, x0_QC) * noise_b_QC


class DDPM(_LinearSchedule):
    """Ancestral sampling on T of the training timesteps (Ho et al. 2020; respacing after Nichol & Dhariwal 2021).

    ``alphas_cumprod``: alpha-bar of every training timestep, decreasing. ``timesteps``: the T training timesteps
    that are sampled, decreasing. ``prediction``: what the head gives. ``variance`` of a step: ``fixed_small``
    is the posterior's ("beta tilde"), ``fixed_large`` is beta, ``learned_range`` (LTH14's MAR, Harmon)
    interpolates between the logarithms of both by a second half of the prediction, which then is (Q, 2C).
    The last step has no noise whatever the variance. Raises ValueError for tables that are not as described.
    """

    def __init__(
        self,
        alphas_cumprod: Tensor,
        timesteps: Sequence[int],
        prediction: Prediction = "epsilon",
        variance: Variance = "fixed_small",
    ) -> None:
        abar_train = alphas_cumprod.double()
        if not bool((abar_train > 0).all() and (abar_train < 1).all() and (abar_train.diff() < 0).all()):
            raise ValueError("alphas_cumprod must decrease strictly within (0, 1)")
        index = torch.tensor(list(timesteps), dtype=torch.int64)
        if len(index) == 0 or not 0 <= int(index.min()) <= int(index.max()) < len(abar_train):
            raise ValueError(f"timesteps must lie in [0, {len(abar_train)}), got {list(timesteps)}")
        if not bool((index.diff() < 0).all()):
            raise ValueError(f"timesteps must decrease strictly, got {list(timesteps)}")

        abar = abar_train[index]
        abar_next = torch.cat([abar[1:], torch.ones(1, dtype=torch.float64)])
        alpha = abar / abar_next
        beta = 1 - alpha
        beta_tilde = beta * (1 - abar_next) / (1 - abar)
        x0_coef = abar_next.sqrt() * beta / (1 - abar)
        xs_coef = alpha.sqrt() * (1 - abar_next) / (1 - abar)
        # x_0 = from_x x + from_prediction prediction, put into the posterior's mean
        zero, one = torch.zeros_like(abar), torch.ones_like(abar)
        from_x, from_prediction = {
            "epsilon": (abar.rsqrt(), -((1 - abar) / abar).sqrt()),
            "v": (abar.sqrt(), -(1 - abar).sqrt()),
            "sample": (zero, one),
        }[prediction]
        std = beta_tilde.sqrt() if variance != "fixed_large" else torch.cat([beta[:-1].sqrt(), zero[:1]])
        tables = _Tables(
            x_coef=xs_coef + x0_coef * from_x,
            prediction_coef=x0_coef * from_prediction,
            std=std,
            signal=abar.sqrt(),
            noise=(1 - abar).sqrt(),
            bridge_x0=x0_coef,
            bridge_x=xs_coef,
            bridge_std=beta_tilde.sqrt(),
        )
        super().__init__(tables, index)
        self.prediction = prediction
        self.variance = variance
        self.alphas_cumprod = abar_train
        self._beta = beta

    @classmethod
    def cosine(
        cls,
        train_steps: int = 1000,
        steps: int = 25,
        spacing: Spacing = "trailing",
        prediction: Prediction = "epsilon",
        variance: Variance = "fixed_small",
    ) -> DDPM:
        """Cosine alpha-bar (Nichol & Dhariwal 2021, eq. 17: offset 0.008, beta at most 0.999)."""
        t = torch.arange(train_steps + 1, dtype=torch.float64) / train_steps
        abar = torch.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2
        betas = (1 - abar[1:] / abar[:-1]).clamp(max=0.999)
        return cls((1 - betas).cumprod(0), spaced_timesteps(train_steps, steps, spacing), prediction, variance)

    @classmethod
    def linear(
        cls,
        train_steps: int = 1000,
        steps: int = 25,
        spacing: Spacing = "trailing",
        prediction: Prediction = "epsilon",
        variance: Variance = "fixed_small",
    ) -> DDPM:
        """Betas linear from 1e-4 to 0.02 at 1000 training steps (Ho et al. 2020), scaled for other numbers."""
        scale = 1000 / train_steps
        betas = torch.linspace(1e-4 * scale, 0.02 * scale, train_steps, dtype=torch.float64).clamp(max=0.999)
        return cls((1 - betas).cumprod(0), spaced_timesteps(train_steps, steps, spacing), prediction, variance)

    def transition(self, prediction_QC: Tensor, x_QC: Tensor, step_Q: Tensor) -> Gaussian:
        if self.variance != "learned_range":
            return super().transition(prediction_QC, x_QC, step_Q)
        mean_part, range_part = prediction_QC.to(x_QC.dtype).chunk(2, dim=-1)
        gaussian = super().transition(mean_part, x_QC, step_Q)
        # log std between beta tilde (-1) and beta (+1); a deterministic step stays one
        smallest = _rows(self.std, step_Q, x_QC)
        largest = _rows(self._beta.sqrt(), step_Q, x_QC)
        noisy = smallest > 0
        log_small = torch.where(noisy, smallest, 1.0).log()
        fraction = (range_part + 1) / 2
        std = (fraction * largest.log() + (1 - fraction) * log_small).exp()
        return Gaussian(gaussian.mean, torch.where(noisy, std, 0.0))

    def add_noise(self, x0_QC: Tensor, timestep_Q: Tensor, noise_QC: Tensor) -> Tensor:
        """(Q, C): x_t at *training* timesteps (Q,) in [0, train_steps), for pre-training."""
        abar = self.alphas_cumprod
        return _rows(abar.sqrt(), timestep_Q, x0_QC) * x0_QC + _rows((1 - abar).sqrt(), timestep_Q, x0_QC) * noise_QC

    def training_target(self, x0_QC: Tensor, timestep_Q: Tensor, noise_QC: Tensor) -> Tensor:
        """(Q, C): what the head should predict from :meth:`add_noise` with the same arguments."""
        if self.prediction == "epsilon":
            return noise_QC
        if self.prediction == "sample":
            return x0_QC
        abar = self.alphas_cumprod
        return _rows(abar.sqrt(), timestep_Q, x0_QC) * noise_QC - _rows((1 - abar).sqrt(), timestep_Q, x0_QC) * x0_QC


def spaced_timesteps(train_steps: int, steps: int, spacing: Spacing) -> list[int]:
    """T training timesteps, decreasing: ``trailing`` starts at the last, ``leading`` ends at 0, ``linspace`` has both
    ends (table 2 of Lin et al. 2023; LTH14's MAR has both ends). Raises ValueError unless 1 <= T <= train_steps.
    """
    if not 1 <= steps <= train_steps:
        raise ValueError(f"diffusion steps must be between 1 and {train_steps}, got {steps}")
    if spacing == "trailing":
        return [round(train_steps * (steps - i) / steps) - 1 for i in range(steps)]
    if spacing == "leading":
        return [i * (train_steps // steps) for i in reversed(range(steps))]
    if spacing == "linspace":
        return [round(i * (train_steps - 1) / max(steps - 1, 1)) for i in reversed(range(steps))]
    raise ValueError(f"spacing must be trailing, leading or linspace, got {spacing!r}")


class FlowSDE(_LinearSchedule):
    """A flow-matching head, x_sigma = (1-sigma) x_0 + sigma noise, sampled by Flow-GRPO's SDE (Liu et al. 2025).

    ``sigmas``: (T+1,), strictly decreasing from at most 1 to 0; ``eta``: noise level (0.7 there, 0 = the plain ODE).
    The head predicts the velocity v = noise - x_0. With dt = sigma_{s+1} - sigma_s < 0::

        g    = eta sqrt(sigma / (1-sigma))
        mean = x (1 + g^2 dt / (2 sigma)) + v (1 + g^2 (1-sigma) / (2 sigma)) dt,      std = g sqrt(-dt)

    At sigma = 1, g diverges; as in Flow-GRPO, the next sigma stands in under the root's denominator there.
    The last step is the plain ODE step (std 0), a departure: Flow-GRPO leaves its noise in the final sample.
    ``final_noise=True`` restores that.

    Bridge: x_s is drawn from the exact marginal and the step from it is the SDE's own with the conditional velocity
    (x_s - x_0) / sigma, so that a velocity field which is right on average, E[v | x_s], maximises the expected
    log-probability. After the step the marginal is right up to the Euler error, O(dt^2).
    """

    def __init__(
        self, sigmas: Tensor, eta: float = 0.7, *, final_noise: bool = False, time_scale: float = 1000.0
    ) -> None:
        s = sigmas.double()
        if len(s) < 2 or float(s[0]) > 1 or float(s[-1]) != 0 or not bool((s.diff() < 0).all()):
            raise ValueError(f"sigmas must decrease strictly from at most 1 to 0, got {sigmas.tolist()}")
        if eta < 0:
            raise ValueError(f"eta must not be negative, got {eta}")
        sigma, dt = s[:-1], s.diff()
        below_one = torch.where(sigma == 1, s[1], sigma)
        g2 = eta**2 * sigma / (1 - below_one)
        if not final_noise:
            g2[-1] = 0
        x_coef = 1 + g2 * dt / (2 * sigma)
        v_coef = (1 + g2 * (1 - sigma) / (2 * sigma)) * dt
        std = (-g2 * dt).sqrt()
        tables = _Tables(
            x_coef=x_coef,
            prediction_coef=v_coef,
            std=std,
            signal=1 - sigma,
            noise=sigma,
            bridge_x0=-v_coef / sigma,
            bridge_x=x_coef + v_coef / sigma,
            bridge_std=std,
        )
        super().__init__(tables, sigma * time_scale)
        self.time_scale = time_scale

    def add_noise(self, x0_QC: Tensor, sigma_Q: Tensor, noise_QC: Tensor) -> Tensor:
        """(Q, C): x_sigma at sigmas (Q,) in [0, 1], for pre-training; the head's time is sigma * ``time_scale``."""
        sigma = sigma_Q.unsqueeze(-1)
        return (1 - sigma) * x0_QC + sigma * noise_QC

    @staticmethod
    def training_target(x0_QC: Tensor, noise_QC: Tensor) -> Tensor:
        """(Q, C): the velocity."""
        return noise_QC - x0_QC
