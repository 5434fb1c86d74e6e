import os
import signal
import threading
import time

import numpy as np
import pytest
import redis

from reward_server.payloads import PayloadReader, PayloadUnreachableError
from reward_server.queue import Part, Task, WorkQueue
from reward_server.rewards.base import Score
from reward_server.settings import WorkerSettings
from reward_server.worker import run


@pytest.fixture
def gateway(redis_url, start_gateway):
    return start_gateway(redis_url=redis_url)


@pytest.fixture
def client(redis_url):
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def registered(client, start_worker, make_reward, redis_url):
    """The reward "red" is served, but by nobody at the moment: jobs wait."""
    start_worker(make_reward(), redis_url=redis_url).stop_and_wait()


def queued(gateway, send, images, **request):
    reply = send(gateway, images, wait=0, **request)
    assert reply.status_code == 202
    return reply.json()["id"]


def result(gateway, job):
    reply = gateway.get(f"/v1/jobs/{job}", params={"wait": 10})
    assert reply.status_code == 200
    return reply.json()["results"]["red"]


def consumed_by(client, name, claim_idle_ms=60_000):
    """Another worker that takes one part and dies."""
    dead = WorkQueue(client, "red", name, claim_idle_ms=claim_idle_ms)
    dead.join()
    (part,) = dead.take(1, 0) or dead.reclaim(1)
    dead.begin(part)
    return part


def test_batches_join_jobs_of_several_clients(
    gateway, registered, send, red_images, start_worker, make_reward, redis_url
):
    jobs = [queued(gateway, send, red_images(*reds)) for reds in ((1, 2, 3), (4, 5), (6,), (7, 8, 9, 10))]
    reward = make_reward()
    start_worker(reward, redis_url=redis_url, max_batch=8)
    assert [result(gateway, job)["scores"] for job in jobs] == [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
    assert [len(call) for call in reward.calls] == [8, 2]  # the last job is split between two batches


def test_a_large_job_is_scored_in_chunks(gateway, send, red_images, start_worker, make_reward, redis_url):
    reward = make_reward(lambda images, prompts, metadata: [Score(float(p[1:]), {"n": len(images)}) for p in prompts])
    start_worker(reward, redis_url=redis_url, max_batch=4)
    reply = send(gateway, red_images(*range(10))).json()["results"]["red"]
    assert reply["scores"] == list(range(10))
    assert reply["details"] == {"n": [4] * 8 + [2] * 2}


def test_two_workers_share_a_job(gateway, send, red_images, start_worker, make_reward, redis_url):
    both = threading.Barrier(2, timeout=5)

    def score(images, prompts, metadata):
        both.wait()  # passes only if both score at the same time
        return [float(image[0, 0, 0]) for image in images]

    for _ in range(2):
        start_worker(make_reward(score), redis_url=redis_url, max_batch=2)
    assert send(gateway, red_images(1, 2, 3, 4)).json()["results"]["red"]["scores"] == [1, 2, 3, 4]


def test_a_batch_waits_for_more_only_while_jobs_come_together(
    gateway, registered, send, red_images, start_worker, make_reward, redis_url
):
    for red in (1, 2):
        queued(gateway, send, red_images(red), id=f"early-{red}")
    reward = make_reward()
    start_worker(reward, redis_url=redis_url, max_batch=4, max_wait_ms=400)
    result(gateway, "early-2")
    assert [len(call) for call in reward.calls] == [2]
    late = queued(gateway, send, red_images(3))  # waits, since the last batch joined two jobs
    time.sleep(0.1)
    later = queued(gateway, send, red_images(4))
    assert [result(gateway, job)["scores"] for job in (late, later)] == [[3], [4]]
    assert [len(call) for call in reward.calls] == [2, 2]
    started = time.monotonic()
    for _ in range(3):  # the first of these may wait, the others come alone
        send(gateway, red_images(5))
    assert time.monotonic() - started < 1.0


def test_failures_have_reasons_and_the_rest_has_scores(gateway, send, red_images, start_worker, make_reward, redis_url):
    def score(images, prompts, metadata):
        if any(image[0, 0, 0] == 13 for image in images):
            raise ValueError("thirteen")
        return [float("nan") if image[0, 0, 0] == 7 else float(image[0, 0, 0]) for image in images]

    start_worker(make_reward(score), redis_url=redis_url)
    reply = send(gateway, red_images(1, 7, 13, 4)).json()
    assert reply["state"] == "done"
    assert reply["results"]["red"]["scores"] == [1, None, None, 4]
    assert reply["results"]["red"]["reasons"] == [
        None,
        "the reward returned nan, which is not a score",
        "ValueError: thirteen",
        None,
    ]
    assert send(gateway, red_images(13)).json()["state"] == "failed"


def test_parts_of_dead_workers_are_taken_over_before_others_are_begun(
    gateway, registered, send, red_images, start_worker, make_reward, redis_url, client
):
    job = queued(gateway, send, red_images(1, 2))
    consumed_by(client, "dead")
    other = queued(gateway, send, red_images(3))
    begun = []

    def score(images, prompts, metadata):
        begun.append(client.hget(f"rs:job:{other}", "tries:red:0"))
        return [float(image[0, 0, 0]) for image in images]

    reward = make_reward(score)
    time.sleep(0.05)
    start_worker(reward, redis_url=redis_url, claim_idle_ms=50)
    assert result(gateway, job)["scores"] == [1, 2]
    assert result(gateway, other)["scores"] == [3]
    assert [len(call) for call in reward.calls] == [2, 1]
    assert begun == [None, "1"]  # had this worker died as well, the other job would have lost no try


def test_a_part_that_was_delivered_before_is_scored_alone(
    gateway, registered, send, red_images, start_worker, make_reward, redis_url, client
):
    jobs = [queued(gateway, send, red_images(*reds)) for reds in ((1,), (2, 3), (4,))]
    client.hset(f"rs:job:{jobs[1]}", "tries:red:0", 1)
    reward = make_reward()
    start_worker(reward, redis_url=redis_url)
    assert [result(gateway, job)["scores"] for job in jobs] == [[1], [2, 3], [4]]
    assert reward.calls == [["p0", "p1"], ["p0", "p0"]]  # it alone, then the jobs before and after it


def test_a_part_that_kills_its_workers_is_given_up(
    gateway, registered, send, red_images, start_worker, make_reward, redis_url, client
):
    job = queued(gateway, send, red_images(1, 2))
    consumed_by(client, "first")
    time.sleep(0.01)
    consumed_by(client, "second", claim_idle_ms=1)
    reward = make_reward()
    start_worker(reward, redis_url=redis_url, claim_idle_ms=50, max_tries=2)
    found = result(gateway, job)
    assert found["scores"] == [None, None]
    assert found["reasons"][0].startswith("gave up after 2 tries: ")
    assert reward.calls == []
    assert [letter["job"] for _, letter in client.xrange("rs:dead:red")] == [job]
    assert client.get("rs:depth:red") == "0"


def test_a_slow_worker_keeps_its_parts(gateway, send, red_images, start_worker, make_reward, redis_url):
    def slow(images, prompts, metadata):
        time.sleep(0.6)
        return [1.0] * len(images)

    rewards = [make_reward(slow), make_reward(slow)]
    for reward in rewards:
        start_worker(reward, redis_url=redis_url, claim_idle_ms=250)  # a heartbeat comes every 100 ms
    assert send(gateway, red_images(1)).json()["results"]["red"]["scores"] == [1]
    assert sum(len(reward.calls) for reward in rewards) == 1


def test_stopping_finishes_the_batch_in_hand_and_gives_back_the_rest(
    gateway, registered, send, red_images, start_worker, make_reward, redis_url, eventually, client
):
    first = queued(gateway, send, red_images(1, 2))
    second = queued(gateway, send, red_images(3))
    third = queued(gateway, send, red_images(4, 5, 6))
    inside, release = threading.Event(), threading.Event()

    def score(images, prompts, metadata):
        inside.set()
        assert release.wait(10)
        return [float(image[0, 0, 0]) for image in images]

    reward = make_reward(score)
    worker = start_worker(reward, redis_url=redis_url, max_batch=4)
    assert inside.wait(10)
    threading.Timer(0.1, release.set).start()
    worker.stop_and_wait()
    assert [len(call) for call in reward.calls] == [4]
    assert result(gateway, first)["scores"] == [1, 2]
    assert result(gateway, second)["scores"] == [3]
    assert gateway.get(f"/v1/jobs/{third}").status_code == 202
    assert client.xpending("rs:stream:red", "workers")["pending"] == 0
    start_worker(make_reward(), redis_url=redis_url, max_tries=1)  # what was given back counts no try
    assert result(gateway, third)["scores"] == [4, 5, 6]


def test_cancelled_jobs_are_not_scored(
    gateway, registered, send, red_images, start_worker, make_reward, redis_url, client, eventually
):
    job = queued(gateway, send, red_images(1, 2))
    gateway.delete(f"/v1/jobs/{job}")
    reward = make_reward()
    start_worker(reward, redis_url=redis_url)
    assert send(gateway, red_images(3)).json()["results"]["red"]["scores"] == [3]
    assert reward.calls == [["p0"]]
    assert client.get("rs:depth:red") == "0"


def test_a_worker_on_another_host_fetches_over_http(
    redis_url, start_gateway, registered, send, red_images, start_worker, make_reward, monkeypatch
):
    monkeypatch.setattr("reward_server.payloads.map_file", lambda ref: None)
    client = start_gateway(redis_url=redis_url, token="t", headers={"Authorization": "Bearer t"})
    job = queued(client, send, [np.full((2 + i, 3, 3), i, np.uint8) for i in range(3)])
    start_worker(make_reward(), redis_url=redis_url, gateway_url=str(client.base_url), token="t", max_batch=2)
    assert result(client, job)["scores"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "is not on this host and no gateway_url is set"),
        ({"gateway_url": "http://127.0.0.1:9"}, "images not fetched from http://127.0.0.1:9"),
        ({"gateway_url": "the gateway", "token": "wrong"}, "401"),
    ],
)
def test_images_that_cannot_be_fetched_are_given_up_with_the_reason(
    redis_url, start_gateway, registered, send, red_images, start_worker, make_reward, monkeypatch, options, reason
):
    monkeypatch.setattr("reward_server.payloads.map_file", lambda ref: None)
    client = start_gateway(redis_url=redis_url, token="t", headers={"Authorization": "Bearer t"})
    job = queued(client, send, red_images(1))
    if options.get("gateway_url") == "the gateway":
        options = {**options, "gateway_url": str(client.base_url)}
    start_worker(make_reward(), redis_url=redis_url, claim_idle_ms=50, max_tries=2, **options)
    found = result(client, job)
    assert found["scores"] == [None]
    assert found["reasons"][0].startswith("gave up after 2 tries: ")
    assert reason in found["reasons"][0]


@pytest.mark.parametrize("spool", ["directory", "redis"])
def test_images_that_are_gone_are_a_reason_at_once(
    redis_url, start_gateway, registered, send, red_images, start_worker, make_reward, client, tmp_path, spool
):
    gateway = start_gateway(redis_url=redis_url, spool=spool)
    job = queued(gateway, send, red_images(1))
    for path in (tmp_path / "spool").iterdir() if spool == "directory" else ():
        path.unlink()
    for key in client.keys("rs:payload:*"):
        client.delete(key)
    start_worker(make_reward(), redis_url=redis_url, gateway_url=str(gateway.base_url))
    (reason,) = result(gateway, job)["reasons"]
    assert "gone" in reason or "does not have the images" in reason


def test_a_damaged_payload_is_a_reason(
    gateway, registered, send, red_images, start_worker, make_reward, redis_url, tmp_path
):
    job = queued(gateway, send, red_images(1))
    (path,) = (tmp_path / "spool").iterdir()
    path.write_bytes(b"x" * 100)
    start_worker(make_reward(), redis_url=redis_url)
    assert "are damaged: " in result(gateway, job)["reasons"][0]


def test_a_worker_outlives_redis(own_redis, start_gateway, start_worker, make_reward, send, red_images, eventually):
    gateway = start_gateway(redis_url=own_redis.url)
    inside, release = threading.Event(), threading.Event()

    def score(images, prompts, metadata):
        inside.set()
        assert release.wait(10)
        return [1.0] * len(images)

    worker = start_worker(make_reward(score), redis_url=own_redis.url)
    queued(gateway, send, red_images(1))
    assert inside.wait(10)
    own_redis.stop()
    release.set()  # the result has nowhere to go, and its job will be unknown
    time.sleep(0.3)
    own_redis.start()
    eventually(lambda: gateway.get("/readyz").status_code == 200)
    assert send(gateway, red_images(2)).json()["results"]["red"]["scores"] == [1]
    own_redis.stop()
    worker.stop_and_wait()  # stops all the same


def test_the_command_serves_until_it_is_told_to_stop(gateway, send, red_images, redis_url):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    answers = []

    def use():
        while gateway.get("/readyz").status_code != 200:
            time.sleep(0.01)
        answers.append(send(gateway, red_images(1, 2), rewards=["null"]).json()["results"]["null"]["scores"])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=use).start()
    run(WorkerSettings(reward="null", redis_url=redis_url))
    assert answers == [[1.0, 1.0]]
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_payloads_are_kept_open_until_they_are_forgotten(gateway, registered, send, red_images, redis_url, tmp_path):
    queued(gateway, send, red_images(1, 2))
    (path,) = (tmp_path / "spool").iterdir()
    tasks = [Task(Part("0-1", "job", i, i + 1), f"file:{path}", 1, 0.0) for i in range(2)]
    with redis.Redis.from_url(redis_url) as binary:
        reader = PayloadReader(binary, None, None)
        assert [item.prompt for item in reader.items(tasks[0])] == ["p0"]
        path.unlink()
        assert [item.prompt for item in reader.items(tasks[1])] == ["p1"]
        reader.forget()
        with pytest.raises(PayloadUnreachableError):
            reader.items(tasks[1])
        reader.close()


def test_a_part_that_could_not_be_opened_is_delivered_again(
    gateway, registered, send, red_images, start_worker, make_reward, redis_url, monkeypatch
):
    items = PayloadReader.items
    failures = [redis.ConnectionError("away")]

    def items_at_second_try(self, task):
        if failures:
            raise failures.pop()
        return items(self, task)

    monkeypatch.setattr(PayloadReader, "items", items_at_second_try)
    job = queued(gateway, send, red_images(1))
    start_worker(make_reward(), redis_url=redis_url, claim_idle_ms=200)  # a heartbeat every 100 ms would keep it
    assert result(gateway, job)["scores"] == [1]


@pytest.mark.parametrize("max_batch", [2, 16])
def test_a_relative_reward_gets_each_job_whole_and_alone(
    gateway, client, send, red_images, start_worker, make_reward, redis_url, max_batch
):
    start_worker(make_reward(relative=True), redis_url=redis_url, max_batch=2).stop_and_wait()
    jobs = [queued(gateway, send, red_images(1, 2, 3, 4, 5)), queued(gateway, send, red_images(6, 7, 8))]
    reward = make_reward(lambda images, *_: [len(images)] * len(images), relative=True)
    start_worker(reward, redis_url=redis_url, max_batch=max_batch)
    assert [result(gateway, job)["scores"] for job in jobs] == [[5.0] * 5, [3.0] * 3]
    assert [len(call) for call in reward.calls] == [5, 3]
    assert gateway.get("/v1/rewards").json()["rewards"][0]["relative"] is True


def test_a_relative_batch_that_fails_is_not_tried_in_halves(
    gateway, send, red_images, start_worker, make_reward, redis_url
):
    reward = make_reward(lambda *_: 1 / 0, relative=True)
    start_worker(reward, redis_url=redis_url)
    answer = send(gateway, red_images(1, 2, 3)).json()
    assert answer["state"] == "failed"
    assert answer["results"]["red"]["reasons"] == ["ZeroDivisionError: division by zero"] * 3
    assert len(reward.calls) == 1


def test_results_say_what_they_came_from(gateway, send, red_images, start_worker, make_reward, redis_url):
    start_worker(make_reward(provenance={"weights": "sha256:aa"}), redis_url=redis_url)
    given = send(gateway, red_images(1, 2)).json()["results"]["red"]["provenance"]
    assert given["weights"] == "sha256:aa"
    assert given["device"] == "cpu"
    assert f"numpy {np.__version__}" in given["libraries"]
