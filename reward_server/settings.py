"""Every setting of the reward server, with its unit and default; an unknown key is an error.

Plain pydantic models: :mod:`reward_server.options` fills them from a YAML file, the environment
(``REWARD_SERVER_PORT=8001``, ``REWARD_SERVER_GATEWAY__MAX_DEPTH=512``) and the command line. Importing this
module loads neither FastAPI nor Redis nor torch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator

from reward_server.options_tree import Heading

ENV_PREFIX = "REWARD_SERVER_"
DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"

ACCESS = Heading("address and access")
MODEL = Heading("reward model")
BATCHES = Heading("batches and retries")
PROCESSES = Heading("rewards and processes")
PAYLOADS = Heading("payloads")
LIMITS = Heading("limits")
LOGGING = Heading("logging")

ENVS: Any = Field(
    default_factory=lambda: Path(os.environ.get(f"{ENV_PREFIX}ENVS", "~/.cache/mar-grpo/envs")),
    description="folder of the rewards' own environments (reward-server env NAME makes one)",
)

LogLevel = Annotated[Literal["debug", "info", "warning", "error"], LOGGING]


def _redis_url(url: str) -> str:
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("a redis://host:port/db, rediss:// or unix:///path URL is needed")
    return url


def without_password(url: str) -> str:
    """A URL as it may be shown and logged."""
    return re.sub(r"(//[^/@]*:)[^/@]*@", r"\1***@", url)


RedisURL = Annotated[str, AfterValidator(_redis_url)]


def _served_name(name: str) -> str:
    from reward_server.contract import NAME_PATTERN  # here, since it loads numpy

    if not re.match(NAME_PATTERN, name):
        raise ValueError(f"{name!r} cannot be a reward's name, which must match {NAME_PATTERN}")
    return name


class Settings(BaseModel):
    """Base of all settings: unknown keys are refused, values are not changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Access(Settings):
    """The bearer token that guards everything but the health endpoints."""

    token: Annotated[SecretStr | None, ACCESS] = Field(
        default=None, description="bearer token; better kept in the environment or token_file"
    )
    token_file: Annotated[Path | None, ACCESS] = Field(
        default=None, description="file that holds the bearer token (used when token is not set)"
    )

    def bearer_token(self) -> str | None:
        """The token, from ``token`` or else from ``token_file``; None when neither is set.

        Raises:
            ValueError: the token is empty, or the file cannot be read.
        """
        if self.token is not None:
            token, source = self.token.get_secret_value().strip(), "token"
        elif self.token_file is not None:
            try:
                token, source = self.token_file.read_text(encoding="utf-8").strip(), f"token_file {self.token_file}"
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"token_file {self.token_file} cannot be read: {error}") from error
        else:
            return None
        if not token:
            raise ValueError(f"{source} is empty: give a token or leave the setting out")
        return token


class GatewayLimits(Settings):
    """Where the gateway keeps image payloads, and how much of everything it accepts."""

    spool: Annotated[Literal["memory", "directory", "redis"], PAYLOADS] = Field(
        default="memory",
        description="where image payloads live: shared memory of this host, a directory (spool_dir), or Redis",
    )
    spool_dir: Annotated[Path | None, PAYLOADS] = Field(
        default=None, description="directory of the payload files, which workers on this host map (spool: directory)"
    )
    spool_max_bytes: Annotated[int, PAYLOADS] = Field(
        default=1 << 30, gt=0, description="bound of all payloads together, bytes"
    )
    spool_ttl_s: Annotated[float, PAYLOADS] = Field(
        default=900.0, gt=0, description="a payload is removed after this, seconds"
    )
    result_ttl_s: Annotated[float, LIMITS] = Field(
        default=900.0, gt=0, description="a job and its result are forgotten after this, seconds"
    )
    max_depth: Annotated[int, LIMITS] = Field(
        default=4096, gt=0, description="images that may wait for one reward; more is answered with 429"
    )
    max_wait_s: Annotated[float, LIMITS] = Field(
        default=60.0, ge=0, description="longest time that one request may wait for its result, seconds"
    )
    max_images: Annotated[int, LIMITS] = Field(default=1024, gt=0, description="images of one request")
    max_pixels: Annotated[int, LIMITS] = Field(default=1 << 24, gt=0, description="pixels of one image")
    max_body_bytes: Annotated[int, LIMITS] = Field(default=256 << 20, gt=0, description="size of one request, bytes")


class GatewaySettings(Access, GatewayLimits):
    """The HTTP API."""

    host: Annotated[str, ACCESS] = Field(
        default="127.0.0.1", description="address to listen on; other than loopback only with a token"
    )
    port: Annotated[int, ACCESS] = Field(
        default=8000, ge=0, le=65535, description="port to listen on; 0 takes a free one"
    )
    redis_url: Annotated[RedisURL, ACCESS] = Field(
        default=DEFAULT_REDIS_URL, description="Redis: redis://host:port/db, rediss:// or unix:///path"
    )
    log_level: LogLevel = Field(default="info", description="least severe messages to log")


class WorkerTuning(Settings):
    """How a worker takes jobs and runs its model."""

    device: Annotated[str, MODEL] = Field(
        default="cpu", description="torch device of the model: cpu, cuda, cuda:1, mps"
    )
    max_batch: Annotated[int, BATCHES] = Field(default=16, gt=0, description="images scored together")
    max_wait_ms: Annotated[float, BATCHES] = Field(
        default=5.0, ge=0, description="longest wait for a batch to fill, milliseconds"
    )
    max_tries: Annotated[int, BATCHES] = Field(
        default=3, gt=0, description="deliveries of an image before it is given up"
    )
    claim_idle_ms: Annotated[int, BATCHES] = Field(
        default=15_000, gt=0, description="a dead worker's images go to another after this, milliseconds"
    )
    heartbeat_s: Annotated[float, BATCHES] = Field(
        default=2.0, gt=0, description="interval of the worker's signs of life, seconds"
    )
    threads: Annotated[int, MODEL] = Field(default=1, gt=0, description="CPU threads of the model")
    options: Annotated[dict[str, Any], MODEL] = Field(
        default_factory=dict, description="options of the reward itself, see its file"
    )


class WorkerSettings(Access, WorkerTuning):
    """One worker process: one reward model."""

    reward: Annotated[str, MODEL] = Field(
        default="shapes", description="the reward to serve: a file name of reward_server/rewards, or module:Class"
    )
    name: Annotated[str | None, MODEL] = Field(
        default=None, description="what requests call it; its own name when not set"
    )
    redis_url: Annotated[RedisURL, ACCESS] = Field(
        default=DEFAULT_REDIS_URL, description="Redis: redis://host:port/db, rediss:// or unix:///path"
    )
    gateway_url: Annotated[str | None, ACCESS] = Field(
        default=None, description="gateway to fetch payloads from that are not on this host"
    )
    log_level: LogLevel = Field(default="info", description="least severe messages to log")

    @field_validator("name")
    @classmethod
    def _can_be_served(cls, value: str | None) -> str | None:
        return None if value is None else _served_name(value)


class RewardSettings(WorkerTuning):
    """One reward of ``reward-server up`` and of the trainer's embedded server."""

    reward: Annotated[str | None, MODEL] = Field(
        default=None,
        description="file name of reward_server/rewards, or module:Class, served under NAME; NAME itself when not set",
    )
    python: Annotated[Path | None, MODEL] = Field(
        default=None,
        description="interpreter of its workers; that of its own environment if made, else this one, when not set",
    )
    workers: Annotated[int, MODEL] = Field(default=1, gt=0, description="processes that serve this reward")


class ServerSettings(Access):
    """Everything at once: Redis, the gateway and the workers (``reward-server up`` and the embedded server)."""

    rewards: Annotated[dict[str, RewardSettings], PROCESSES] = Field(
        default_factory=lambda: {"shapes": RewardSettings()},
        description="rewards to serve: names (shapes,null) or a mapping of names to their settings",
    )
    envs: Annotated[Path, PROCESSES] = ENVS
    host: Annotated[str, ACCESS] = Field(
        default="127.0.0.1", description="address to listen on; other than loopback only with a token"
    )
    port: Annotated[int, ACCESS] = Field(
        default=8000, ge=0, le=65535, description="port to listen on; 0 takes a free one"
    )
    redis_url: Annotated[RedisURL | None, ACCESS] = Field(
        default=None, description="Redis to use; a bundled one is started when not set"
    )
    cores: Annotated[int | None, PROCESSES] = Field(
        default=None, gt=0, description="CPU cores to share out; all that this process may use when not set"
    )
    start_timeout_s: Annotated[float, PROCESSES] = Field(
        default=120.0, gt=0, description="longest time until all rewards are ready, seconds"
    )
    max_restarts: Annotated[int, PROCESSES] = Field(
        default=5, ge=0, description="restarts of one process within restart_window_s before it is given up"
    )
    restart_window_s: Annotated[float, PROCESSES] = Field(
        default=300.0, gt=0, description="time over which restarts are counted, seconds"
    )
    log_dir: Annotated[Path | None, LOGGING] = Field(
        default=None, description="folder for the processes' logs; a temporary one when not set"
    )
    log_level: LogLevel = Field(default="info", description="least severe messages to log")
    gateway: GatewayLimits = Field(default_factory=GatewayLimits, description="what the gateway keeps and accepts")

    @field_validator("rewards", mode="before")
    @classmethod
    def _names_are_enough(cls, value: Any) -> Any:
        """``shapes,null`` and ``[shapes, null]`` mean default settings for each; ``{shapes: null}`` too."""
        if isinstance(value, str):
            value = [name for name in map(str.strip, value.split(",")) if name]
        if isinstance(value, list):
            value = dict.fromkeys(value)
        if isinstance(value, dict):
            if not value:
                raise ValueError("at least one reward must be named")
            return {name: {} if options is None else options for name, options in value.items()}
        return value

    @field_validator("rewards")
    @classmethod
    def _names_can_be_served(cls, value: dict[str, RewardSettings]) -> dict[str, RewardSettings]:
        for name, settings in value.items():
            if settings.reward is not None:
                _served_name(name)
        return value


class EmbeddedSettings(ServerSettings):
    """The reward server that the trainer starts for itself: any free port, and a random token when none is given."""

    port: Annotated[int, ACCESS] = Field(default=0, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    log_level: LogLevel = Field(default="warning", description="least severe messages to log")
