"""What goes wrong: malformed replies, servers that are busy, slow, absent or hostile; and the native protocol."""

import json
import pickle
import time

import numpy as np
import pytest

from reward_server.rewards.base import RewardLoadError, Score, load, prepare


def images(*reds, size=(8, 12)):
    return [np.full((*size, 3), (red, 0, 0), np.uint8) for red in reds]


def values(scores):
    return [score.value for score in scores]


def flow_factory(path, headers, body):
    """Ten and the prompt's length."""
    if path == "/health":
        return {"status": "ok"}
    return {"rewards": [10.0 + len(prompt) for prompt in json.loads(body)["prompt"]]}


def unirl(path, headers, body):
    if path == "/health":
        return {"status": "ok", "rewards": {"hpsv2": ["ready"]}}
    return {"results": [{"hpsv2": {"score": 9.0}}] * len(json.loads(body)["requests"])}


def test_an_absent_server_is_told_at_once(server, remote):
    server.answer = lambda path, headers, body: (404, {}, b"nothing here")
    with pytest.raises(RewardLoadError, match="/health answered 404: nothing here"):
        remote("flow_factory")
    with pytest.raises(RewardLoadError, match="ConnectError"):
        remote("flow_factory", url="http://127.0.0.1:9")


def test_a_server_that_comes_later_is_waited_for(server, remote):
    later = [(503, {}, b"starting")] * 2
    server.answer = lambda *request: later.pop() if later else flow_factory(*request)
    assert values(remote("flow_factory", wait_s=10).score(images(10), ["a"], [{}])) == [11]
    assert later == []


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"not JSON", "is not JSON: not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1.0, 2.0]", "no list rewards"),
        (b'{"rewards": [1.0]}', "has 1 rewards for 2 images"),
        (b'{"rewards": []}', "has 0 rewards for 2 images"),
        (b'{"scores": [1.0, 2.0]}', "no list rewards; it has: scores (option key)"),
        (b'{"rewards": 1.0}', "no list rewards"),
        (b'{"error": "broken"}', "the server answered: broken"),
        (b"", "is not JSON: (empty)"),
    ],
)
def test_malformed_replies_are_no_scores(server, remote, reply, reason):
    server.answer = flow_factory
    reward = remote("flow_factory")
    server.answer = lambda path, headers, body: (200, {}, reply)
    scores = reward.score(images(1, 2), ["a", "b"], [{}, {}])
    assert values(scores) == [None, None]
    assert reason in scores[0].reason


@pytest.mark.parametrize(
    "reply",
    [
        [],
        {},
        {"results": 3},
        {"results": [3]},
        {"results": [{}], "errors": ["x"]},
        {"results": [{"hpsv2": {}}]},
        {"results": [{"hpsv2": 1.0}]},
        {"results": [{"hpsv2": {"score": None}}]},
        {"results": [{"hpsv2": {"score": 1.0}}], "identities": [1]},
        {"results": [{"hpsv2": {"score": 1.0}}], "identities": [{}, {}]},
        {"results": [{"hpsv2": {"score": 1.0}}], "protocol_version": "2"},
        {"results": [{"hpsv2": {"score": 1.0}}] * 2},
    ],
)
def test_malformed_replies_of_unirl(server, remote, reply):
    server.answer = unirl
    reward = remote("unirl", reward="hpsv2")
    assert values(reward.score(images(9), ["a"], [{}])) == [9.0]
    server.answer = lambda *request: reply
    (score,) = reward.score(images(9), ["a"], [{}])
    assert score.value is None
    assert score.reason


def test_replies_that_are_strange_on_purpose(server, remote):
    endless = {}
    endless["scores"] = endless
    deep = b"}\x8c\x06scores" * 3000 + b"]" + b"s" * 3000  # more than Python's pickler could write
    strange = [endless, {"scores": [2**20000]}, {"scores": [{"x": 1.0}]}, [1.0], 1.0, None, {"scores": "1"}, {1: [1.0]}]
    reward = remote("flow_grpo", allow_pickle=True)
    for body in [b"\x80\x04" + deep + b".", *map(pickle.dumps, strange)]:
        server.answer = lambda *request, body=body: (200, {}, body)
        (score,) = reward.score(images(9), ["a"], [{}])
        assert score.value is None
        assert score.reason


def test_null_nan_and_text_are_null_where_they_stand(server, remote):
    server.answer = flow_factory
    reward = remote("flow_factory")
    reply = b'{"rewards": [1.5, NaN, null, "7", Infinity, 1' + b"0" * 400 + b"]}"
    server.answer = lambda path, headers, body: (200, {}, reply)
    scores = reward.score(images(*range(6)), ["p"] * 6, [{}] * 6)
    assert values(scores) == [1.5, None, None, None, None, None]
    assert all("the server answered" in score.reason for score in scores[1:])


def test_an_empty_batch_asks_nothing(server, remote):
    server.answer = flow_factory
    reward = remote("flow_factory")
    assert reward.score([], [], []) == []
    assert server.requests == []


def test_retry_after_is_obeyed(server, remote):
    server.answer = flow_factory
    reward = remote("flow_factory", retries=1)
    busy = [(429, {"Retry-After": "1"}, b"busy")]
    server.answer = lambda *request: busy.pop() if busy else flow_factory(*request)
    started = time.monotonic()
    assert values(reward.score(images(10), ["a"], [{}])) == [11]
    assert 1.0 <= time.monotonic() - started < 3.0
    server.answer = lambda *request: (503, {"Retry-After": "3600"}, b"maintenance")
    server.requests.clear()
    (score,) = reward.score(images(10), ["a"], [{}])
    assert "asks to wait 3600 s" in score.reason
    assert len(server.requests) == 1


@pytest.mark.parametrize(("status", "tries"), [(500, 3), (503, 3), (400, 1), (401, 1)])
def test_only_what_may_pass_is_tried_again(server, remote, status, tries):
    server.answer = flow_factory
    reward = remote("flow_factory", retries=2)
    server.requests.clear()
    server.answer = lambda *request: (status, {}, b"Traceback (most recent call last):\n  File\nValueError: odd image")
    scores = reward.score(images(1, 2), ["a", "b"], [{}, {}])
    assert values(scores) == [None, None]
    assert f"answered {status}: ValueError: odd image" in scores[0].reason
    assert len(server.requests) == tries


def test_a_batch_is_not_posted_again_after_time_outs_more_than_asked(server, remote):
    server.answer = flow_factory
    reward = remote("flow_factory", timeout_s=0.2, retries=1)
    server.answer = lambda *request: time.sleep(0.5) or {"rewards": [1.0, 1.0]}
    scores = reward.score(images(1, 2), ["a", "b"], [{}, {}])
    assert values(scores) == [None, None]
    assert "no answer within 0.2 s" in scores[0].reason
    assert len(server.requests) == 2


def test_the_token_comes_from_the_environment(server, remote, monkeypatch):
    server.answer = flow_factory
    with pytest.raises(RewardLoadError, match="variable REMOTE_TOKEN is not set"):
        remote("flow_factory", token_env="REMOTE_TOKEN")
    monkeypatch.setenv("REMOTE_TOKEN", "secret")
    reward = remote("flow_factory", token_env="REMOTE_TOKEN")
    reward.score(images(1), ["a"], [{}])
    assert server.requests[0].headers["Authorization"] == "Bearer secret"
    assert "secret" not in str(reward.provenance) + reward.revision


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protocol": "grpc"}, "none of cosmos, flow_factory"),
        ({"protocol": "unirl"}, "option reward"),
        ({"protocol": "openrlhf", "url": "localhost:5000"}, "no http:// or https:// URL"),
        ({"protocol": "openrlhf", "image_format": "webp"}, "none of png, jpeg"),
        ({"protocol": "openrlhf", "retries": -1}, "at least 0"),
    ],
)
def test_wrong_options(remote, options, message):
    with pytest.raises(RewardLoadError, match=message):
        remote(**options)


def test_as_a_part_of_an_ensemble(server):
    server.answer = flow_factory
    part = {"weight": 0.5, "reward": "remote", "options": {"protocol": "flow_factory", "url": server.url, "retries": 0}}
    mix = load("ensemble")
    prepare(mix, "cpu", {"parts": {"far": part, "null": {"weight": 2.0}}})
    (score,) = mix.score(images(9), ["a"], [{}])
    assert (score.value, score.details["far.rewards"]) == (0.5 * 11 + 2.0, 11)
    server.answer = lambda *request: (400, {}, b"no more")
    (score,) = mix.score(images(9), ["a"], [{}])
    assert (score.value, score.details["null"]) == (None, 1.0)
    assert score.reason.startswith("part 'far': POST")
    mix.close()


# native


@pytest.fixture
def other_server(redis_url, start_gateway, start_worker, make_reward):
    """Another reward-server, with a token and a slow reward "red"; gives its URL."""

    def start(score, **attributes):
        start_worker(make_reward(score, **attributes), redis_url=redis_url)
        return str(start_gateway(redis_url=redis_url, token="secret").base_url)

    return start


def test_native(other_server, remote, monkeypatch):
    monkeypatch.setenv("OTHER_TOKEN", "secret")

    def score(images, prompts, metadata):
        reds = [float(image[0, 0, 0]) for image in images]
        return [Score(r, {"raw": r * 2}) if r else Score(None, reason="black") for r in reds]

    url = other_server(score, needs=("tag",), revision="abc", description="redness")
    with pytest.raises(RewardLoadError, match=r"401.*option token_env"):
        remote("native", url=url, reward="red")
    with pytest.raises(RewardLoadError, match="serves no 'blue' but red"):
        remote("native", url=url, reward="blue", token_env="OTHER_TOKEN")
    reward = remote("native", url=url, reward="red", token_env="OTHER_TOKEN")
    assert (reward.revision, reward.needs, reward.description) == ("abc", ("tag",), "redness (remote)")
    rng = np.random.default_rng(0)
    pictures = [rng.integers(1, 256, (5 + i, 7, 3), dtype=np.uint8) for i in range(4)]
    pictures[2][:] = 0
    scores = reward.score(pictures, ["a", "b", "c", "d"], [{"tag": 1}] * 4)
    expected = [float(picture[0, 0, 0]) or None for picture in pictures]
    assert values(scores) == expected  # pixels are lossless, and pairs stay pairs
    assert (scores[0].details["raw"], scores[2].reason) == (2 * expected[0], "black")


def test_native_waits_and_gives_up_in_time(other_server, remote, monkeypatch):
    monkeypatch.setenv("OTHER_TOKEN", "secret")
    url = other_server(lambda images, *_: time.sleep(1.0) or [1.0] * len(images))
    patient = remote("native", url=url, reward="red", token_env="OTHER_TOKEN", timeout_s=10)
    hasty = remote("native", url=url, reward="red", token_env="OTHER_TOKEN", timeout_s=0.5)
    assert values(patient.score(images(1), ["a"], [{}])) == [1.0]
    (score,) = hasty.score(images(1), ["a"], [{}])
    assert score.value is None
    assert "was not finished within 0.5 s" in score.reason
