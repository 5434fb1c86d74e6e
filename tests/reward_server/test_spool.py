import asyncio
import os
import stat

import pytest
import redis.asyncio

from reward_server import spool as spool_module
from reward_server.spool import DirectorySpool, RedisSpool, SpoolFullError, default_directory, map_file


async def written(spool, job_id, data):
    payload = await spool.create(job_id, len(data))
    payload.write(data[:3])
    payload.write(memoryview(data)[3:])
    return await payload.commit()


async def nobody(job_ids):
    return set()


def run_with(kind, folder, url, body, max_bytes=100):
    """Run ``body(spool)`` on a spool of either kind."""

    async def main():
        if kind == "directory":
            return await body(DirectorySpool(folder / "spool", max_bytes))
        async with redis.asyncio.Redis.from_url(url) as client:
            return await body(RedisSpool(client, max_bytes, ttl_s=5))

    return asyncio.run(main())


@pytest.fixture(params=["directory", "redis"])
def run(request, tmp_path, redis_url):
    return lambda body, **options: run_with(request.param, tmp_path, redis_url, body, **options)


def test_a_payload_is_read_back_until_it_is_deleted(run):
    async def body(spool):
        ref = await written(spool, "job", b"0123456789")
        before = bytes(await spool.read(ref)), await spool.used()
        await spool.delete(ref)
        return before, await spool.read(ref), await spool.used()

    assert run(body) == ((b"0123456789", 10), None, 0)


def test_two_payloads_of_one_job_do_not_meet(run):
    async def body(spool):
        refs = await written(spool, "job", b"first"), await written(spool, "job", b"other")
        return [bytes(await spool.read(ref)) for ref in refs]

    assert run(body) == [b"first", b"other"]


def test_the_bound_holds_and_room_comes_back(run):
    async def body(spool):
        ref = await written(spool, "a", b"x" * 60)
        with pytest.raises(SpoolFullError, match="41 bytes do not fit: 60 of 100"):
            await spool.create("b", 41)
        await spool.delete(ref)
        await written(spool, "b", b"y" * 100)
        return await spool.used()

    assert run(body) == 100


def test_a_discarded_payload_leaves_nothing(run):
    async def body(spool):
        payload = await spool.create("a", 10)
        payload.write(b"12345")
        await payload.discard()
        committed = await spool.create("b", 4)
        committed.write(b"1234")
        ref = await committed.commit()
        await committed.discard()
        return await spool.used(), await spool.read(ref)

    assert run(body) == (0, None)


def test_sweeping_keeps_what_is_needed_or_young(run, monkeypatch):
    async def b_is_unfinished(job_ids):
        assert set(job_ids) == {"a.x", "b"}
        return {"b"}

    async def body(spool):
        refs = [await written(spool, job, b"1234") for job in ("a.x", "b")]
        young = await spool.sweep(nobody)
        monkeypatch.setattr(spool_module, "SWEEP_AGE_S", -1.0)
        swept = await spool.sweep(b_is_unfinished)
        return young, swept, [await spool.read(ref) is None for ref in refs]

    assert run(body) == (0, 1, [True, False])


def test_files_are_private_and_appear_whole(tmp_path):
    async def main():
        spool = DirectorySpool(tmp_path / "spool", 100)
        payload = await spool.create("job", 4)
        payload.write(b"12")
        partial = [path.suffix for path in spool.directory.iterdir()], await spool.used()
        payload.write(b"34")
        return spool, partial, await payload.commit()

    spool, partial, ref = asyncio.run(main())
    assert partial == ([".partial"], 4)
    (path,) = spool.directory.iterdir()
    assert ref == f"file:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(spool.directory.stat().st_mode) == 0o700
    assert bytes(map_file(ref)) == b"1234"


def test_files_that_are_not_payloads_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(spool_module, "SWEEP_AGE_S", -1.0)
    spool = DirectorySpool(tmp_path, 100)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"w" * 500)
    outside = tmp_path.parent / "outside.payload"
    outside.write_bytes(b"o")

    async def main():
        swept = await spool.sweep(nobody)
        await spool.delete(f"file:{outside}")
        return swept, await spool.used(), await spool.read(f"file:{outside}")

    assert asyncio.run(main()) == (0, 0, None)
    assert weights.exists()
    assert outside.exists()


def test_a_directory_behind_a_link_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError, match="spool_dir"):
        DirectorySpool(tmp_path / "link", 100)


def test_the_default_directory_is_one_per_redis(monkeypatch, tmp_path):
    assert default_directory("redis://a") != default_directory("redis://b")
    assert str(os.getuid()) in default_directory("redis://a").name
    monkeypatch.setattr(spool_module, "SHARED_MEMORY", tmp_path / "missing")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert default_directory("redis://a").parent == tmp_path
