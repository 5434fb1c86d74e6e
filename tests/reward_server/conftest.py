"""Rewards of another package, for the tests whose server is processes of its own."""

import pytest

PLUGIN = """
import os
import sys


class Plugin:
    revision, description, needs = "1", "", ()

    def setup(self, device):
        pass

    def score(self, images, prompts, metadata):
        return [0.5] * len(images)


class Good(Plugin):
    name = "good-name"


class Dies(Plugin):
    name = "dies"
    example = ("warm-up", {})

    def score(self, images, prompts, metadata):
        if prompts == ["warm-up"]:
            return [0.5]
        print("dying", file=sys.stderr, flush=True)
        os._exit(3)


class GivesNan(Plugin):
    name = "gives-nan"

    def score(self, images, prompts, metadata):
        return [float("nan")] * len(images)


class DiesAtStart(Plugin):
    name = "dies-at-start"

    def setup(self, device):
        print("bye", file=sys.stderr, flush=True)
        os._exit(2)


class NoWeights(Plugin):
    name = "no-weights"

    def setup(self, device):
        raise ValueError("weights are missing:\\n  w.pt")
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A module ``plugged`` with rewards that a server's processes can import."""
    (tmp_path / "plugged.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
