import importlib
import sys

import numpy as np
import pytest

from reward_server.rewards.base import RewardLoadError, available, load, prepare

PLUGIN = """
class Good:
    name, revision, description, needs = "good", "1", "", ()
    def setup(self, device): ...
    def score(self, images, prompts, metadata): return [0.5] * len(images)
class BadName(Good):
    name = "a/b"
class Half:
    name = revision = "x"
class Needy(Good):
    def __init__(self, path): ...
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(PLUGIN)
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "lacking.py").write_text("import a_package_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_rewards", None)


def test_rewards_are_listed_by_file_name():
    assert "null" in available()
    assert "base" not in available()


def test_the_null_reward_gives_every_image_one():
    reward = load("null")
    reward.setup("cpu")
    assert reward.score([np.zeros((1, 1, 3), np.uint8)] * 3, ["a"] * 3, [{}] * 3) == [1.0, 1.0, 1.0]


def test_a_reward_of_another_package(plugin):
    assert load("my_rewards:Good").name == "good"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nul", "no reward 'nul'; did you mean 'null'"),
        ("base", "no reward 'base'"),
        ("../null", "available: "),
        ("nowhere:Model", "needs the package 'nowhere'"),
        ("lacking:Model", "needs the package 'a_package_nobody_has'"),
        ("broken:Model", "broken cannot be imported: ZeroDivisionError: division by zero"),
        ("my_rewards:Missing", "my_rewards has no class Missing"),
        ("my_rewards:Half", "is not a reward: it lacks description, needs, setup, score"),
        ("my_rewards:BadName", "name is 'a/b'"),
        ("my_rewards:Needy", "my_rewards.Needy cannot be constructed without arguments: TypeError: "),
        ("os:getcwd", "os.getcwd is not a reward: it is no class but a builtin_function_or_method"),
    ],
)
def test_what_cannot_be_loaded_says_why(plugin, name, message):
    with pytest.raises(RewardLoadError) as error:
        load(name)
    assert message in str(error.value)


def test_options_are_checked_by_name(make_reward):
    seen = []

    def setup(device, size="small"):
        seen.append((device, size))

    reward = make_reward(setup=setup)
    prepare(reward, "cpu", {"size": "large"})
    assert seen == [("cpu", "large")]
    with pytest.raises(RewardLoadError, match=r"options of reward 'red': .*'sise'; it has: size"):
        prepare(reward, "cpu", {"sise": "large"})


def test_a_package_that_setup_lacks_is_named_with_what_to_do(make_reward):
    def setup(device):
        importlib.import_module("a_package_nobody_has")

    with pytest.raises(
        RewardLoadError, match=r"'red' needs the package 'a_package_nobody_has', which is not installed$"
    ):
        prepare(make_reward(setup=setup), "cpu", {})
    ours = load("null")
    ours.setup = setup
    with pytest.raises(
        RewardLoadError, match=r"'null' needs .*, which is not installed: `reward-server env null` makes "
    ):
        prepare(ours, "cpu", {})


@pytest.mark.parametrize(("device", "message"), [("gpu", "none that torch knows"), ("cuda:0", "sees none here")])
def test_a_device_that_is_not_there_is_one_line(make_reward, monkeypatch, device, message):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RewardLoadError, match=message):
        prepare(make_reward(setup=lambda device: torch.zeros(1, device="cpu").item() / 0), device, {})
