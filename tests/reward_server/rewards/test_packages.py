"""The rewards that call the packages hpsv2 and image-reward, as far as testable where those are not installed.

Their numbers: tests/integration/test_environments_side_by_side.py.
"""

import ast
from pathlib import Path

import pytest

import reward_server.rewards
from reward_server.rewards import base

FOLDER = Path(reward_server.rewards.__file__).parent
REQUIREMENTS = FOLDER.parents[1] / "docker" / "requirements"
PAIRS = [("hpsv2", "hpsv2_package"), ("imagereward", "imagereward_package")]


def options(name):
    """Option -> default, as source text, of a reward's ``setup``, which need not be importable."""
    (model,) = (n for n in ast.parse((FOLDER / f"{name}.py").read_text()).body if getattr(n, "name", "") == "Model")
    (setup,) = (n for n in model.body if getattr(n, "name", "") == "setup")
    arguments = setup.args
    names = [a.arg for a in arguments.args[2:]] + [a.arg for a in arguments.kwonlyargs]
    defaults = [*arguments.defaults, *arguments.kw_defaults]
    return dict(zip(names, map(ast.unparse, defaults), strict=True))


@pytest.mark.parametrize(("own", "package"), PAIRS)
def test_a_package_has_the_options_of_the_project_s_model(own, package):
    assert len(options(own)) > 2
    assert options(package) == options(own)


@pytest.mark.parametrize(("reward", "package"), [("hpsv2_package", "hpsv2"), ("imagereward_package", "image-reward")])
def test_without_its_environment_a_package_says_what_is_missing(reward, package):
    with pytest.raises(base.RewardLoadError, match=f"needs the package {package!r}"):
        base.load(reward)


def pins(name):
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_locks_hold_the_contradictory_pins():
    hpsv2, image_reward = pins("hpsv2_package"), pins("imagereward_package")
    assert (hpsv2["hpsv2"], hpsv2["pytest"], hpsv2["protobuf"][:2]) == ("1.2.0", "7.2.0", "3.")
    assert (image_reward["image-reward"], image_reward["timm"]) == ("1.5", "0.6.13")
    assert (image_reward["transformers"], image_reward["fairscale"]) == ("4.46.3", "0.4.13")
    assert int(image_reward["setuptools"].split(".")[0]) < 81
