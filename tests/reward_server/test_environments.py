"""Environments of rewards' own: real ones, small, made from lock files; and what the lock files hold."""

import ast
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from reward_server import environments
from reward_server.embedded import EmbeddedServer
from reward_server.environments import (
    LOCKS,
    Environment,
    NoEnvironmentError,
    cures,
    description,
    missing,
    own,
    pins,
    place,
    python_for,
)
from reward_server.rewards.base import RewardLoadError, available, load
from reward_server.settings import EmbeddedSettings, RewardSettings
from trainer.rewards import RewardClient

PLUGIN = """
from importlib.metadata import version

class Idna:
    name, revision, description, needs = "idna", "", "", ()
    def setup(self, device):
        self.revision = version("idna")
    def score(self, images, prompts, metadata):
        return [0.5] * len(images)
"""


@pytest.mark.parametrize("reward", available())
def test_a_rewards_lock_pins_what_a_worker_and_the_reward_need(reward):
    found = pins(LOCKS / f"{reward}.txt")
    wanted = (LOCKS / "common" / "worker.in").read_text().splitlines()[1:]
    assert [name for name in wanted if name not in found] == []
    for requirement in environments._extra(reward):
        assert requirement.specifier.contains(found[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("lock", sorted(LOCKS.glob("*.txt")), ids=lambda path: path.stem)
def test_a_lock_holds_versions_and_nothing_of_the_machine(lock):
    head, *lines = lock.read_text().splitlines()
    assert head == f"# Made from {lock.stem}.in by: make locks"
    assert lock.with_suffix(".in").is_file()
    assert list(pins(lock)) == sorted(pins(lock))
    assert len(pins(lock)) == len(lines)
    for line in lines:
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert (specifier.operator, requirement.url, requirement.marker) == ("==", None, None)
        assert Version(specifier.version).local is None
        assert not requirement.name.startswith(("nvidia-", "cuda-", "triton"))


def test_rewards_with_equal_pins_share_an_environment(tmp_path):
    assert own("hpsv2", tmp_path).folder == own("clip", tmp_path).folder
    assert own("hpsv2", tmp_path).folder != own("null", tmp_path).folder


def test_the_folder_follows_the_pins_and_not_the_comments(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "LOCKS", tmp_path)
    lock = tmp_path / "null.txt"
    folders = []
    for text in ("a==1\nB_c==2\n", "# why\nb-c==2  # hm\na==1\n", "a==1\nb-c==2.1\n"):
        lock.write_text(text)
        folders.append(own("null", Path("envs")).folder)
    assert folders[0] == folders[1]
    assert folders[0] != folders[2]
    assert folders[0].parent == Path("envs").absolute()
    lock.write_text("a>=1\n")
    with pytest.raises(NoEnvironmentError, match=r"null\.txt: 'a>=1' is not name==version"):
        own("null", tmp_path)


def test_an_unfinished_environment_is_made_anew_once_by_two_at_a_time(tmp_path, capfd):
    (tmp_path / "idna.txt").write_text("idna==3.20\n")
    environment = Environment("idna", tmp_path / "idna.txt", tmp_path / "envs" / "a")
    (environment.folder / "left over").mkdir(parents=True)
    assert environment.differences() == [f"{environment.folder} has not been made: reward-server env idna"]
    both = [threading.Thread(target=environment.make) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count(f"making {environment.folder} from ") == 1
    assert environment.is_made
    assert not (environment.folder / "left over").exists()
    assert environment.differences() == []
    environment.lock.write_text("idna==3.10\nsix==1.17.0\n")
    assert environment.differences() == [
        f"{environment.folder} differs from {environment.lock}; remove it to have it made anew",
        "idna: 3.10 is wanted, 3.20 installed",
        "six: 1.17.0 is wanted, not installed",
    ]


def test_an_environment_that_pip_cannot_make_is_not_made(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "x.txt").write_text("idna==0.0.0\n")
    environment = Environment("x", tmp_path / "x.txt", tmp_path / "envs" / "a")
    with pytest.raises(NoEnvironmentError, match=r"'x' could not be made from .*x\.txt: python -m pip failed, see its"):
        environment.make()
    assert "idna==0.0.0" in capfd.readouterr().err
    assert not environment.is_made


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NoEnvironmentError, match=r"file/envs/py3.* cannot be made: .*Not a directory"):
        own("null", tmp_path / "file" / "envs").make()


def test_workers_run_in_their_own_environments_side_by_side(tmp_path, monkeypatch, children):
    """null in its own, since it has been made; one class three times: in the main one, and in two that contradict."""
    (tmp_path / "other.txt").write_text(
        (LOCKS / "null.txt").read_text().replace(f"idna=={pins(LOCKS / 'null.txt')['idna']}", "idna==3.10")
    )
    other = Environment("other", tmp_path / "other.txt", tmp_path / "envs" / "other")
    other.make()
    environment = own("null", tmp_path / "envs")
    environment.make()
    assert place("null", tmp_path / "envs") == "own"
    (tmp_path / "plugged.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rewards = {
        "null": RewardSettings(),
        "here": RewardSettings(reward="plugged:Idna"),
        "new": RewardSettings(reward="plugged:Idna", python=environment.python),
        "old": RewardSettings(reward="plugged:Idna", python=other.python),
    }
    with EmbeddedServer(EmbeddedSettings(envs=tmp_path / "envs", rewards=rewards)) as server:
        assert server.names == {name: name for name in rewards}
        with RewardClient(server.url, server.token, list(rewards)) as client:
            revisions = client.check()
        null = next(p for p in children() if p.environ().get("REWARD_SERVER_REWARD") == "null")
        assert null.cmdline()[0] == str(environment.python)
    assert revisions["here"] == metadata.version("idna")
    assert (revisions["new"], revisions["old"]) == (pins(environment.lock)["idna"], "3.10")


def test_the_main_environment_serves_what_it_has_and_names_the_cures_for_the_rest(tmp_path, monkeypatch):
    this = python_for("shapes", tmp_path)
    assert (
        this == python_for("hpsv2", tmp_path) == python_for("a.module:Class", tmp_path) == python_for("nul", tmp_path)
    )
    with pytest.raises(NoEnvironmentError) as error:
        python_for("hpsv2_package", tmp_path)
    assert str(error.value) == (
        "reward 'hpsv2_package' needs hpsv2==1.2.0, clip-anytorch==2.6.0: "
        "`reward-server env hpsv2_package` makes an environment of its own"
    )
    assert (place("hpsv2_package", tmp_path), place("hpsv2", tmp_path)) == ("not installed", "main")
    monkeypatch.setattr(environments.metadata, "version", lambda name: "4.46.3")
    assert missing("hpsv2") == ["transformers<6,>=5 (installed: 4.46.3)"]
    assert cures("t2i_compbench") == (
        "`reward-server env t2i_compbench` makes an environment of its own, "
        "`pip install -e '.[t2i_compbench]'` installs them in this one"
    )


def test_a_reward_whose_package_is_missing_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.delitem(sys.modules, "reward_server.rewards.shapes", raising=False)
    with pytest.raises(
        RewardLoadError, match=r"needs the package 'scipy', which is not installed: `reward-server env s"
    ):
        load("shapes")


def test_without_lock_files_it_is_said_where_they_are(tmp_path, monkeypatch):
    with pytest.raises(NoEnvironmentError, match=r"^no lock file nul\.txt; there are: .*null, "):
        own("nul", tmp_path)
    monkeypatch.setattr(environments, "LOCKS", tmp_path)
    with pytest.raises(NoEnvironmentError, match=r"^no lock file null\.txt: write .*null\.in and run `make locks`"):
        own("null", tmp_path)
    monkeypatch.setattr(environments, "LOCKS", tmp_path / "nowhere")
    with pytest.raises(NoEnvironmentError, match="environments are made from a clone of the project, installed by"):
        own("null", tmp_path)
    assert python_for("null", tmp_path) == python_for("a.module:Class", tmp_path)


def test_descriptions_are_read_without_importing():
    assert description("null") == "Always 1.0, whatever the image: measures the reward path itself."
    assert description("shapes") == load("shapes").description


@pytest.mark.parametrize("reward", available())
def test_what_a_reward_imports_is_in_its_lock(reward):
    """The modules that its file, and the shared ones it uses, import at their top."""
    todo, seen, imported = (
        [f"reward_server.rewards.{reward}", "reward_server.worker", "reward_server.cli"],
        set(),
        set(),
    )
    while todo:
        module = todo.pop()
        file = environments.ROOT / f"{module.replace('.', '/')}.py"
        if module in seen or not file.is_file():
            continue
        seen.add(module)
        for node in ast.parse(file.read_text()).body:
            match node:
                case ast.ImportFrom(module=name):
                    todo += [name, *(f"{name}.{alias.name}" for alias in node.names)]
                    imported.add(name.partition(".")[0])
                case ast.Import():
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
    packages = metadata.packages_distributions()
    imported -= {*sys.stdlib_module_names, "reward_server"}
    found = pins(LOCKS / f"{reward}.txt")
    assert "redis" in imported
    assert [
        name for name in imported if not {canonicalize_name(d) for d in packages.get(name, [name])} & set(found)
    ] == []


def test_who_waits_for_another_says_so(tmp_path, capfd):
    with environments._alone(tmp_path / "x.lock"):
        second = threading.Thread(target=lambda: environments._alone(tmp_path / "x.lock").__enter__())
        second.start()
        deadline = time.monotonic() + 10
        said = ""
        while not said and time.monotonic() < deadline:
            time.sleep(0.05)
            said = capfd.readouterr().err
    second.join()
    assert said == f"waiting for another process that makes {tmp_path / 'x'}\n"


def test_nobody_works_in_the_folder_while_a_killed_one_leaves_its_pip_behind(tmp_path):
    """The lock is held by what inherited it, too."""
    program = (
        "import sys; from pathlib import Path; from reward_server import environments as e\n"
        "with e._alone(Path(sys.argv[1])) as lock:\n"
        "    print('held', flush=True); e._run(lock, sys.executable, '-c', 'import time; time.sleep(1.5)')\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "x.lock")], stdout=subprocess.PIPE) as first:
        assert first.stdout.readline() == b"held\n"
        time.sleep(0.3)  # its child runs
        first.kill()
    started = time.monotonic()
    with environments._alone(tmp_path / "x.lock"):
        assert time.monotonic() - started > 0.5


def test_files_that_are_gone_are_told(tmp_path):
    folder = tmp_path / "py"
    site = folder / "lib" / "python3.11" / "site-packages"
    (site / "idna-3.10.dist-info").mkdir(parents=True)
    (site / "idna-3.10.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: idna\nVersion: 3.10\n")
    (site / "idna-3.10.dist-info" / "RECORD").write_text("idna/__init__.py,,\nidna-3.10.dist-info/METADATA,,\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").touch()
    (folder / "finished").touch()
    lock = tmp_path / "x.txt"
    lock.write_text("idna==3.10\n")
    environment = environments.Environment("x", lock, folder)
    assert environment.differences()[1:] == ["idna: 1 of its files are gone"]
    (site / "idna").mkdir()
    (site / "idna" / "__init__.py").touch()
    assert environment.differences() == []
