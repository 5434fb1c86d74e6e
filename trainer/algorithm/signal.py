"""Signal-to-noise ratio of a policy gradient, from the gradients of independent groups.

The loop takes one gradient per group and diffusion step; these figures tell which steps teach and which only shake.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GradientSignal:
    signal2: float
    """Unbiased estimate of |E g|^2; may come out negative where noise hides the signal."""
    noise2: float
    """Trace of the covariance of one group's gradient."""
    groups: int

    @property
    def snr(self) -> float | None:
        """signal^2 / noise^2 of one group; a batch of n groups has n times that. None where noise^2 is 0."""
        return self.signal2 / self.noise2 if self.noise2 > 0 else None


def gradient_signal(gradients_GP: Tensor) -> GradientSignal:
    """From the gradients of G >= 2 groups over P parameters: noise^2 is the trace of the sample covariance,
    signal^2 = |mean|^2 - noise^2 / G."""
    squares = gradients_GP.double().square().sum()
    return gradient_signal_from_sums(gradients_GP.double().sum(dim=0), float(squares), len(gradients_GP))


def gradient_signal_from_sums(total_P: Tensor, squares: float, groups: int) -> GradientSignal:
    """The same from running sums, for models whose gradients do not fit side by side: ``total_P`` is the sum of the
    groups' gradients, ``squares`` the sum of their squared norms. Raises ValueError for G < 2 or sums not finite."""
    if groups < 2:
        raise ValueError(f"a variance over groups needs at least 2 groups, got {groups}")
    if not (math.isfinite(squares) and bool(torch.isfinite(total_P).all())):
        raise ValueError("a group's gradient is not finite")
    mean2 = float((total_P.double() / groups).square().sum())
    noise2 = max(0.0, (squares - groups * mean2) / (groups - 1))
    return GradientSignal(mean2 - noise2 / groups, noise2, groups)


def snr_weights(signals: Sequence[GradientSignal | None]) -> list[float]:
    """A weight per diffusion step, mean 1 over the steps with a weight: sqrt(signal^2) / noise^2.

    Among weighted sums of independent gradients with parallel means, this one has the highest signal-to-noise ratio.
    Steps that were not measured (None) or show no signal get 0. Raises ValueError where no step shows any.
    """
    raw = [0.0 if s is None or s.snr is None else max(s.signal2, 0.0) ** 0.5 / s.noise2 for s in signals]
    used = sum(w > 0 for w in raw)
    if not used:
        raise ValueError("no diffusion step shows a signal above its noise: measure more groups")
    return [w * used / sum(raw) for w in raw]
