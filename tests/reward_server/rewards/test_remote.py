"""``remote`` against small servers on loopback that read requests and answer as the real projects' servers do."""

import base64
import io
import json
import pickle
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest

from reward_server.rewards import _remote_http
from reward_server.rewards.base import RewardLoadError, load, prepare


class Server:
    """``answer(path, headers, body)`` gives (status, headers, bytes), or an object to be sent as JSON."""

    def __init__(self):
        self.answer = None
        self.requests = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.requests.append(SimpleNamespace(path=self.path, headers=self.headers, body=body))
                answer = outer.answer(self.path, self.headers, body)
                status, headers, content = (
                    answer if isinstance(answer, tuple) else (200, {}, json.dumps(answer).encode())
                )
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST  # noqa: N815

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(_remote_http, "FIRST_PAUSE_S", 0.01)
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def remote(server):
    """``remote(protocol, **options)``: the reward, set up on the server."""

    made = []

    def make(protocol, *, url=None, **options):
        reward = load("remote")
        options = {"protocol": protocol, "url": url or server.url, "timeout_s": 5.0, "retries": 0, **options}
        prepare(reward, "cpu", options)
        made.append(reward)
        server.requests.clear()
        return reward

    yield make
    for reward in made:
        reward.close()


def images(*reds, size=(8, 12)):
    return [np.full((*size, 3), (red, 0, 0), np.uint8) for red in reds]


def red(data):
    """What these servers score: the red of an image file."""
    return float(np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB"))[..., 0].mean())


def red_base64(text):
    return red(base64.b64decode(text))


def values(scores):
    return [score.value for score in scores]


# flow_grpo: the request is unpickled and the reply pickled as in app_geneval.py and app_deqa.py of its reward-server


def geneval(path, headers, body):
    data = pickle.loads(body)
    files = [PIL.Image.open(io.BytesIO(d), formats=["jpeg"]) for d in data["images"]]
    tags = [m["tag"] for m in data["meta_datas"]]
    scores = [float(np.asarray(file)[..., 0].mean()) for file in files]
    group = {
        tag: [s if tag == t else -10.0 for s, t in zip(scores, tags, strict=True)] for tag in ("counting", "colors")
    }
    reply = {
        "scores": scores,
        "rewards": [float(data["only_strict"])] * len(files),
        "strict_rewards": [1.0] * len(files),
        "group_rewards": group,
        "group_strict_rewards": group,
    }
    return 200, {}, pickle.dumps(reply)


def test_flow_grpo_geneval(server, remote):
    server.answer = geneval
    reward = remote("flow_grpo", allow_pickle=True)
    tags = [{"tag": "counting"}, {"tag": "colors"}]
    scores = reward.score(images(200, 50), ["a", "b"], tags)
    assert values(scores) == pytest.approx([200, 50], abs=2)  # through JPEG
    assert scores[0].details["rewards"] == 1.0
    assert scores[0].details["group_rewards.counting"] == scores[0].value == scores[0].details["raw"]
    assert scores[0].details["group_rewards.colors"] is None  # -10.0: not applicable
    sent = pickle.loads(server.requests[0].body)
    assert sent["meta_datas"] == [{"prompt": "a", "tag": "counting"}, {"prompt": "b", "tag": "colors"}]
    assert server.requests[0].path == "/"
    by_group = remote("flow_grpo", allow_pickle=True, key="group_rewards.colors").score(
        images(200, 50), ["a", "b"], tags
    )
    assert by_group[0].value is None
    assert "does not apply" in by_group[0].reason
    assert by_group[1].value == pytest.approx(50, abs=2)


def test_flow_grpo_outputs_in_batches_of_64_and_as_numpy(server, remote):
    def answer(path, headers, body):
        data = pickle.loads(body)
        assert isinstance(data["prompts"], np.ndarray)
        return 200, {}, pickle.dumps({"outputs": np.array([float(p) for p in data["prompts"].tolist()], np.float32)})

    server.answer = answer
    reward = remote("flow_grpo", allow_pickle=True, numpy_prompts=True)
    scores = reward.score(images(*[1] * 70), [str(i) for i in range(70)], [{}] * 70)
    assert values(scores) == list(range(70))
    assert [len(pickle.loads(request.body)["images"]) for request in server.requests] == [64, 6]


def test_flow_grpo_sends_the_jpeg_of_its_clients(server, remote):
    server.answer = lambda path, headers, body: (200, {}, pickle.dumps({"outputs": [1.0]}))
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    remote("flow_grpo", allow_pickle=True).score([image], ["a"], [{}])
    buffer = io.BytesIO()
    PIL.Image.fromarray(image).save(buffer, format="JPEG")  # no quality, as there
    assert pickle.loads(server.requests[0].body)["images"] == [buffer.getvalue()]


def test_flow_grpo_must_be_allowed(remote):
    with pytest.raises(RewardLoadError, match="allow_pickle: true"):
        remote("flow_grpo")


def test_a_hostile_pickle_is_refused_and_not_run(server, remote, tmp_path):
    class Hostile:
        def __reduce__(self):
            return exec, (f"import os; os.mkdir({str(tmp_path / 'run')!r})",)

    server.answer = lambda path, headers, body: (200, {}, pickle.dumps({"scores": [Hostile()]}))
    (score,) = remote("flow_grpo", allow_pickle=True).score(images(1), ["a"], [{}])
    assert score.value is None
    assert "builtins.exec" in score.reason
    assert not (tmp_path / "run").exists()
    pickle.loads(pickle.dumps(Hostile()))
    assert (tmp_path / "run").exists()  # it would have been


# the JSON protocols


def openrlhf(path, headers, body):
    data = json.loads(body)
    assert path == "/get_reward"
    scores = [red_base64(query.rpartition("base64,")[2]) for query in data["query"]]
    assert len(data["query"]) == len(data["prompts"]) == len(data["labels"])
    return {"rewards": scores, "scores": [s / 255 for s in scores], "extra_logs": {"dummy_scores": scores}}


def test_openrlhf(server, remote):
    server.answer = openrlhf
    url = server.url + "/get_reward"
    scores = remote("openrlhf", url=url).score(images(10, 255), ["a", "b"], [{"label": "x"}, {}])
    assert values(scores) == [10, 255]
    assert scores[1].details == {"raw": 255, "rewards": 255, "scores": 1.0, "extra_logs.dummy_scores": 255}
    sent = json.loads(server.requests[0].body)
    assert (sent["prompts"], sent["labels"]) == (["a", "b"], ["x", None])
    assert sent["query"][0].startswith("a\ndata:image/png;base64,")
    assert values(remote("openrlhf", url=url, key="scores").score(images(255), ["a"], [{}])) == [1.0]


def test_slime(server, remote):
    def answer(path, headers, body):
        data = json.loads(body)
        assert data.keys() == {"prompt", "response", "label"}
        value = red_base64(data["response"].partition("base64,")[2])
        if data["prompt"] == "refused":
            return 422, {}, b"no such prompt"
        return value if data["label"] is None else {"score": value, "acc": data["label"]}

    server.answer = answer
    reward = remote("slime", url=server.url + "/rm", concurrency=2)
    scores = reward.score(images(1, 2, 3, 4, 5), ["a", "b", "refused", "d", "e"], [{}] * 5)
    assert values(scores) == [1, 2, None, 4, 5]
    assert "answered 422: no such prompt" in scores[2].reason
    keyed = remote("slime", key="score").score(images(7), ["a"], [{"label": 0.5}])
    assert (keyed[0].value, keyed[0].details["acc"]) == (7, 0.5)
    (unkeyed,) = reward.score(images(7), ["a"], [{"label": 0.5}])
    assert unkeyed.value is None
    assert "it has: score, acc" in unkeyed.reason


def flow_factory(path, headers, body):
    if path == "/health":
        return {"status": "ok"}
    data = json.loads(body)
    return {"rewards": [red_base64(image) + len(p) for p, image in zip(data["prompt"], data["image"], strict=True)]}


def test_flow_factory(server, remote):
    server.answer = flow_factory
    assert values(remote("flow_factory").score(images(10, 20), ["a", "bcd"], [{}, {}])) == [11, 23]
    assert server.requests[0].path == "/compute"


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


def unirl(version=None, break_identity=False):
    def answer(path, headers, body):
        if path == "/health":
            return {"status": "ok", "rewards": {"hpsv2": ["ready"], "ocr": ["ready"]}}
        requests = json.loads(body)["requests"]
        results, errors = [], []
        for request in requests:
            (turn,) = request["history"]
            value = red_base64(turn["image_b64"])
            failed = turn["text"] == "fails"
            results.append(
                {} if failed else {name: {"score": value, "half": value / 2} for name in request["required_rewards"]}
            )
            errors.append({"hpsv2": "OutOfMemory()"} if failed else {})
        reply = {"results": results, "errors": errors}
        if version:
            keys = ("request_id", "idempotency_key")
            identities = [{key: r[key] for key in keys} | {"scorer_version": version} for r in requests]
            reply |= {"protocol_version": "1", "identities": identities[::-1] if break_identity else identities}
        return reply

    return answer


def test_unirl(server, remote):
    server.answer = unirl()
    reward = remote("unirl", reward="hpsv2", image_format="png")
    scores = reward.score(images(10, 20, 30), ["a", "fails", "b"], [{}, {}, {"k": 1}])
    assert values(scores) == [10, None, 30]
    assert scores[1].reason == "OutOfMemory()"
    assert scores[0].details == {"raw": 10, "score": 10, "half": 5}
    assert json.loads(server.requests[0].body)["requests"][2]["metadata"] == {"k": 1}
    assert values(remote("unirl", reward="hpsv2", image_format="png", key="half").score(images(10), ["a"], [{}])) == [5]
    with pytest.raises(RewardLoadError, match="no 'hpsv3' but hpsv2, ocr"):
        remote("unirl", reward="hpsv3")


def test_unirl_identities(server, remote):
    server.answer = unirl(version="v1")
    reward = remote("unirl", reward="hpsv2")
    assert values(reward.score(images(10, 20), ["a", "b"], [{}, {}])) == pytest.approx([10, 20], abs=1)
    assert reward.provenance["remote.revision"] == "v1"
    server.answer = unirl(version="v1", break_identity=True)
    assert "not those of the request" in reward.score(images(10, 20), ["a", "b"], [{}, {}])[0].reason
    server.answer = unirl(version="v2")
    (changed,) = reward.score(images(10), ["a"], [{}])
    assert changed.value is None
    assert "revision v2, and before with v1" in changed.reason


class Cosmos:
    """Scores come at the third pull; a batch whose prompt is "dropped" never has any."""

    def __init__(self):
        self.scores, self.pulls = {}, {}

    def __call__(self, path, headers, body):
        if path == "/api/reward/ping":
            return {"message": "Ping request received"}
        if path == "/api/reward/enqueue":
            header, _, file = body.partition(b"\n")
            header, pixels = json.loads(header), np.load(io.BytesIO(file), allow_pickle=False)
            assert (header["media_type"], pixels.dtype, len(pixels)) == ("image", np.uint8, len(header["prompts"]))
            ticket = str(len(self.scores))
            reds = [float(image[..., 0].mean()) for image in pixels]
            self.scores[ticket] = (
                None
                if "dropped" in header["prompts"]
                else {
                    name: {"scores": {name: reds, "group": {"x": [-10.0] * len(reds)}}, "type": name}
                    for name in header["reward_fn"]
                }
            )
            return {"uuid": ticket, "replica_id": "r7"}
        form = dict(urllib.parse.parse_qsl(body.decode()))
        assert (path, headers["X-Lepton-Replica-Target"]) == ("/api/reward/pull", "r7")
        self.pulls[form["uuid"]] = self.pulls.get(form["uuid"], 0) + 1
        if self.scores[form["uuid"]] is None or self.pulls[form["uuid"]] < 3:
            return 400, {}, json.dumps({"message": f"Not found scores for {form['uuid']}"}).encode()
        return self.scores[form["uuid"]][form["type"]]


def test_cosmos_by_size_and_polling(server, remote):
    server.answer = Cosmos()
    reward = remote("cosmos", reward="hpsv2", key="hpsv2")
    mixed = images(1, size=(4, 4)) + images(2, size=(4, 6)) + images(3, size=(4, 4))
    scores = reward.score(mixed, ["a", "b", "c"], [{}] * 3)
    assert values(scores) == [1, 2, 3]
    assert scores[0].details["group.x"] is None
    assert len(server.requests) == 2 * (1 + 3)
    slow = remote("cosmos", reward="hpsv2", key="hpsv2", timeout_s=0.3)
    assert "no score of hpsv2 within 0.3 s" in slow.score(images(1), ["dropped"], [{}])[0].reason
    (unkeyed,) = remote("cosmos", reward="hpsv2").score(images(1), ["a"], [{}])
    assert "several scores, hpsv2, group.x: choose one (option key)" in unkeyed.reason


def test_cosmos_tells_an_error(server, remote):
    cosmos = Cosmos()

    def answer(path, headers, body):
        if path == "/api/reward/pull":
            return {"error": "[hpsv2] images batch size is zero.", "scores": None}
        return cosmos(path, headers, body)

    server.answer = answer
    (score,) = remote("cosmos", reward="hpsv2").score(images(1), ["a"], [{}])
    assert (score.value, score.reason) == (None, "the server answered: [hpsv2] images batch size is zero.")


# what goes wrong


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


# native


@pytest.fixture
def other_server(redis_url, start_gateway, start_worker, make_reward):
    """Another reward-server, with a token and a slow reward "red"; gives its URL."""

    def start(score, **attributes):
        start_worker(make_reward(score, **attributes), redis_url=redis_url)
        return str(start_gateway(redis_url=redis_url, token="secret").base_url)

    return start


def test_native(other_server, remote, monkeypatch):
    from reward_server.rewards.base import Score

    monkeypatch.setenv("OTHER_TOKEN", "secret")

    def score(images, prompts, metadata):
        reds = [float(image[0, 0, 0]) for image in images]
        return [Score(r, {"raw": r * 2}) if r else Score(None, reason="black") for r in reds]

    url = other_server(score, needs=("tag",), revision="abc", description="redness")
    with pytest.raises(RewardLoadError, match="401"):
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
