"""docker/k8s and docker/slurm: built, held against Kubernetes' schemas, and against what the programs understand."""

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import redis
import redis.asyncio
import yaml

from reward_server.contract import RewardResult, Timings
from reward_server.queue import GROUP, PREFIX, JobQueue, WorkerInfo, WorkQueue
from reward_server.rewards.base import available
from reward_server.settings import ENV_PREFIX, GatewaySettings, WorkerSettings
from trainer.config import Config

ROOT = Path(__file__).resolve().parents[1]
K8S = ROOT / "docker" / "k8s"
KUBERNETES = "1.33"
BUILT = ["example", "train", *(f"rewards/{name}" for name in available())]

STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
NAMED = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string"}},
    "additionalProperties": False,
}


def closed(required, **properties):
    """Schema of an object with these properties and no others."""
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


COUNT = {"type": "integer", "minimum": 0}
RULES = closed(
    ["stabilizationWindowSeconds"],
    stabilizationWindowSeconds=COUNT,
    policies={
        "type": "array",
        "items": closed(["type", "value", "periodSeconds"], type={}, value=COUNT, periodSeconds=COUNT),
    },
)
# The parts of KEDA's and JobSet's own schemas that are used here.
CUSTOM = {
    "ScaledObject": closed(
        ["scaleTargetRef", "triggers"],
        scaleTargetRef=NAMED,
        minReplicaCount={"type": "integer", "minimum": 1},
        maxReplicaCount=COUNT,
        pollingInterval=COUNT,
        advanced=closed(
            ["horizontalPodAutoscalerConfig"],
            horizontalPodAutoscalerConfig=closed(["behavior"], behavior=closed([], scaleUp=RULES, scaleDown=RULES)),
        ),
        triggers={
            "type": "array",
            "items": closed(
                ["type", "metadata"], type={"const": "redis-streams"}, metadata=STRINGS, authenticationRef=NAMED
            ),
        },
    ),
    "TriggerAuthentication": closed(
        ["secretTargetRef"],
        secretTargetRef={
            "type": "array",
            "items": closed(
                ["parameter", "name", "key"],
                parameter={"const": "password"},
                name={"type": "string"},
                key={"type": "string"},
            ),
        },
    ),
    "JobSet": closed(
        ["replicatedJobs"],
        network=closed([], enableDNSHostnames={"type": "boolean"}),
        failurePolicy=closed([], maxRestarts=COUNT),
        replicatedJobs={
            "type": "array",
            "items": closed(["name", "template"], name={"type": "string"}, replicas=COUNT, template={"type": "object"}),
        },
    ),
}


def build(name):
    """The objects of a kustomization, by kind and name."""
    program = (
        [shutil.which("kubectl"), "kustomize"] if shutil.which("kubectl") else [shutil.which("kustomize"), "build"]
    )
    if program[0] is None:
        pytest.skip("neither kubectl nor kustomize is installed; the files themselves are checked by other tests")
    done = subprocess.run([*program, K8S / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(done.stdout)}


def files():
    return [path for path in sorted(K8S.rglob("*.yaml")) if path.name not in ("kustomization.yaml", "names.yaml")]


def check(item):
    """Hold one object against its schema; unknown fields are errors."""
    if schema := CUSTOM.get(item["kind"]):
        jsonschema.validate(item["spec"], schema)
        for job in item["spec"].get("replicatedJobs", []):
            check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]})
    else:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)


def pods(items):
    """Pod templates by the name of what makes them."""
    found = {}
    for (kind, name), item in items.items():
        if kind in ("Deployment", "StatefulSet"):
            found[name] = item["spec"]["template"]
        elif kind == "JobSet":
            found[name] = item["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    return found


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(K8S)))
def test_each_file_fits_the_schemas(path):
    for item in yaml.safe_load_all(path.read_text()):
        check(item)


@pytest.mark.parametrize("name", BUILT)
def test_each_kustomization_builds_to_what_fits_the_schemas(name):
    items = build(name)
    assert items
    for item in items.values():
        check(item)


def test_the_schemas_refuse_a_misspelt_field():
    (path,) = [path for path in files() if path.name == "scaling.yaml"]
    scaled, _ = yaml.safe_load_all(path.read_text())
    scaled["spec"]["minReplicas"] = scaled["spec"].pop("minReplicaCount")
    with pytest.raises(jsonschema.ValidationError, match="minReplicas"):
        check(scaled)
    gateway = next(yaml.safe_load_all((K8S / "base" / "gateway.yaml").read_text()))
    gateway["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenessProb"):
        check(gateway)


@pytest.mark.parametrize("reward", available())
def test_each_reward_has_workers_that_scale_on_its_own_stream(reward):
    name = f"worker-{reward.replace('_', '-')}"
    items = build(f"rewards/{reward}")
    (container,) = items["Deployment", name]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"mar-grpo/worker-{reward}"
    spec = items["ScaledObject", name]["spec"]
    assert spec["scaleTargetRef"] == {"name": name}
    assert [trigger["authenticationRef"]["name"] for trigger in spec["triggers"]] == [name, name]
    for trigger, measure in zip(spec["triggers"], ("lagCount", "pendingEntriesCount"), strict=True):
        assert trigger["metadata"]["stream"] == f"{PREFIX}stream:{reward}"
        assert trigger["metadata"]["consumerGroup"] == GROUP
        assert int(trigger["metadata"][measure]) > 0
    labels = items["Deployment", name]["spec"]["template"]["metadata"]["labels"]
    budget = items["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"]
    assert budget.items() <= labels.items()
    assert budget["app.kubernetes.io/instance"] == reward.replace("_", "-")  # not all workers' at once


@pytest.mark.parametrize("name", ["example", "train"])
def test_what_the_pods_name_exists(name):
    items = build(name)
    claims = {name for kind, name in items if kind == "PersistentVolumeClaim"}
    known = {f"{ENV_PREFIX}{field.upper()}" for model in (GatewaySettings, WorkerSettings) for field in fields(model)}
    known |= {f"TRAINER_REWARD__{field.upper()}" for field in fields(Config.model_fields["reward"].annotation)}
    for maker, template in pods(items).items():
        for volume in template["spec"].get("volumes", []):
            if claim := volume.get("persistentVolumeClaim"):
                assert claim["claimName"] in claims, maker
        for variable in template["spec"]["containers"][0]["env"]:
            if variable["name"].startswith((ENV_PREFIX, "TRAINER_")):
                assert variable["name"] in known, maker
    addresses = re.findall(
        r"@(\w[\w-]*):|//([\w-]+)\.reward-server\.svc|\b(redis)\.reward-server", yaml.dump_all(items.values())
    )
    services = {name for kind, name in build("example") if kind == "Service"}
    assert {part for found in addresses for part in found if part} <= services


def fields(model):
    return model.model_fields.keys()


@pytest.mark.parametrize("name", ["example", "train"])
def test_pods_are_confined_and_say_what_they_need(name):
    for maker, template in pods(build(name)).items():
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False, maker
        assert spec["securityContext"]["runAsNonRoot"] is True
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        if name != "train":  # a run that ends is no illness
            assert {"startupProbe", "readinessProbe"} <= container.keys(), maker


def test_only_what_is_listed_may_talk():
    items = build("example")
    policies = {name: item["spec"] for (kind, name), item in items.items() if kind == "NetworkPolicy"}
    assert policies["nothing-by-default"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert set(policies) == {"nothing-by-default", "names", "redis", "to-redis", "gateway"}
    opened = {
        name: [port["port"] for rule in spec.get("ingress", []) for port in rule["ports"]]
        for name, spec in policies.items()
    }
    assert opened["redis"] == [6379]
    assert opened["gateway"] == [8000]
    for (kind, _), item in items.items():
        assert kind != "Secret"  # no secret in a file
        if kind == "Service":
            assert item["spec"].get("type", "ClusterIP") == "ClusterIP"  # nothing is published
    assert ("NetworkPolicy", "outward-judge") in build("rewards/judge")


def test_the_machines_of_a_jobset_are_those_of_the_launcher():
    items = build("train")
    jobset = items["JobSet", "train"]["spec"]
    job = jobset["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    options = dict(argument.removeprefix("--").split("=", 1) for argument in container["args"] if "=" in argument)
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert job["completions"] == job["parallelism"] == int(options["num_machines"])
    assert int(options["num_processes"]) == gpus * job["completions"]
    assert options["main_process_ip"] == f"train-{jobset['replicatedJobs'][0]['name']}-0-0.train"
    assert int(options["train.prompts_per_step"]) % int(options["num_processes"]) == 0
    assert (ROOT / options["config_file"]).is_file()
    assert (ROOT / options["config"]).is_file()


SRUN = """#!/bin/bash
# every machine runs the step's program with a rank of its own
shift
for node in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$node "$@"; done
"""


def test_the_slurm_script_starts_one_launcher_a_machine_with_its_rank(tmp_path):
    programs = {
        "scontrol": '#!/bin/sh\nprintf "node7\\nnode8\\nnode9\\n"\n',
        "srun": SRUN,
        "venv/bin/accelerate": '#!/bin/sh\nprintf "%s|" "$@"; echo\n',
    }
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(tmp_path / "venv"),
        "SLURM_NNODES": "3",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_NODELIST": "node[7-9]",
        "SLURM_JOB_ID": "1234567",
        "REWARD_URL": "http://rewards:8000",
    }
    command = [
        "bash",
        ROOT / "docker" / "slurm" / "train.sbatch",
        "--train.learning_rate",
        "1e-5",
        "--tag",
        "two words",
    ]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "TRAINER_REWARD__TOKEN: its token" in refused.stderr
    done = subprocess.run(
        command, env={**environment, "TRAINER_REWARD__TOKEN": "secret"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split("|")[:-1] for line in done.stdout.splitlines()]
    assert [line[line.index("--machine_rank") + 1] for line in lines] == ["0", "1", "2"]
    for line in lines:
        assert line[:3] == ["launch", "--config_file", "configs/accelerate/nodes.yaml"]
        assert line[line.index("--num_machines") + 1] == "3"
        assert line[line.index("--num_processes") + 1] == "24"
        assert line[line.index("--main_process_ip") + 1] == "node7"
        assert line[line.index("--reward-url") + 1] == "http://rewards:8000"
        assert line[-4:] == ["--train.learning_rate", "1e-5", "--tag", "two words"]
    assert "secret" not in done.stdout  # arguments are visible to everybody on a machine


def test_the_streams_lag_is_what_waits_and_its_pending_entries_what_is_in_hand(redis_url):
    """What KEDA's two triggers read, through all that happens to a part."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        worker = WorkQueue(client, "red", "w1", claim_idle_ms=0)
        worker.join()
        worker.heartbeat(WorkerInfo("red", "r1", "", (), max_batch=4, heartbeat_s=1.0, host="h", pid=1))

        def group():
            (found,) = client.xinfo_groups(f"{PREFIX}stream:red")
            return found["lag"], found["pending"]

        submit(redis_url, "a", 40)
        assert group() == (10, 0)
        parts = worker.take(3, 0)
        assert group() == (7, 3)
        for part in parts:
            assert worker.begin(part)
        worker.finish(parts[1], result())
        assert group() == (7, 2)
        worker.give_back(parts[0])
        assert group() == (8, 1)
        assert len(worker.reclaim(1)) == 1
        assert group() == (8, 1)
        worker.finish(parts[2], result())
        submit(redis_url, "b", 4)
        assert group() == (9, 0)
        for part in worker.take(100, 0):
            worker.begin(part)
            worker.finish(part, result())
        assert group() == (0, 0)


def result():
    timings = Timings(queued_ms=0.0, scored_ms=0.0)
    return RewardResult(revision="r1", scores=[1.0] * 4, reasons=[None] * 4, timings=timings)


def submit(redis_url, job, images):
    async def main():
        async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
            queue = JobQueue(client, max_depth=100, job_ttl_s=60, result_ttl_s=60)
            assert await queue.submit(job, "digest", images, "ref", ["red"])

    asyncio.run(main())
