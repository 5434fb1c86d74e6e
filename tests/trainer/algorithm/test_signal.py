import math

import pytest
import torch

from trainer.algorithm.signal import GradientSignal, gradient_signal, gradient_signal_from_sums, snr_weights


def test_signal_and_noise_by_hand():
    # mean (2, 1); deviations (-1, 1), (1, -1): trace of the sample covariance (2 + 2) / 1 = 4; |mean|^2 - 4/2 = 3
    s = gradient_signal(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
    assert (s.signal2, s.noise2, s.snr, s.groups) == (3, 4, 0.75, 2)


def test_running_sums_give_the_same():
    g = torch.randn(9, 50)
    direct = gradient_signal(g)
    sums = gradient_signal_from_sums(g.sum(dim=0), sum(float(row.square().sum()) for row in g), 9)
    assert sums.signal2 == pytest.approx(direct.signal2, rel=1e-5)
    assert sums.noise2 == pytest.approx(direct.noise2, rel=1e-5)


def test_signal_estimate_is_unbiased(generator):
    # mean (1, 0, 0), unit noise: signal^2 1, noise^2 3; the naive |mean|^2 would be 1 + 3/4
    g = torch.randn(4000, 4, 3, generator=generator) + torch.tensor([1.0, 0.0, 0.0])
    estimates = torch.tensor([gradient_signal(groups).signal2 for groups in g])
    assert estimates.mean().item() == pytest.approx(1, abs=4 * estimates.std().item() / math.sqrt(4000))
    assert estimates.std().item() / math.sqrt(4000) < 0.03


def test_ratio_without_noise_is_no_number():
    assert gradient_signal(torch.ones(3, 2)).snr is None


def test_weights_by_signal_to_noise():
    # sqrt(signal^2)/noise^2: 2/1, 1/4, none, none (negative) -> scaled to mean 1 over the two
    signals = [GradientSignal(4, 1, 8), GradientSignal(1, 4, 8), None, GradientSignal(-1, 4, 8)]
    assert snr_weights(signals) == pytest.approx([2 * 2 / 2.25, 2 * 0.25 / 2.25, 0, 0])
    with pytest.raises(ValueError, match="measure more groups"):
        snr_weights(signals[2:])


def test_weights_maximise_the_ratio_of_the_sum():
    signals = [GradientSignal(4, 1, 8), GradientSignal(1, 4, 8)]

    def ratio(weights):
        signal = sum(w * math.sqrt(s.signal2) for w, s in zip(weights, signals, strict=True))
        return signal**2 / sum(w**2 * s.noise2 for w, s in zip(weights, signals, strict=True))

    a, b = snr_weights(signals)
    assert ratio([a, b]) == pytest.approx(4 + 0.25)
    assert all(ratio([a * f, b]) < ratio([a, b]) for f in (0.5, 0.9, 1.1, 2))


def test_bad_gradients_are_refused():
    with pytest.raises(ValueError, match="at least 2 groups, got 1"):
        gradient_signal(torch.ones(1, 2))
    with pytest.raises(ValueError, match="not finite"):
        gradient_signal(torch.tensor([[1.0, math.nan], [1.0, 1.0]]))
