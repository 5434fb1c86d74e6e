"""The server's settings: what users may write for rewards and tokens, and the configurations that we ship."""

from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from reward_server.options import load
from reward_server.rewards.base import available
from reward_server.settings import (
    ENV_PREFIX,
    EmbeddedSettings,
    GatewaySettings,
    RewardSettings,
    ServerSettings,
    WorkerSettings,
)

ROOT = Path(__file__).parents[2]


def up(*argv):
    return load(ServerSettings, argv, prog="up", description="", env_prefix=ENV_PREFIX)


@pytest.mark.parametrize(
    ("argv", "batches"),
    [
        ([], {"shapes": 16}),
        (["--rewards", "shapes,null"], {"shapes": 16, "null": 16}),
        (["--rewards", "[shapes]"], {"shapes": 16}),
        (["--rewards", "{shapes: {max_batch: 8}, 'null': }"], {"shapes": 8, "null": 16}),
        (["--rewards.shapes.max_batch", "4"], {"shapes": 4}),
        (["--rewards", "shapes,null", "--rewards.null.max-batch", "4"], {"shapes": 16, "null": 4}),
        (["--rewards", "[shapes, 'null']", "--rewards.null.max-batch", "4"], {"shapes": 16, "null": 4}),
    ],
)
def test_rewards_may_be_names_or_a_mapping(argv, batches):
    assert {name: reward.max_batch for name, reward in up(*argv).rewards.items()} == batches


def test_no_reward_at_all_is_refused():
    with pytest.raises(ValidationError, match="at least one reward must be named"):
        ServerSettings(rewards=" , ")


def test_a_served_name_may_be_apart_from_the_implementation_and_must_be_a_name():
    rewards = up("--rewards", "{a: {reward: 'm:C', python: /p}, 'm:C': }").rewards
    assert (rewards["a"].reward, rewards["a"].python, rewards["m:C"].reward) == ("m:C", Path("/p"), None)
    with pytest.raises(ValidationError, match="'m:C' cannot be a reward's name, which must match"):
        ServerSettings(rewards={"m:C": RewardSettings(reward="null")})
    with pytest.raises(ValidationError, match="name"):
        WorkerSettings(name="a/b")


def test_the_folder_of_environments_comes_from_the_variable_for_the_embedded_server_too(monkeypatch):
    monkeypatch.delenv("REWARD_SERVER_ENVS", raising=False)
    assert EmbeddedSettings().envs == Path("~/.cache/mar-grpo/envs")
    monkeypatch.setenv("REWARD_SERVER_ENVS", "/e")
    assert EmbeddedSettings().envs == up().envs == Path("/e")
    assert up("--envs", "/f").envs == Path("/f")


def test_the_token_comes_from_the_setting_or_else_from_the_file(tmp_path):
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert GatewaySettings().bearer_token() is None
    assert GatewaySettings(token_file=file).bearer_token() == "from-file"
    assert GatewaySettings(token=SecretStr("set"), token_file=file).bearer_token() == "set"


def test_an_empty_token_is_an_error_and_not_an_open_server(tmp_path):
    file = tmp_path / "token"
    file.write_text("\n")
    for settings in (GatewaySettings(token_file=file), GatewaySettings(token=SecretStr(" "))):
        with pytest.raises(ValueError, match="is empty"):
            settings.bearer_token()
    with pytest.raises(ValueError, match="nowhere cannot be read"):
        GatewaySettings(token_file=tmp_path / "nowhere").bearer_token()


def test_embedded_settings_take_a_free_port_and_say_little():
    assert EmbeddedSettings().port == 0
    assert EmbeddedSettings().log_level == "warning"
    assert ServerSettings().port == 8000


@pytest.mark.parametrize("path", sorted((ROOT / "configs/rewards").glob("*.yaml")), ids=lambda path: path.name)
def test_the_configurations_that_we_ship_load(path):
    settings = up("--config", str(path))
    assert {reward.reward or name for name, reward in settings.rewards.items()} <= set(available())
    assert settings.host == "127.0.0.1"


@pytest.mark.parametrize("model", [WorkerSettings, GatewaySettings, ServerSettings])
def test_a_redis_url_is_one(model):
    with pytest.raises(ValidationError, match="redis://host:port/db"):
        model(redis_url="foo")
    assert model(redis_url="unix:///run/redis.sock").redis_url == "unix:///run/redis.sock"


def test_names_of_rewards_stay_as_they_are_typed():
    flags = ["--rewards.shapes-two.reward", "shapes", "--rewards.shapes-two.max-batch", "3", "--start-timeout-s", "9"]
    flags += ["--rewards.shapes-two.options.max-pixels", "5", "--rewards.shapes-two.options.parts.a-b", "1"]
    settings = load(ServerSettings, flags, prog="p", description="", env_prefix="NOTHING_")
    assert settings.rewards["shapes-two"].options == {"max_pixels": 5, "parts": {"a-b": 1}}
    assert (settings.rewards["shapes-two"].reward, settings.rewards["shapes-two"].max_batch) == ("shapes", 3)
    assert settings.start_timeout_s == 9
