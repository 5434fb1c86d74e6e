"""The chat client against a scripted server: every way in which an answer can fail to come, and the API key."""

import email.utils
import json
import socket
import time

import httpx
import pytest

from reward_server.rewards._chat import ChatClient, ChatError, _in_words, _key, _retry_after, _tokens
from reward_server.rewards.base import RewardLoadError

BUSY = (429, {"Retry-After": "0.3"}, b"slow down")


@pytest.fixture
def connect(chat):
    clients = []

    def make(url=None, **options):
        defaults = {"api_key_env": None, "connect_timeout_s": 1, "timeout_s": 0.5, "retries": 2, "max_retry_after_s": 5}
        clients.append(ChatClient(chat.url if url is None else url, **{**defaults, **options}))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("reward_server.rewards._chat._MAX_BACKOFF_S", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def in_turn(chat, *answers):
    left = list(answers)
    chat.answer = lambda body: left.pop(0) if len(left) > 1 else left[0]


@pytest.mark.parametrize("first", [(503, {}, b""), (500, {}, b"oops"), (408, {}, b""), None, BUSY])
def test_what_passes_is_tried_again(chat, connect, first):
    in_turn(chat, first, chat.completion("4"))
    assert connect().complete({}).text == "4"
    assert len(chat.bodies) == 2


def test_retry_after_is_waited_for(chat, connect):
    in_turn(chat, BUSY, chat.completion("4"))
    started = time.monotonic()
    connect().complete({})
    assert time.monotonic() - started >= 0.3


def test_a_server_that_asks_for_too_long_a_wait_is_given_up(chat, connect):
    chat.answer = lambda body: (429, {"Retry-After": "3600"}, b"daily limit")
    with pytest.raises(ChatError, match=r'answered 429: "daily limit"; it asks to wait 3600 s'):
        connect().complete({})
    assert len(chat.bodies) == 1


@pytest.mark.parametrize(("answer", "told"), [((503, {}, b"loading"), "503"), (None, "disconnected")])
def test_tries_are_bounded(chat, connect, answer, told):
    chat.answer = lambda body: answer
    with pytest.raises(ChatError, match=rf"{told}.*tried 3 times"):
        connect().complete({})
    assert len(chat.bodies) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 301])
def test_what_does_not_pass_is_not_tried_again(chat, connect, status):
    chat.answer = lambda body: (status, {"Location": "/v1/elsewhere"}, b'{"error": "no"}')
    with pytest.raises(ChatError, match=f"answered {status}") as caught:
        connect().complete({})
    assert caught.value.status == status
    assert len(chat.bodies) == 1


def test_a_stalled_server_is_left(chat, connect):
    def stall(body):
        time.sleep(0.8)
        return chat.completion("4")

    chat.answer = stall
    started = time.monotonic()
    with pytest.raises(ChatError, match="no complete answer in time"):
        connect(timeout_s=0.2, retries=1).complete({})
    assert time.monotonic() - started < 0.7


def test_no_further_try_begins_after_the_deadline(chat, connect):
    chat.answer = lambda body: (503, {"Retry-After": "0.6"}, b"busy")
    started = time.monotonic()
    with pytest.raises(ChatError, match=r"tried 2 times") as failure:
        connect(retries=5).complete({}, started + 1.1)
    assert failure.value.status == 503
    assert len(chat.bodies) == 2
    assert time.monotonic() - started < 1.1


def test_the_deadline_cuts_a_try_short(chat, connect):
    chat.answer = lambda body: time.sleep(1) or chat.completion("4")
    started = time.monotonic()
    with pytest.raises(ChatError, match=r"no complete answer in time \(tried 1 times\)"):
        connect(timeout_s=60, retries=5).complete({}, started + 0.3)
    assert 0.3 <= time.monotonic() - started < 0.9


def test_no_connection_in_time_is_told():
    assert _in_words(httpx.ConnectTimeout("")) == "no connection in time"


def test_a_dripping_server_is_left(chat, connect):
    """A byte every 0.1 s keeps a time-out between bytes from ever coming."""
    chat.answer = lambda body: (200, {"Content-Length": "60"}, [b" "] * 60)
    started = time.monotonic()
    with pytest.raises(ChatError, match="no complete answer in time"):
        connect(retries=0).complete({})
    assert time.monotonic() - started < 1.5


def test_a_flooding_server_is_left(chat, connect, monkeypatch):
    monkeypatch.setattr("reward_server.rewards._chat.MAX_ANSWER_BYTES", 1000)
    chat.answer = lambda body: (200, {}, b" " * 2000)
    with pytest.raises(ChatError, match="more than 1000 bytes"):
        connect().complete({})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"<html>Welcome</html>", r"\(text/html\) is not JSON.*Welcome"),
        (b"", "is not JSON"),
        (b'{"choices": [{"mess', "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "not a JSON object"),
        (b"{}", "no completion"),
        (b'{"choices": []}', "no completion"),
        (b'{"choices": null}', "no completion"),
        (b'{"choices": [{"message": null}]}', "no completion"),
        (b'{"choices": ["text"]}', "no completion"),
        (b'{"error": {"message": "model is overloaded"}}', "model is overloaded"),
    ],
)
def test_what_is_no_completion(chat, connect, content, told):
    chat.answer = lambda body: (200, {"Content-Type": "text/html"}, content)
    with pytest.raises(ChatError, match=told):
        connect().complete({})


@pytest.mark.parametrize("content", [None, 4, ["4"], {"text": "4"}])
def test_content_that_is_no_text_is_an_empty_answer(chat, connect, content):
    chat.answer = lambda body: {"choices": [{"message": {"content": content}, "logprobs": None}]}
    assert connect().complete({}).text == ""


def test_words_of_a_server_are_kept_short_and_on_one_line(chat, connect):
    chat.answer = lambda body: (400, {}, b"a\nb\x1b[31m" + b"x" * 10_000)
    with pytest.raises(ChatError) as caught:
        connect().complete({})
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


def test_nobody_listens(connect):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ChatError, match=rf"127.0.0.1:{port}/v1/models: .*refused.*tried 3 times"):
        connect(f"http://127.0.0.1:{port}/v1").models()


@pytest.mark.parametrize("models", [{"a": 1}, [1], [{"id": 1}], "x"])
def test_what_is_no_list_of_models(chat, connect, models):
    chat.models = models
    with pytest.raises(ChatError, match="is it an OpenAI-compatible server"):
        connect().models()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("file:///etc/passwd", "http://host:port/v1"),
        ("ftp://host/v1", "not ftp"),
        ("127.0.0.1:8000/v1", "http://host:port/v1"),
        ("", "no scheme"),
        ("http:///v1", "http://host:port/v1"),
        ("http://me:secret@host/v1", "no user"),
        ("http://host/v1?key=secret", "no user"),
        ("http://host:port/v1", "not a URL"),
    ],
)
def test_wrong_urls(connect, url, told):
    with pytest.raises(RewardLoadError) as caught:
        connect(url)
    assert told in str(caught.value)
    assert "secret" not in str(caught.value)


def test_the_key_comes_from_the_environment_and_is_told_to_nobody(chat, connect, monkeypatch, caplog):
    caplog.set_level("DEBUG", logger="reward_server")
    monkeypatch.setenv("MY_KEY", "sk-secret")
    chat.answer = lambda body: (400, {}, b"wrong key sk-secret")
    with pytest.raises(ChatError, match=r"wrong key \*\*\*") as caught:
        connect(api_key_env="MY_KEY").complete({})
    assert chat.headers[0]["Authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in f"{caught.value} {caplog.text} {json.dumps(chat.bodies)}"


def test_without_a_key_none_is_sent(chat, connect):
    connect().complete({})
    assert "Authorization" not in chat.headers[0]


def test_a_named_key_must_be_there(connect):
    with pytest.raises(RewardLoadError, match="api_key_env names NOT_SET"):
        connect(api_key_env="NOT_SET")


def test_a_key_that_cannot_be_one(connect, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "two\nlines")
    with pytest.raises(RewardLoadError, match="OPENAI_API_KEY holds no API key"):
        connect()


@pytest.mark.parametrize(
    ("url", "name", "sent"),
    [
        ("https://api.example.com/v1", None, True),
        ("http://localhost:8000/v1", None, True),
        ("http://[::1]:8000/v1", None, True),
        ("http://10.0.0.3:8000/v1", None, False),
        ("http://judge:8000/v1", None, False),
        ("http://10.0.0.3:8000/v1", "OPENAI_API_KEY", True),
    ],
)
def test_openais_key_is_not_sent_to_strangers_in_the_clear(monkeypatch, url, name, sent):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert (_key(name, httpx.URL(url)) == "sk-secret") is sent


def test_retry_after_in_both_forms():
    assert _retry_after("7") == 7.0
    assert _retry_after(email.utils.formatdate(time.time() + 30, usegmt=True)) == pytest.approx(30, abs=2)
    assert _retry_after(email.utils.formatdate(time.time() - 30, usegmt=True)) == 0.0
    assert [_retry_after(header) for header in (None, "", "soon", "-4", "nan")] == [0.0] * 5


def test_tokens_are_read_as_openai_defines_them():
    entry = {"token": "\u2581Yes", "logprob": -0.5, "top_logprobs": [{"token": "\u0120no", "logprob": -9999.0}]}
    (token,) = _tokens({"content": [entry]})
    assert token.text == " Yes"
    assert token.candidates == {" no": 0.0, " Yes": pytest.approx(0.60653, abs=1e-5)}


@pytest.mark.parametrize(
    "logprobs",
    [None, {}, {"content": None}, [], "x", {"content": [{"token": "4"}]}, {"content": [None]}]
    + [{"content": [{"token": "4", "logprob": value}]} for value in (float("nan"), 0.5, None, "high")]
    + [{"content": [{"token": 4, "logprob": -1}]}, {"content": [{"token": "4", "logprob": -1, "top_logprobs": [1]}]}],
)
def test_what_is_no_log_probability_is_none_at_all(logprobs):
    assert _tokens(logprobs) == ()
