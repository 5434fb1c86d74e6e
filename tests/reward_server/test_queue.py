import asyncio
import contextlib
import time

import pytest
import redis
import redis.asyncio

from reward_server import queue as queue_module
from reward_server.contract import JobState, RewardResult, Timings
from reward_server.queue import IdConflictError, JobQueue, QueueFullError, UnknownRewardError, WorkerInfo, WorkQueue


def info(reward="red", **changes):
    defaults = {"revision": "r1", "description": "d", "needs": ("n",), "max_batch": 4, "heartbeat_s": 1.0}
    return WorkerInfo(**{"reward": reward, "host": "h", "pid": 1, **defaults, **changes})


def scores(*values, revision="r1", queued_ms=0.0, scored_ms=0.0, **details):
    reasons = [None if value is not None else "broken" for value in values]
    timings = Timings(queued_ms=queued_ms, scored_ms=scored_ms)
    return RewardResult(revision=revision, scores=values, reasons=reasons, details=details, timings=timings)


@pytest.fixture
def client(redis_url):
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def make_worker(client):
    def make(reward="red", name="w1", claim_idle_ms=60_000, **changes):
        worker = WorkQueue(client, reward, name, claim_idle_ms=claim_idle_ms)
        worker.join()
        worker.heartbeat(info(reward, **changes))
        return worker

    return make


@pytest.fixture
def on_queue(redis_url):
    """``on_queue(body)``: run the coroutine function ``body(queue)`` on the gateway's side."""

    def run(body, **options):
        async def main():
            async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
                settings = {"max_depth": 100, "job_ttl_s": 60, "result_ttl_s": 60, **options}
                return await body(JobQueue(client, **settings))

        return asyncio.run(main())

    return run


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.02)


def submit(on_queue, job="j", images=4, rewards=("red",), digest="d", **options):
    return on_queue(lambda queue: queue.submit(job, digest, images, "ref", rewards), **options)


def status(on_queue, job="j"):
    return on_queue(lambda queue: queue.status(job))


def test_a_job_is_cut_into_batches_and_put_together_in_order(on_queue, make_worker, client):
    worker = make_worker()
    assert submit(on_queue, images=10)
    assert status(on_queue).state is JobState.QUEUED
    parts = worker.take(10, 0)
    assert [(part.start, part.stop) for part in parts] == [(0, 4), (4, 8), (8, 10)]
    assert [worker.begin(part).tries for part in parts] == [1, 1, 1]
    assert status(on_queue).state is JobState.RUNNING
    assert worker.finish(parts[2], scores(8, 9, queued_ms=5, scored_ms=1, extra=[0.5, None]))
    assert worker.finish(parts[0], scores(0, 1, 2, 3, queued_ms=2, scored_ms=7))
    assert client.get("rs:depth:red") == "4"
    assert status(on_queue).results == {}
    assert worker.finish(parts[1], scores(4, None, 6, 7))
    done = status(on_queue)
    assert done.state is JobState.DONE
    result = done.results["red"]
    assert result.scores == [0, 1, 2, 3, 4, None, 6, 7, 8, 9]
    assert result.reasons == [None] * 5 + ["broken"] + [None] * 4
    assert result.details == {"extra": [None] * 8 + [0.5, None]}
    assert (result.timings.queued_ms, result.timings.scored_ms, result.revision) == (5, 7, "r1")
    assert (client.get("rs:depth:red"), client.xlen("rs:stream:red")) == ("0", 0)
    assert client.xpending("rs:stream:red", "workers")["pending"] == 0


def test_revisions_of_one_job_are_both_named(on_queue, make_worker):
    worker = make_worker()
    submit(on_queue, images=8)
    first, second = worker.take(2, 0)
    worker.begin(first), worker.begin(second)
    worker.finish(first, scores(1, 1, 1, 1, revision="old"))
    worker.finish(second, scores(1, 1, 1, 1, revision="new"))
    assert status(on_queue).results["red"].revision == "old+new"


def test_a_job_without_any_score_has_failed(on_queue, make_worker):
    worker = make_worker()
    submit(on_queue, images=2)
    (part,) = worker.take(1, 0)
    worker.begin(part)
    worker.finish(part, scores(None, None))
    assert status(on_queue).state is JobState.FAILED


def test_the_same_job_twice_is_queued_once_and_another_content_conflicts(on_queue, make_worker, client):
    make_worker()
    assert submit(on_queue)
    assert not on_queue(lambda queue: queue.submit("j", "d", 4, "other ref", ["red"]))
    assert submit(on_queue)  # the very same call, repeated by the Redis client
    assert client.get("rs:depth:red") == "4"
    with pytest.raises(IdConflictError):
        submit(on_queue, digest="other")


def test_all_rewards_or_none(on_queue, make_worker, client):
    make_worker()
    make_worker("blue")
    with pytest.raises(UnknownRewardError) as unknown:
        submit(on_queue, rewards=["red", "green"])
    assert unknown.value.reward == "green"
    submit(on_queue, job="fill", images=98, rewards=["blue"])
    with pytest.raises(QueueFullError) as full:
        submit(on_queue, images=3, rewards=["red", "blue"])
    assert (full.value.reward, full.value.depth) == ("blue", 98)
    assert (client.get("rs:depth:red"), client.xlen("rs:stream:red"), client.exists("rs:job:j")) == (None, 0, 0)
    assert submit(on_queue, images=2, rewards=["red", "blue"])
    assert client.get("rs:depth:blue") == "100"


def test_a_reward_is_served_within_the_grace_period_only(on_queue, make_worker):
    worker = make_worker()
    worker.leave(info())
    (reward,) = on_queue(lambda queue: queue.rewards())
    assert reward.workers == 0
    assert submit(on_queue)
    time.sleep(0.01)
    with pytest.raises(UnknownRewardError):
        submit(on_queue, job="late", grace_s=0.005)
    assert on_queue(lambda queue: queue.rewards(), grace_s=0.005) == []


def test_rewards_are_listed_with_live_workers_and_depth(on_queue, make_worker):
    make_worker(name="w1")
    make_worker(name="w2", revision="r2", max_batch=2)
    make_worker("blue", name="w3", heartbeat_s=0.0)  # already silent for longer than three heartbeats
    submit(on_queue, images=3)
    time.sleep(0.01)
    blue, red = on_queue(lambda queue: queue.rewards())
    assert (blue.name, blue.workers, blue.depth) == ("blue", 0, 0)
    assert (red.name, red.workers, red.depth, red.revision, red.max_batch, red.needs) == ("red", 2, 3, "r2", 2, ["n"])


def test_what_a_silent_worker_held_goes_to_another_and_the_first_result_stays(on_queue, make_worker, client):
    slow, quick = make_worker(name="slow"), make_worker(name="quick", claim_idle_ms=30)
    submit(on_queue, images=2)
    (part,) = slow.take(1, 0)
    slow.begin(part)
    assert quick.reclaim(1) == []
    time.sleep(0.05)
    slow.hold([part])  # slow but alive
    assert quick.reclaim(1) == []
    time.sleep(0.05)
    assert quick.reclaim(1) == [part]
    assert quick.begin(part).tries == 2
    assert quick.finish(part, scores(1, 2))
    assert not slow.finish(part, scores(3, 4))
    assert status(on_queue).results["red"].scores == [1, 2]
    assert client.get("rs:depth:red") == "0"


def test_a_part_given_back_is_there_at_once_and_counts_no_try(on_queue, make_worker, client):
    first, second = make_worker(name="w1"), make_worker(name="w2")
    submit(on_queue, images=2)
    (part,) = first.take(1, 0)
    first.begin(part)
    first.give_back(part)
    (again,) = second.take(1, 0)
    assert (again.job, again.start, again.stop) == ("j", 0, 2)
    assert second.begin(again).tries == 1
    assert client.get("rs:depth:red") == "2"
    second.finish(again, scores(1, 2))
    assert client.get("rs:depth:red") == "0"


def test_giving_up_leaves_a_dead_letter(on_queue, make_worker, client):
    worker = make_worker()
    submit(on_queue, images=2)
    (part,) = worker.take(1, 0)
    worker.begin(part)
    worker.finish(part, scores(None, None), gave_up="gave up after 3 tries")
    ((_, letter),) = client.xrange("rs:dead:red")
    assert letter == {"job": "j", "start": "0", "stop": "2", "reason": "gave up after 3 tries"}


def test_parts_of_a_cancelled_or_forgotten_job_are_dropped(on_queue, make_worker, client):
    worker = make_worker()
    for job in ("cancelled", "forgotten"):
        submit(on_queue, job=job)
    assert on_queue(lambda queue: queue.cancel("cancelled")) is JobState.QUEUED
    client.delete("rs:job:forgotten")
    parts = worker.take(2, 0)
    assert [worker.begin(part) for part in parts] == [None, None]
    assert (client.get("rs:depth:red"), client.xlen("rs:stream:red")) == ("0", 0)
    assert status(on_queue, "cancelled").state is JobState.CANCELLED
    assert not worker.finish(parts[0], scores(1, 1, 1, 1))
    assert status(on_queue, "cancelled").results == {}


def test_cancelling_a_finished_job_forgets_it(on_queue, make_worker):
    worker = make_worker()
    submit(on_queue, images=1)
    (part,) = worker.take(1, 0)
    worker.begin(part)
    worker.finish(part, scores(1))
    assert on_queue(lambda queue: queue.cancel("j")) is JobState.DONE
    assert status(on_queue) is None
    assert on_queue(lambda queue: queue.cancel("j")) is None


def test_jobs_and_results_have_a_time_to_live(on_queue, make_worker, client):
    worker = make_worker()
    submit(on_queue, images=1, job_ttl_s=50, result_ttl_s=20)
    assert 49_000 < client.pttl("rs:job:j") <= 50_000
    (part,) = worker.take(1, 0)
    worker.begin(part)
    worker.finish(part, scores(1))
    assert 19_000 < client.pttl("rs:job:j") <= 20_000


def test_payloads_are_needed_until_the_job_ends(on_queue, make_worker):
    worker = make_worker()
    submit(on_queue, images=1)
    submit(on_queue, job="other", images=1)
    assert on_queue(lambda queue: queue.payload_ref("j")) == "ref"
    (part,) = worker.take(1, 0)
    worker.begin(part)
    worker.finish(part, scores(1))
    assert on_queue(lambda queue: queue.payload_ref("j")) is None
    assert on_queue(lambda queue: queue.unfinished(["j", "other", "never"])) == {"other"}
    assert on_queue(lambda queue: queue.unfinished([])) == set()


def test_a_worker_leaves_without_losing_a_part_it_holds(on_queue, make_worker, client):
    worker, other = make_worker(name="w1"), make_worker(name="w2", claim_idle_ms=0)
    submit(on_queue, images=1)
    (part,) = worker.take(1, 0)
    worker.leave(info())
    assert other.reclaim(1) == [part]
    worker.leave(info())
    assert [consumer["name"] for consumer in client.xinfo_consumers("rs:stream:red", "workers")] == ["w2"]


def test_a_worker_takes_up_again_when_redis_came_back_empty(on_queue, make_worker, client):
    worker = make_worker()
    client.flushall()
    assert worker.take(1, 0) == []
    worker.heartbeat(info())
    submit(on_queue, images=1)
    assert len(worker.take(1, 0)) == 1


async def waited(queue, job, timeout, act=None):
    """The answer of ``queue.wait`` while ``act`` runs in a thread, and the seconds it took."""

    async def ignore(job_id):
        return None

    listener = asyncio.create_task(queue.listen(ignore))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    acting = asyncio.create_task(asyncio.to_thread(act)) if act else None
    response = await queue.wait(job, timeout)
    took = time.monotonic() - started
    if acting:
        await acting
    listener.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await listener
    return response, took


@pytest.mark.parametrize("how", ["timed out", "silent"])
def test_listening_survives_a_connection_whose_host_is_gone(on_queue, client, monkeypatch, how):
    """A TCP connection that is given up says ETIMEDOUT at each read; before that, one without a host is just silent."""
    monkeypatch.setattr(queue_module, "SILENCE_S", 0.1)
    monkeypatch.setattr(queue_module, "RECHECK_S", 0.1)

    async def body(queue):
        opened, heard = [], asyncio.Queue()
        pubsub = queue.client.pubsub
        monkeypatch.setattr(queue.client, "pubsub", lambda **options: opened.append(pubsub(**options)) or opened[-1])
        listener = asyncio.create_task(queue.listen(heard.put))
        await until(lambda: client.publish("rs:done", "before"))
        assert await asyncio.wait_for(heard.get(), 5) == "before"
        await asyncio.sleep(0.5)  # idle for longer than the time to ask: it lives, and is not opened again
        assert len(opened) == 1
        if how == "timed out":
            opened[0].connection._reader.set_exception(TimeoutError(110, "Connection timed out"))
        else:
            opened[0].connection._reader.feed_data = lambda data: None
        await until(lambda: len(opened) == 2 and client.publish("rs:done", "after") == 1)
        assert await asyncio.wait_for(heard.get(), 5) == "after"
        listener.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listener

    on_queue(body)


def test_waiting_ends_with_the_job_or_with_the_time(on_queue, make_worker, monkeypatch):
    worker = make_worker()
    submit(on_queue, images=1)
    monkeypatch.setattr(queue_module, "RECHECK_S", 60.0)
    response, took = on_queue(lambda queue: waited(queue, "j", 0.2))
    assert response.state is JobState.QUEUED
    assert 0.15 < took < 5

    def finish():
        (part,) = worker.take(1, 0)
        worker.begin(part)
        worker.finish(part, scores(1))

    response, took = on_queue(lambda queue: waited(queue, "j", 30, finish))
    assert response.state is JobState.DONE
    assert took < 5


def test_a_missed_message_delays_but_does_not_hang(on_queue, make_worker, client, monkeypatch):
    make_worker()
    submit(on_queue, images=1)
    monkeypatch.setattr(queue_module, "RECHECK_S", 0.1)
    # the state changes without a message
    response, _ = on_queue(lambda queue: waited(queue, "j", 30, lambda: client.hset("rs:job:j", "state", "cancelled")))
    assert response.state is JobState.CANCELLED
    assert on_queue(lambda queue: queue.wait("never", 5)) is None


def test_reclaiming_reaches_a_dead_workers_part_behind_many_others(on_queue, make_worker):
    alive, dead, third = (make_worker(name=name, claim_idle_ms=50) for name in ("alive", "dead", "third"))
    submit(on_queue, images=100)  # 25 parts of 4
    held = alive.take(24, 0)
    (lost,) = dead.take(1, 0)
    time.sleep(0.06)
    alive.hold(held)
    assert [part for _ in range(3) for part in third.reclaim(1)] == [lost]


def test_the_first_result_of_a_part_stays_while_the_job_runs(on_queue, make_worker):
    slow, quick = make_worker(name="slow"), make_worker(name="quick", claim_idle_ms=0)
    submit(on_queue, images=8)
    first, second = slow.take(2, 0)
    slow.begin(first), slow.begin(second)
    assert quick.reclaim(1) == [first]
    assert quick.finish(first, scores(1, 1, 1, 1))
    assert not slow.finish(first, scores(2, 2, 2, 2))
    assert slow.begin(first) is None  # nothing is left to do for it
    assert slow.finish(second, scores(3, 3, 3, 3))
    assert status(on_queue).results["red"].scores == [1, 1, 1, 1, 3, 3, 3, 3]
