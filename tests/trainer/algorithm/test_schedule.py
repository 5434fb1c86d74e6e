import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.schedule import (
    choose_ar_steps,
    choose_diffusion_steps,
    diffusion_step_weights,
    predicted_at,
    tokens_per_ar_step,
)
from trainer.algorithm.transitions import DDPM


def test_cosine_schedule_rounded_down():
    # 16 cos(pi/8, pi/4, 3pi/8) = 14.78, 11.31, 6.12 stay masked
    assert tokens_per_ar_step(16, 4) == [2, 3, 5, 6]


def test_cosine_schedule_rounded_to_nearest():
    assert tokens_per_ar_step(16, 4, rounding="round") == [1, 4, 5, 6]


def test_as_many_steps_as_tokens_predict_one_each():
    assert tokens_per_ar_step(16, 16) == [1] * 16
    assert tokens_per_ar_step(1, 1) == [1]


def test_nova_has_63_steps_with_a_token():
    counts = tokens_per_ar_step(1024, 64, rounding="round")
    assert (len(counts), sum(counts)) == (63, 1024)


@given(st.integers(1, 600), st.data())
def test_every_step_predicts_and_all_tokens_are_predicted(tokens, data):
    steps = data.draw(st.integers(1, tokens))
    counts = tokens_per_ar_step(tokens, steps)
    assert len(counts) == steps
    assert min(counts) >= 1
    assert sum(counts) == tokens
    rounded = tokens_per_ar_step(tokens, steps, rounding="round")
    assert min(rounded) >= 1
    assert sum(rounded) == tokens


@pytest.mark.parametrize(("tokens", "steps", "message"), [(0, 1, "positive"), (4, 0, "positive"), (4, 5, "at most 4")])
def test_impossible_cosine_schedules_are_refused(tokens, steps, message):
    with pytest.raises(ValueError, match=message):
        tokens_per_ar_step(tokens, steps)


def test_predicted_at_by_hand():
    order = torch.tensor([[2, 0, 3, 1], [0, 1, 2, 3]])
    assert predicted_at(order, [1, 3]).tolist() == [[1, 1, 0, 1], [0, 1, 1, 1]]
    with pytest.raises(ValueError, match="predict 3 tokens, the order holds 4"):
        predicted_at(order, [1, 2])


def test_ar_steps_are_a_seeded_subset():
    first = choose_ar_steps(16, 5, torch.Generator().manual_seed(1))
    again = choose_ar_steps(16, 5, torch.Generator().manual_seed(1))
    other = choose_ar_steps(16, 5, torch.Generator().manual_seed(2))
    assert first == again == sorted(set(first))
    assert first != other
    assert len(first) == 5
    assert set(first) <= set(range(16))


def test_steps_are_drawn_evenly(generator):
    drawn = torch.zeros(6)
    for _ in range(3000):
        drawn[choose_ar_steps(6, 2, generator)] += 1
    assert (drawn / 3000).tolist() == pytest.approx([1 / 3] * 6, abs=0.03)  # 3.5 standard errors


def test_all_and_listed_steps(generator):
    schedule = DDPM.cosine(steps=4)
    assert choose_ar_steps(3, "all", generator) == [0, 1, 2]
    assert choose_ar_steps(3, 9, generator) == [0, 1, 2]
    assert choose_diffusion_steps(schedule, "all", generator) == [0, 1, 2]
    assert choose_diffusion_steps(schedule, [2, 1, 2], generator) == [1, 2]


@pytest.mark.parametrize("choice", [[1, 3], [], [-1]])
def test_a_step_without_noise_cannot_be_chosen(choice, generator):
    with pytest.raises(ValueError, match="no diffusion step with noise"):
        choose_diffusion_steps(DDPM.cosine(steps=4), choice, generator)


def test_no_steps_cannot_be_drawn(generator):
    with pytest.raises(ValueError, match="at least one step"):
        choose_ar_steps(4, 0, generator)


def test_weights_have_mean_one_over_the_steps():
    schedule = DDPM.cosine(steps=5)
    assert diffusion_step_weights(schedule, "uniform", [1, 3]).tolist() == [0, 1, 0, 1, 0]
    assert diffusion_step_weights(schedule, "uniform", [1, 3, 3]).tolist() == [0, 1, 0, 1, 0]
    assert diffusion_step_weights(schedule, [9, 1, 0, 3, 9], [1, 2, 3]).tolist() == pytest.approx([0, 0.75, 0, 2.25, 0])
    variance = diffusion_step_weights(schedule, "variance", [0, 1, 2, 3])
    assert (variance[0] / variance[3]).item() == pytest.approx((schedule.std[0] / schedule.std[3]).item() ** 2)
    assert variance.sum().item() == pytest.approx(4)
    assert variance[4] == 0


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("snr", "'uniform', 'variance' or a list"),
        ([1.0, 1.0], "each of the 5 diffusion steps expected, got 2"),
        ([0.0, 0.0, 1.0, 1.0, 1.0], "not all 0"),
        ([-1.0, 3.0, 1.0, 1.0, 1.0], "not negative"),
        ([float("nan"), 1.0, 1.0, 1.0, 1.0], "finite"),
    ],
)
def test_unusable_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        diffusion_step_weights(DDPM.cosine(steps=5), weights, [0, 1])
