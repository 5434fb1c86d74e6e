import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from reward_server.rewards.base import RewardLoadError, Score, load, prepare
from reward_server.scoring import Scorer
from reward_server.weights import Source


class Red:
    """Redness times ``gain``; a black image has none."""

    name, revision, description, needs = "red", "unknown", "", ("tag",)
    relative = False

    def setup(self, device, *, gain: float = 1.0, folder: str = "red/one"):
        self.gain, self.revision = gain, f"red-{gain:g}"
        self.provenance = {"weights": "sha256:00"}

    def sources(self, *, folder: str = "red/one", **_):
        return [Source(folder, ("w",)), Source("both/share", ("w",))]

    def score(self, images, prompts, metadata):
        reds = [float(image[0, 0, 0]) for image in images]
        return [Score(r * self.gain, {"raw": r}) if r else Score(None, reason="black") for r in reds]


class Length:
    """The prompt's length, as a bare number; NaN for an empty one."""

    name, revision, description, needs = "length", "1", "", ("lang", "tag")
    relative = True
    example = ("four", {"lang": "en", "tag": 3})

    def setup(self, device):
        pass

    def score(self, images, prompts, metadata):
        return [float(len(prompt)) or float("nan") for prompt in prompts]


class Short(Length):
    def score(self, images, prompts, metadata):
        return [1.0]


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    monkeypatch.setitem(sys.modules, "parts", SimpleNamespace(Red=Red, Length=Length, Short=Short))


def ensemble(**parts):
    reward = load("ensemble")
    prepare(reward, "cpu", {"parts": parts})
    return reward


MIX = {
    "a": {"weight": 0.5, "reward": "parts:Red"},
    "b": {"weight": 2, "reward": "parts:Red", "options": {"gain": 10.0}},
    "length": {"weight": -1.0, "reward": "parts:Length"},
}


def image(red):
    return np.full((2, 2, 3), red, np.uint8)


def test_weighted_sum_with_parts_reported():
    scores = ensemble(**MIX).score([image(4), image(8)], ["abc", "a"], [{}, {}])
    assert [score.value for score in scores] == [0.5 * 4 + 2 * 40 - 3, 0.5 * 8 + 2 * 80 - 1]
    assert scores[0].details == {"raw": 79.0, "a": 4.0, "a.raw": 4.0, "b": 40.0, "b.raw": 4.0, "length": 3.0}


def test_a_part_without_a_score_makes_the_sum_null():
    black, unnamed = ensemble(**MIX).score([image(0), image(3)], ["abc", ""], [{}, {}])
    assert (black.value, black.reason) == (None, "part 'a': black; part 'b': black")
    assert black.details == {"raw": None, "a": None, "b": None, "length": 3.0}
    assert (unnamed.value, unnamed.reason) == (None, "part 'length': it returned nan")
    assert unnamed.details["a"] == 3.0


def test_needs_example_and_relative_are_those_of_the_parts():
    mix = ensemble(**MIX)
    assert mix.needs == ("tag", "lang")
    assert mix.relative is True
    assert mix.example == ("four", {"lang": "en", "tag": 3})
    assert ensemble(a=MIX["a"]).relative is False
    assert mix.provenance == {
        "a.revision": "red-1", "a.weights": "sha256:00", "a.weight": "0.5",
        "b.revision": "red-10", "b.weights": "sha256:00", "b.weight": "2.0",
        "length.revision": "1", "length.weight": "-1.0",
    }  # fmt: skip


def test_the_revision_follows_parts_and_weights():
    same, other = ensemble(**MIX), ensemble(**{**MIX, "a": {"weight": 0.6, "reward": "parts:Red"}})
    louder = ensemble(**{**MIX, "b": {**MIX["b"], "options": {"gain": 11.0}}})
    assert same.revision == ensemble(**MIX).revision
    assert len({same.revision, other.revision, louder.revision}) == 3


def test_sources_are_those_of_the_parts_each_once():
    parts = {**MIX, "b": {**MIX["b"], "options": {"folder": "red/two"}}}
    found = [source.repo for source in load("ensemble").sources(parts=parts)]
    assert found == ["red/one", "both/share", "red/two"]


def test_rewards_of_the_project_as_parts():
    mix = ensemble(null={"weight": 3.0}, shapes={"weight": 1.0})
    square = np.full((48, 48, 3), 255, np.uint8)
    square[12:36, 12:36] = (222, 48, 42)
    scored, refused = Scorer(mix, 8).score(
        [SimpleNamespace(image=square, prompt=prompt, metadata={}) for prompt in ("one red square", "a cat")]
    )
    assert scored.value == pytest.approx(4.0, abs=0.02)
    assert scored.details["shapes.strict"] == 1.0
    assert refused.reason.startswith("part 'shapes': the prompt makes no claim")


def test_the_example_settings_load():
    text = (Path(__file__).parents[3] / "configs" / "rewards" / "ensemble.yaml").read_text()
    mix = ensemble(**yaml.safe_load(text)["rewards"]["mix"]["options"]["parts"])
    assert list(mix.provenance) == ["shapes.revision", "shapes.weight", "null.revision", "null.weight"]


def test_a_part_that_returns_too_few_is_named():
    with pytest.raises(ValueError, match="part 'a' returned 1 scores for 2 images"):
        ensemble(a={"weight": 1.0, "reward": "parts:Short"}).score([image(1)] * 2, ["a", "b"], [{}, {}])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "needs parts"),
        ({"shape": {"weight": 1.0}}, "part 'shape': no reward 'shape'; did you mean 'shapes'"),
        ({"shapes": {}}, "part 'shapes' must be"),
        ({"shapes": {"weight": 1.0, "wieght": 1.0}}, "part 'shapes' must be"),
        ({"shapes": {"weight": 0}}, "no finite number other than 0"),
        ({"shapes": {"weight": float("nan")}}, "no finite number other than 0"),
        ({"shapes": {"weight": True}}, "no finite number other than 0"),
        ({"a b": {"weight": 1.0, "reward": "shapes"}}, "its name must match"),
        ({"shapes": {"weight": 1.0, "options": {"x": 1}}}, "part 'shapes': options of reward 'shapes'"),
        ({"inner": {"weight": 1.0, "reward": "ensemble"}}, "part 'inner' is an ensemble"),
        ({"inner": {"weight": 1.0, "reward": "reward_server.rewards.ensemble:Model"}}, "part 'inner' is an ensemble"),
    ],
)
def test_wrong_parts(parts, message):
    with pytest.raises(RewardLoadError, match=message):
        ensemble(**parts)
