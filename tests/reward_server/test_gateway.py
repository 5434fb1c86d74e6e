import io
import json
import os
import signal
import threading
import time

import httpx
import numpy as np
import pytest
import redis
from PIL import Image

from reward_server import queue as queue_module
from reward_server.access import check_exposure
from reward_server.contract import CONTENT_TYPE, ScoreRequest, ScoreResponse, decode_request, encode_request
from reward_server.gateway import create_app, run
from reward_server.settings import GatewaySettings


@pytest.fixture
def gateway(redis_url, start_gateway):
    return start_gateway(redis_url=redis_url)


@pytest.fixture
def serve(redis_url, start_worker, make_reward):
    """``serve(score)``: a worker for the reward "red"; returns the reward."""

    def serve(*score, **attributes):
        reward = make_reward(*score, **attributes)
        start_worker(reward, redis_url=redis_url)
        return reward

    return serve


@pytest.fixture
def blocked(serve):
    """A worker that scores only once this event is set."""
    event = threading.Event()

    def score(images, prompts, metadata):
        assert event.wait(10)
        return [1.0] * len(images)

    serve(score)
    yield event
    event.set()


def error(reply, status):
    assert reply.status_code == status, reply.text
    return reply.json()["error"]


def png(red, size=(6, 4), kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", size, (red, 0, 0)).save(file, kind)
    return file.getvalue()


def spooled(tmp_path):
    return list((tmp_path / "spool").iterdir())


def test_images_are_scored_and_their_payload_is_removed(gateway, serve, send, red_images, tmp_path, eventually):
    serve(description="how red")
    reply = send(gateway, red_images(10, 20, 30))
    assert reply.status_code == 200
    answer = ScoreResponse.model_validate_json(reply.content)
    assert answer.state == "done"
    assert answer.results["red"].scores == [10, 20, 30]
    assert answer.results["red"].revision == "r1"
    assert answer.results["red"].timings.scored_ms >= 0
    assert gateway.get(f"/v1/jobs/{answer.id}").json() == reply.json()
    eventually(lambda: spooled(tmp_path) == [])


def test_several_rewards_and_sizes_in_one_request(gateway, serve, send):
    serve()
    serve(lambda images, prompts, metadata: [float(len(image)) for image in images], name="height")
    images = [np.full((height, 3, 3), height, np.uint8) for height in (2, 5)]
    results = send(gateway, images, rewards=["height", "red"]).json()["results"]
    assert results["height"]["scores"] == [2, 5]
    assert results["red"]["scores"] == [2, 5]


def test_a_job_that_takes_longer_is_polled(gateway, blocked, send, red_images):
    reply = send(gateway, red_images(1, 2), wait=0)
    assert reply.status_code == 202
    assert reply.json()["state"] in ("queued", "running")
    url = f"/v1/jobs/{reply.json()['id']}"
    assert gateway.get(url, params={"wait": 0.05}).status_code == 202
    threading.Timer(0.2, blocked.set).start()
    reply = gateway.get(url, params={"wait": 10})
    assert reply.status_code == 200
    assert reply.json()["results"]["red"]["scores"] == [1, 1]


def test_waiting_is_bounded_by_the_server(redis_url, start_gateway, blocked, send, red_images):
    client = start_gateway(redis_url=redis_url, max_wait_s=0.1)
    started = time.monotonic()
    assert send(client, red_images(1), wait=1000).status_code == 202
    assert time.monotonic() - started < 5


def test_the_same_request_twice_is_one_job(gateway, serve, send, red_images, tmp_path, eventually):
    reward = serve()
    first = send(gateway, red_images(1, 2), id="mine")
    again = send(gateway, red_images(1, 2), id="mine", wait=3)
    assert first.json() == again.json()
    assert first.json()["id"] == "mine"
    assert reward.calls == [["p0", "p1"]]
    for changes in ({"prompts": ["p0", "other"]}, {"images": red_images(1, 3)}):
        conflict = send(gateway, changes.pop("images", red_images(1, 2)), id="mine", **changes)
        assert error(conflict, 409)["code"] == "id_conflict"
    eventually(lambda: spooled(tmp_path) == [])


def test_a_pixel_in_the_last_chunk_is_other_content(gateway, serve, red_images):
    serve()
    request = ScoreRequest(rewards=["red"], prompts=["a"], id="mine", wait=10)

    def post(images):
        body = b"".join(encode_request(request, images))

        def in_two_pieces():
            yield body[:-10]
            time.sleep(0.1)
            yield body[-10:]

        return gateway.post("/v1/score", content=in_two_pieces(), headers={"Content-Type": CONTENT_TYPE})

    images = red_images(5)
    assert post(images).json()["results"]["red"]["scores"] == [5]
    assert post(images).status_code == 200
    images[-1, -1, -1, -1] = 1
    assert error(post(images), 409)["where"] == "request.id"


def test_a_repeated_request_leaves_the_first_payload_alone(gateway, blocked, send, red_images, tmp_path):
    send(gateway, red_images(1), id="mine", wait=0)
    before = spooled(tmp_path)
    send(gateway, red_images(1), id="mine", wait=0)
    assert spooled(tmp_path) == before
    blocked.set()
    assert gateway.get("/v1/jobs/mine?wait=10").json()["state"] == "done"


def test_unknown_rewards_name_those_that_are_served(gateway, serve, send, red_images, tmp_path):
    assert "none at the moment" in error(send(gateway, red_images(1)), 404)["message"]
    serve()
    found = error(send(gateway, red_images(1), rewards=["green"]), 404)
    assert found["code"] == "unknown_reward"
    assert found["message"] == "no worker serves 'green'; served: red"
    assert found["where"] == "request.rewards"
    assert spooled(tmp_path) == []


def test_a_full_queue_says_when_to_come_back(redis_url, start_gateway, blocked, send, red_images, tmp_path):
    client = start_gateway(redis_url=redis_url, max_depth=4)
    assert send(client, red_images(1, 2, 3), wait=0).status_code == 202
    reply = send(client, red_images(1, 2))
    assert error(reply, 429)["code"] == "queue_full"
    assert int(reply.headers["Retry-After"]) >= 1
    assert len(spooled(tmp_path)) == 1
    assert error(send(client, red_images(*range(5))), 413)["code"] == "too_large"  # can never fit


def test_a_full_spool_says_when_to_come_back(redis_url, start_gateway, blocked, send, red_images):
    client = start_gateway(redis_url=redis_url, spool_max_bytes=600)
    assert send(client, red_images(1), wait=0).status_code == 202
    reply = send(client, red_images(1, 2), wait=0)
    assert error(reply, 429)["code"] == "spool_full"
    assert "Retry-After" in reply.headers


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_images": 1}, "2 images, at most 1"),
        ({"max_pixels": 23}, "24 pixels, at most 23"),
        ({"max_body_bytes": 300}, "bytes, at most 300"),
        ({"spool_max_bytes": 300}, "bytes, at most 300"),
    ],
)
def test_what_is_too_large_is_refused(redis_url, start_gateway, send, red_images, setting, message):
    client = start_gateway(redis_url=redis_url, **setting)
    assert message in error(send(client, red_images(1, 2)), 413)["message"]


def test_a_chunked_body_is_bounded_too(redis_url, start_gateway, red_images):
    client = start_gateway(redis_url=redis_url, max_body_bytes=300)
    chunks = encode_request(ScoreRequest(rewards=["red"], prompts=["a"] * 9), red_images(*range(9)))
    reply = client.post("/v1/score", content=iter(chunks), headers={"Content-Type": CONTENT_TYPE})
    assert error(reply, 413)["where"] == "body"


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        (lambda body: body[:5], "header", "ends within the 8-byte"),
        (lambda body: body[:50], "header", "the body ends after 42"),
        (lambda body: body[:-1], "images", "describes 72 bytes of pixels, got 71"),
        (lambda body: body + b"x", "images", "got more than 72"),
        (lambda body: body.replace(b"U8", b"I8"), "header.images.dtype", "expected U8, got 'I8'"),
    ],
)
def test_a_malformed_body_says_which_part(gateway, red_images, tmp_path, change, where, message):
    body = b"".join(encode_request(ScoreRequest(rewards=["red"], prompts=["a"]), red_images(1)))
    reply = gateway.post("/v1/score", content=change(body), headers={"Content-Type": CONTENT_TYPE})
    found = error(reply, 422)
    assert (found["code"], found["where"]) == ("malformed", where)
    assert message in found["message"]
    assert spooled(tmp_path) == []


def test_other_content_types_and_paths(gateway):
    assert error(gateway.post("/v1/score", json={}), 415)["where"] == "header Content-Type"
    assert error(gateway.get("/v1/nothing"), 404)["code"] == "http"
    assert error(gateway.get("/v1/jobs/never"), 404)["code"] == "unknown_job"
    assert error(gateway.delete("/v1/jobs/never"), 404)["code"] == "unknown_job"
    assert error(gateway.get("/v1/jobs/never/images"), 404)["code"] == "no_images"
    assert error(gateway.get("/v1/jobs/never?wait=nan"), 422)["where"] == "query.wait"


def test_people_send_files(gateway, serve):
    seen = []

    def score(images, prompts, metadata):
        seen.extend(zip([image.shape for image in images], prompts, metadata, strict=True))
        return [float(image[0, 0, 0]) for image in images]

    serve(score)
    files = [("image", ("a.png", png(10))), ("image", ("b.webp", png(0, (2, 3), "WEBP")))]
    data = {"prompt": ["a", "b"], "reward": "red", "metadata": ['{"n": 1}', "{}"], "id": "form", "wait": "5"}
    reply = gateway.post("/v1/score", files=files, data=data)
    assert reply.json()["results"]["red"]["scores"] == [10, 0]
    assert reply.json()["id"] == "form"
    assert seen == [((4, 6, 3), "a", {"n": 1}), ((3, 2, 3), "b", {})]


@pytest.mark.parametrize(
    ("files", "data", "status", "where", "message"),
    [
        ([], {"prompt": "a"}, 422, "body", "multipart"),
        ([("image", png(1))], {"reward": "red"}, 422, "form.prompt", "0 prompts for 1 images"),
        ([("image", png(1))], {"prompt": "a"}, 422, "form.reward", "field reward is missing"),
        ([("image", png(1))], {"prompt": "a", "reward": "red,red"}, 422, "form", "a reward is named twice"),
        ([("image", png(1))], {"prompt": "a", "reward": "re/d"}, 422, "form.reward.0", "should match pattern"),
        ([("image", png(1))], {"prompt": "a", "reward": "red", "pormpt": "a"}, 422, "form.pormpt", "known are image"),
        (
            [("image", png(1))],
            {"prompt": "a", "reward": "red", "wait": "soon"},
            422,
            "form.wait",
            "must be a number of seconds, got 'soon'",
        ),
        (
            [("image", png(1))],
            {"prompt": "a", "reward": "red", "metadata": "{"},
            422,
            "form.metadata",
            "must be a JSON object per image",
        ),
        ([("image", png(1))], {"prompt": "a", "reward": "red", "metadata": "3"}, 422, "form.metadata.0", "an object"),
        ([("prompt", png(1))], {"reward": "red"}, 422, "form.prompt", "expected text"),
        ([("image", ("x.png", b"nonsense"))], {"prompt": "a", "reward": "red"}, 422, "form.image x.png", "not a PNG"),
        (
            [("image", ("x.png", png(1, (9, 9))))],
            {"prompt": "a", "reward": "red"},
            413,
            "form.image x.png",
            "81 pixels",
        ),
    ],
)
def test_a_wrong_form_says_which_field(redis_url, start_gateway, files, data, status, where, message):
    client = start_gateway(redis_url=redis_url, max_pixels=50)
    headers = None if files else {"Content-Type": "multipart/form-data"}
    reply = client.post("/v1/score", files=files, data=data, headers=headers)
    found = error(reply, status)
    assert found["where"] == where
    assert message in found["message"]


def test_a_job_is_cancelled_or_forgotten(gateway, blocked, send, red_images, tmp_path, eventually):
    job = send(gateway, red_images(1), wait=0).json()["id"]
    reply = gateway.delete(f"/v1/jobs/{job}")
    assert (reply.status_code, reply.json()["state"]) == (200, "cancelled")
    assert gateway.get(f"/v1/jobs/{job}").json() == {"version": "1", "id": job, "state": "cancelled", "results": {}}
    eventually(lambda: spooled(tmp_path) == [])
    blocked.set()
    done = send(gateway, red_images(1)).json()
    assert gateway.delete(f"/v1/jobs/{done['id']}").json() == done
    assert gateway.get(f"/v1/jobs/{done['id']}").status_code == 404


def test_workers_elsewhere_fetch_only_their_images(gateway, blocked, send, red_images):
    metadata = [{"n": i} for i in range(3)]
    job = send(gateway, red_images(10, 20, 30), metadata=metadata, wait=0).json()["id"]
    reply = gateway.get(f"/v1/jobs/{job}/images", params={"start": 1, "stop": 3})
    assert reply.headers["Content-Type"] == CONTENT_TYPE
    request, images = decode_request(reply.content)
    assert images[:, 0, 0, 0].tolist() == [20, 30]
    assert (request.prompts, request.metadata) == (["p1", "p2"], [{"n": 1}, {"n": 2}])
    assert len(decode_request(gateway.get(f"/v1/jobs/{job}/images").content)[1]) == 3
    assert "the job has 3" in error(gateway.get(f"/v1/jobs/{job}/images?start=3"), 422)["message"]


def test_rewards_are_listed(gateway, serve):
    assert gateway.get("/v1/rewards").json() == {"version": "1", "rewards": []}
    serve(description="how red", needs=("tag",))
    (reward,) = gateway.get("/v1/rewards").json()["rewards"]
    provenance = reward.pop("provenance")
    assert provenance["device"] == "cpu"
    assert f"numpy {np.__version__}" in provenance["libraries"]
    assert reward == {
        "name": "red",
        "revision": "r1",
        "description": "how red",
        "needs": ["tag"],
        "relative": False,
        "workers": 1,
        "max_batch": 16,
        "depth": 0,
    }


def test_health_readiness_and_metrics(gateway, serve, send, red_images, tmp_path, eventually):
    assert gateway.get("/healthz").json() == {"status": "ok"}
    assert "no worker is alive" in error(gateway.get("/readyz"), 503)["message"]
    serve(lambda images, prompts, metadata: [1.0, None])
    assert gateway.get("/readyz").json() == {"ready": True, "rewards": ["red"]}
    send(gateway, red_images(1, 2))
    eventually(lambda: spooled(tmp_path) == [])
    lines = gateway.get("/metrics").text.splitlines()
    assert "reward_server_images_total 2.0" in lines
    assert 'reward_server_workers{reward="red"} 1.0' in lines
    assert 'reward_server_queue_depth_images{reward="red"} 0.0' in lines
    assert 'reward_server_requests_total{method="POST",route="/v1/score",status="200"} 1.0' in lines
    assert 'reward_server_scores_total{outcome="scored",reward="red"} 1.0' in lines
    assert 'reward_server_scores_total{outcome="failed",reward="red"} 1.0' in lines
    assert 'reward_server_parts_total{outcome="delivered",reward="red"} 1.0' in lines
    assert "reward_server_spool_bytes 0.0" in lines
    assert "reward_server_redis_up 1.0" in lines


def test_a_token_guards_all_but_health(redis_url, start_gateway, tmp_path, serve, send, red_images):
    (tmp_path / "token").write_text("s3cret\n")
    client = start_gateway(redis_url=redis_url, token_file=tmp_path / "token")
    serve()
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
        for path in ("/v1/rewards", "/metrics", "/docs", "/openapi.json", "/v1/jobs/x/images"):
            reply = client.get(path, headers=headers)
            assert error(reply, 401)["code"] == "unauthorized"
            assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert error(send(client, red_images(1)), 401)["where"] == "header Authorization"
    none = error(client.get("/v1/rewards"), 401)["message"]
    wrong = error(client.get("/v1/rewards", headers={"Authorization": "Bearer wrong"}), 401)["message"]
    assert none.startswith("a bearer token is needed, and none was sent: ")
    assert wrong.startswith("the bearer token is wrong: ")
    for message in (none, wrong):
        assert "REWARD_SERVER_TOKEN" in message
        assert "TRAINER_REWARD__TOKEN" in message
        assert "s3cret" not in message
    assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200
    client.headers["Authorization"] = "Bearer s3cret"
    assert send(client, red_images(7)).json()["results"]["red"]["scores"] == [7]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", ""])
def test_without_a_token_other_machines_are_not_served(host):
    with pytest.raises(ValueError, match="no token is set"):
        check_exposure(host, None)
    check_exposure(host, "token")


def test_loopback_needs_no_token():
    for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost"):
        check_exposure(host, None)
    with pytest.raises(ValueError, match="cannot be resolved"):
        check_exposure("no-such-host.invalid", None)
    with pytest.raises(ValueError, match="no token is set"):
        run(GatewaySettings(host="0.0.0.0"))


@pytest.fixture
def signals():
    """Signal handlers are as they were after the test."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_says_where_it_listens_and_answers_before_it_stops(
    redis_url, signals, blocked, send, red_images, tmp_path, number
):
    """``run`` on a free port; on the signal a waiting request is answered with 202 at once, and ``run`` returns."""
    answers = []

    def use(url):
        with httpx.Client(base_url=url, timeout=30) as client:
            threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
            answers.append(send(client, red_images(1), wait=20).status_code)

    def on_ready(url):
        threading.Thread(target=use, args=[url]).start()

    started = time.monotonic()
    run(GatewaySettings(redis_url=redis_url, port=0, spool="directory", spool_dir=tmp_path / "spool"), on_ready)
    assert answers == [202]
    assert time.monotonic() - started < 4


def test_settings_that_do_not_fit_together():
    with pytest.raises(ValueError, match="spool_dir must name one"):
        create_app(GatewaySettings(spool="directory"))


def test_the_queue_goes_away_and_comes_back(
    own_redis, start_gateway, start_worker, make_reward, send, red_images, eventually
):
    client = start_gateway(redis_url=own_redis.url)
    start_worker(make_reward(), redis_url=own_redis.url)
    assert send(client, red_images(1)).status_code == 200
    own_redis.stop()
    for reply in (send(client, red_images(2)), client.get("/v1/rewards"), client.get("/readyz")):
        assert error(reply, 503)["code"] in ("redis_away", "not_ready")
        assert "Retry-After" in reply.headers
    assert client.get("/healthz").status_code == 200
    assert "reward_server_redis_up 0.0" in client.get("/metrics").text.splitlines()
    own_redis.start()
    eventually(lambda: client.get("/readyz").status_code == 200)
    assert send(client, red_images(3)).json()["results"]["red"]["scores"] == [3]


def test_a_lost_answer_of_redis_does_not_lose_the_images(gateway, blocked, send, red_images, monkeypatch):
    submit = queue_module.JobQueue.submit

    async def submit_and_fail(self, *arguments):
        await submit(self, *arguments)
        raise redis.ConnectionError("the connection broke before the answer came")

    with monkeypatch.context() as patch:
        patch.setattr(queue_module.JobQueue, "submit", submit_and_fail)
        assert error(send(gateway, red_images(1), id="mine"), 503)["code"] == "redis_away"
    blocked.set()
    assert send(gateway, red_images(1), id="mine").json()["results"]["red"]["scores"] == [1]


def test_a_job_lost_with_redis_is_reported(redis_url, gateway, blocked, send, red_images, monkeypatch):
    monkeypatch.setattr(queue_module, "RECHECK_S", 0.05)

    def lose():
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()

    threading.Timer(0.3, lose).start()
    reply = send(gateway, red_images(1), id="mine")
    assert error(reply, 503)["code"] == "job_lost"
    assert "Retry-After" in reply.headers


def test_payloads_may_live_in_redis(redis_url, start_gateway, serve, send, red_images, eventually):
    client = start_gateway(redis_url=redis_url, spool="redis")
    serve()
    assert send(client, red_images(5, 6)).json()["results"]["red"]["scores"] == [5, 6]
    with redis.Redis.from_url(redis_url) as connection:
        eventually(lambda: not connection.exists("rs:payloads"))


def test_the_interface_is_described(gateway):
    paths = gateway.get("/openapi.json").json()["paths"]
    assert "422" in paths["/v1/score"]["post"]["responses"]
    assert json.dumps(paths).count("ScoreResponse") >= 3


def test_what_a_crash_left_is_removed_at_start(
    redis_url, start_gateway, gateway, blocked, send, red_images, tmp_path, eventually
):
    send(gateway, red_images(1), id="unfinished", wait=0)
    (needed,) = spooled(tmp_path)
    left = [tmp_path / "spool" / name for name in ("gone.01234567.payload", "half.01234567.partial")]
    for path in left:
        path.touch()
    for path in [needed, *left]:
        os.utime(path, (1, 1))
    start_gateway(redis_url=redis_url)
    eventually(lambda: spooled(tmp_path) == [needed])


def test_a_client_that_goes_away_leaves_nothing(gateway, serve, red_images, tmp_path, eventually):
    serve()
    body = b"".join(encode_request(ScoreRequest(rewards=["red"], prompts=["a"]), red_images(1)))

    def half():
        yield body[:-10]
        eventually(lambda: len(spooled(tmp_path)) == 1)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        gateway.post("/v1/score", content=half(), headers={"Content-Type": CONTENT_TYPE})
    eventually(lambda: spooled(tmp_path) == [])
