import math

import pytest
import torch

from trainer.algorithm.transitions import DDPM, FlowSDE, gaussian_log_prob, sample, spaced_timesteps
from trainer.algorithm.types import Gaussian

TWO = torch.tensor([0.9, 0.5])  # alpha-bar of two training timesteps


def row(value):
    return torch.tensor([[value]], dtype=torch.float64)


def at(step):
    return torch.tensor([step])


def test_ddpm_epsilon_transition_by_hand():
    # alpha = 5/9, beta = 4/9; x_0 = (1 - sqrt(.5) .5) / sqrt(.5) = .9142136
    # mean = sqrt(.9) (4/9) / .5 * x_0 + sqrt(5/9) .1 / .5 * 1 = .8432740 * .9142136 + .1490712 = .9200038
    g = DDPM(TWO, [1, 0]).transition(row(0.5), row(1.0), at(0))
    assert g.mean.item() == pytest.approx(0.9200038, abs=1e-6)
    assert g.std.item() == pytest.approx(math.sqrt(4 / 9 * 0.1 / 0.5), abs=1e-6)


def test_ddpm_last_step_returns_the_clean_estimate_without_noise():
    schedule = DDPM(TWO, [1, 0])
    g = schedule.transition(row(0.5), row(1.0), at(1))
    assert g.mean.item() == pytest.approx((1 - math.sqrt(0.1) * 0.5) / math.sqrt(0.9), abs=1e-6)
    assert g.std.item() == 0
    assert schedule.stochastic_steps == (0,)


@pytest.mark.parametrize("prediction", ["epsilon", "v", "sample"])
def test_ddpm_predictions_of_the_same_clean_token_agree(prediction):
    schedule = DDPM.cosine(steps=7, prediction=prediction)
    x0, noise = torch.randn(7, 3).double(), torch.randn(7, 3).double()
    step = torch.arange(7)
    timestep = schedule.timesteps.long()
    x = schedule.add_noise(x0, timestep, noise)
    g = schedule.transition(schedule.training_target(x0, timestep, noise), x, step)
    reference = DDPM.cosine(steps=7, prediction="sample").transition(x0, x, step)
    torch.testing.assert_close(g.mean, reference.mean)


def test_ddpm_posterior_agrees_with_conditioning_the_joint_gaussian():
    # x_t = sqrt(alpha) x_s + sqrt(beta) e, x_s = sqrt(abar_s) x_0 + sqrt(1-abar_s) e': condition x_s on x_t
    schedule = DDPM.linear(steps=6)
    abar = schedule.alphas_cumprod[schedule.timesteps.long()]
    for s in range(5):
        abar_t, abar_s = abar[s].item(), abar[s + 1].item()
        alpha = abar_t / abar_s
        var_s, var_t, cov = 1 - abar_s, 1 - abar_t, math.sqrt(alpha) * (1 - abar_s)
        x0, x = 0.7, -1.3
        mean = math.sqrt(abar_s) * x0 + cov / var_t * (x - math.sqrt(abar_t) * x0)
        g = DDPM.linear(steps=6, prediction="sample").transition(row(x0), row(x), at(s))
        assert g.mean.item() == pytest.approx(mean, rel=1e-9)
        assert g.std.item() == pytest.approx(math.sqrt(var_s - cov**2 / var_t), rel=1e-9)


@pytest.mark.parametrize("spacing", ["trailing", "leading", "linspace"])
def test_ddpm_chain_with_an_exact_head_has_the_forward_marginals(spacing):
    # data at one point m: the exact x_0 prediction is m whatever x
    m, schedule = 0.8, DDPM.cosine(steps=9, spacing=spacing, prediction="sample")
    t = schedule.tables
    mean, var = t.signal[0].item() * m, t.noise[0].item() ** 2
    for s in range(8):
        intercept = schedule.transition(row(m), row(0.0), at(s))
        slope = schedule.transition(row(m), row(1.0), at(s)).mean - intercept.mean
        mean = intercept.mean.item() + slope.item() * mean
        var = slope.item() ** 2 * var + intercept.std.item() ** 2
        assert mean == pytest.approx(t.signal[s + 1].item() * m, rel=1e-9)
        assert var == pytest.approx(t.noise[s + 1].item() ** 2, rel=1e-9)


def test_ddpm_fixed_large_is_beta_but_for_the_last_step():
    schedule = DDPM(TWO, [1, 0], variance="fixed_large")
    assert schedule.std.tolist() == pytest.approx([math.sqrt(4 / 9), 0])
    # the bridge is the true posterior all the same
    assert schedule.tables.bridge_std.tolist() == pytest.approx([math.sqrt(4 / 45), 0])


def test_learned_range_interpolates_log_variance():
    schedule = DDPM(TWO, [1, 0], variance="learned_range")
    small, large = math.sqrt(4 / 45), math.sqrt(4 / 9)
    prediction = torch.tensor([[0.5, 0.5, 0.5, -1.0, 0.0, 1.0]], dtype=torch.float64)
    g = schedule.transition(prediction, torch.ones(1, 3, dtype=torch.float64), at(0))
    assert g.std[0].tolist() == pytest.approx([small, math.sqrt(small * large), large])
    assert g.mean[0].tolist() == pytest.approx([0.9200038] * 3, abs=1e-6)


def test_learned_range_last_step_is_deterministic_with_finite_gradients():
    schedule = DDPM(TWO, [1, 0], variance="learned_range")
    prediction = torch.tensor([[0.5, 0.3]], dtype=torch.float64, requires_grad=True)
    g = schedule.transition(prediction, row(1.0), at(1))
    assert g.std.item() == 0
    (g.mean.sum() + g.std.sum()).backward()
    assert torch.isfinite(prediction.grad).all()
    assert prediction.grad[0, 1] == 0


def test_spacings_by_hand():
    assert spaced_timesteps(1000, 4, "trailing") == [999, 749, 499, 249]
    assert spaced_timesteps(1000, 4, "leading") == [750, 500, 250, 0]
    assert spaced_timesteps(1000, 4, "linspace") == [999, 666, 333, 0]
    assert spaced_timesteps(1000, 1, "trailing") == [999]
    assert spaced_timesteps(10, 10, "trailing") == list(range(9, -1, -1))


def test_cosine_and_linear_tables():
    cosine = DDPM.cosine(steps=10)
    f = math.cos((0.5 + 0.008) / 1.008 * math.pi / 2) ** 2 / math.cos(0.008 / 1.008 * math.pi / 2) ** 2
    assert cosine.alphas_cumprod[499].item() == pytest.approx(f, rel=1e-9)
    assert (cosine.alphas_cumprod[999] / cosine.alphas_cumprod[998]).item() == pytest.approx(1e-3, rel=1e-6)
    linear = DDPM.linear(steps=10)
    assert linear.alphas_cumprod[0].item() == pytest.approx(1 - 1e-4)
    assert (linear.alphas_cumprod[999] / linear.alphas_cumprod[998]).item() == pytest.approx(0.98)
    assert cosine.timesteps.tolist() == [999, 899, 799, 699, 599, 499, 399, 299, 199, 99]


def test_flow_sde_by_hand():
    # sigma 1 -> .5: the next sigma stands in: g^2 = .49 / .5 = .98; mean = 2 (1 - .98 .5 / 2) - .5 = 1.01
    schedule = FlowSDE(torch.tensor([1.0, 0.5, 0.0]), eta=0.7)
    g = schedule.transition(row(1.0), row(2.0), at(0))
    assert (g.mean.item(), g.std.item()) == pytest.approx((1.01, 0.7))
    g = schedule.transition(row(1.0), row(2.0), at(1))
    assert (g.mean.item(), g.std.item()) == pytest.approx((1.5, 0.0))
    assert schedule.stochastic_steps == (0,)
    assert schedule.timesteps.tolist() == [1000, 500]
    # sigma .5 -> 0 with noise: g^2 = .49; mean = 2 (1 - .245) - .5 (1 + .245) = .8875
    g = FlowSDE(torch.tensor([1.0, 0.5, 0.0]), final_noise=True).transition(row(1.0), row(2.0), at(1))
    assert (g.mean.item(), g.std.item()) == pytest.approx((0.8875, math.sqrt(0.245)))


def test_flow_with_eta_zero_is_the_euler_ode():
    schedule = FlowSDE(torch.linspace(1, 0, 5), eta=0)
    g = schedule.transition(row(0.4), row(2.0), at(1))
    assert (g.mean.item(), g.std.item()) == pytest.approx((2 - 0.25 * 0.4, 0))
    assert schedule.stochastic_steps == ()


def flow_end(steps, start=1.0):
    """Mean and variance at the end of the chain for data N(.8, .25), with the exact velocity E[noise - x_0 | x]."""
    m, v = 0.8, 0.25
    schedule = FlowSDE(torch.linspace(start, 0, steps + 1, dtype=torch.float64))
    mean, var = (1 - start) * m, (1 - start) ** 2 * v + start**2
    for s in range(steps):
        sigma = schedule.tables.noise[s].item()
        total = (1 - sigma) ** 2 * v + sigma**2
        slope_v = (sigma - (1 - sigma) * v) / total  # Cov(noise - x_0, x) / Var(x)
        velocity = [-m + slope_v * (x - (1 - sigma) * m) for x in (0.0, 1.0)]
        at_zero, at_one = (schedule.transition(row(velocity[x]), row(float(x)), at(s)) for x in (0, 1))
        slope = (at_one.mean - at_zero.mean).item()
        mean, var = at_zero.mean.item() + slope * mean, slope**2 * var + at_zero.std.item() ** 2
    return mean, var


def test_flow_chain_with_an_exact_head_ends_at_the_data():
    mean, var = flow_end(400)
    assert mean == pytest.approx(0.8, abs=1e-9)
    assert var == pytest.approx(0.25, abs=0.002)


def test_flow_chain_error_is_of_first_order_in_the_step():
    # from sigma .8: at 1, where g^2 has its pole, the first steps are off by O(1) whatever their size
    errors = [abs(flow_end(steps, start=0.8)[1] - 0.25) for steps in (200, 400, 800)]
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.2)
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.2)


def schedules():
    return [DDPM.cosine(steps=6, prediction="sample"), FlowSDE(torch.linspace(1, 0, 7))]


@pytest.mark.parametrize("schedule", schedules(), ids=["ddpm", "flow"])
def test_bridge_starts_at_the_marginal_and_steps_with_the_true_prediction(schedule):
    x0, a, b = (torch.randn(6, 3).double() for _ in range(3))
    step = torch.arange(6)
    x, target = schedule.bridge(x0, step, a, b)
    t = schedule.tables
    torch.testing.assert_close(x, t.signal[:, None] * x0 + t.noise[:, None] * a)
    truth = x0 if isinstance(schedule, DDPM) else a - x0
    g = schedule.transition(truth, x, step)
    torch.testing.assert_close(target, sample(g, b))


def test_ddpm_bridge_ends_at_the_next_marginal():
    schedule = DDPM.cosine(steps=6)
    t = schedule.tables
    zero, one = torch.zeros(6, 1).double(), torch.ones(6, 1).double()
    step = torch.arange(6)
    of_x0, of_a, of_b = (
        schedule.bridge(x0, step, a, b)[1] for x0, a, b in [(one, zero, zero), (zero, one, zero), (zero, zero, one)]
    )
    next_signal, next_noise = torch.cat([t.signal[1:], one[0]]), torch.cat([t.noise[1:], zero[0]])
    torch.testing.assert_close(of_x0[:, 0], next_signal)
    torch.testing.assert_close((of_a**2 + of_b**2).sqrt()[:, 0], next_noise)


def test_flow_training_pair_matches_the_bridge():
    schedule = FlowSDE(torch.linspace(1, 0, 5))
    x0, noise = torch.randn(4, 2).double(), torch.randn(4, 2).double()
    x, _ = schedule.bridge(x0, torch.arange(4), noise, noise)
    torch.testing.assert_close(schedule.add_noise(x0, schedule.tables.noise, noise), x)
    torch.testing.assert_close(schedule.training_target(x0, noise), noise - x0)


def test_log_prob_by_hand():
    # -(1/2) (1/2)^2 - log 2 - log(2 pi) / 2
    g = Gaussian(row(0.0), row(2.0))
    assert gaussian_log_prob(row(1.0), g).item() == pytest.approx(-0.125 - 0.693147 - 0.918939, abs=1e-6)


def test_log_prob_of_a_sample_is_that_of_its_noise():
    noise = torch.randn(5, 3).double()
    g = Gaussian(torch.randn(5, 3).double(), torch.full((5, 1), 0.3, dtype=torch.float64))
    expected = -0.5 * noise**2 - math.log(0.3) - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(gaussian_log_prob(sample(g, noise), g), expected)


@pytest.mark.parametrize("std", [0.0, math.nan, -1.0])
def test_log_prob_refuses_a_std_that_is_not_positive(std):
    with pytest.raises(ValueError, match="not positive"):
        gaussian_log_prob(row(1.0), Gaussian(row(0.0), row(std)))


def test_half_precision_predictions_are_applied_in_the_precision_of_x():
    g = DDPM.cosine(steps=4).transition(torch.ones(4, 2, dtype=torch.bfloat16), torch.ones(4, 2), torch.arange(4))
    assert g.mean.dtype == g.std.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DDPM(torch.tensor([0.5, 0.9]), [1, 0]), "decrease strictly within"),
        (lambda: DDPM(torch.tensor([1.0, 0.5]), [1, 0]), "decrease strictly within"),
        (lambda: DDPM(TWO, [0, 1]), "timesteps must decrease"),
        (lambda: DDPM(TWO, [2, 0]), r"timesteps must lie in \[0, 2\)"),
        (lambda: DDPM(TWO, []), "timesteps must lie"),
        (lambda: DDPM.cosine(steps=1001), "between 1 and 1000"),
        (lambda: spaced_timesteps(10, 2, "even"), "trailing, leading or linspace"),
        (lambda: FlowSDE(torch.tensor([1.0, 0.5])), "from at most 1 to 0"),
        (lambda: FlowSDE(torch.tensor([1.0, 1.0, 0.0])), "decrease strictly"),
        (lambda: FlowSDE(torch.tensor([1.0, 0.0]), eta=-1), "eta must not be negative"),
    ],
)
def test_impossible_schedules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
