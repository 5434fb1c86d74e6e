"""Where a reward's worker runs: in a virtual environment of its own, made from its lock file, or in the main one.

``docker/requirements/NAME.txt`` pins all that the worker of the reward NAME needs. ``reward-server env NAME`` installs
that into a folder named by the pins, so that rewards with equal pins share one and a changed lock gets a new one; what
contradicts each other lives side by side. This package itself is not installed there: workers find it by PYTHONPATH.
Importing this module loads no reward.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "docker" / "requirements"
TOGETHER = "rewards"
"""The extra that holds those of all rewards which fit one environment with the trainer"""


class NoEnvironmentError(Exception):
    """There is no environment for a reward, or it cannot be made; the message says what to do."""


@dataclass(frozen=True)
class Environment:
    """The environment of a reward's own, whether or not it has been made."""

    reward: str
    lock: Path
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def is_made(self) -> bool:
        """Whether it was finished; the mark is the last thing that :func:`make` writes."""
        return self._mark.is_file() and self.python.exists()

    @property
    def _mark(self) -> Path:
        return self.folder / "finished"

    def make(self) -> None:
        """Make it unless that has been done; one left unfinished is made anew. pip's output goes to stderr.

        Raises:
            NoEnvironmentError: pip cannot install the lock, or the folder cannot be written.
        """
        try:
            with _alone(self.folder.with_name(f"{self.folder.name}.lock")) as lock:
                if self.is_made:
                    return
                shutil.rmtree(self.folder, ignore_errors=True)
                print(f"making {self.folder} from {self.lock}", file=sys.stderr, flush=True)
                _run(lock, sys.executable, "-m", "venv", str(self.folder))
                pip = (str(self.python), "-m", "pip", "install", "--disable-pip-version-check", "-r", str(self.lock))
                _run(lock, *pip)
                self._mark.touch()
        except subprocess.CalledProcessError as error:
            raise NoEnvironmentError(
                f"the environment of reward {self.reward!r} could not be made from {self.lock}: "
                f"python {' '.join(error.cmd[2:4])} failed, see its output above"
            ) from error
        except OSError as error:
            raise NoEnvironmentError(f"the environment {self.folder} cannot be made: {error}") from error

    def differences(self) -> list[str]:
        """How what is installed there differs from the lock; empty if it does not."""
        if not self.is_made:
            return [f"{self.folder} has not been made: reward-server env {self.reward}"]
        folders = [str(path) for path in self.folder.glob("lib/python*/site-packages")]
        distributions = metadata.distributions(path=folders)
        packages: dict[str, metadata.Distribution] = {canonicalize_name(d.name): d for d in distributions}
        found = []
        for name, version in pins(self.lock).items():
            there = packages.get(name)
            if there is None:
                found.append(f"{name}: {version} is wanted, not installed")
            elif Version(there.version).public != version:
                found.append(f"{name}: {version} is wanted, {there.version} installed")
            elif lost := sum(not Path(str(file.locate())).exists() for file in there.files or []):
                found.append(f"{name}: {lost} of its files are gone")
        return [f"{self.folder} differs from {self.lock}; remove it to have it made anew", *found] if found else []


def own(reward: str, envs: Path) -> Environment:
    """The environment of a reward's own below the folder ``envs``.

    Raises:
        NoEnvironmentError: no such reward, or it has no lock file.
    """
    lock = LOCKS / f"{reward}.txt"
    if not LOCKS.is_dir():
        raise NoEnvironmentError(
            f"there are no lock files in {LOCKS}: environments are made from a clone of the project, installed by "
            "`pip install -e .`"
        )
    if reward not in locked():
        how = f": write {lock.with_suffix('.in')} and run `make locks`" if _file(reward).is_file() else ""
        raise NoEnvironmentError(f"no lock file {reward}.txt{how}; there are: {', '.join(locked())}")
    text = "\n".join(f"{name}=={version}" for name, version in sorted(pins(lock).items()))
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    python = "py{}{}".format(*sys.version_info)
    return Environment(reward, lock, envs.expanduser().absolute() / f"{python}-{key}")


def locked() -> list[str]:
    """Names of the rewards that have a lock file."""
    return sorted(path.stem for path in LOCKS.glob("*.txt"))


def pins(lock: Path) -> dict[str, str]:
    """Version by normalised name of each package of a lock file.

    Raises:
        NoEnvironmentError: a line is not ``name==version``.
    """
    found: dict[str, str] = {}
    for line in lock.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text:
            name, equals, version = text.partition("==")
            if not equals:
                raise NoEnvironmentError(f"{lock}: {text!r} is not name==version")
            found[canonicalize_name(name.strip())] = version.strip()
    return found


def python_for(reward: str, envs: Path) -> Path:
    """The interpreter of a reward's worker: that of its own environment if it has been made, else this one.

    Args:
        reward: a file name of reward_server/rewards; ``module:Class`` always runs in the main environment.

    Raises:
        NoEnvironmentError: neither has what the reward needs; the message says how to get either.
    """
    this = Path(sys.executable)
    if reward not in locked() or not _file(reward).is_file():  # the worker loads it, or says why not
        return this
    environment = own(reward, envs)
    if environment.is_made:
        return environment.python
    lacking = missing(reward)
    if lacking:
        raise NoEnvironmentError(f"reward {reward!r} needs {', '.join(lacking)}: {cures(reward)}")
    return this


def place(reward: str, envs: Path) -> str:
    """Where the worker of a reward would run now, for people: ``own``, ``main`` or ``not installed``."""
    if reward in locked() and own(reward, envs).is_made:
        return "own"
    return "not installed" if missing(reward) else "main"


def missing(reward: str) -> list[str]:
    """What this environment lacks of the reward's extra; nothing is imported."""
    lacking = []
    for requirement in _extra(reward):
        try:
            there = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            lacking.append(f"{requirement.name}{requirement.specifier}")
            continue
        if not requirement.specifier.contains(there, prereleases=True):
            lacking.append(f"{requirement.name}{requirement.specifier} (installed: {there})")
    return lacking


def cures(reward: str) -> str:
    """What to do about a reward whose packages are not installed."""
    own_environment = f"`reward-server env {reward}` makes an environment of its own"
    together = {canonicalize_name(extra) for requirement in _extra(TOGETHER) for extra in requirement.extras}
    if canonicalize_name(reward) not in together:
        return own_environment
    return f"{own_environment}, `pip install -e '.[{reward}]'` installs them in this one"


def description(reward: str) -> str:
    """The one line about a reward that its file has, without importing it."""
    tree = ast.parse(_file(reward).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name("description")], value=ast.Constant(value=str(text))):
                return text
    return (ast.get_docstring(tree) or "").partition("\n")[0]


def _file(reward: str) -> Path:
    return ROOT / "reward_server" / "rewards" / f"{reward}.py"


def _extra(name: str) -> list[Requirement]:
    """The requirements of one of the project's extras; none where the package stands outside a clone."""
    project = ROOT / "pyproject.toml"
    if not project.is_file():
        return []
    extras = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    return [Requirement(text) for text in extras.get(name, [])]


def _run(lock: int, *command: str) -> None:
    """Run a Python, which neither sees PYTHONPATH nor the current folder; stdout is for the result alone.

    It inherits the lock: should this process be killed, nobody works in the folder before pip has ended, too.
    """
    subprocess.run([command[0], "-I", *command[1:]], stdout=sys.stderr, check=True, pass_fds=(lock,))


@contextmanager
def _alone(lock: Path) -> Iterator[int]:
    """One process at a time; the others wait. Ends with the process, however that ends, and those that inherit it."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that makes {lock.with_suffix('')}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
