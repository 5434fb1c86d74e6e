"""What docs/protocol.md shows works as it stands: the Python program, the curl line, and the answers."""

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from reward_server.contract import ScoreResponse
from reward_server.embedded import EmbeddedServer
from reward_server.settings import EmbeddedSettings
from trainer.shapes import all_scenes, render

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
URL = "http://127.0.0.1:8000"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def url():
    with EmbeddedServer(EmbeddedSettings(rewards="shapes,null"), open_access=True) as server:
        yield server.url


def test_the_python_program_prints_what_the_page_says(url, tmp_path):
    (program,) = blocks("python")
    (printed,) = blocks("text")
    assert program.count(URL) == 1
    (tmp_path / "example.py").write_text(program.replace(URL, url))
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout == printed


def test_the_curl_line_scores_a_file(url, tmp_path):
    (line,) = blocks("bash")
    scene = next(s for s in all_scenes() if s.prompt == "two red circles")
    Image.fromarray(render([scene], np.random.default_rng(0))[0]).save(tmp_path / "picture.png")
    command = shlex.split(line.replace(URL, url))
    assert command[0] == "curl"
    if shutil.which("curl"):
        done = subprocess.run([*command[:1], "-s", *command[1:]], cwd=tmp_path, capture_output=True, timeout=60)
        answer = done.stdout
    else:  # the same form, sent by httpx
        fields = dict(part.split("=", 1) for part in command if "=" in part and "://" not in part)
        with (tmp_path / fields.pop("image").removeprefix("@")).open("rb") as file:
            answer = httpx.post(command[-1], data=fields, files={"image": file}, timeout=60).content
    job = ScoreResponse.model_validate_json(answer)
    assert job.state == "done"
    assert job.results["shapes"].scores == pytest.approx([1.0], abs=0.1)
    assert job.results["shapes"].details.keys() == {"count", "colour", "shape", "strict"}


def test_the_answers_are_what_the_server_gives(url):
    result, queued, error, rewards = blocks("json")
    assert ScoreResponse.model_validate_json(result).state == "done"
    assert ScoreResponse.model_validate_json(queued).state == "queued"
    real = httpx.get(f"{url}/v1/rewards").json()
    (info,) = (reward for reward in real["rewards"] if reward["name"] == "null")
    (shown,) = json.loads(rewards)["rewards"]
    versions = shown["provenance"].pop("libraries"), info["provenance"].pop("libraries")
    assert all(text.startswith("python 3.") and "numpy" in text for text in versions)
    assert shown == info
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    refused = httpx.post(f"{url}/v1/score", data={"prompt": "p", "reward": "clip"}, files={"image": picture.getvalue()})
    assert refused.status_code == 404
    assert refused.json() == json.loads(error)


def test_every_endpoint_is_on_the_page_and_every_metric_of_the_page_exists(url):
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    assert all(path.replace("job_id", "id") in PAGE for path in paths)
    served = set(re.findall(r"^# TYPE (\w+)", httpx.get(f"{url}/metrics").text, re.MULTILINE))
    told = set(re.findall(r"`(reward_server_\w+)`", PAGE))
    assert len(told) == 10
    assert told <= served
