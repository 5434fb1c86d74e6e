"""What the commands of ``reward-server`` share: their own settings, how they are loaded, a mistake of the user."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, field_validator

from reward_server.options import load
from reward_server.settings import (
    ACCESS,
    ENV_PREFIX,
    ENVS,
    PROCESSES,
    Access,
    GatewaySettings,
    ServerSettings,
    Settings,
    WorkerSettings,
)

S = TypeVar("S", bound=BaseModel)


class CommandError(Exception):
    """A mistake of the user: shown as one line, exit code 2."""


class ClientSettings(Access):
    """What ``score`` and ``list`` need to reach a server."""

    url: Annotated[str | None, ACCESS] = Field(default=None, description="reward server, http://host:port")
    json_output: bool = Field(default=False, description="print JSON instead of a table")

    @field_validator("url")
    @classmethod
    def _with_scheme(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("an http:// or https:// URL is needed, such as http://127.0.0.1:8000")
        return value


class ListSettings(ClientSettings):
    """``reward-server list``"""

    envs: Path = ENVS


class ScoreSettings(ClientSettings):
    """``reward-server score``"""

    url: Annotated[str, ACCESS] = Field(default="http://127.0.0.1:8000", description="reward server, http://host:port")
    images: list[Path] = Field(default=[], description="image files (PNG, JPEG, WebP), or folders of them")
    prompt: str | None = Field(default=None, description="the prompt of all images")
    prompts: Path | None = Field(
        default=None, description="text file with one prompt per image, in order; else each image's own NAME.txt"
    )
    rewards: list[str] = Field(default=["shapes"], description="rewards to score by")
    metadata: list[dict[str, Any]] | None = Field(
        default=None, description="what the rewards need beside the prompt: one JSON object per image"
    )
    timeout_s: float = Field(default=300.0, gt=0, description="longest wait for the scores, seconds")

    @field_validator("rewards")
    @classmethod
    def _some(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("at least one reward must be named")
        if len(set(value)) < len(value):
            raise ValueError(f"each reward can be named once, got {', '.join(value)}")
        return value


class EnvSettings(Settings):
    """``reward-server env``"""

    reward: str = Field(default="", description="the reward: a file name of reward_server/rewards")
    check: bool = Field(default=False, description="make nothing; say how the environment differs from the lock file")
    envs: Path = ENVS


class UpSettings(ServerSettings):
    """``reward-server up``"""

    backend: Annotated[Literal["processes", "docker"], PROCESSES] = Field(
        default="processes", description="what runs the parts: processes of this machine, or compose.yaml's containers"
    )
    build: Annotated[bool, PROCESSES] = Field(
        default=False, description="with backend docker: build images that exist, too"
    )


class DockerSettings(Settings):
    """What all ``reward-server docker`` commands need."""

    files: list[Path] = Field(default=[], description="compose file, and overrides; the project's compose.yaml if none")


class DockerUpSettings(DockerSettings):
    """``reward-server docker up``"""

    rewards: list[str] = Field(default=["shapes"], description="rewards to serve")
    build: bool = Field(default=False, description="build images that exist, too")
    timeout_s: float = Field(default=1800.0, gt=0, description="longest wait for all to be healthy, seconds")


class DockerStatusSettings(ClientSettings, DockerSettings):
    """``reward-server docker status``"""


class DockerLogsSettings(DockerSettings):
    """``reward-server docker logs``"""

    services: list[str] = Field(default=[], description="services of compose.yaml; all if none")
    tail: int = Field(default=100, gt=0, description="lines of each container, the last ones")
    follow: bool = Field(default=False, description="go on with what comes")


class DockerScaleSettings(ClientSettings, DockerSettings):
    """``reward-server docker scale``"""

    reward: str = Field(default="shapes", description="the reward whose workers to scale")
    workers: int | None = Field(default=None, ge=0, description="so many, once; by the queue's depth when not set")
    least: int = Field(default=1, ge=1, description="workers when there is nothing to do")
    most: int = Field(default=4, ge=1, description="workers at most")
    images_per_worker: int = Field(default=64, gt=0, description="images in the queue that one worker may have")
    every_s: float = Field(default=5.0, gt=0, description="interval of looking at the queue, seconds")
    idle_s: float = Field(default=60.0, ge=0, description="one worker fewer after so long of too little to do, seconds")


_MODELS = (
    GatewaySettings,
    WorkerSettings,
    UpSettings,
    ScoreSettings,
    EnvSettings,
    DockerUpSettings,
    DockerLogsSettings,
    DockerScaleSettings,
)


def load_settings(model: type[S], argv: Sequence[str], command: str, description: str, **extra: Any) -> S:
    """The command's settings; a token that cannot be had is a mistake of the user, found here.

    Raises:
        CommandError: the token is empty or its file cannot be read.
        SystemExit: what :func:`reward_server.options.load` refuses, said on stderr.
    """
    prog = f"reward-server {command}"
    settings = load(
        model, argv, prog=prog, description=description, env_prefix=ENV_PREFIX, env_siblings=_MODELS, **extra
    )
    if isinstance(settings, Access):
        try:
            settings.bearer_token()
        except ValueError as error:
            raise CommandError(str(error)) from error
    return settings


def log_to_stderr(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of text, each as wide as its widest cell."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)
