"""What a dry run says is what the model is: against real tiny models, and against the published sizes."""

import re

import pytest

from tests.trainer.policies.families import FAMILIES
from trainer import dry_run, run
from trainer.algorithm.objective import Objective
from trainer.config import Config, UserError
from trainer.outlines import Outline, outline
from trainer.rollout import build_objective


def settings(name, source, options, **sections):
    policy = {"name": name, "checkpoint": str(source), "options": options, "ar_steps": 4, "diffusion_steps": 5}
    return Config(policy=policy | {"guidance": 2.5}, **sections)


@pytest.mark.parametrize("name", ["small", "nova", "harmon"])  # a tiny MAR has no published size
def test_an_outline_has_the_parameters_and_keeps_the_activations_of_the_real_model(name, tmp_path):
    family = FAMILIES[name](tmp_path)
    train = {"prompts_per_step": 2, "group_size": 2, "micro_batch": 4}
    config = settings(name, family.source, family.options, train=train)
    found, real = outline(config), family.load()
    assert {n: p.shape for n, p in found.policy.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
    assert all(p.is_meta for p in found.policy.parameters())
    assert found.policy.tokens_per_step() == real.tokens_per_step()
    objective = build_objective(config.algorithm)
    for head_rows in (10**6, 32):
        found.policy.head_rows = real.head_rows = head_rows
        prompts = real.encode_prompts(family.prompts)
        beside = [real.frozen] if name == "harmon" else []
        estimates = dry_run.activations(found, config, objective)
        beside_it = Outline(real, lambda count, ids=prompts: ids[:count], in_forward=beside)
        counted = dry_run.activations(beside_it, config, objective)
        assert estimates == pytest.approx(counted, rel=0.1)  # prompts are longer than the fixture's
        assert estimates[1] <= estimates[0]


def test_a_rollouts_record_is_what_is_recorded(tmp_path):
    family = FAMILIES["small"](tmp_path)
    policy, objective = family.load(ar_steps=16), Objective()
    steps = [2, 4, 6]  # apart: each needs two maps of its own
    trajectory = policy.rollout(
        family.prompts, [1, 2, 3, 4], full_chains_at=objective.full_chains_at(steps),
        full_latents_at=objective.full_latents_at(steps),
    )  # fmt: skip
    extra = policy.extra_trajectories(trajectory, objective.fresh_trajectories, [1, 2, 3, 4])
    kept = {k: v for k, v in trajectory.tensors().items() if k not in ("prompt_ids", "predicted_at", "stitched")}
    size = sum(v.nbytes for v in [*kept.values(), extra])
    assert dry_run.record_bytes(policy, objective, len(steps)) * 4 == size


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nova", ["N 1024, C 16, K 63, T 25, D 1024, H 2", "645.7 M, of which head 37.0 M", "Phi-2"]),
        ("harmon", ["N 1024, C 16, K 64, T 25, D 1280, H 2", "language model 1543.7 M"]),
        ("mar", ["N 256, C 16, K 64, T 25, D 768, H 2"]),
        ("small", ["N 16, C 24, K 8, T 16, D 128, H 1"]),
    ],
)
def test_the_shipped_configurations_are_estimated_without_weights(name, words, capsys):
    assert run.main(["--config", f"configs/train/{name}.yaml", "--dry-run"]) == 0
    text = capsys.readouterr().out
    for word in words:
        assert word in text
    table = [line for line in text.splitlines() if line.startswith(("whole", "FSDP2"))]
    assert len(table) == 4
    numbers = [[float(n) for n in re.findall(r"([\d.]+) GB", line)] for line in table]
    assert all(update >= recomputed for *_, update, recomputed in numbers)
    states = [row[1] for row in numbers]
    assert states == sorted(states, reverse=True)


def test_adapters_are_all_that_has_a_gradient(capsys):
    arguments = ["--config", "configs/train/nova.yaml", "--dry-run", "--policy.lora.rank", "16"]
    assert run.main(arguments) == 0
    text = capsys.readouterr().out
    (trained,) = re.findall(r"trained ([\d.]+) M", text)
    assert 1 < float(trained) < 30
    assert re.search(r"whole, as with DDP +2\.\d\d GB +0\.\d\d GB", text)


def test_a_model_that_is_not_known_is_told(capsys):
    with pytest.raises(UserError, match="configuration of NOVA me/mine is not here: name its folder, or one of BAAI"):
        outline(settings("nova", "me/mine", {}))
    assert run.main(["--policy.name", "harmon", "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the configuration of Harmon (no policy.checkpoint) is not here" in line
