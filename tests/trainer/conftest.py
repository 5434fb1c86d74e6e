"""A tiny policy, a reward server in this process, and runs made of both."""

from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch

from reward_server.contract import RewardInfo, RewardList, RewardResult, ScoreResponse, Timings, decode_request
from trainer import launch, parts
from trainer.config import Config
from trainer.policies.small import SmallConfig, SmallPolicy
from trainer.rewards import RewardClient
from trainer.shapes import render, split_scenes


def redness(image, prompt):
    """Mean red minus mean blue, -1 to 1."""
    return float(image[..., 0].mean() - image[..., 2].mean()) / 255


class Server:
    """Answers like a reward server; ``score(image, prompt)`` gives a number or None."""

    def __init__(self, score=redness):
        self.score = score
        self.requests = []
        self.revision = "1"
        self.provenance = {"device": "cpu", "dtype": "float32"}
        self.relative = False
        self.away = False
        self.refused = 0  # requests while away
        self.patience = 0.2  # of its clients, seconds

    def __call__(self, request):
        if self.away:
            self.refused += 1
            raise httpx.ConnectError("connection refused")
        if request.method == "GET":
            names = ["null", "shapes"]
            facts = {"revision": self.revision, "provenance": self.provenance, "relative": self.relative}
            infos = [RewardInfo(name=n, workers=1, max_batch=16, depth=0, **facts) for n in names]
            return httpx.Response(200, content=RewardList(rewards=infos).model_dump_json())
        wanted, images = decode_request(request.read())
        self.requests.append(wanted)
        scores = [self.score(image, prompt) for image, prompt in zip(images, wanted.prompts, strict=True)]
        result = RewardResult(
            revision=self.revision,
            provenance=self.provenance,
            scores=scores,
            reasons=[None if s is not None else "the judge is asleep" for s in scores],
            details={"half": [None if s is None else s / 2 for s in scores]},
            timings=Timings(queued_ms=0, scored_ms=0),
        )
        answer = ScoreResponse(id=wanted.id, state="done", results=dict.fromkeys(wanted.rewards, result))
        return httpx.Response(200, content=answer.model_dump_json())

    def client(self, rewards=("shapes",)):
        transport = httpx.MockTransport(self)
        return RewardClient("http://test", None, rewards, give_up_after_s=self.patience, transport=transport)


@pytest.fixture
def server():
    return Server()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Files: a random policy of 40 k parameters, and prompts."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    policy = SmallPolicy(SmallConfig(width=32, depth=2, heads=2, head_width=32, head_depth=1, channels=8))
    torch.nn.init.normal_(policy.head.out.weight, std=0.1)
    scenes, _ = split_scenes()
    policy.fit_codec(render(scenes[:200], np.random.default_rng(0)))
    policy.save(folder / "tiny.safetensors")
    (folder / "prompts.txt").write_text("\n".join(scene.prompt for scene in scenes[:20]))
    return SimpleNamespace(checkpoint=folder / "tiny.safetensors", prompts=folder / "prompts.txt")


@pytest.fixture
def make_config(tiny, tmp_path):
    """Tiny settings; keyword arguments are sections to change."""

    def make(**changes):
        sections = {
            "policy": {"checkpoint": tiny.checkpoint, "ar_steps": 4, "diffusion_steps": 5},
            "prompts": {"train": tiny.prompts, "heldout": tiny.prompts},
            "algorithm": {"ar_steps_per_update": 2},
            "train": {"steps": 3, "prompts_per_step": 3, "group_size": 4, "learning_rate": 1e-3},
            "evaluate": {"prompts": 0},
            "report": {"run_dir": tmp_path / "run", "trackers": [], "snr_groups": 0, "sheet_prompts": 0},
        }
        for name, values in changes.items():
            sections[name] = {**sections.get(name, {}), **values}
        return Config.model_validate(sections)

    return make


@pytest.fixture
def make_run(make_config, server):
    """A run at step 0, or resumed as its settings say; its client is closed at the end of the test."""
    clients = []

    def make(stop=lambda: False, **changes):
        config = make_config(**changes)
        torch.set_num_threads(1)
        accelerator = parts.build_accelerator(config)
        clients.append(server.client(config.reward.names))
        run = launch.build(config, accelerator, clients[-1], config.report.run_dir, stop)
        launch.restore(run, launch.checkpoints.find(config.checkpoint.resume, run.checkpoints))
        return run

    yield make
    for client in clients:
        client.close()
