"""How an answer becomes a rating: numbers worked out by hand, and every answer that must not become one."""

import pytest

from reward_server.rewards._chat import Reply, Token
from reward_server.rewards._judge_reading import from_json, from_logprobs, from_text
from reward_server.rewards._judge_template import Template

FIVE = Template(kind="rating", scale=(1, 5), user="{prompt}")
TEN = Template(kind="rating", scale=(1, 10), user="{prompt}")
YES = Template(kind="yes_no", user="{prompt}")
FINAL = Template(kind="rating", scale=(1, 5), user="{prompt}", markers={"score": "Final Score:"})
AXES = Template(kind="rating", scale=(1, 5), user="{prompt}", markers={"a": "Alignment:", "s": "Style (1-5):"})


def reply(*tokens, cut=False):
    """Each token is its candidates with their probabilities; the first one was generated."""
    made = tuple(Token(next(iter(candidates)), candidates) for candidates in tokens)
    return Reply("".join(token.text for token in made), made, cut)


def test_the_expected_value_is_over_the_valid_ratings_renormalised():
    reading = from_logprobs(FIVE, reply({"4": 0.5, "5": 0.25, " 3": 0.15, "The": 0.1}), 0.8)
    assert reading.value == pytest.approx((4 * 0.5 + 5 * 0.25 + 3 * 0.15) / 0.9)
    assert reading.mass == pytest.approx(0.9)


def test_with_less_than_the_least_mass_there_is_no_expected_value():
    answer = reply({"4": 0.5, "The": 0.5})
    assert from_logprobs(FIVE, answer, 0.51) is None
    assert from_logprobs(FIVE, answer, 0.5).value == 4.0
    assert from_logprobs(FIVE, reply({"The": 0.6, "4": 0.4}), 0.3).value == 4.0, "whatever was generated"
    assert from_logprobs(FIVE, Reply("4"), 0.01) is None, "no log-probabilities"


def test_yes_is_summed_over_its_spellings():
    answer = reply({"Yes": 0.4, " yes": 0.2, "YES": 0.1, "No": 0.1, " no": 0.1, "Maybe": 0.1})
    assert from_logprobs(YES, answer, 0.8).value == pytest.approx(0.7 / 0.9)


def test_white_space_before_the_answer_is_passed_over():
    reading = from_logprobs(FIVE, reply({"\n": 0.9, "1": 0.1}, {" 2": 0.7, "3": 0.3}), 0.8)
    assert reading.value == pytest.approx(2.3)


def test_an_answer_of_several_tokens_is_followed():
    """ "1" (0.6) goes on as "0" (0.75) or ends (0.2, 0.05); "9" has 0.3: p(10) = .45, p(1) = .15, p(9) = .3."""
    answer = reply({"1": 0.6, "9": 0.3, "The": 0.1}, {"0": 0.75, "<|im_end|>": 0.2, "\n": 0.05})
    assert from_logprobs(TEN, answer, 0.8).value == pytest.approx((10 * 0.45 + 1 * 0.15 + 9 * 0.3) / 0.9)
    assert from_logprobs(TEN, answer, 0.8).mass == pytest.approx(0.9)


def test_a_beginning_that_was_not_generated_counts_for_none():
    """After "9" nobody knows whether "1" would have become 10, so that its 0.3 is missing from the mass."""
    answer = reply({"9": 0.7, "1": 0.3}, {"<|im_end|>": 1.0})
    assert from_logprobs(TEN, answer, 0.71) is None
    assert from_logprobs(TEN, answer, 0.7).value == 9.0
    cut = reply({"1": 1.0}, cut=True)
    assert from_logprobs(TEN, cut, 0.1) is None, "cut where 10 could have followed"
    assert from_logprobs(TEN, reply({"1": 1.0}), 0.1).value == 1.0


@pytest.mark.parametrize(
    "tokens",
    [
        [{"1": 0.9}, {"0": 1.0}],  # 10 on a scale to 5 is not a 1
        [{"4": 0.9}, {".": 1.0}, {"5": 1.0}],
        [{"4": 0.9}, {"/": 1.0}, {"10": 1.0}],
        [{"3rd": 0.9}],
        [{"7": 1.0}],
        [{"-": 0.9, "4": 0.1}, {"4": 1.0}],
        [{"": 1.0}],
    ],
)
def test_what_goes_on_after_a_digit_is_not_that_digit(tokens):
    assert from_logprobs(FIVE, reply(*tokens), 0.8) is None


def test_log_probabilities_after_a_marker():
    answer = reply({"Final": 1.0}, {" Score:": 1.0}, {" ": 1.0}, {"4": 0.6, "5": 0.4}, {"\n": 1.0})
    assert from_logprobs(FINAL, answer, 0.8).value == pytest.approx(4.4)
    twice = reply({"Final Score:": 1.0}, {" 4": 1.0}, {" Final Score:": 1.0}, {" 2": 1.0})
    assert from_logprobs(FINAL, twice, 0.8) is None
    glued = reply({"Final": 1.0}, {" Score:4": 1.0})
    assert from_logprobs(FINAL, glued, 0.01) is None, "the token holds a part of the marker"


def test_choices_may_be_words():
    words = {"bad": 1, "poor": 2, "fair": 3, "good": 4, "excellent": 5}
    template = Template(kind="rating", scale=(1, 5), user="{prompt}", choices=words)
    reading = from_logprobs(template, reply({" good": 0.5, " excellent": 0.3, " fair": 0.2}), 0.8)
    assert reading.value == pytest.approx(4 * 0.5 + 5 * 0.3 + 3 * 0.2)
    assert from_json(template, Reply('{"answer": "Poor"}')).value == 2.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        (" 4.\n", 4),
        ("**5**", 5),
        ('"1"', 1),
        ("4.5", None),
        ("6", None),
        ("0", None),
        ("-4", None),
        ("10", None),
        ("4 5", None),
        ("I give it 4", None),
        ("four", None),
        ("", None),
        ("NaN", None),
        ("4/5", None),
    ],
)
def test_a_free_answer_is_a_rating_only_if_it_is_nothing_else(text, value):
    reading = from_text(FIVE, Reply(text))
    assert (reading.value if reading else None) == value


def test_a_cut_answer_that_could_go_on_is_none():
    assert from_text(TEN, Reply("1", cut=True)) is None
    assert from_text(TEN, Reply("1")).value == 1.0
    assert from_text(TEN, Reply("9", cut=True)).value == 9.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("cat (animal): 1\nFinal Score: 3.6247", 3.6247),
        ("**Final Score:** 4", 4),
        ("Final Score: 4/5", 4),
        ("Final Score: 4 out of 5.", 4),
        ("Final Score: 2.5\n\nFinal Score: 2.5", 2.5),
        ("Final Score:5", 5),
        ("Final Score: 5.0", 5),
        ("Final", None),
        ("Final Score:", None),
        ("Final Score: NaN", None),
        ("Final Score: nan, so 3", None),
        ("Final Score: five", None),
        ("Final Score: 0.9", None),
        ("Final Score: 5.01", None),
        ("Final Score: 45", None),
        ("Final Score: -3", None),
        ("Final Score: 3,5", None),
        ("Final Score: 3e0", None),
        ("Final Score: 4/10", None),
        ("Final Score: 4 / 50", None),
        ("Final Score: 4 out of 10", None),
        ("Final Score: 80%", None),
        ("Final Score: 3 Final Score: 4", None),
        ("Final Score: 3 Final Score: -4", None),
        ("The score is 4", None),
        ("", None),
    ],
)
def test_a_number_after_a_marker(text, value):
    reading = from_text(FINAL, Reply(text))
    assert (reading.value if reading else None) == value


def test_a_number_at_the_end_of_a_cut_answer_is_none():
    assert from_text(FINAL, Reply("Final Score: 3", cut=True)) is None
    assert from_text(FINAL, Reply("Final Score: 3\n", cut=True)).value == 3.0


def test_axes_are_averaged_and_all_are_needed():
    reading = from_text(AXES, Reply("Alignment: 2.6947\nStyle (1-5): 4.5\n"))
    assert reading.value == pytest.approx((2.6947 + 4.5) / 2)
    assert reading.axes == {"a": 2.6947, "s": 4.5}
    assert from_text(AXES, Reply("Alignment: 2.6947\nStyle (1-5): nan")) is None, "one axis alone is no score"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"answer": "4"}', 4),
        (' {"answer":"4"}\n', 4),
        ('{"answer": "4"', None),
        ('{"answer": 4}', None),
        ('{"answer": "9"}', None),
        ('{"answer": null}', None),
        ('{"answer": "4", "why": "nice"}', None),
        ('{"Answer": "4"}', None),
        ('["4"]', None),
        ("4", None),
        ("[" * 100_000, None),
        ("", None),
    ],
)
def test_constrained_output(text, value):
    reading = from_json(FIVE, Reply(text))
    assert (reading.value if reading else None) == value


@pytest.mark.parametrize(
    ("a", "s", "value"),
    [
        ("4", "2.5", 3.25),
        ("NaN", "2", None),
        ("Infinity", "2", None),
        ("true", "2", None),
        ("0", "2", None),
        ('"4"', "2", None),
        ("1e400", "2", None),
        ("9" * 400, "2", None),
        ("null", "2", None),
    ],
)
def test_constrained_output_of_axes(a, s, value):
    reading = from_json(AXES, Reply(f'{{"a": {a}, "s": {s}}}'))
    assert (reading.value if reading else None) == value
