import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.numpy import load, save

from reward_server.contract import (
    ContractError,
    RewardResult,
    ScoreRequest,
    Timings,
    decode_request,
    encode_request,
    header_length,
    join_results,
    parse_header,
)

REQUEST = ScoreRequest(rewards=["shapes"], prompts=["ä cat", "b"], metadata=[{"n": 1}, {}], id="job-1")


def pixels(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def body(header, data=b""):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    return len(text).to_bytes(8, "little") + text + data


def with_request(request=None, **tensors):
    request = request or {"rewards": ["r"], "prompts": ["a", "b"]}
    return {"__metadata__": {"request": json.dumps(request)}, **tensors}


def tensor(shape, begin, end, dtype="U8"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_stacked_round_trip_without_copies():
    images = pixels(2, 5, 7, 3)
    chunks = encode_request(REQUEST, images)
    assert np.shares_memory(np.frombuffer(chunks[1], np.uint8), images)
    received = b"".join(chunks)
    assert len(chunks[0]) % 8 == 0
    request, decoded = decode_request(received)
    assert request == REQUEST
    assert np.array_equal(decoded, images)
    assert np.shares_memory(decoded, np.frombuffer(received, np.uint8))
    assert not decoded.flags.writeable


def test_images_of_different_sizes_round_trip():
    images = [pixels(2, 3, 3), pixels(5, 1, 3)]
    request, decoded = decode_request(bytearray(b"".join(encode_request(REQUEST, images))))
    assert request == REQUEST
    assert [image.shape for image in decoded] == [(2, 3, 3), (5, 1, 3)]
    assert all(np.array_equal(a, b) for a, b in zip(images, decoded, strict=True))


def test_the_official_library_reads_our_body_and_we_read_theirs():
    images = pixels(2, 4, 4, 3)
    assert np.array_equal(load(b"".join(encode_request(REQUEST, images)))["images"], images)
    # 11 images: the library orders names as text, so that images.10 lies before images.2
    many = {f"images.{i}": pixels(1 + i, 2, 3) for i in range(11)}
    request = ScoreRequest(rewards=["r"], prompts=["x"] * 11)
    _, decoded = decode_request(save(many, metadata={"request": request.model_dump_json()}))
    assert [len(image) for image in decoded] == list(range(1, 12))


def test_a_transposed_view_arrives_as_it_looks():
    images = pixels(2, 5, 7, 3).transpose(0, 2, 1, 3)
    assert np.array_equal(decode_request(b"".join(encode_request(REQUEST, images)))[1], images)


@pytest.mark.parametrize(
    ("images", "where", "message"),
    [
        (pixels(3, 4, 4, 3), "images", "3 images for 2 prompts"),
        (pixels(2, 4, 4, 4), "images", "expected uint8 [B, H, W, 3], got uint8 [2, 4, 4, 4]"),
        (pixels(2, 4, 4, 3).astype(np.float32), "images", "got float32"),
        ([pixels(4, 4, 3), pixels(4, 4)], "images.1", "expected uint8 [H, W, 3]"),
        (pixels(2, 0, 4, 3), "images", "got uint8 [2, 0, 4, 3]"),
    ],
)
def test_encoding_refuses(images, where, message):
    with pytest.raises(ContractError) as error:
        encode_request(REQUEST, images)
    assert error.value.where == where
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("broken", "where", "message"),
    [
        (b"123", "header", "ends within"),
        (b"\xff" * 8, "header", "header length"),
        (body(b"{}")[:9], "header", "the body ends after 1"),
        (body(b"{nonsense"), "header", "not JSON"),
        (body(b"[1]"), "header", "JSON object"),
        (body(b"[" * 100_000), "header", "not JSON"),
        (body(b'{"a":1,"a":2}'), "header", "twice"),
        (body(b'{"a":' + b"1" * 5000 + b"}"), "header", "not JSON"),
        (body({"images": tensor([1, 1, 1, 3], 0, 3)}), "header", "request"),
        (body(with_request({"prompts": ["a"]})), "request.rewards", "required"),
        (body(with_request({"rewards": ["r", "r"], "prompts": ["a"]})), "request", "named twice"),
        (body(with_request({"rewards": ["../x"], "prompts": ["a"]})), "request.rewards.0", "pattern"),
        (body(with_request({"rewards": ["r"], "prompts": ["a"], "id": "a/b"})), "request.id", "pattern"),
        (body(with_request({"rewards": ["r"], "prompts": ["a"], "version": "2"})), "request.version", "'1'"),
        (body(with_request({"rewards": ["r"], "prompts": ["a"], "speed": 1})), "request.speed", "not permitted"),
        (body(with_request({"rewards": ["r"], "prompts": ["a"], "metadata": []})), "request", "0 metadata for 1"),
        (body(with_request()), "header", "got none"),
        (body(with_request(images=tensor([2, 1, 1, 3], 0, 6), more=tensor([3], 6, 9))), "header", "images, more"),
        (body(with_request(images={"dtype": "U8"})), "header.images", "shape"),
        (body(with_request(images=tensor([2, 1, 1, 3], 0, 6, "F32"))), "header.images.dtype", "F32"),
        (body(with_request(images=tensor([2, 1, 3], 0, 6))), "header.images.shape", "4 non-negative"),
        (body(with_request(images=tensor([2, 1, True, 3], 0, 6))), "header.images.shape", "4 non-negative"),
        (body(with_request(images=tensor([2, 1, 1, 3], -3, 3))), "header.images.data_offsets", "2 non-negative"),
        (body(with_request(images=tensor([2, 1, 1, 4], 0, 8))), "header.images.shape", "[B, H, W, 3]"),
        (body(with_request(images=tensor([2, 1, 1, 3], 0, 7))), "header.images", "needs 6 bytes"),
        (body(with_request(images=tensor([3, 1, 1, 3], 0, 9))), "header.images.shape", "3 images for 2"),
        (
            body(with_request(**{"images.0": tensor([1, 1, 3], 0, 3), "images.1": tensor([1, 1, 3], 0, 3)})),
            "header.images.1.data_offsets",
            "overlap",
        ),
        (
            body(with_request(**{"images.0": tensor([1, 1, 3], 0, 3), "images.1": tensor([1, 1, 3], 4, 7)})),
            "header.images.1.data_offsets",
            "gap",
        ),
        (
            body(with_request(images=tensor([2, 1, 1, 3], 0, 6)), b"12345"),
            "images",
            "describes 6 bytes of pixels, got 5",
        ),
        (body(with_request(images=tensor([2, 1, 1, 3], 0, 6)), b"1234567"), "images", "got 7"),
    ],
)
def test_a_broken_body_is_refused_with_the_part_at_fault(broken, where, message):
    with pytest.raises(ContractError) as error:
        decode_request(broken)
    assert error.value.where == where
    assert message in str(error.value)


def test_the_header_alone_tells_everything_but_the_pixels():
    chunks = encode_request(REQUEST, pixels(2, 5, 7, 3))
    length = header_length(chunks[0])
    header = parse_header(chunks[0][8 : 8 + length])
    assert header.request == REQUEST
    assert header.shapes == [(2, 5, 7, 3)]
    assert header.data_bytes == 210
    assert header.largest_image == 35


def test_a_request_too_long_for_a_header_is_refused_by_the_sender():
    long = ScoreRequest(rewards=["r"], prompts=["x" * (17 << 20)])
    with pytest.raises(ContractError, match="prompts and metadata take"):
        encode_request(long, pixels(1, 1, 1, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reasons": [None]}, "length"),
        ({"details": {"a": [0.5]}}, "length"),
        ({"reasons": [None, None]}, "null exactly"),
        ({"reasons": ["why", "broken"]}, "null exactly"),
        ({"scores": [float("nan"), None]}, "finite"),
        ({"scores": [float("inf"), None]}, "finite"),
    ],
)
def test_a_result_never_holds_a_failure_as_a_score(changes, message):
    good = {
        "revision": "1",
        "scores": [1.0, None],
        "reasons": [None, "broken"],
        "timings": Timings(queued_ms=0, scored_ms=0),
    }
    RewardResult(**good)
    with pytest.raises(ValidationError, match=message):
        RewardResult(**{**good, **changes})


@given(st.integers(0, 300), st.binary(min_size=1, max_size=4))
def test_whatever_arrives_is_decoded_or_refused_with_a_reason(place, junk):
    received = bytearray(b"".join(encode_request(REQUEST, pixels(2, 2, 2, 3))))
    received[place : place + len(junk)] = junk
    where = "accepted"
    try:
        request, images = decode_request(received)
        assert len(images) == len(request.prompts)
    except ContractError as error:
        where = error.where
    assert where


def test_results_of_consecutive_parts_are_joined():
    def part(revision, scores, details, provenance, queued_ms):
        return RewardResult(
            revision=revision,
            scores=scores,
            reasons=[None if score is not None else "no" for score in scores],
            details=details,
            provenance=provenance,
            timings=Timings(queued_ms=queued_ms, scored_ms=10 - queued_ms),
        )

    one = part("r1", [1.0, None], {"a": [5.0, None]}, {"device": "cpu", "weights": "w"}, 3.0)
    two = part("r2", [3.0], {"b": [7.0]}, {"device": "cuda:0", "weights": "w", "dtype": "float16"}, 4.0)
    joined = join_results([one, two])
    assert (joined.revision, joined.scores, joined.reasons) == ("r1+r2", [1.0, None, 3.0], [None, "no", None])
    assert joined.details == {"a": [5.0, None, None], "b": [None, None, 7.0]}
    assert joined.provenance == {"device": "cpu+cuda:0", "weights": "w", "dtype": "float16"}
    assert (joined.timings.queued_ms, joined.timings.scored_ms) == (4.0, 7.0)
    assert join_results([one]) is one
