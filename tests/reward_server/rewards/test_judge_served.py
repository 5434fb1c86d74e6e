"""The judge of the example configuration, served: trainer's client, gateway, queue, worker, and a scripted judge."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from reward_server.embedded import EmbeddedServer, EmbeddedServerMistake
from reward_server.settings import EmbeddedSettings
from trainer.rewards import RewardClient

EXAMPLE = Path(__file__).resolve().parents[3] / "configs" / "rewards" / "judge.yaml"


def settings(chat, **options):
    text = re.sub(r"http://127.0.0.1:800[12]/v1", chat.url, EXAMPLE.read_text())
    values = yaml.safe_load(text) | {"port": 0}
    values["rewards"]["judge"]["options"] |= options
    return EmbeddedSettings(**values)


def answer(chat):
    def scripted(body):
        brightness = int(chat.pictures(body)[0][0, 0, 0])
        if "Coherence" in body["messages"][-1]["content"][-1]["text"]:
            lines = [f"{axis} Score (1-5): {brightness / 50}" for axis in ("Alignment", "Coherence", "Style")]
            return chat.completion("\n".join(lines))
        if brightness == 250:
            return chat.completion("a nice picture")
        return chat.completion("4", {"4": 0.75, "5": 0.25})

    return scripted


def test_the_example_serves_judges_from_end_to_end(chat, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    chat.answer = answer(chat)
    images = np.zeros((4, 8, 8, 3), np.uint8)
    images += np.array([100, 200, 250, 50], np.uint8)[:, None, None, None]
    with (
        EmbeddedServer(settings(chat)) as server,
        RewardClient(server.url, server.token, ["judge", "unifiedreward"]) as client,
    ):
        result = client.submit(images, ["a {cat}"] * 4).result(60)
    assert result.scores["judge"][[0, 1, 3]] == pytest.approx([(4.25 - 1) / 4] * 3)
    assert result.valid["judge"].tolist() == [True, True, False, True]
    assert result.reasons["judge"][2] == 'no rating in 3 answers; the last: "a nice picture"'
    assert result.details["judge"]["asks"].tolist() == [1, 1, 3, 1]
    assert result.scores["unifiedreward"] == pytest.approx([2 / 5, 4 / 5, 5 / 5, 1 / 5])
    assert {headers["Authorization"] for headers in chat.headers} == {"Bearer sk-secret"}


def test_a_judge_whose_server_is_away_is_a_users_mistake_in_words(chat):
    with (
        pytest.raises(EmbeddedServerMistake, match=r"127.0.0.1:1/v1/models.*Is it running, and is base_url right"),
        EmbeddedServer(settings(chat, base_url="http://127.0.0.1:1/v1", retries=0)),
    ):
        pass
