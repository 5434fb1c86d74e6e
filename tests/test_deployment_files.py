"""The files of the deployment, without an engine: each is valid, and no reward was forgotten."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from reward_server.environments import LOCKS, locked, pins
from reward_server.metrics import Metrics
from reward_server.rewards.base import available

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
GPU = ("-f", "compose.yaml", "-f", "docker/compose.gpu.yaml")
SECRETS = {"REDIS_PASSWORD": "secret1", "REWARD_SERVER_TOKEN": "secret2"}
OURS = ("reward_server", "trainer", "worker-")


def run(tool, *arguments, env=SECRETS):
    """One of the linters, with an environment in which no variable of this machine changes the outcome."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [BIN / tool, *arguments], cwd=ROOT, env=environment | dict(env), capture_output=True, text=True, timeout=120
    )


def compose(*arguments, env=SECRETS):
    """The services as compose understands them."""
    shown = run("docker-compose", "--env-file", os.devnull, *arguments, "config", "--format", "json", env=env)
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)["services"]


@pytest.fixture(scope="module")
def services():
    return compose("--profile", "*")


def workers(services):
    return {name.removeprefix("worker-"): service for name, service in services.items() if name.startswith("worker-")}


def test_hadolint_has_nothing_to_say():
    assert len(DOCKERFILES) == 3
    found = run("hadolint", "--failure-threshold", "style", *map(str, DOCKERFILES))
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@pytest.mark.parametrize("file", ["compose.yaml", "docker/compose.gpu.yaml"])
def test_compose_files_follow_the_compose_specification(file):
    found = run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", file)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("variable", SECRETS)
def test_a_secret_that_is_not_set_is_named(variable):
    others = {name: value for name, value in SECRETS.items() if name != variable}
    shown = run("docker-compose", "--env-file", os.devnull, "config", "-q", env=others)
    assert shown.returncode != 0
    assert variable in shown.stderr
    assert ".env.example" in shown.stderr


def test_the_example_has_the_secrets_and_names_only_variables_of_the_compose_file():
    lines = (ROOT / ".env.example").read_text().splitlines()
    assert {line.rstrip("=") for line in lines if re.fullmatch(r"[A-Z_]+=", line)} == set(SECRETS)
    optional = {match[1] for line in lines if (match := re.match(r"#([A-Z_]+)=", line))}
    assert len(optional) > 4
    text = (ROOT / "compose.yaml").read_text()
    assert [name for name in optional if f"${{{name}" not in text] == []


def test_every_reward_has_a_lock_file_and_a_service_under_its_profile(services):
    found = workers(services)
    assert set(found) == set(available()) == set(locked())
    for name, service in found.items():
        assert service["build"]["args"]["REWARD"] == name
        assert service["image"] == f"mar-grpo/worker-{name}:latest"
        assert service.get("profiles", []) == ([] if name == "shapes" else [name])


def test_up_without_a_profile_starts_redis_the_gateway_and_the_default_reward():
    assert set(compose()) == {"redis", "reward_server", "worker-shapes"}


def test_the_gateway_waits_for_a_redis_and_a_worker_that_are_healthy(services):
    waits = services["reward_server"]["depends_on"]
    assert {name: wait["condition"] for name, wait in waits.items()} == {
        "redis": "service_healthy",
        "worker-shapes": "service_healthy",
    }
    assert all(set(service["depends_on"]) == {"redis"} for service in workers(services).values())


def test_only_loopback_is_published_and_redis_not_at_all(services):
    published = {name: [port["host_ip"] for port in s.get("ports", [])] for name, s in services.items()}
    addresses = {name: ips for name, ips in published.items() if ips}
    assert addresses == {name: ["127.0.0.1"] for name in ("reward_server", "prometheus", "grafana")}
    assert not any(service.get("privileged") for service in services.values())


def test_services_can_be_scaled(services):
    for service in workers(services).values():
        assert "container_name" not in service
        assert "ports" not in service
    ports = compose(env=SECRETS | {"PUBLISH": "127.0.0.1:8000-8003"})["reward_server"]["ports"]
    assert [(port["target"], port["published"]) for port in ports] == [(8000, "8000-8003")]


def test_containers_may_do_little(services):
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if name != "judge":  # vLLM compiles at its start
            assert service["read_only"] is True, name
            assert "mem_limit" in service, name


def test_images_of_others_are_pinned(services):
    others = {name: service["image"] for name, service in services.items() if not name.startswith(OURS)}
    assert set(others) == {"redis", "judge", "prometheus", "grafana"}
    assert [image for image in others.values() if not re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", image)] == []
    bases = {re.search(r"^ARG BASE_IMAGE=(.*)$", file.read_text(), re.M)[1] for file in DOCKERFILES}
    built = {s["build"]["args"]["BASE_IMAGE"] for s in services.values() if "build" in s}
    assert bases == built
    assert re.fullmatch(r"python:3\.11[\w.-]*@sha256:[0-9a-f]{64}", bases.pop())


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda path: path.stem)
def test_images_are_built_in_stages_and_run_as_nobody_in_particular(file):
    text = file.read_text()
    packages, final = text.split("# --- what runs")
    assert "pip install" in packages
    assert "COPY reward_server" not in packages  # a change of the code installs nothing again
    assert not re.search(r"\b(pip|apt-get|gcc|make)\b", final)
    users = re.findall(r"^USER (.*)$", final, re.M)
    assert users == ["10001:10001"]
    assert final.index("USER 10001") < final.index("ENTRYPOINT")
    assert re.search(r"^HEALTHCHECK (NONE|--interval)", final, re.M)
    for label in ("title", "description", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in final
    assert not re.search(r"<<|--mount|--chmod|--link", text)  # the classic builder has none of them


def test_gpus_go_to_every_reward_that_runs_torch():
    services = compose(*GPU, "--profile", "*")

    def gpus(service):
        return service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])

    with_gpu = {name for name, service in services.items() if gpus(service)}
    models = {f"worker-{path.stem}" for path in LOCKS.glob("*.txt") if "torch" in pins(path)}
    assert with_gpu == models | {"judge", "trainer"}
    for name in models:
        assert services[name]["environment"]["REWARD_SERVER_DEVICE"] == "cuda"
        assert services[name]["environment"]["REWARD_SERVER_TOKEN"] == "secret2"  # the rest stays as it was
        assert services[name]["image"].endswith(":latest-gpu")
        assert services[name]["build"]["args"]["REWARD"] == name.removeprefix("worker-")


def test_the_dashboard_shows_metrics_that_the_gateway_has():
    files = sorted((ROOT / "docker/monitoring").rglob("*.y*ml"))
    assert len(files) == 3
    for file in files:
        yaml.safe_load(file.read_text())
    board = json.loads((ROOT / "docker/monitoring/grafana/dashboards/reward-server.json").read_text())
    shown = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"reward_server_\w+", target["expr"])
    }
    text = Metrics().render(([], [], 0))
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    suffixes = {"counter": ["_total"], "histogram": ["_bucket"], "gauge": [""]}
    known = {name + suffix for name, family in families.items() for suffix in suffixes[family.type]}
    assert len(shown) > 6
    assert shown - known == set()
