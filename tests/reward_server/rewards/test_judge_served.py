"""The judge of the example configuration, served: trainer's client, gateway, queue, worker, and a scripted judge."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from reward_server.embedded import EmbeddedServer, EmbeddedServerMistake
from reward_server.settings import EmbeddedSettings
from trainer import run
from trainer.rewards import RewardClient

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "configs" / "rewards" / "judge.yaml"


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


def brighter(chat):
    """A judge that finds the brighter image the better one, and is partial to the first."""

    def scripted(body):
        first, second = (float(picture.mean()) for picture in chat.pictures(body))
        return chat.completion("1", {"1": 0.9, "2": 0.1} if first >= second else {"1": 0.3, "2": 0.7})

    return scripted


@pytest.mark.parametrize("max_batch", [2, 16])  # a request above it is not split, two below it are not scored together
def test_win_rates_are_those_of_whole_requests(chat, max_batch):
    chat.answer = brighter(chat)
    options = {"base_url": chat.url, "template": "pairwise"}
    rewards = {"judge": {"max_batch": max_batch, "max_wait_ms": 300, "options": options}}
    requests = [np.full((3, 8, 8, 3), 0, np.uint8) + np.array(v, np.uint8)[:, None, None, None] for v in BRIGHTNESS]
    with (
        EmbeddedServer(EmbeddedSettings(rewards=rewards)) as server,
        RewardClient(server.url, server.token, ["judge"]) as client,
    ):
        client.check()
        jobs = [client.submit(images, ["p"] * 3) for images in requests * 2]
        results = [job.result(60) for job in jobs]
    asked = [tuple(int(picture[0, 0, 0]) for picture in chat.pictures(body)) for body in chat.bodies]
    met = [pair for values in BRIGHTNESS for pair in itertools.permutations(values, 2)]
    assert sorted(pair for pair in asked if pair[0] != pair[1]) == sorted(
        met * 2
    )  # both orders; the warm-ups' are alike
    # in the two orders the brighter one is preferred by 0.9 and 0.7: 0.8 on the mean, the other by 0.2
    rates = [result.scores["judge"].tolist() for result in results]
    assert rates == [pytest.approx(expected) for expected in ([0.2, 0.8, 0.5], [0.8, 0.5, 0.2])] * 2
    assert [r.details["judge"]["comparisons"].tolist() for r in results] == [[2, 2, 2]] * 4
    assert client.provenance["judge"]["template"].startswith("pairwise sha256:")


BRIGHTNESS = [(10, 200, 100), (250, 240, 230)]


def test_the_trainer_learns_from_win_rates_by_configuration_alone(chat, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    chat.answer = brighter(chat)
    overlay = {
        "reward": {"names": {"judge": 1.0}},
        "server": {"rewards": {"judge": {"max_batch": 2, "options": {"base_url": chat.url, "template": "pairwise"}}}},
        "train": {"steps": 1, "prompts_per_step": 2, "group_size": 3, "rollout_batch": 3, "threads": 1},
        "evaluate": {"prompts": 2, "seeds": 2},
        "report": {"run_dir": str(tmp_path / "run"), "sheet_prompts": 2, "snr_groups": 0},
    }
    (tmp_path / "judge.yaml").write_text(yaml.safe_dump(overlay))
    arguments = ["--config", "configs/train/small.yaml", "--config", str(tmp_path / "judge.yaml")]
    assert run.main(arguments) == 0
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["reward/mean"] == pytest.approx(0.5)  # the mean of all win rates, whatever the images
    evaluations = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["missing"]["judge"] for line in evaluations] == [0, 0]  # no prompt's images were cut apart
    provenance = json.loads((tmp_path / "run" / "versions.json").read_text())["provenance"]
    assert provenance["judge"]["template"].startswith("pairwise sha256:")
