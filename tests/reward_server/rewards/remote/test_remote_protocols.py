"""Each protocol against a server that reads requests and answers as the real project's does."""

import base64
import io
import json
import pickle
import urllib.parse

import numpy as np
import PIL.Image
import pytest

from reward_server.rewards.base import RewardLoadError


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
    assert scores[1].reason == "the server answered: OutOfMemory()"
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
