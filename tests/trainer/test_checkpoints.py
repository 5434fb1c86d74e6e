"""Checkpoints: complete or not there, pruned, and exact."""

import json
import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from trainer import checkpoints
from trainer.checkpoints import CheckpointError, Pending
from trainer.policies.small import SmallPolicy


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture
def parts(tiny):
    policy = SmallPolicy.load(tiny.checkpoint, ar_steps=4, diffusion_steps=5)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    return policy, {"optimizer": optimizer, "scheduler": scheduler}


def step(policy, training):
    """One optimizer step on random gradients."""
    for parameter in policy.parameters():
        parameter.grad = torch.randn_like(parameter) * np.random.random() * random.random()
    training["optimizer"].step()
    training["scheduler"].step()
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def save(root, number, accelerator, parts, keep=10, pending=()):
    policy, training = parts
    return checkpoints.save(
        root,
        number,
        accelerator=accelerator,
        policy=policy,
        training=training,
        pending=pending,
        manifest={"note": "x"},
        keep=keep,
    )


def test_training_goes_on_exactly(tmp_path, accelerator, parts, tiny):
    policy, training = parts
    step(policy, training)
    path = save(tmp_path, 1, accelerator, parts)
    expected = [step(policy, training).clone() for _ in range(3)]
    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(123)
    loaded = checkpoints.load(path, accelerator=accelerator, policy=policy, training=training)
    assert (loaded.step, loaded.pending, loaded.manifest["note"]) == (1, [], "x")
    assert training["scheduler"].get_last_lr() == [0.05]
    for want in expected:
        assert torch.equal(step(policy, training), want)


def test_pending_rollouts_come_back(tmp_path, accelerator, parts):
    whole = torch.arange(24.0).reshape(4, 6)
    pending = [
        Pending(
            {"index": 7}, {"trajectory:tokens": whole[:2], "score:shapes": torch.tensor([0.1], dtype=torch.float64)}
        ),
        Pending({"index": 8}, {"trajectory:tokens": whole[2:], "old:3/0": torch.zeros(0, 2)}),
    ]
    path = save(tmp_path, 5, accelerator, parts, pending=pending)
    policy, training = parts
    loaded = checkpoints.load(path, accelerator=accelerator, policy=policy, training=training)
    assert [p.values for p in loaded.pending] == [{"index": 7}, {"index": 8}]
    assert torch.equal(loaded.pending[0].tensors["trajectory:tokens"], whole[:2])
    assert loaded.pending[0].tensors["score:shapes"].tolist() == [0.1]
    assert torch.equal(loaded.pending[1].tensors["trajectory:tokens"], whole[2:])
    assert loaded.pending[1].tensors["old:3/0"].shape == (0, 2)


def test_only_the_newest_are_kept_and_found(tmp_path, accelerator, parts):
    assert checkpoints.latest(tmp_path) is None
    for number in (2, 4, 10, 12):
        save(tmp_path, number, accelerator, parts, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000012"]
    assert checkpoints.latest(tmp_path).name == "step-00000012"


def test_what_a_killed_run_left_half_written_is_not_found(tmp_path, accelerator, parts):
    whole = save(tmp_path, 3, accelerator, parts)
    half = tmp_path / ".partial-00000006"
    half.mkdir()
    (half / "manifest.json").write_text("{}")
    assert checkpoints.latest(tmp_path) == whole
    save(tmp_path, 9, accelerator, parts)
    checkpoints.sweep(tmp_path, 3)  # a run that goes on from step 3
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]


def test_a_failure_while_writing_leaves_the_last_checkpoint(tmp_path, accelerator, parts, monkeypatch):
    whole = save(tmp_path, 3, accelerator, parts)
    monkeypatch.setattr(checkpoints, "_flush", lambda path: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 6, accelerator, parts)
    assert checkpoints.latest(tmp_path) == whole


def test_the_same_step_can_be_saved_again(tmp_path, accelerator, parts):
    save(tmp_path, 3, accelerator, parts)
    step(*parts)
    path = save(tmp_path, 3, accelerator, parts)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]
    assert SmallPolicy.load(path / "policy.safetensors").state_dict()["backbone.mask_token"].tolist() == (
        parts[0].backbone.mask_token.tolist()
    )


def test_resume_setting(tmp_path, accelerator, parts):
    assert checkpoints.find("none", tmp_path) is None
    assert checkpoints.find("auto", tmp_path) is None
    path = save(tmp_path / "other", 3, accelerator, parts)
    assert checkpoints.find(str(path), tmp_path) == path
    assert checkpoints.find("auto", tmp_path / "other") == path
    with pytest.raises(CheckpointError, match="is not a checkpoint folder"):
        checkpoints.find(str(tmp_path), tmp_path)


def test_errors_name_the_checkpoint_and_the_cause(tmp_path, accelerator, parts):
    policy, training = parts
    path = save(tmp_path, 3, accelerator, parts, pending=[Pending({"index": 3}, {"t": torch.ones(1)})])
    manifest = json.loads((path / "manifest.json").read_text())

    (path / "manifest.json").write_text(json.dumps({**manifest, "processes": 2}))
    with pytest.raises(CheckpointError, match=r"rollouts of 2 process\(es\) that wait.*resume with 2"):
        checkpoints.load(path, accelerator=accelerator, policy=policy, training=training)
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="has format 99; this version reads 1"):
        checkpoints.load(path, accelerator=accelerator, policy=policy, training=training)
    (path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"no readable manifest\.json"):
        checkpoints.load(path, accelerator=accelerator, policy=policy, training=training)
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "training.pt").unlink()
    with pytest.raises(CheckpointError, match="does not fit this run"):
        checkpoints.load(path, accelerator=accelerator, policy=policy, training=training)


def test_nothing_is_unpickled(tmp_path, accelerator, parts):
    path = save(tmp_path, 3, accelerator, parts)

    class Evil:
        def __reduce__(self):
            return (print, ("pwned",))

    torch.save({"optimizer": Evil(), "scheduler": {}}, path / "training.pt")
    policy, training = parts
    with pytest.raises(CheckpointError, match="holds more than tensors"):
        checkpoints.load(path, accelerator=accelerator, policy=policy, training=training)


FILES = ["manifest.json", "policy.safetensors", "training.pt", "process-0.pt", "pending-0.safetensors"]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_named_and_auto_goes_on_from_the_one_before(tmp_path, accelerator, parts, name, caplog):
    older = save(tmp_path, 2, accelerator, parts)
    newer = save(tmp_path, 4, accelerator, parts)
    assert {file.name for file in newer.iterdir()} == set(FILES)
    assert checkpoints.find("auto", tmp_path) == newer
    assert caplog.messages == []
    whole = (newer / name).read_bytes()
    (newer / name).write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(CheckpointError, match=f"{newer}.*{name}"):
        checkpoints.find(str(newer), tmp_path)
    assert checkpoints.find("auto", tmp_path) == older
    (message,) = caplog.messages
    assert str(newer) in message
    assert name in message
    assert message.endswith(f"going on from the older {older}")
    (older / "training.pt").unlink()
    with pytest.raises(CheckpointError, match="no older one is left"):
        checkpoints.find("auto", tmp_path)
