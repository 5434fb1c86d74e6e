"""The run's folder: logs that survive a kill, the summary, and the pictures."""

import json

import numpy as np
import pytest
from PIL import Image

from trainer.evaluate import Evaluation
from trainer.figures import contact_sheet, smooth
from trainer.report import JsonLines, RunFolder, choose_folder, markdown, sha256, versions


def test_log_passes_over_half_a_line_and_truncates(tmp_path):
    log = JsonLines(tmp_path / "log.jsonl")
    assert log.read() == []
    for step in (1, 2, 3):
        log.append(step, {"x": step / 2})
    with log.path.open("a") as file:
        file.write('{"step": 4, "x"')  # killed here
    assert [line["step"] for line in log.read()] == [1, 2, 3]
    log.truncate(2)
    log.append(3, {"x": None})
    assert log.path.read_text() == '{"step": 1, "x": 0.5}\n{"step": 2, "x": 1.0}\n{"step": 3, "x": null}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.append(4, {"x": float("nan")})


def test_a_run_takes_a_free_folder_and_a_resumed_one_the_last(tmp_path):
    wanted = tmp_path / "run"
    assert choose_folder(wanted, resume=False) == choose_folder(wanted, resume=True) == wanted
    for name in ("run", "run-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("")
    assert choose_folder(wanted, resume=False) == tmp_path / "run-3"
    assert choose_folder(wanted, resume=True) == tmp_path / "run-2"


def step(number, reward, wait=0.5, missing=0):
    return {"reward/mean": reward, "time/step_s": 2.0, "time/wait_s": wait, "missing": missing, "step": number}


def evaluation(rows, shade):
    scores = np.array(rows, float)
    images = np.full((2, 2, 8, 8, 3), (shade, 99, 0), np.uint8)
    return Evaluation(["a", "b"], {"reward": scores}, {"reward": np.ones_like(scores, bool)}, images)


def test_summary_adds_up_what_was_logged(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create()
    for number, (reward, missing) in enumerate([(0.1, 0), (None, 12), (0.3, 1)], start=1):
        folder.metrics.append(number, step(number, reward, missing=missing))
    folder.add_evaluation(0, evaluation([[0.1, 0.3], [0.5, 0.7]], 10), [0, 1])
    folder.add_evaluation(3, evaluation([[0.2, 0.4], [0.6, 0.8]], 200), [0, 1])
    row = {"diffusion_step": 0, "signal2": -1.0, "noise2": 4.0, "snr": -0.25}
    folder.signal.append(0, {"groups": 5, "steps": [row]})
    summary = folder.finish(2, {"rewards": {"shapes": "r1"}})
    assert summary["steps"] == 3
    assert (summary["seconds"], summary["seconds_waiting_for_rewards"]) == (6.0, 1.5)
    assert summary["missing_scores"] == 13
    assert summary["heldout"]["reward"]["before"]["mean"] == pytest.approx(0.4)
    assert summary["heldout"]["reward"]["difference"]["mean"] == pytest.approx(0.1)
    assert json.loads((tmp_path / "report.json").read_text()) == summary
    page = (tmp_path / "report.md").read_text()
    assert "| reward | 0.4000 [0.2000, 0.6000] | 0.5000 [0.3000, 0.7000] | 0.1000 [0.1000, 0.1000] |" in page
    assert "| 0 | -1 | 4 | -0.25 |" in page
    assert "1.5 s of it waiting for rewards; 13 missing scores" in page
    with Image.open(tmp_path / "reward.png") as curve:
        assert curve.size == (960, 540)
    with Image.open(tmp_path / "sheet.png") as sheet:
        pixels = np.asarray(sheet)
    for shade in (10, 200):
        assert (pixels == (shade, 99, 0)).all(axis=-1).sum() == 4 * 96 * 96


def test_a_run_without_evaluation_has_a_report_too(tmp_path):
    summary = RunFolder(tmp_path).finish(4, {})
    assert summary["steps"] == 0
    assert summary["heldout"] == {}
    assert "Held-out" not in markdown(summary)
    assert not (tmp_path / "sheet.png").exists()


def test_truncating_forgets_what_will_be_logged_again(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create()
    for number in (1, 2, 3, 4):
        folder.metrics.append(number, step(number, 0.5))
    for number in (0, 2, 4):
        folder.evaluations.append(number, {})
        folder.signal.append(number, {})
    folder.truncate(2)
    assert [line["step"] for line in folder.metrics.read()] == [1, 2]
    assert [line["step"] for line in folder.evaluations.read()] == [0, 2]
    assert [line["step"] for line in folder.signal.read()] == [0]  # step 2's is measured again before step 3


def test_smoothing_is_a_centred_mean():
    assert smooth(np.array([0.0, 3.0, 6.0, 0.0])).tolist() == [1.5, 3.0, 3.0, 3.0]
    assert smooth(np.full(60, 2.0)).tolist() == [2.0] * 60


def test_sheet_enlarges_by_whole_factors_and_shortens_long_prompts(tmp_path):
    images = np.zeros((1, 1, 40, 40, 3), np.uint8)
    contact_sheet(tmp_path / "s.png", images, ["a very long prompt " * 20], ["0.50"])
    with Image.open(tmp_path / "s.png") as sheet:
        assert sheet.size == (120 + 8, 4 + 18 + 120 + 8)  # 40 x 3 is the first multiple of at least 96


def test_versions_and_checksums(tmp_path):
    found = versions()
    assert found["packages"]["torch"]
    assert found["python"].count(".") == 2
    (tmp_path / "f").write_bytes(b"abc")
    assert sha256(tmp_path / "f") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
