"""The judge and its preset against a scripted server: what it asks, makes of the answers, and refuses."""

import threading
import time

import numpy as np
import pytest

from reward_server.rewards import _judge_pairs, unifiedreward
from reward_server.rewards.base import RewardLoadError, is_relative, prepare, provenance
from reward_server.rewards.judge import Model


def grey(value, height=4, width=6):
    return np.full((height, width, 3), value, np.uint8)


def asked(body):
    return "logprobs" if body.get("logprobs") else "json" if "response_format" in body else "text"


def text_of(body):
    return body["messages"][-1]["content"][-1]["text"]


def one(reward, image=None, prompt="a cat"):
    (score,) = reward.score([grey(9) if image is None else image], [prompt], [{}])
    return score


class Server:
    """Offers ``ways``: what it does not offer it refuses or ignores. Each way has its answer."""

    def __init__(self, chat, ways, refuses=True):
        self.ways, self.refuses, self.chat = ways, refuses, chat
        self.logprobs = chat.completion("4", {"4": 0.6, "5": 0.4})
        self.json = chat.completion('{"answer": "2"}')
        self.text = chat.completion("3")
        chat.answer = self

    def __call__(self, body):
        way = asked(body)
        if way != "text" and way not in self.ways:
            return (400, {}, b"unknown parameter: " + way.encode()) if self.refuses else self.text
        return getattr(self, way)


@pytest.mark.parametrize("refuses", [True, False])
@pytest.mark.parametrize(
    ("ways", "mode", "value"),
    [
        (("logprobs", "json"), "logprobs, then json, then text", 4.4),
        (("logprobs",), "logprobs, then text", 4.4),
        (("json",), "json, then text", 2.0),
        ((), "text", 3.0),
    ],
)
def test_the_best_way_that_the_server_offers_is_found_once_and_used(chat, make_judge, ways, mode, value, refuses):
    Server(chat, ways, refuses)
    reward = make_judge()
    assert provenance(reward)["mode"] == mode
    score = one(reward)
    assert score.value == pytest.approx(value)
    assert score.details["mass"] == (pytest.approx(1.0) if "logprobs" in ways else None)
    assert (score.details["asks"], score.details["unparsed"]) == (1.0, 0.0)
    assert [asked(body) for body in chat.bodies] == [mode.split(",")[0]], "what is not offered is not asked for again"


def test_constrained_output_gives_the_schema_and_has_room_for_it(chat, make_judge):
    Server(chat, ("json",)).json = chat.completion('{"answer": "no"}')
    assert one(make_judge(mode="json", template="yes_no")).value == 0.0
    schema = chat.bodies[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"] == {"answer": {"type": "string", "enum": ["yes", "no"]}}
    assert chat.bodies[0]["max_tokens"] >= 32, "four, as of the template, would cut the object"


def test_fewer_candidates_are_asked_for_where_twenty_are_too_many(chat, make_judge):
    server = Server(chat, ("logprobs",))
    chat.answer = lambda body: (400, {}, b"max is 5") if body.get("top_logprobs", 0) > 5 else server(body)
    one(make_judge())
    assert [body["top_logprobs"] for body in chat.bodies] == [5]


def test_too_little_mass_leads_to_constrained_output(chat, make_judge):
    server = Server(chat, ("logprobs", "json"))
    reward = make_judge()
    server.logprobs = chat.completion("I", {"I": 0.7, "4": 0.3})
    score = one(reward)
    assert score.value == 2.0
    assert (score.details["asks"], score.details["unparsed"]) == (2.0, 1.0)


def test_too_little_mass_without_constrained_output_leads_to_the_text(chat, make_judge):
    server = Server(chat, ("logprobs",))
    reward = make_judge()
    server.logprobs = chat.completion("4", {"4": 0.3, "I": 0.2})
    assert one(reward).value == 4.0
    assert one(make_judge(mode="logprobs")).value is None, "a fixed mode is that one alone"
    assert one(make_judge(mode="logprobs", min_mass=0.3)).value == 4.0


def test_asking_again_is_bounded_and_warmer_and_keeps_the_text(chat, make_judge):
    reward = make_judge()
    chat.answer = lambda body: chat.completion("I think the image is\n quite good" + "!" * 1000)
    score = one(reward)
    assert score.value is None
    assert score.reason.startswith('no rating in 3 answers; the last: "I think the image is\\n quite good!!!')
    assert len(score.reason) < 400
    assert score.details == {"truncated": 0.0, "asks": 3.0, "unparsed": 3.0}
    assert [(body["temperature"], body.get("seed")) for body in chat.bodies] == [(0.0, None), (0.7, 1), (0.7, 2)]


def test_the_second_answer_counts_if_the_first_is_none(chat, make_judge):
    reward = make_judge()
    answers = ["Final", "5"]
    chat.answer = lambda body: chat.completion(answers.pop(0))
    score = one(reward)
    assert (score.value, score.details["asks"], score.details["unparsed"]) == (5.0, 2.0, 1.0)


@pytest.mark.parametrize(
    "answer", ["Final", "NaN", "0", "6", "-1", "1e0", "4.5", "", " ", '{"answer": "4"', "null", "five", "4 because"]
)
def test_what_is_no_rating_is_never_a_score(chat, make_judge, answer):
    reward = make_judge(asks=1)
    chat.answer = lambda body: chat.completion(answer)
    score = one(reward)
    assert score.value is None
    assert score.reason


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((400, {}, b"image too small"), "image too small"),
        ((429, {"Retry-After": "9999"}, b""), "asks to wait 9999 s"),
        ((503, {}, b""), "503"),
        ((200, {}, b"<html>"), "not JSON"),
        (None, "disconnected"),
    ],
)
def test_an_image_fails_alone_and_says_why(chat, make_judge, answer, told):
    reward = make_judge()
    chat.answer = lambda body: answer if chat.pictures(body)[0][0, 0, 0] == 66 else chat.completion("2")
    scores = reward.score([grey(1), grey(66), grey(2)], ["a", "b", "c"], [{}] * 3)
    assert [score.value for score in scores] == [2.0, None, 2.0]
    assert told in scores[1].reason


def test_every_image_meets_its_own_prompt_in_any_order(chat, make_judge):
    """The server rates by image and prompt together, and answers out of turn; mixed-up pairs would have no rating."""
    reward = make_judge(concurrency=4)
    values = [3, 1, 5, 2, 4, 1, 3]

    def answer(body):
        value = int(chat.pictures(body)[0][0, 0, 0])
        time.sleep(0.01 * (value % 3))
        return chat.completion(str(value) if f'"prompt {value}"' in text_of(body) else "mixed up")

    chat.answer = answer
    scores = reward.score([grey(v) for v in values], [f"prompt {v}" for v in values], [{}] * len(values))
    assert [score.value for score in scores] == values


def test_no_more_requests_at_once_than_allowed(chat, make_judge):
    reward = make_judge(concurrency=3)
    barrier = threading.Barrier(3)

    def answer(body):
        barrier.wait(5)
        return chat.completion("4")

    chat.answer, chat.busiest = answer, 0
    reward.score([grey(1)] * 9, ["a"] * 9, [{}] * 9)
    assert chat.busiest == 3


def test_images_arrive_as_they_are(chat, make_judge):
    image = np.random.default_rng(0).integers(0, 256, (7, 5, 3), np.uint8)
    image.flags.writeable = False
    one(make_judge(), image)
    assert (chat.pictures(chat.bodies[0])[0] == image).all()
    assert one(make_judge(), grey(9, 1, 1)).value == 4.0


def test_large_images_are_scaled_down_and_keep_their_shape(chat, make_judge):
    reward = make_judge(max_pixels=5000)
    one(reward, grey(9, 200, 100))
    one(reward, grey(9, 100, 50))
    one(reward, grey(9, 1, 100_000))
    assert [picture.shape for body in chat.bodies for picture in chat.pictures(body)] == [
        (100, 50, 3),
        (100, 50, 3),
        (1, 22360, 3),
    ]


def test_a_long_prompt_is_cut_and_told(chat, make_judge):
    reward = make_judge(max_prompt_chars=5)
    assert one(reward, prompt="abcdef").details["truncated"] == 1.0
    assert one(reward, prompt="abcde").details["truncated"] == 0.0
    assert [('"abcde"' in text_of(body)) for body in chat.bodies] == [True, True]


def test_scalings(chat, make_judge):
    details = one(make_judge(scale="unit")).details
    assert (details["raw"], details["unit"]) == (4.0, 0.75)
    assert one(make_judge(scale="unit")).value == 0.75
    with pytest.raises(RewardLoadError, match="scale is 'x100'; it can be raw, unit"):
        make_judge(scale="x100")


def test_yes_is_a_probability(chat, make_judge):
    chat.answer = lambda body: chat.completion("Yes", {"Yes": 0.6, " yes": 0.1, "No": 0.2, "Maybe": 0.1})
    assert one(make_judge(template="yes_no")).value == pytest.approx(0.7 / 0.9)


def test_extra_body_adds_and_takes_out_keys(chat, make_judge):
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": None, "max_completion_tokens": 9}
    one(make_judge(extra_body=extra))
    assert chat.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert chat.bodies[0]["max_completion_tokens"] == 9
    assert "max_tokens" not in chat.bodies[0]


def test_revision_and_provenance(chat, make_judge):
    first, second = make_judge(), make_judge(template="yes_no")
    assert first.revision == make_judge().revision
    others = [make_judge(**changed) for changed in ({"resize": 64}, {"min_mass": 0.5}, {"extra_body": {"top_k": 1}})]
    assert len({reward.revision for reward in (first, second, *others)}) == 5
    found = provenance(first)
    assert found["weights"] == f"unknown (served as tiny-judge at {chat.url}, from /weights/tiny, by tests)"
    assert found["template"].startswith("rating sha256:")
    assert found["preprocessing"] == "png-as-is-max1048576/1"
    assert all(isinstance(value, str) for value in found.values())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mode": "guess"}, "it can be auto, logprobs, json, text"),
        ({"mode": "json"}, "does not offer json for tiny-judge"),
        ({"asks": 0}, "asks is 0, and must be at least 1"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"min_mass": 0}, "min_mass is 0"),
        ({"retries": -1}, "retries is -1"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"max_pixels": 0}, "max_pixels is 0"),
        ({"mode": "json", "template": "unifiedreward"}, "mode: json does not fit the template"),
        ({"extra_body": {"messages": []}}, "extra_body must not hold messages"),
        ({"model": "other"}, "does not serve 'other' but tiny-judge"),
        ({"base_url": "ftp://x"}, "base_url must be"),
        ({"base_url": "http://127.0.0.1:1/v1"}, "Is it running, and is base_url right?"),
        ({"template": "none"}, "there are pairwise, rating"),
        ({"api_key_env": "NOT_SET"}, "api_key_env names NOT_SET"),
        ({"nonsense": 1}, "it has: base_url, model"),
    ],
)
def test_wrong_options_are_told_in_words(chat, options, told):
    reward = Model()
    with pytest.raises(RewardLoadError) as caught:
        prepare(reward, "cpu", {"base_url": chat.url, "retries": 0, **options})
    assert told in str(caught.value)
    if hasattr(reward, "chat"):
        reward.chat.close()


@pytest.mark.parametrize(("status", "told"), [(400, "takes no images"), (503, "takes no images"), (401, "takes no")])
def test_a_model_that_cannot_answer_is_refused_at_the_start(chat, make_judge, status, told):
    chat.answer = lambda body: (status, {}, b"this model takes no images")
    with pytest.raises(RewardLoadError, match=rf"tiny-judge does not answer: .* answered {status}: .*{told}"):
        make_judge()


def test_of_several_models_one_must_be_named(chat, make_judge):
    chat.models = [{"id": "a"}, {"id": "b"}]
    with pytest.raises(RewardLoadError, match=r"model must be named; .* serves a, b"):
        make_judge()
    make_judge(model="b")
    assert chat.setup_bodies[0]["model"] == "b"
    chat.models = None
    assert one(make_judge(model="unlisted")).value == 4.0, "a server without a list"


# UnifiedReward


@pytest.mark.parametrize(("scale", "value"), [("raw", 3.5), ("raw/5", 0.7), ("(raw-1)/4", 0.625)])
def test_unifiedreward_scales_as_the_field_does(chat, make_judge, scale, value):
    chat.answer = lambda body: chat.completion("cat (animal): 1\nFinal Score: 3.5")
    score = one(make_judge(unifiedreward.Model, scale=scale))
    assert score.value == pytest.approx(value)
    assert [score.details[name] for name in ("raw", "raw/5", "(raw-1)/4")] == pytest.approx([3.5, 0.7, 0.625])
    assert {asked(body) for body in chat.setup_bodies + chat.bodies} == {"text"}, "its ratings are decimals in text"


def test_unifiedreward_by_axes(chat, make_judge):
    """The example of the model's repository."""
    chat.answer = lambda body: chat.completion(
        "\nAlignment Score (1-5): 2.694700002670288\nCoherence Score (1-5): 2.371500015258789\n"
        "Style Score (1-5): 2.802500009536743\n"
    )
    score = one(make_judge(unifiedreward.Model, template="unifiedreward_axes"))
    assert score.value == pytest.approx(2.62290000915527)
    assert score.details["coherence"] == 2.371500015258789


def test_an_axis_cannot_take_the_place_of_the_score(chat, make_judge, tmp_path):
    (tmp_path / "t.yaml").write_text(
        "kind: rating\nscale: [1, 5]\nuser: '{prompt}'\nmarkers: {raw: 'R:', asks: 'A:'}\n"
    )
    chat.answer = lambda body: chat.completion("R: 2\nA: 4")
    score = one(make_judge(template=str(tmp_path / "t.yaml")))
    assert (score.value, score.details["raw"], score.details["asks"]) == (3.0, 3.0, 1.0)


def test_unifiedreward_may_resize_as_the_field_does(chat, make_judge):
    chat.answer = lambda body: chat.completion("Final Score: 3.5")
    one(make_judge(unifiedreward.Model, resize=512), grey(9, 100, 300))
    assert chat.pictures(chat.bodies[0])[0].shape == (512, 512, 3)


# pairs


def brighter(chat):
    """The brighter image wins, by the text alone."""
    return lambda body: chat.completion(
        "1" if chat.pictures(body)[0][0, 0, 0] > chat.pictures(body)[1][0, 0, 0] else "2"
    )


def test_groups_become_win_rates(chat, make_judge):
    chat.answer = brighter(chat)
    reward = make_judge(template="pairwise")
    assert is_relative(reward)
    scores = reward.score([grey(v) for v in (10, 200, 30, 7, 90)], ["a", "b", "a", "b", "a"], [{}] * 5)
    assert [score.value for score in scores] == [0.0, 1.0, 0.5, 0.0, 1.0]
    assert len(chat.bodies) == 2 * (3 + 1), "each pair in both orders"
    assert scores[0].details["comparisons"] == 2.0
    assert scores[0].details["asks"] == 4.0


def test_both_orders_are_averaged(chat, make_judge):
    """A judge that always prefers the first image says nothing: each image wins half."""
    chat.answer = lambda body: chat.completion("1")
    scores = make_judge(template="pairwise").score([grey(1), grey(2)], ["a", "a"], [{}] * 2)
    assert [score.value for score in scores] == [0.5, 0.5]


def test_probabilities_of_a_pair_are_averaged(chat, make_judge):
    """p(1 | bright first) = .9, p(1 | dark first) = .3: the bright image has (.9 + .7) / 2."""

    def answer(body):
        first, second = (int(picture[0, 0, 0]) for picture in chat.pictures(body))
        p = 0.9 if first > second else 0.3
        return chat.completion("1", {"1": p, "2": 1 - p})

    chat.answer = answer
    scores = make_judge(template="pairwise").score([grey(9), grey(99)], ["a", "a"], [{}] * 2)
    assert [score.value for score in scores] == pytest.approx([0.2, 0.8])


def test_a_failed_comparison_counts_for_nobody_and_is_told(chat, make_judge):
    """Of three images, the order (30, 20) fails: 30 and 20 have one comparison each, against 10."""
    reward = make_judge(template="pairwise", asks=1)
    rule = brighter(chat)
    pair = lambda body: tuple(int(picture[0, 0, 0]) for picture in chat.pictures(body))  # noqa: E731
    chat.answer = lambda body: chat.completion("a tie") if pair(body) == (30, 20) else rule(body)
    scores = reward.score([grey(v) for v in (10, 20, 30)], ["a"] * 3, [{}] * 3)
    assert [score.value for score in scores] == [0.0, 1.0, 1.0]
    assert [score.details["failed"] for score in scores] == [0.0, 1.0, 1.0]
    assert [score.details["comparisons"] for score in scores] == [2.0, 1.0, 1.0]
    assert [score.details["unparsed"] for score in scores] == [0.0, 1.0, 1.0]


def test_an_image_without_a_comparison_is_null(chat, make_judge):
    reward = make_judge(template="pairwise", asks=1)
    rule = brighter(chat)
    chat.answer = lambda body: (400, {}, b"broken") if 66 in [p[0, 0, 0] for p in chat.pictures(body)] else rule(body)
    images = [grey(v) for v in (10, 66, 20, 5)]
    scores = reward.score(images, ["a", "a", "a", "alone"], [{}] * 4)
    assert [score.value for score in scores] == [0.0, None, 1.0, None]
    assert "none of its 2 comparisons succeeded" in scores[1].reason
    assert "broken" in scores[1].reason
    assert "nothing to compare it with" in scores[3].reason


def test_groups_by_metadata(chat, make_judge):
    chat.answer = brighter(chat)
    reward = make_judge(template="pairwise", group_by="group")
    assert reward.needs == ("group",)
    assert "group" in reward.example[1]
    keys = [{"group": key} for key in (1, "1", 1, "1", 2, 2)]
    scores = reward.score([grey(v) for v in (1, 2, 3, 4, 5, 6)], ["a", "a", "a", "a", "a", "b"], keys)
    assert [score.value for score in scores] == [0.0, 0.0, 1.0, 1.0, None, None]
    assert "different prompts" in scores[4].reason


def test_opponents_are_bounded_and_seeded(chat, make_judge):
    chat.answer = brighter(chat)
    images, prompts = [grey(v) for v in range(10, 19)], ["a"] * 9
    first = make_judge(template="pairwise", opponents=2).score(images, prompts, [{}] * 9)
    assert len(chat.bodies) == 18, "nine pairs in both orders, not thirty-six"
    assert {score.details["comparisons"] for score in first} == {2.0}
    again = make_judge(template="pairwise", opponents=2).score(images, prompts, [{}] * 9)
    other = make_judge(template="pairwise", opponents=2, seed=1).score(images, prompts, [{}] * 9)
    assert [s.value for s in first] == [s.value for s in again]
    assert [s.value for s in first] != [s.value for s in other]


@pytest.mark.parametrize("size", range(2, 10))
@pytest.mark.parametrize("opponents", range(7))
def test_a_schedule_is_fair(size, opponents):
    made = _judge_pairs.pairs(list(range(size)), opponents, "seed")
    met = {frozenset(pair) for pair in made}
    assert len(met) == len(made), "no pair twice"
    assert all(len(pair) == 2 for pair in met), "nobody meets itself"
    wanted = size - 1 if opponents == 0 else min(size - 1, 2 * ((opponents + 1) // 2))
    assert [sum(index in pair for pair in met) for index in range(size)] == [wanted] * size
