"""Adapters: what is trained, what is saved, what the reference is."""

import copy

import pytest
import torch

from tests.trainer.policies.families import FAMILIES
from tests.trainer.policies.test_every_policy import SEEDS, close, kept_rows, whole_loss
from trainer import checkpoints
from trainer.checkpoints import CheckpointError
from trainer.config import LoraSettings, UserError
from trainer.loop import train
from trainer.lora import Adapters, Merged, WithoutAdapters, add_adapters, merged

LORA = {"rank": 2, "alpha": 4}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


def adapted(family, **settings):
    policy = family.load()
    return policy, add_adapters(policy, LoraSettings(**LORA | settings), seed=0)


def test_adapters_alone_are_trained_and_all_of_them(family):
    plain = family.load()
    policy, parameters = adapted(family)
    trajectory = policy.rollout(family.prompts, SEEDS, full_chains_at=range(policy.ar_steps))
    assert torch.equal(trajectory.tokens, plain.rollout(family.prompts, SEEDS).tokens)  # B is zero
    trained = {n for n, p in policy.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in policy.named_parameters() if "lora_" in n}
    assert 0 < sum(p.numel() for p in parameters) < sum(p.numel() for p in policy.backbone_parameters()) / 3

    with torch.no_grad():
        for parameter in parameters:
            parameter += 0.05 * torch.randn_like(parameter)
    advantages = torch.tensor([1.0, -0.5, 0.25, -1.0])
    whole_loss(policy, trajectory, advantages, mte_trajectories=0, consistency=False).backward()
    without = [n for n, p in policy.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert without == []
    assert all(p.grad is None for p in policy.parameters() if not p.requires_grad)


def test_saved_weights_are_merged_and_the_reference_is_the_policy_before(family, tmp_path):
    before = family.load()
    policy, parameters = adapted(family)
    with torch.no_grad():
        for parameter in parameters:
            parameter += 0.1 * torch.randn_like(parameter)
    trajectory = before.rollout(family.prompts, SEEDS)
    rows = kept_rows(trajectory, 1, 0)
    with torch.no_grad():
        now, then = (p.forward(trajectory, 1, rows, True).mean for p in (policy, before))
        assert not torch.allclose(now, then, rtol=1e-3)
        assert torch.equal(WithoutAdapters(policy).forward(trajectory, 1, rows, True).mean, then)
        assert torch.equal(policy.forward(trajectory, 1, rows, True).mean, now)  # switched on again
        Merged(policy).save(tmp_path / "policy.safetensors", {})
        loaded = family.load(tmp_path / "policy.safetensors")
        close(loaded.forward(trajectory, 1, rows, True).mean, now)
        assert loaded.state_dict().keys() == before.state_dict().keys()
        close(policy.forward(trajectory, 1, rows, True).mean, now, 0)  # saving changed nothing
        # what has no adapter is not copied
        head = next(policy.head_parameters())
        assert next(merged(policy).head_parameters()) is head


@pytest.fixture
def small(tmp_path):
    return FAMILIES["small"](tmp_path)


def test_targets_and_seed(small):
    policy, parameters = adapted(small, targets=["qkv"])
    assert len(parameters) == 2 * 2  # two blocks, A and B
    names = [n for n, p in policy.named_parameters() if p.requires_grad]
    assert all(".qkv.lora_" in name for name in names)
    with pytest.raises(UserError, match=r"no linear layer's name ends with 'q_proj'; ends: \[.*'qkv'"):
        adapted(small, targets=["qkv", "q_proj"])
    torch.manual_seed(5)  # of no consequence
    again, _ = adapted(small, targets=["qkv"])
    for one, two in zip(policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def test_adapters_of_other_layers_are_refused(small):
    one, _ = adapted(small, targets=["qkv"])
    two, _ = adapted(small)
    state = copy.deepcopy(Adapters(one).state_dict())
    Adapters(one).load_state_dict(state)
    with pytest.raises(KeyError, match="adapters of other layers"):
        Adapters(two).load_state_dict(state)


def test_a_run_with_adapters_trains_resumes_and_leaves_merged_weights(make_run, tmp_path):
    settings = {"policy": {"lora": LORA}, "train": {"steps": 4}}
    whole = make_run(**settings, checkpoint={"every": 2}, report={"run_dir": tmp_path / "whole"})
    base = copy.deepcopy(whole.policy.state_dict())
    train(whole)
    lines = [{k: line[k] for k in ("kl", "grad_norm", "reward/mean")} for line in whole.folder.metrics.read()]
    assert lines[0]["kl"] == 0.0
    assert lines[1]["kl"] > 0
    for name, value in whole.policy.state_dict().items():
        assert torch.equal(base[name], value) != ("lora_" in name), name

    part = make_run(**settings, checkpoint={"every": 2}, report={"run_dir": tmp_path / "part"})
    part.config = part.config.model_copy(update={"train": part.config.train.model_copy(update={"steps": 2})})
    train(part)
    resumed = make_run(**settings, report={"run_dir": tmp_path / "part"}, checkpoint={"every": 2, "resume": "auto"})
    assert resumed.step == 2
    train(resumed)
    again = [{k: line[k] for k in lines[0]} for line in resumed.folder.metrics.read()]
    assert again == lines

    newest = checkpoints.latest(tmp_path / "whole" / "checkpoints")
    plain = make_run(policy={"checkpoint": newest}, report={"run_dir": tmp_path / "plain"})
    ours = whole.sampler.sample(0).trajectory.tokens
    assert torch.allclose(plain.sampler.sample(0).trajectory.tokens, ours, atol=1e-4)
    with pytest.raises(CheckpointError, match=r"was trained with policy\.lora .*'rank': 2.* not .*'rank': 0"):
        make_run(checkpoint={"resume": str(newest)}, report={"run_dir": tmp_path / "other"}, train={"steps": 4})


def test_adapters_need_a_frozen_head(make_config):
    with pytest.raises(ValueError, match=r"algorithm\.head must be frozen, not trained"):
        make_config(policy={"lora": LORA}, algorithm={"head": "trained"})
