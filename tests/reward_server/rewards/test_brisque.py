"""The real BRISQUE of its package, in the environment of its own that it needs (numpy < 2.4), on images made here."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from reward_server import environments
from reward_server.rewards.base import RewardLoadError, load

SCRIPT = '''
import io, json, sys
import numpy as np
import PIL.Image, PIL.ImageFilter
import brisque
from reward_server.rewards.base import load, prepare

def photo(seed, size=192):
    """Pink noise: the spectrum of photographs, 1/f."""
    noise = np.random.default_rng(seed).standard_normal((3, size, size))
    f = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.fftfreq(size)[None])
    f[0, 0] = 1
    x = np.fft.ifft2(np.fft.fft2(noise) / f).real.transpose(1, 2, 0)
    x = 0.8 * x[..., :1] + 0.2 * x
    return np.uint8(255 * (x - x.min()) / (x.max() - x.min()))

def jpeg(image, quality):
    buffer = io.BytesIO()
    PIL.Image.fromarray(image).save(buffer, "JPEG", quality=quality)
    return np.asarray(PIL.Image.open(buffer))

def blurred(image, radius):
    return np.asarray(PIL.Image.fromarray(image).filter(PIL.ImageFilter.GaussianBlur(radius)))

def noisy(image, sigma):
    noise = np.random.default_rng(9).normal(0, sigma, image.shape)
    return np.uint8(np.clip(image + noise, 0, 255).round())

reward = load("brisque")
prepare(reward, "cpu", {})
def score(*images):
    return [vars(s) for s in reward.score(images, ["p"] * len(images), [{}] * len(images))]

result = {"photos": []}
for seed in range(3):
    clean = photo(seed)
    images = {"clean": clean}
    images |= {f"blur{radius}": blurred(clean, radius) for radius in (1, 2, 4)}
    images |= {f"noise{sigma}": noisy(clean, sigma) for sigma in (20, 60)}
    images |= {f"jpeg{quality}": jpeg(clean, quality) for quality in (10, 3)}
    result["photos"].append(dict(zip(images, score(*images.values()))))
package = brisque.BRISQUE(url=False)
result["package"] = [float(package.score(photo(0))), float(package.score(jpeg(photo(0), 3)))]
flat, halves = np.full((64, 64, 3), 90, np.uint8), np.zeros((64, 64, 3), np.uint8)
halves[:, 32:] = 255
frozen = photo(5, 33)[:, :20]
frozen.flags.writeable = False
result["odd"] = score(flat, halves, np.zeros((1, 1, 3), np.uint8), np.zeros((15, 400, 3), np.uint8), frozen)
result["revision"], result["provenance"], result["python"] = reward.revision, reward.provenance, sys.executable
print(json.dumps(result))
'''


@pytest.fixture(scope="module")
def measured():
    """What the script prints, run by the Python of brisque's environment, which is made if it is not there yet."""
    envs = Path(os.environ.get("REWARD_SERVER_ENVS", "~/.cache/mar-grpo/envs"))
    environment = environments.own("brisque", envs)
    environment.make()
    root = Path(environments.__file__).parents[1]
    run = subprocess.run(
        [environment.python, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(run.stdout)
    assert result["python"].startswith(str(environment.folder))
    return result


def test_every_distortion_lowers_the_score_and_a_stronger_one_more(measured):
    for photo in measured["photos"]:
        value = {name: score["value"] for name, score in photo.items()}
        assert value["clean"] > value["blur1"] > value["blur2"] > value["blur4"]
        assert value["clean"] > value["noise20"] > value["noise60"]
        assert value["clean"] > value["jpeg10"] > value["jpeg3"]
        assert -45 < value["clean"] < -20
        assert value["jpeg3"] < -90


def test_the_score_is_minus_the_package_s_number(measured):
    first = measured["photos"][0]
    for name, number in zip(("clean", "jpeg3"), measured["package"], strict=True):
        assert first[name]["details"]["raw"] == pytest.approx(number, abs=1e-9)
        assert first[name]["value"] == -first[name]["details"]["raw"]


def test_what_has_no_statistics_is_null(measured):
    flat, halves, dot, low, small = measured["odd"]
    assert [score["value"] for score in (flat, halves, dot, low)] == [None] * 4
    assert "too uniform" in flat["reason"]
    assert "too uniform" in halves["reason"]
    assert "1x1 pixels is too small" in dot["reason"]
    assert "400x15 pixels is too small" in low["reason"]
    assert small["value"] < 0


def test_provenance(measured):
    assert len(measured["provenance"]["weights"]) == len("sha256:") + 64
    assert measured["revision"] == measured["provenance"]["weights"][7:19] == "a53a782df988"


def test_the_main_environment_says_what_is_missing():
    with pytest.raises(RewardLoadError, match=r"needs the package 'brisque'.*reward-server env brisque"):
        load("brisque")
