"""The real recogniser reads what Pillow draws: true end-to-end tests, not plumbing."""

import socket
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
from PIL import ImageDraw, ImageFont

from reward_server.contract import ScoreResponse
from reward_server.rewards.base import RewardLoadError, load, prepare
from reward_server.rewards.ocr import distance, wanted_text


def drawn(*lines, size=(384, 256), height=40, ink="black", paper="white"):
    image = PIL.Image.new("RGB", size, paper)
    pen = ImageDraw.Draw(image)
    for i, line in enumerate(lines):
        pen.text((20, 30 + 70 * i), line, fill=ink, font=ImageFont.load_default(size=height))
    return np.asarray(image)


@pytest.fixture(scope="module")
def ocr():
    reward = load("ocr")
    with pytest.MonkeyPatch.context() as patch:  # whatever it did not find in its wheel it would download
        patch.setattr(socket.socket, "connect", lambda *_: pytest.fail("rapidocr asked the network"))
        prepare(reward, "cpu", {"threads": 1})
        (score,) = reward.score([drawn("OPEN")], [reward.example[0]], [{}])
    assert score.value == 1.0
    return reward


def score(ocr, image, prompt, **metadata):
    return ocr.score([image], [prompt], [metadata])[0]


def test_the_text_asked_for_is_perfect(ocr):
    result = score(ocr, drawn("HELLO WORLD"), 'a neon sign "Hello World" at night')
    assert result.value == 1.0
    assert result.details["distance"] == 0
    assert result.details["target_length"] == result.details["recognised_length"] == 10
    assert result.details["confidence"] > 0.9


def test_near_misses_lose_by_the_letter(ocr):
    image = drawn("HELLO WORLD")
    assert score(ocr, image, 'says "HELLO WORLDS"').value == pytest.approx(1 - 1 / 11)
    assert score(ocr, image, 'says "JELLO WORD"').value == pytest.approx(1 - 2 / 9)
    assert score(ocr, image, 'says "xyz"').value == 0.0  # 10 edits, but at most the 3 letters count


def test_lines_are_joined_and_surrounding_text_is_no_fault(ocr):
    image = drawn("Open 24", "Hours")
    assert score(ocr, image, 'a shop "Open 24 Hours"').value == 1.0
    assert score(ocr, image, 'a shop "Open 24" and below it “Hours”').value == 1.0
    assert score(ocr, image, 'a shop "24"').value == 1.0


def test_colours_are_not_swapped_for_the_reader(ocr):
    assert score(ocr, drawn("BLUE", ink=(40, 60, 200), paper=(255, 230, 120)), '"blue"').value == 1.0


def test_metadata_says_the_text(ocr):
    assert score(ocr, drawn("HELLO"), 'a sign "BYE"', text="hello").value == 1.0


def test_no_text_asked_for_is_null_and_no_text_found_is_zero(ocr):
    nothing = score(ocr, drawn("HELLO"), "a cat")
    assert (nothing.value, nothing.reason) == (
        None,
        "the prompt has no text in double quotes, and the metadata no text: a cat",
    )
    assert "only empty quotes" in score(ocr, drawn("HELLO"), 'a sign "" here').reason
    blank = score(ocr, drawn(), 'a sign "HELLO"')
    assert (blank.value, blank.details["recognised_length"], blank.details["confidence"]) == (0.0, 0.0, None)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (31, 87)])
def test_odd_sizes(ocr, shape):
    image = np.full((*shape, 3), 200, np.uint8)
    image.flags.writeable = False
    assert score(ocr, image, '"A"').value == 0.0


def test_an_image_too_narrow_to_be_resized_fails_alone(ocr):
    narrow = np.full((1, 5000, 3), 200, np.uint8)
    scores = ocr.score([drawn("STOP"), narrow, drawn("STOP")], ['"STOP"'] * 3, [{}] * 3)
    assert [s.value for s in scores] == [1.0, None, 1.0]
    assert scores[1].reason.startswith("5000 x 1 pixels: too long and narrow")


def test_the_reader_gets_blue_green_red(ocr, monkeypatch):
    seen = []
    monkeypatch.setattr(ocr, "_read", lambda image: seen.append(image) or SimpleNamespace(txts=None, scores=None))
    score(ocr, np.array([[[1, 2, 3]]], np.uint8), '"A"')
    assert seen[0].tolist() == [[[3, 2, 1]]]


def test_each_image_is_paired_with_its_prompt(ocr):
    words = ["APPLE", "BREAD", "CHESS", "DRUMS"]
    pictures = [drawn(word) for word in words]
    prompts = [f'a poster "{words[i]}"' for i in (2, 1, 0, 3)]
    values = [s.value for s in ocr.score(pictures, prompts, [{}] * 4)]
    assert [value == 1.0 for value in values] == [False, True, False, True]


def test_through_a_worker(ocr, redis_url, start_gateway, start_worker, send):
    start_worker(ocr, redis_url=redis_url)
    client = start_gateway(redis_url=redis_url)
    pictures = [drawn("STOP"), drawn("STEP"), drawn("STOP")]
    prompts = ['a sign "STOP"', 'a sign "STOP"', "no quotes"]
    answer = ScoreResponse.model_validate_json(
        send(client, pictures, rewards=["ocr"], prompts=prompts, wait=30).content
    )
    assert answer.results["ocr"].scores == [1.0, 0.75, None]
    assert answer.results["ocr"].revision == ocr.revision


@pytest.mark.parametrize(
    ("prompt", "metadata", "expected"),
    [
        ('a "b c" d', {}, "b c"),
        ('"a" then “b” then „c“ then «d»', {}, "a b c d"),
        ("it's 5 o'clock", {}, None),
        ('"unfinished', {}, None),
        ('""', {}, ""),
        ('"a"', {"text": "b"}, "b"),
        ('"a"', {"text": None}, "a"),
    ],
)
def test_which_text_is_wanted(prompt, metadata, expected):
    assert wanted_text(prompt, metadata) == expected


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [("", "", 0), ("", "abc", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("ab", "ba", 2)],
)
def test_distance(a, b, expected):
    assert distance(a, b) == distance(b, a) == expected


def test_another_rapidocr_is_told(monkeypatch):
    monkeypatch.setitem(__import__("reward_server.rewards.ocr").rewards.ocr.MODELS, "Rec", "PP-OCRv9_rec.onnx")
    with pytest.raises(RewardLoadError, match=r"rapidocr 3\.\S+ brings no PP-OCRv9_rec.onnx"):
        prepare(load("ocr"), "cpu", {})


def test_a_gpu_that_onnxruntime_cannot_use_is_told():
    with pytest.raises(RewardLoadError, match="install onnxruntime-gpu"):
        prepare(load("ocr"), "cuda:0", {})
