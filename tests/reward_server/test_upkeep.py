import numpy as np
import pytest
import yaml
from PIL import Image

from reward_server import upkeep
from reward_server.cli import main
from reward_server.rewards.base import RewardLoadError, available, load
from reward_server.weights import Source

PLUGIN = """
from reward_server.weights import Source


class Brightness:
    name, revision, description, needs = "brightness", "r1", "mean brightness", ()
    provenance = {"weights": "sha256:00"}

    def setup(self, device, *, folder="org/repo", gain=1.0):
        self.gain = gain

    def sources(self, *, folder="org/repo", **_):
        return [Source(folder, ("w.pt",), licence="MIT")]

    def score(self, images, prompts, metadata):
        return [self.gain * float(image.mean()) + len(prompt) for image, prompt in zip(images, prompts)]


class WholeBatch(Brightness):
    def score(self, images, prompts, metadata):  # the mean of the batch: not what one image alone gets
        values = super().score(images, prompts, metadata)
        return [sum(values) / len(values)] * len(values)


class Crossed(Brightness):
    def score(self, images, prompts, metadata):  # image i with the prompt of image 0
        return super().score(images, prompts[:1] * len(prompts), metadata)


class SometimesNan(Brightness):
    def score(self, images, prompts, metadata):
        return [float("nan") if image.shape[0] == 96 else 1.0 for image in images]


class Mute(Brightness):
    def score(self, images, prompts, metadata):
        return [None] * len(images)
"""


@pytest.fixture
def plugged(tmp_path, monkeypatch):
    (tmp_path / "upkept.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_prefetch_downloads_what_these_options_need(plugged, monkeypatch, capsys, tmp_path):
    downloaded = []
    monkeypatch.setattr(upkeep, "download", lambda source: downloaded.append(source) or tmp_path)
    assert main(["prefetch", "upkept:Brightness"]) == 0
    assert main(["prefetch", "upkept:Brightness", "--options", '{"folder": "other/repo"}']) == 0
    assert [source.repo for source in downloaded] == ["org/repo", "other/repo"]
    output = capsys.readouterr()
    assert output.out == f"{tmp_path}\n" * 2
    assert "org/repo: w.pt, licence MIT" in output.err
    assert main(["prefetch", "upkept:Brightness", "--options", '{"wights": "x"}']) == 2
    assert "it has: folder, gain" in capsys.readouterr().err
    assert main(["prefetch"]) == 2
    assert "which reward?" in capsys.readouterr().err


def test_every_reward_with_weights_names_their_files():
    for name in available():
        if hasattr(reward := load_or_none(name), "sources"):
            sources = upkeep.weights_of(reward, OPTIONS.get(name, {}))
            assert all(isinstance(source, Source) and source.files for source in sources), name


OPTIONS = {
    "ensemble": {"parts": {"clip": {"weight": 1.0}}},
    "geneval": {"weights": "facebook/mask2former-swin-small-coco-instance"},
}


def load_or_none(name):
    """The reward, unless its packages need an environment of their own."""
    try:
        return load(name)
    except RewardLoadError:
        return None


def test_a_good_reward_passes_its_selftest(plugged, capsys):
    assert main(["selftest", "upkept:Brightness", "--options", '{"gain": 2.0}']) == 0
    output = capsys.readouterr().out
    assert "weights: sha256:00" in output
    assert "no published score is on record" in output
    assert [line.split()[-1] for line in output.splitlines() if line.startswith(("made", "one", "in r"))] == ["ok"] * 3


@pytest.mark.parametrize(
    ("name", "failed"),
    [
        ("WholeBatch", ["one by one"]),
        ("Crossed", ["one by one", "in reverse"]),
        ("Mute", ["made images"]),
        ("SometimesNan", ["made images"]),
    ],
)
def test_a_reward_that_mixes_up_its_batch_fails(plugged, capsys, name, failed):
    assert main(["selftest", f"upkept:{name}"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith("FAILED")]
    assert len(lines) == len(failed)
    assert all(line.startswith(start) for line, start in zip(lines, failed, strict=True))


def test_golden_values_are_compared_where_the_image_is_at_hand(plugged, capsys, tmp_path, monkeypatch):
    entry = {"source": "s", "prompt": "four", "tolerance": 0.01, "images": {"http://127.0.0.1:9/a/grey.png": 104.0}}
    monkeypatch.setattr(yaml, "safe_load", lambda text: {"upkept:Brightness": [entry]})
    assert main(["selftest", "upkept:Brightness", "--images", str(tmp_path)]) == 1
    assert "not checked" in capsys.readouterr().out
    Image.fromarray(np.full((8, 8, 3), 100, np.uint8)).save(tmp_path / "grey.png")
    assert main(["selftest", "upkept:Brightness", "--images", str(tmp_path)]) == 0
    assert "104 +- 0.01" in capsys.readouterr().out
    entry["images"] = {"grey.png": 104.02}
    assert main(["selftest", "upkept:Brightness", "--images", str(tmp_path)]) == 1
    assert "FAILED" in capsys.readouterr().out
    entry["options"] = {"gain": 3.0}  # numbers of other options say nothing
    assert main(["selftest", "upkept:Brightness", "--images", str(tmp_path)]) == 0


def test_images_of_golden_values_are_fetched_once(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    Image.fromarray(np.full((8, 8, 3), 9, np.uint8)).save(tmp_path / "grey.png")
    data, asked = (tmp_path / "grey.png").read_bytes(), []

    def get(url, **_):
        asked.append(url)
        return upkeep.httpx.Response(200, content=data, request=upkeep.httpx.Request("GET", url))

    monkeypatch.setattr(upkeep.httpx, "get", get)
    for _ in range(2):
        assert upkeep.golden_image("http://host/grey.png", None).tolist() == np.full((8, 8, 3), 9).tolist()
    assert asked == ["http://host/grey.png"]


def test_golden_values_on_record_are_well_formed():
    text = (upkeep.ROOT / "reward_server" / "golden.yaml").read_text()
    for reward, entries in yaml.safe_load(text).items():
        assert reward in available()
        for entry in entries:
            assert entry.keys() - {"options"} == {"source", "prompt", "tolerance", "images"}
            assert upkeep.golden_values(reward, entry.get("options", {}))
            upkeep.check_options(load(reward), "cpu", entry.get("options", {}))
