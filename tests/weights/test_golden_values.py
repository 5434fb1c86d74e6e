"""The scores that the models' own projects print, with the real weights: ``make test-weights``, where those are.

Not part of the suite, which must pass without gigabytes of downloads. Weights: ``reward-server prefetch NAME``. Images
are fetched once, or taken from the folder that GOLDEN_IMAGES names; the device is REWARD_DEVICE, else the CPU.
"""

import os
from pathlib import Path

import pytest
import yaml

from reward_server.rewards.base import RewardLoadError, load, prepare
from reward_server.upkeep import ROOT, Golden, check_golden, golden_values, weights_of
from reward_server.weights import locate

ENTRIES = [
    (reward, entry.get("options", {}))
    for reward, entries in yaml.safe_load((ROOT / "reward_server" / "golden.yaml").read_text()).items()
    for entry in entries
]
CASES = {
    f"{reward}-{golden.prompt[:12]}-{golden.image.rpartition('/')[2]}": (reward, golden)
    for reward, options in ENTRIES
    for golden in golden_values(reward, options)
}


@pytest.fixture(scope="session")
def loaded():
    """Rewards by name and options, each loaded once."""
    return {}


@pytest.mark.weights
@pytest.mark.parametrize("case", CASES)
def test_published_scores_are_reproduced(case, loaded):
    name, golden = CASES[case]
    assert isinstance(golden, Golden)
    key = (name, str(golden.options))
    if key not in loaded:
        reward = load(name)
        try:
            for source in weights_of(reward, golden.options):
                locate(source, reward=name)
        except RewardLoadError as error:
            pytest.skip(str(error))
        prepare(reward, os.environ.get("REWARD_DEVICE", "cpu"), golden.options)
        loaded[key] = reward
    images = os.environ.get("GOLDEN_IMAGES")
    check, expected, got, verdict = check_golden(loaded[key], golden, Path(images) if images else None)
    assert verdict == "ok", f"{name}: {check}: expected {expected}, got {got}"
