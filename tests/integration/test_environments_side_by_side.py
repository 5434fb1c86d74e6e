"""One server, five rewards, three environments: the packages hpsv2 and image-reward beside the project's own models.

Their pins contradict each other and the trainer's (protobuf < 4, pytest 7.2, transformers 4.46, timm 0.6), so each
worker runs in the environment that ``reward-server env`` made for it. The first run on a machine makes two (1.5 GB
each, minutes); later ones find them. Small checkpoints of random weights: equal numbers, no taste.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import transformers
import yaml
from transformers import CLIPConfig, CLIPModel

from reward_server.contract import CONTENT_TYPE, ScoreRequest, ScoreResponse, encode_request

pytestmark = pytest.mark.timeout(1200)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = {"hpsv2": "hpsv2_package", "imagereward": "imagereward_package"}
SIZES = [(224, 224), (32, 32), (101, 333), (301, 77), (1, 1), (512, 512)]
PROMPTS = ["a red circle", "two blue squares", "a painting of the sea, with a Dog!", "", "a cat", "on and on " * 50]
PICKSCORE = {
    "projection_dim": 32,
    "vision_config": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "text_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
}
PROCESSOR = {
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 224},
}


def command(*arguments):
    return [sys.executable, "-m", "reward_server", *arguments]


@pytest.fixture(scope="module")
def pythons():
    """The interpreters of the packages' environments."""
    made = {}
    for name in PACKAGES.values():
        done = subprocess.run(command("env", name), cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=900)
        assert done.returncode == 0
        made[name] = done.stdout.strip()
    return made


@pytest.fixture(scope="module")
def options(pythons, tmp_path_factory):
    """Options of each reward, with small checkpoints in the official layouts; a package's are its model's."""
    folder = tmp_path_factory.mktemp("checkpoints")
    hps, pick, image_reward = (folder / name for name in ("hps", "pickscore", "imagereward"))
    hps.mkdir()
    make = [pythons["hpsv2_package"], "-P", str(HERE / "make_clip_files.py"), str(hps)]
    subprocess.run(make, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)
    torch.manual_seed(1)
    CLIPModel(CLIPConfig(**PICKSCORE)).save_pretrained(pick)
    (pick / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    for name in ("vocab.json", "merges.txt"):
        (pick / name).write_bytes((hps / name).read_bytes())
    tiny = ROOT / "tests" / "reward_server" / "rewards" / "fixtures" / "imagereward" / "tiny.py"
    runpy.run_path(str(tiny))["write"](image_reward)
    hps_options = {"weights": str(hps)}
    image_reward_options = {"weights": str(image_reward), "tokenizer": str(image_reward)}
    return {
        "hpsv2": hps_options,
        "hpsv2_package": hps_options,
        "imagereward": image_reward_options,
        "imagereward_package": image_reward_options,
        "pickscore": {"weights": str(pick)},
    }


@pytest.fixture(scope="module")
def url(options, tmp_path_factory):
    """A server with all five, started as a user would."""
    folder = tmp_path_factory.mktemp("server")
    rewards = {name: {"options": its} for name, its in options.items()}
    (folder / "server.yaml").write_text(
        yaml.safe_dump({"rewards": rewards, "start_timeout_s": 300, "log_dir": str(folder)})
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = command("up", "--config", str(folder / "server.yaml"), "--port", "0")
    with (folder / "up.log").open("w") as log:
        server = subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        line = server.stdout.readline()
        assert line, (folder / "up.log").read_text()
        yield json.loads(line)["url"]
    finally:
        server.terminate()
        server.wait(timeout=60)
        server.stdout.close()


@pytest.fixture(scope="module")
def answer(url, options):
    """One batch of several sizes, scored by all five through one request."""
    random = np.random.RandomState(0)
    images = [random.randint(0, 256, (height, width, 3)).astype(np.uint8) for height, width in SIZES]
    request = ScoreRequest(rewards=list(options), prompts=PROMPTS, wait=60)
    body = b"".join(encode_request(request, images))
    response = httpx.post(f"{url}/v1/score", content=body, headers={"Content-Type": CONTENT_TYPE}, timeout=90)
    job = ScoreResponse.model_validate_json(response.content)
    assert job.state == "done", response.text
    return job.results


@pytest.mark.parametrize(("own", "package"), PACKAGES.items())
def test_the_package_and_the_project_s_model_give_equal_numbers(answer, own, package):
    scores = np.array(answer[own].scores, dtype=np.float64)
    assert scores.std() > 0.01  # far above the tolerance
    assert scores == pytest.approx(np.array(answer[package].scores, dtype=np.float64), abs=1e-5)
    assert answer[own].details["truncated"] == answer[package].details["truncated"] == [0, 0, 0, 0, 0, 1]
    assert answer[own].revision == answer[package].revision


def test_each_worker_runs_in_its_environment(answer):
    def version(reward, library):
        libraries = dict(entry.split(" ") for entry in answer[reward].provenance["libraries"].split(", "))
        return libraries[library]

    assert version("imagereward_package", "transformers") == "4.46.3"
    for name in ("hpsv2", "imagereward", "pickscore"):
        assert version(name, "transformers") == transformers.__version__
    assert transformers.__version__.startswith("5.")
    assert answer["hpsv2_package"].provenance["preprocessing"] == "hpsv2-1.2.0"
    assert answer["imagereward_package"].provenance["preprocessing"] == "image-reward-1.5"
    for own, package in PACKAGES.items():
        assert answer[own].provenance["weights"] == answer[package].provenance["weights"]


def test_the_packages_environments_contradict_each_other(pythons):
    program = "import importlib.metadata as m, sys; print(*[m.version(name) for name in sys.argv[1:]])"

    def versions(name, *packages):
        arguments = [pythons[name], "-I", "-c", program, *packages]
        return subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=60).stdout.split()

    assert versions("hpsv2_package", "hpsv2", "pytest")[:2] == ["1.2.0", "7.2.0"]
    assert int(versions("hpsv2_package", "protobuf")[0].split(".")[0]) < 4
    assert versions("imagereward_package", "image-reward", "timm", "transformers") == ["1.5", "0.6.13", "4.46.3"]


def test_the_trainer_switches_between_them_and_a_mix_by_configuration_alone(url, tiny_run):
    """The first step's images are those of the seed, so that its mean rewards can be compared between runs."""
    names = {
        "hpsv2": {"hpsv2": 1.0},
        "hpsv2_package": {"hpsv2_package": 1.0},
        "imagereward": {"imagereward": 1.0},
        "mix": {"hpsv2": 2.0, "imagereward": 0.5},
    }
    means = {}
    for run, weights in names.items():
        overlay = tiny_run.folder / f"{run}.yaml"
        overlay.write_text(yaml.safe_dump({"reward": {"url": url, "names": weights}, "train": {"steps": 1}}))
        (step,) = tiny_run.finish(tiny_run.start(run, "--config", str(overlay)), run)
        assert step["missing"] == 0
        assert step["grad_norm"] > 0
        means[run] = step["reward/mean"]
    assert means["hpsv2_package"] == pytest.approx(means["hpsv2"], abs=1e-5)
    assert means["mix"] == pytest.approx(2 * means["hpsv2"] + 0.5 * means["imagereward"], abs=1e-5)
    assert abs(means["hpsv2"] - means["imagereward"]) > 1e-3
