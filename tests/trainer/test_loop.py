"""The training step on a tiny policy: what moves, what is counted, what happens when scores do not come."""

import math
import time

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

from trainer import checkpoints, loop
from trainer.checkpoints import CheckpointError
from trainer.config import UserError
from trainer.diagnostics import group_gradient
from trainer.loop import global_advantages, optimizer_step, receive, train, update
from trainer.metrics import reward_metrics
from trainer.policies.small import SmallPolicy
from trainer.rewards import RewardError, RewardServerLost


def metrics(run):
    return run.folder.metrics.read()


def lasting(lines):
    """Metrics without those that depend on the clock."""
    return [{k: v for k, v in s.items() if not k.startswith("time/") and k != "images_per_s"} for s in lines]


def parameters(policy):
    return (
        torch.cat([p.detach().flatten().clone() for p in policy.backbone_parameters()]),
        torch.cat([p.detach().flatten().clone() for p in policy.head_parameters()]),
    )


@pytest.mark.parametrize(
    ("head", "backbone_moves", "head_moves"), [("frozen", True, False), ("trained", True, True), ("only", False, True)]
)
def test_head_setting_decides_what_is_trained(make_run, head, backbone_moves, head_moves):
    run = make_run(algorithm={"head": head}, train={"steps": 1})
    backbone, diffusion_head = parameters(run.policy)
    train(run)
    new_backbone, new_head = parameters(run.policy)
    assert torch.equal(backbone, new_backbone) is not backbone_moves
    assert torch.equal(diffusion_head, new_head) is not head_moves


def test_on_policy_ratios_are_one_and_kl_starts_at_zero(make_run):
    run = make_run()
    train(run)
    lines = metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["ratio_mean"] == line["ratio_max"] == 1.0 for line in lines)
    assert all(line["clip_fraction"] == 0.0 for line in lines)
    assert lines[0]["kl"] == 0.0
    assert 0 < lines[1]["kl"] < lines[2]["kl"]
    assert all(line["signal_fraction"] == 1.0 for line in lines)


@pytest.mark.parametrize("algorithm", [{}, {"mte_source": "bridged", "token_scope": "predicted", "kl_beta": 0.0}])
def test_micro_batches_do_not_change_the_update(make_run, algorithm):
    found = []
    for size in (12, 5):
        run = make_run(train={"steps": 1, "micro_batch": size, "rollout_batch": size}, algorithm=algorithm)
        train(run)
        found.append((metrics(run)[-1]["grad_norm"], parameters(run.policy)[0]))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=2e-5)  # Adam's first step is 1e-3 an element


def test_training_raises_the_reward(make_run):
    run = make_run(
        train={"steps": 12, "prompts_per_step": 2, "group_size": 12, "learning_rate": 3e-3},
        algorithm={"ar_steps_per_update": 4, "mte": False, "kl_beta": 0.0},
    )
    train(run)
    rewards = [line["reward/mean"] for line in metrics(run)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.02


def test_reward_metrics_and_what_is_sent(make_run, server):
    server.score = lambda image, prompt: len(server.requests) * 1.0
    run = make_run(train={"steps": 1}, reward={"names": {"shapes": 2.0, "null": 0.5}})
    train(run)
    (request,) = server.requests
    assert request.rewards == ["shapes", "null"]
    assert len(request.prompts) == 12
    assert [request.prompts[i] for i in (0, 1, 2, 3)] == [request.prompts[0]] * 4
    assert len(set(request.prompts)) == 3
    (line,) = metrics(run)
    assert line["reward/shapes/mean"] == line["reward/null/mean"] == 1.0
    assert line["reward/mean"] == 2.5
    assert line["reward/shapes.half/mean"] == 0.5
    assert line["reward/std"] == 0.0


def test_equal_rewards_teach_nothing(make_run, server):
    server.score = lambda image, prompt: 0.5
    run = make_run(algorithm={"kl_beta": 0.0}, train={"steps": 2})
    before, _ = parameters(run.policy)
    train(run)
    assert torch.equal(parameters(run.policy)[0], before)
    line = metrics(run)[-1]
    assert line["signal_fraction"] == line["grad_norm"] == line["transitions"] == 0
    assert line["ratio_mean"] is None


def test_missing_scores_are_dropped_and_counted(make_run, server):
    calls = []

    def score(image, prompt):
        calls.append(prompt)
        return None if len(calls) in (2, 5, 6, 7) else float(len(calls))

    server.score = score
    run = make_run(train={"steps": 1})
    train(run)
    (line,) = metrics(run)
    assert line["missing"] == 4
    assert line["missing_reason"] == "the judge is asleep"
    # group 1 keeps 1, 3, 4; group 2 only 8, which is nobody's equal; group 3 keeps all
    assert line["reward/mean"] == pytest.approx((1 + 3 + 4 + 8 + 9 + 10 + 11 + 12) / 8)
    assert line["signal_fraction"] == pytest.approx(7 / 12)
    assert math.isfinite(line["grad_norm"])


def test_a_mean_of_no_scores_is_null_not_zero():
    found = reward_metrics({"reward": np.zeros(3)}, {"reward": np.zeros(3, dtype=bool)})
    assert found == {"reward/mean": None, "reward/std": None, "missing": 3}


def test_a_batch_without_any_score_stops_the_run(make_run, server):
    server.score = lambda image, prompt: None if len(server.requests) == 2 else image.mean() / 255
    run = make_run()
    with pytest.raises(UserError, match=r"12 of 12 images of step 1 got no score.*nothing to learn.*judge is asleep"):
        train(run)
    assert checkpoints.latest(run.checkpoints).name == "step-00000001"
    resumed = make_run(checkpoint={"resume": "auto"})
    assert (resumed.step, len(resumed.pending)) == (1, 1)
    assert train(resumed)
    assert [line["step"] for line in metrics(resumed)] == [1, 2, 3]


def test_an_evaluation_without_any_score_stops_the_run(make_run, server):
    server.score = lambda image, prompt: None
    run = make_run(evaluate={"prompts": 2})
    with pytest.raises(RewardError, match="none of the 4 held-out images got a score: the judge is asleep"):
        train(run)
    assert checkpoints.latest(run.checkpoints).name == "step-00000000"
    assert run.folder.evaluations.read() == []


@pytest.mark.parametrize("evaluated", [0, 2])
def test_stopping_while_the_server_is_away_does_not_wait_for_it(make_run, server, evaluated):
    settings = {"evaluate": {"prompts": evaluated}}
    whole = make_run(report={"run_dir": make_run().config.report.run_dir.with_name("whole")}, **settings)
    assert train(whole)
    server.patience = 600
    run = make_run(stop=lambda: server.refused > 0, **settings)
    server.away = True
    started = time.monotonic()
    assert not train(run)
    assert time.monotonic() - started < 5
    server.away = False
    resumed = make_run(checkpoint={"resume": "auto"}, **settings)
    assert (resumed.step, len(resumed.pending)) == (0, 0 if evaluated else 1)
    assert train(resumed)
    assert lasting(metrics(resumed)) == lasting(metrics(whole))
    assert [line["step"] for line in resumed.folder.evaluations.read()] == ([0, 3] if evaluated else [])


def test_missing_scores_can_stop_the_run(make_run, server):
    server.score = lambda image, prompt: None if len(server.requests) == 2 else image.mean() / 255
    run = make_run(reward={"on_missing": "stop"})
    with pytest.raises(UserError, match=r"12 of 12 images of step 1 got no score.*the judge is asleep"):
        train(run)
    assert checkpoints.latest(run.checkpoints).name == "step-00000001"
    resumed = make_run(reward={"on_missing": "stop"}, checkpoint={"resume": "auto"})
    train(resumed)  # the third request is answered
    assert [line["step"] for line in metrics(resumed)] == [1, 2, 3]


def test_a_lost_server_stops_the_run_with_nothing_lost(make_run, server):
    whole = make_run(report={"run_dir": make_run().config.report.run_dir.with_name("whole")})
    train(whole)
    server.requests.clear()

    def score(image, prompt):
        server.away = len(server.requests) == 2 and prompt == server.requests[-1].prompts[-1]
        return float(image[..., 0].mean() - image[..., 2].mean()) / 255

    server.score = score  # answers twice, then goes away
    run = make_run()
    with pytest.raises(RewardServerLost, match=r"stayed away for 0\.2 s"):
        train(run)
    assert run.step == 2
    server.away, server.requests[:] = False, [None] * 9
    resumed = make_run(checkpoint={"resume": "auto"})
    assert (resumed.step, len(resumed.pending)) == (2, 1)
    train(resumed)
    assert lasting(metrics(resumed)) == lasting(metrics(whole))


def test_resuming_refuses_to_mix_two_runs(make_run, tiny, tmp_path):
    asked = iter([False, True])
    train(make_run(stop=lambda: next(asked), train={"depth": 1}))
    resume = {"resume": "auto"}
    with pytest.raises(CheckpointError, match=r"train.micro_batch \(64 there, 4 now\); resume with the settings"):
        make_run(train={"depth": 1, "micro_batch": 4}, checkpoint=resume)
    assert make_run(train={"depth": 1, "learning_rate": 1e-5, "steps": 9}, checkpoint=resume).step == 1
    other = SmallPolicy.load(tiny.checkpoint)
    other.backbone.mask_token.data += 1
    other.save(tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="trained from other weights"):
        make_run(policy={"checkpoint": tmp_path / "other.safetensors"}, train={"depth": 1}, checkpoint=resume)


def test_a_server_lost_in_evaluation_loses_no_step(make_run, server):
    def score(image, prompt):
        server.away = len(server.requests) == 4  # the third step's; the evaluation after it finds nobody
        return float(image.mean())

    server.score = score
    run = make_run(evaluate={"prompts": 2})
    with pytest.raises(RewardServerLost):
        train(run)
    assert checkpoints.latest(run.checkpoints).name == "step-00000003"
    assert [line["step"] for line in run.folder.evaluations.read()] == [0]
    server.score, server.away = lambda image, prompt: 0.5, False
    resumed = make_run(evaluate={"prompts": 2}, checkpoint={"resume": "auto"})
    train(resumed)
    assert [line["step"] for line in run.folder.evaluations.read()] == [0, 3]


def test_waiting_is_shared_even_where_a_checkpoint_collected_the_scores(make_run, monkeypatch):
    """A process that has its scores must wait along: one that skips the shared decision leaves the others hanging."""
    run = make_run()
    waits = []
    monkeypatch.setattr(loop, "wait_for_scores", lambda accelerator, job, stop: waits.append(job))
    rollout = run.sampler.sample(0)
    rollout.job.result(20)
    rollout.pending(run.config.reward.names)  # as a checkpoint does
    assert rollout.scores is not None
    receive(run, rollout)
    assert waits == [None]


def test_depth_sends_the_next_rollout_before_the_scores_are_used(make_run, server):
    sent = []
    run = make_run(train={"steps": 3, "depth": 1})
    original = run.folder.metrics.append
    run.folder.metrics.append = lambda step, values: (sent.append(len(run.pending)), original(step, values))
    train(run)
    assert sent == [1, 1, 0]  # still waiting after each step
    lines = metrics(run)
    assert len(server.requests) == 3
    assert lines[0]["ratio_max"] == 1.0  # sampled before any update
    assert lines[1]["ratio_max"] != 1.0  # sampled before the first, trained after it
    assert lines[1]["ratio_mean"] == pytest.approx(1.0, abs=0.2)


def test_several_updates_per_rollout_leave_the_sampling_policy(make_run):
    run = make_run(train={"steps": 1, "learning_rate": 1e-2}, algorithm={"updates_per_rollout": 3, "clip": 0.01})
    train(run)
    (line,) = metrics(run)
    assert line["ratio_max"] > 1.0
    assert 0 < line["clip_fraction"] < 1
    assert run.scheduler.last_epoch == 3


def test_learning_rate_follows_warm_up_and_cosine(make_run):
    run = make_run(train={"steps": 6, "warmup_steps": 2, "scheduler": "cosine", "learning_rate": 0.3})
    train(run)
    cosine = [0.15 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    assert [line["lr"] for line in metrics(run)] == pytest.approx([0.1, 0.2, *cosine])


def test_a_gradient_that_is_not_finite_stops_the_run(make_run):
    run = make_run()
    for parameter in run.parameters:
        parameter.grad = torch.full_like(parameter, math.nan)
    before, _ = parameters(run.policy)
    with pytest.raises(UserError, match="the gradient of step 0 is not finite"):
        optimizer_step(run)
    assert torch.equal(parameters(run.policy)[0], before)


def test_the_gradient_is_clipped_but_its_norm_reported(make_run):
    run = make_run(train={"max_grad_norm": 0.5})
    for parameter in run.parameters:
        parameter.grad = torch.ones_like(parameter)
    count = sum(p.numel() for p in run.parameters)
    assert optimizer_step(run) == pytest.approx(math.sqrt(count), rel=1e-5)


def test_stopping_finishes_the_step_and_saves(make_run):
    asked = iter([False, False, True])
    run = make_run(stop=lambda: next(asked), train={"steps": 5})
    train(run)
    assert run.step == 2
    assert checkpoints.latest(run.checkpoints).name == "step-00000002"


def test_evaluation_before_periodically_and_after(make_run):
    run = make_run(train={"steps": 5}, evaluate={"prompts": 4, "seeds": 2, "every": 2}, report={"sheet_prompts": 2})
    train(run)
    lines = run.folder.evaluations.read()
    assert [line["step"] for line in lines] == [0, 2, 4, 5]
    assert len(lines[0]["prompts"]) == 4
    assert len(lines[0]["scores"]["shapes"][0]) == 2
    assert lines[0]["scores"]["shapes"] != lines[-1]["scores"]["shapes"]
    assert np.load(run.folder.root / "samples" / "step-00000005.npy").shape == (2, 2, 48, 48, 3)
    again = make_run(train={"steps": 5}, evaluate={"prompts": 4, "seeds": 2}, checkpoint={"resume": "auto"})
    train(again)  # all done: neither trains nor evaluates
    assert [line["step"] for line in again.folder.evaluations.read()] == [0, 2, 4, 5]


def test_signal_is_measured_per_diffusion_step(make_run):
    run = make_run(train={"steps": 3}, report={"snr_groups": 3, "snr_every": 2})
    before, _ = parameters(run.policy)
    train(run)
    lines = run.folder.signal.read()
    assert [line["step"] for line in lines] == [0, 2]
    assert [row["diffusion_step"] for row in lines[0]["steps"]] == [0, 1, 2, 3]  # the last of five has no noise
    assert all(row["noise2"] > 0 for row in lines[0]["steps"])
    assert lines[0]["groups"] == 3

    plain = make_run(train={"steps": 3}, report={"snr_groups": 0})
    train(plain)  # measuring leaves no trace in training
    assert torch.equal(parameters(plain.policy)[0], parameters(run.policy)[0])
    assert not torch.equal(parameters(run.policy)[0], before)


@pytest.mark.parametrize("source", ["fresh", "bridged"])
def test_measured_gradient_is_the_one_that_trains(make_run, source):
    algorithm = {"kl_beta": 0.0, "diffusion_steps": [1], "mte_source": source, "consistency": True}
    run = make_run(train={"prompts_per_step": 1, "group_size": 8}, algorithm=algorithm)
    rollout = run.sampler.sample(0)
    advantages = global_advantages(run.config, *receive(run, rollout))
    gradients = [
        group_gradient(
            run.sampler, run.sampler.objective, rollout.trajectory, ar_step, 1, rollout.uncertain,
            rollout.seeds, advantages.values, advantages.signal, run.parameters,
        )
        for ar_step in rollout.ar_steps
    ]  # fmt: skip
    norm = float((sum(gradients) / len(gradients)).norm())
    assert update(run, rollout, advantages)["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_a_resumed_run_trains_with_the_settings_of_now(make_run):
    old = {"steps": 2, "scheduler": "cosine", "warmup_steps": 1, "learning_rate": 1e-3}
    train(make_run(train=old))
    new = {"steps": 4, "scheduler": "constant", "learning_rate": 0.25, "betas": (0.5, 0.6), "weight_decay": 0.125}
    run = make_run(train=new, checkpoint={"resume": "auto"})
    (group,) = run.optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.25, (0.5, 0.6), 0.125)
    assert run.scheduler.last_epoch == 2
    train(run)
    assert [line["lr"] for line in metrics(run)[2:]] == [0.25, 0.25]
    assert run.optimizer.param_groups[0]["lr"] == 0.25


def test_resuming_with_another_head_names_the_setting(make_run):
    train(make_run(train={"steps": 1}))
    with pytest.raises(CheckpointError, match=r"trained with algorithm\.head frozen, not only"):
        make_run(algorithm={"head": "only"}, checkpoint={"resume": "auto"})


def test_offloaded_rollouts_train_the_same(make_run, tmp_path):
    runs = [
        make_run(
            train={"offload_rollouts": offload, "micro_batch": 5, "depth": 1},
            report={"run_dir": tmp_path / str(offload), "snr_groups": 2},
        )
        for offload in (False, True)
    ]
    for run in runs:
        train(run)
    one, two = (lasting(metrics(run)) for run in runs)
    assert one == two
    assert runs[0].folder.signal.read() == runs[1].folder.signal.read()


def test_a_rollout_keeps_only_what_scoring_reads(make_run):
    run = make_run()
    rollout = run.sampler.sample(0)
    assert rollout.trajectory.stitched.numel() == 0
    step = max(rollout.ar_steps)
    part, uncertain = run.sampler.part(rollout, slice(2, 4), step)
    assert set(part.full_chains) == {step}
    assert set(part.full_latents) <= {step - 1, step}
    assert len(part) == len(uncertain) == 2


@pytest.fixture
def fresh_accelerator():
    """accelerate keeps one precision per process."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


@pytest.mark.parametrize("depth", [0, 1])
def test_bfloat16_computes_while_weights_and_optimizer_stay_float32(make_run, fresh_accelerator, depth):
    run = make_run(train={"mixed_precision": "bf16", "depth": depth})
    seen = []
    run.policy.backbone.blocks[0].qkv.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    train(run)
    assert set(seen) == {torch.bfloat16}  # in sampling, in scoring and in the reference
    assert {p.dtype for p in run.policy.parameters()} == {torch.float32}
    assert {v.dtype for state in run.optimizer.state_dict()["state"].values() for v in state.values()} == {
        torch.float32
    }
    lines = metrics(run)
    assert lines[0]["ratio_mean"] == pytest.approx(1.0, abs=1e-6)  # recorded and recomputed log-probabilities agree
    assert lines[0]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert lines[-1]["kl"] > 0
