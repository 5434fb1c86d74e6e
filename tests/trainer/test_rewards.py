"""The reward server's client against a server played by an httpx transport: no network, no server."""

import json
import logging
import math
import threading

import httpx
import numpy as np
import pytest

from reward_server.contract import ContractError, decode_request
from trainer import rewards
from trainer.rewards import RewardClient, RewardError, RewardRefused, RewardServerLost

IMAGES = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)


def result(scores=(0.25, 0.5), reasons=(None, None), **extra):
    timings = {"queued_ms": 1.0, "scored_ms": 2.0}
    return {"revision": "r1", "scores": list(scores), "reasons": list(reasons), "timings": timings, **extra}


def answer(state="done", status=200, job="job", **results):
    return httpx.Response(status, json={"id": job, "state": state, "results": results})


def refusal(status, code, message, headers=None, where=None):
    detail = {"code": code, "message": message, "where": where}
    return httpx.Response(status, json={"error": detail}, headers=headers)


class Script:
    """A transport that gives the answers in order and keeps the requests; an exception is raised."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []

    def __call__(self, request):
        request.read()
        self.requests.append(request)
        reply = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(reply, Exception):
            raise reply
        return reply


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(rewards, "_RETRY_S", (0.001, 0.01))
    opened = []

    def make(script, names=("a",), **extra):
        made = RewardClient("http://server:1/", "secret", names, transport=httpx.MockTransport(script), **extra)
        opened.append(made)
        return made

    yield make
    for made in opened:
        made.close()


def test_scores_arrive_as_arrays_with_a_mask(client):
    script = Script(
        answer(
            a=result((0.25, None), (None, "too dark"), details={"strict": [1.0, None]}),
            b=result((2, 3)),
        )
    )
    scores = client(script, {"a": 1.0, "b": 0.5}).submit(IMAGES, ["p", "q"], [{"k": 1}, {}], "job-1").result(5)
    assert scores.scores["a"].dtype == np.float64
    assert scores.scores["a"][0] == 0.25
    assert math.isnan(scores.scores["a"][1])
    assert scores.valid["a"].tolist() == [True, False]
    assert scores.reasons["a"] == [None, "too dark"]
    assert scores.details["a"]["strict"][0] == 1.0
    assert math.isnan(scores.details["a"]["strict"][1])
    assert scores.scores["b"].tolist() == [2.0, 3.0]
    assert scores.valid["b"].all()
    assert scores.revisions == {"a": "r1", "b": "r1"}
    assert scores.away_s == 0.0
    assert scores.seconds >= 0.0


def test_the_request_is_the_contract_s_with_the_token_and_the_exact_length(client):
    script = Script(answer(a=result()))
    client(script).submit(IMAGES, ["p", "q"], [{"k": [1]}, {}], "job-1").result(5)
    sent = script.requests[0]
    assert (sent.method, sent.url.path) == ("POST", "/v1/score")
    assert sent.headers["Authorization"] == "Bearer secret"
    assert sent.headers["Content-Type"] == "application/vnd.safetensors"
    assert int(sent.headers["Content-Length"]) == len(sent.content)
    assert "Transfer-Encoding" not in sent.headers
    request, images = decode_request(sent.content)
    assert np.array_equal(images, IMAGES)
    assert (request.id, request.rewards, request.prompts) == ("job-1", ["a"], ["p", "q"])
    assert request.metadata == [{"k": [1]}, {}]


def test_images_of_several_sizes_and_larger_than_one_piece(client):
    script = Script(answer(a=result()))
    images = [np.full((1000, 700, 3), 7, np.uint8), np.full((2, 9, 3), 8, np.uint8)]
    client(script).submit(images, ["p", "q"]).result(5)
    request, received = decode_request(script.requests[0].content)
    assert [i.shape for i in received] == [(1000, 700, 3), (2, 9, 3)]
    assert all(np.array_equal(i, j) for i, j in zip(images, received, strict=True))
    assert request.id


def test_an_unfinished_job_is_polled_by_its_id(client):
    script = Script(answer("queued", 202), answer("running", 202), answer(a=result()))
    scores = client(script).submit(IMAGES, ["p", "q"], job_id="job-1").result(5)
    assert [(r.method, r.url.path) for r in script.requests] == [
        ("POST", "/v1/score"),
        ("GET", "/v1/jobs/job-1"),
        ("GET", "/v1/jobs/job-1"),
    ]
    assert float(script.requests[1].url.params["wait"]) > 0
    assert scores.scores["a"].tolist() == [0.25, 0.5]


def test_an_outage_pauses_says_so_once_and_goes_on_with_the_same_id(client, caplog):
    away = httpx.ConnectError("connection refused")
    script = Script(
        away, away, refusal(503, "redis_away", "Redis is away"), answer("queued", 202), away, answer(a=result())
    )
    with caplog.at_level(logging.WARNING, logger="trainer.rewards"):
        scores = client(script).submit(IMAGES, ["p", "q"], job_id="job-1").result(5)
    posts = [decode_request(r.content)[0].id for r in script.requests if r.method == "POST"]
    assert posts == ["job-1"] * 4
    assert scores.away_s > 0
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "reward server at http://server:1 is away (connection refused); waiting up to 600 s"
    assert messages[1].startswith("reward server at http://server:1 is back after ")
    assert len(messages) == 4, "two outages, each with one message at its start and one at its end"


def test_the_server_s_retry_after_is_heeded(client, monkeypatch):
    pauses = []
    script = Script(refusal(429, "busy", "the queue is full", {"Retry-After": "3"}), answer(a=result()))
    made = client(script)
    monkeypatch.setattr(made._closed, "wait", pauses.append)
    made.submit(IMAGES, ["p", "q"]).result(5)
    assert pauses == [3.0]


def test_a_forgotten_job_is_sent_again(client):
    script = Script(answer("queued", 202), refusal(404, "unknown_job", "no such job"), answer(a=result()))
    assert client(script).submit(IMAGES, ["p", "q"]).result(5).valid["a"].all()
    assert [r.method for r in script.requests] == ["POST", "GET", "POST"]


def test_a_server_that_stays_away_is_given_up(client):
    made = client(Script(httpx.ConnectError("connection refused")), give_up_after_s=0.05)
    with pytest.raises(RewardServerLost, match=r"at http://server:1 stayed away for 0\.05 s \(connection refused\)"):
        made.submit(IMAGES, ["p", "q"]).result(5)


def test_a_server_known_to_be_down_for_good_is_not_waited_for(client):
    def down():
        raise RewardError("the server is down: out of memory")

    made = client(Script(httpx.ConnectError("connection refused")), while_away=down)
    with pytest.raises(RewardError, match="down: out of memory"):
        made.submit(IMAGES, ["p", "q"]).result(5)


def test_a_job_that_never_ends_is_given_up(client):
    made = client(Script(answer("running", 202)), timeout_s=0.05)
    with pytest.raises(RewardServerLost, match=r"job job-1 is unfinished after 0\.05 s"):
        made.submit(IMAGES, ["p", "q"], job_id="job-1").result(5)


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "no token"), (404, "nobody serves 'a'"), (409, "other content"), (413, "too large"), (422, "bad header")],
)
def test_a_refusal_is_an_error_at_once_with_the_server_s_words(client, status, message):
    script = Script(refusal(status, "code", message, where="header"))
    with pytest.raises(RewardRefused) as error:
        client(script).submit(IMAGES, ["p", "q"]).result(5)
    assert str(error.value) == f"http://server:1 answered {status}: {message} (at header)"
    assert error.value.status == status
    assert len(script.requests) == 1


def test_a_reward_that_was_served_before_is_waited_for(client):
    script = Script(answer(a=result()), refusal(404, "unknown_reward", "nobody serves 'a'"), answer(a=result((1, 2))))
    made = client(script)
    made.submit(IMAGES, ["p", "q"]).result(5)
    assert made.submit(IMAGES, ["p", "q"]).result(5).scores["a"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (answer("cancelled"), "was cancelled"),
        (answer(), "has no result of 'a' for 2 images"),
        (answer(a=result((1.0,), (None,))), "has 1 scores of 'a' for 2 images"),
        (httpx.Response(200, html="<p>"), r"like a reward server \(HTTP 200, text/html; charset=utf-8\)$"),
        (
            httpx.Response(404, html="<p>"),
            r"^http://server:1 does not answer like a reward server \(HTTP 404, text/html",
        ),
        (httpx.Response(200, json=[]), "answered what this client cannot read"),
        (answer(a=result((None, 1.0))), "answered what this client cannot read"),
        (
            httpx.Response(
                200,
                text='{"id": "x", "state": "done", "results": {"a": NaN}}',
                headers={"Content-Type": "application/json"},
            ),
            "cannot read",
        ),
    ],
)
def test_an_answer_that_is_no_score_is_an_error(client, reply, message):
    with pytest.raises(RewardError, match=message):
        client(Script(reply)).submit(IMAGES, ["p", "q"]).result(5)


def test_a_failed_job_gives_reasons_and_no_number(client):
    script = Script(answer("failed", a=result((None, None), ("gave up", "gave up"))))
    scores = client(script).submit(IMAGES, ["p", "q"]).result(5)
    assert not scores.valid["a"].any()
    assert np.isnan(scores.scores["a"]).all()
    assert scores.reasons["a"] == ["gave up", "gave up"]


@pytest.mark.parametrize(
    ("images", "prompts", "metadata", "job_id"),
    [
        (IMAGES.astype(np.float32), ["p", "q"], None, None),
        (IMAGES, ["p"], None, None),
        (IMAGES, ["p", "q"], [{}], None),
        (IMAGES, ["p", "q"], None, "a/b"),
    ],
)
def test_what_breaks_the_contract_is_refused_before_sending(client, images, prompts, metadata, job_id):
    script = Script(answer(a=result()))
    with pytest.raises(ContractError):
        client(script).submit(images, prompts, metadata, job_id)
    assert script.requests == []


def test_check_returns_revisions_and_names_the_nearest(client):
    info = {"name": "shapes", "revision": "abc", "workers": 1, "max_batch": 16, "depth": 0}
    info["provenance"] = {"weights": "sha256:abc"}
    listing = httpx.Response(200, json={"rewards": [{**info, "relative": True}, {**info, "name": "other"}]})
    asking = client(Script(listing), ["shapes"])
    assert asking.check() == {"shapes": "abc"}
    assert asking.provenance == {"shapes": {"weights": "sha256:abc"}}
    assert asking.relative == ["shapes"]
    other = client(Script(listing), ["other"])
    other.check()
    assert other.relative == []
    with pytest.raises(
        RewardRefused, match=r"does not serve 'shape'; did you mean 'shapes'\? \(served: shapes, other\)"
    ):
        client(Script(listing), ["shape"]).check()
    with pytest.raises(RewardServerLost):
        client(Script(httpx.ConnectError("refused")), ["shapes"]).check(wait_s=0.02)


def test_jobs_run_side_by_side_and_close_ends_those_that_wait(client):
    both = threading.Barrier(2, timeout=5)

    def serve(request):
        both.wait()
        return answer(a=result())

    made = client(serve)
    futures = [made.submit(IMAGES, ["p", "q"]) for _ in range(2)]
    assert all(f.result(5).valid["a"].all() for f in futures)

    stuck = client(Script(httpx.ConnectError("refused")))
    future = stuck.submit(IMAGES, ["p", "q"])
    stuck.close()
    with pytest.raises(RewardError, match="closed"):
        future.result(5)


def test_the_token_does_not_appear_in_errors_or_logs(client, caplog):
    script = Script(httpx.ConnectError("refused"), refusal(401, "unauthorized", "a right token is needed"))
    with caplog.at_level(logging.DEBUG), pytest.raises(RewardRefused) as error:
        client(script).submit(IMAGES, ["p", "q"]).result(5)
    assert "secret" not in str(error.value) + caplog.text
    assert json.loads(script.answers[0].content)["error"]["code"] == "unauthorized"
