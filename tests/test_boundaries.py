"""Imports run one way, and light modules stay light (each is imported in a process of its own)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SERVER = ("fastapi", "starlette", "uvicorn", "redis")
MODELS = ("transformers", "diffusers", "timm", "open_clip")


def loaded_by(module):
    """Names of all modules that importing ``module`` loads."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


def imports_of(path):
    """Absolute names that a file imports anywhere, as ``module`` or ``module.name``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.relative_to(ROOT).with_suffix("").parts[: -node.level]) if node.level else ""
            module = ".".join(filter(None, [package, node.module]))
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def of_package(names, package):
    return {name for name in names if name == package or name.startswith(f"{package}.")}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("reward_server.contract", (*SERVER, "torch", "scipy", "PIL", "httpx", *MODELS)),
        ("reward_server.options", (*SERVER, "torch", "scipy", "httpx")),
        ("reward_server.settings", (*SERVER, "torch", "scipy", "httpx")),
        ("reward_server.embedded", (*SERVER, "torch", "scipy", *MODELS)),
        ("reward_server.supervisor", (*SERVER, "torch", "scipy", "httpx", "numpy")),
        ("reward_server.cli", (*SERVER, "torch", "scipy", *MODELS)),
        ("reward_server.gateway", ("torch", "scipy", *MODELS)),
        ("reward_server.worker", ("torch", "scipy", "fastapi", *MODELS)),
        ("trainer.rewards", (*SERVER, "torch", "scipy", *MODELS)),
        ("trainer.prompts", (*SERVER, "torch", "pyarrow", "pandas")),
        ("trainer.config", (*SERVER, "torch", *MODELS)),
        ("trainer.policies", ("torch", *SERVER, *MODELS)),
        ("trainer.policies.base", (*SERVER, *MODELS)),
        ("trainer.policies.harmon", (*SERVER, *MODELS)),
    ],
)
def test_importing_a_light_module_loads_nothing_heavy(module, forbidden):
    loaded = loaded_by(module)
    assert module in loaded
    assert {name for name in loaded if name.partition(".")[0] in forbidden} == set()


def test_the_reward_client_knows_the_contract_and_nothing_else_of_the_server():
    loaded = of_package(loaded_by("trainer.rewards"), "reward_server")
    assert loaded == {"reward_server", "reward_server.contract"}


@pytest.mark.parametrize("module", ["reward_server.gateway", "reward_server.worker", "reward_server.embedded"])
def test_no_reward_model_is_loaded_before_it_is_chosen(module):
    rewards = of_package(loaded_by(module), "reward_server.rewards")
    assert rewards <= {"reward_server.rewards", "reward_server.rewards.base"}


def test_no_policy_is_loaded_before_it_is_chosen():
    assert of_package(loaded_by("trainer.policies.base"), "trainer.policies") == {
        "trainer.policies",
        "trainer.policies.base",
    }


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("trainer/algorithm", ("trainer.algorithm",)),
        ("trainer/policies", ("trainer.algorithm", "trainer.policies")),
    ],
)
def test_what_the_layers_of_the_trainer_import(folder, allowed):
    files = list((ROOT / folder).glob("*.py"))
    assert files
    for file in files:
        ours = of_package(imports_of(file), "trainer") | of_package(imports_of(file), "reward_server")
        wrong = {name for name in ours if not any(of_package({name}, package) for package in allowed)}
        assert wrong == set(), file.name


def test_the_contract_imports_nothing_of_the_project_and_the_server_nothing_of_the_trainer():
    assert of_package(imports_of(ROOT / "reward_server/contract.py"), "reward_server") == set()
    for file in (ROOT / "reward_server").rglob("*.py"):
        assert of_package(imports_of(file), "trainer") == set(), file.name


def test_of_the_server_the_trainer_imports_the_contract_and_how_to_start_one():
    light = [f"reward_server.{name}" for name in ("contract", "options", "settings", "embedded")]
    for file in (ROOT / "trainer").rglob("*.py"):
        names = of_package(imports_of(file), "reward_server")
        assert {name for name in names if not any(of_package({name}, module) for module in light)} == set(), file.name
