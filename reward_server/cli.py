"""The ``reward-server`` command: run the server whole or in parts, list rewards, score image files.

Each command's ``--help`` lists all its settings. Errors of the user are one line and exit code 2; a failure of the
server is exit code 1.
"""

from __future__ import annotations

import difflib
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import Field, field_validator

from reward_server.contract import ContractError, ErrorResponse, JobState, RewardList, ScoreResponse, parse_model
from reward_server.embedded import EmbeddedServer, EmbeddedServerError, EmbeddedServerMistake
from reward_server.options import load
from reward_server.settings import ACCESS, ENV_PREFIX, Access, GatewaySettings, ServerSettings, WorkerSettings

S = TypeVar("S", bound=Access)
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


class ClientSettings(Access):
    """What ``list`` and ``score`` need to reach a server."""

    url: Annotated[str | None, ACCESS] = Field(default=None, description="reward server, http://host:port")
    json_output: bool = Field(default=False, description="print JSON instead of a table")

    @field_validator("url")
    @classmethod
    def _with_scheme(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("an http:// or https:// URL is needed, such as http://127.0.0.1:8000")
        return value


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
        return value


_MODELS = (GatewaySettings, WorkerSettings, ServerSettings, ScoreSettings)


class CommandError(Exception):
    """A mistake of the user: shown as one line, exit code 2."""


def _load(model: type[S], argv: Sequence[str], command: str, description: str, **extra: Any) -> S:
    """The command's settings; a token that cannot be had is a mistake of the user, found here."""
    prog = f"reward-server {command}"
    settings = load(
        model, argv, prog=prog, description=description, env_prefix=ENV_PREFIX, env_siblings=_MODELS, **extra
    )
    try:
        settings.bearer_token()
    except ValueError as error:
        raise CommandError(str(error)) from error
    return settings


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)


# --- commands


def up(argv: Sequence[str]) -> int:
    """Run everything in the foreground: Redis (bundled), gateway and workers"""
    settings = _load(
        ServerSettings,
        argv,
        "up",
        "Run a whole reward server in the foreground until Ctrl-C: a bundled Redis unless one is given, the gateway\n"
        "and the workers. When all is ready, one line of JSON with the URL goes to stdout; all else goes to stderr.",
    )
    _log_to_stderr(settings.log_level)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        with EmbeddedServer(settings, open_access=True) as server:
            print(json.dumps({"url": server.url, "rewards": list(server.names.values())}), flush=True)
            print(_how_to_use(server), file=sys.stderr, flush=True)
            server.wait()
            server.check()
    except EmbeddedServerMistake as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return 0


def _how_to_use(server: EmbeddedServer) -> str:
    header = ' -H "Authorization: Bearer $REWARD_SERVER_TOKEN"' if server.token else ""
    variable = "TRAINER_REWARD__TOKEN=<the token> " if server.token else ""
    names = ",".join(server.names.values())
    return (
        f"Reward server at {server.url} serves {names}. Ctrl-C stops it. From another terminal:\n"
        f'  curl{header} -F image=@image.png -F prompt="a red circle" -F reward={names} {server.url}/v1/score\n'
        f"  {variable}python trainer/run.py --config configs/train/small.yaml --reward-url {server.url}"
    )


def gateway(argv: Sequence[str]) -> int:
    """Run the HTTP API alone"""
    settings = _load(
        GatewaySettings,
        argv,
        "gateway",
        "Run the HTTP API in front of a Redis; workers that use the same Redis serve the rewards.\n"
        "When it accepts requests, one line of JSON with the URL goes to stdout.",
    )
    _log_to_stderr(settings.log_level)
    from reward_server import gateway as server  # here, so that other commands need not load FastAPI

    def ready(url: str) -> None:
        print(json.dumps({"url": url}), flush=True)

    try:
        server.run(settings, ready)
    except ValueError as error:  # settings that do not fit together, such as an open address without a token
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}") from error
    return 0


def worker(argv: Sequence[str]) -> int:
    """Run one worker: one process, one reward model"""
    settings = _load(
        WorkerSettings,
        argv,
        "worker",
        "Serve one reward model: take images from Redis in batches, score them, store the scores.",
        positionals=["reward"],
    )
    _log_to_stderr(settings.log_level)
    from reward_server import worker as server  # here, so that other commands need not load Redis
    from reward_server.rewards.base import RewardLoadError

    try:
        server.run(settings)
    except RewardLoadError as error:
        raise CommandError(str(error)) from error
    return 0


def list_rewards(argv: Sequence[str]) -> int:
    """List the rewards that can be served, or those that a server serves (--url)"""
    settings = _load(
        ClientSettings,
        argv,
        "list",
        "List the rewards that this installation can serve, or, with --url, those that a server serves.",
        aliases={"json": "json_output"},
    )
    if settings.url is None:
        from reward_server.rewards.base import available

        names = available()
        print(json.dumps(names) if settings.json_output else "\n".join(names))
        return 0
    with _client(settings, settings.url) as client:
        answer = _ask(client, "GET", "/v1/rewards")
    rewards = parse_model(RewardList, answer.content, "answer").rewards
    if settings.json_output:
        print(json.dumps([reward.model_dump() for reward in rewards], indent=1))
        return 0
    rows = [[r.name, r.revision[:12], r.workers, r.depth, ",".join(r.needs) or "-", r.description] for r in rewards]
    print(_table(["reward", "revision", "workers", "waiting", "needs", ""], rows))
    return 0


def score(argv: Sequence[str]) -> int:
    """Score image files on a running server"""
    settings = _load(
        ScoreSettings,
        argv,
        "score",
        "Score images on a running server (reward-server up), and print a table or JSON.\n"
        'Example: reward-server score cat.png dog.png --prompt "a red circle" --rewards shapes',
        aliases={"json": "json_output"},
        positionals=["images"],
    )
    images = _images(settings.images)
    prompts = _prompts(settings, images)
    if settings.metadata is not None and len(settings.metadata) != len(images):
        raise CommandError(f"{len(settings.metadata)} metadata for {len(images)} images: one per image is needed")
    with _client(settings, settings.url) as client:
        job = _score_files(client, settings, images, prompts)
    if settings.json_output:
        print(json.dumps({"images": [str(i) for i in images], "prompts": prompts, **job.model_dump()}, indent=1))
    else:
        rows = []
        for index, image in enumerate(images):
            results = [job.results[name] for name in settings.rewards]
            cells = ["-" if r.scores[index] is None else f"{r.scores[index]:.4f}" for r in results]
            reasons = [f"{n}: {r.reasons[index]}" for n, r in zip(settings.rewards, results, strict=True)]
            missing = [text for text, r in zip(reasons, results, strict=True) if r.scores[index] is None]
            rows.append([image, *cells, "; ".join(missing)])
        print(_table(["image", *settings.rewards, ""], rows))
    return 0


# --- talking to a server


def _client(settings: ClientSettings, url: str) -> httpx.Client:
    token = settings.bearer_token()
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=url, headers=headers, timeout=60.0, trust_env=False)


def _ask(client: httpx.Client, method: str, path: str, **content: Any) -> httpx.Response:
    """The answer, if it is one.

    Raises:
        CommandError: no server there, or it refuses; in the server's own words.
    """
    try:
        response = client.request(method, path, **content)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise CommandError(f"no answer from {client.base_url}: {error}; is `reward-server up` running?") from error
    if response.is_success:
        return response
    try:
        detail = parse_model(ErrorResponse, response.content, "error").error
        message = f"{detail.message} (at {detail.where})" if detail.where else detail.message
    except ContractError:
        message = f"{response.text[:200]!r}, which is not from a reward server"
    raise CommandError(f"{client.base_url} answered {response.status_code}: {message}")


def _score_files(
    client: httpx.Client, settings: ScoreSettings, images: Sequence[Path], prompts: Sequence[str]
) -> ScoreResponse:
    """Send the files as they are (the server decodes them by its one rule) and wait for the scores."""
    fields: dict[str, Any] = {"prompt": list(prompts), "reward": settings.rewards, "wait": "10"}
    if settings.metadata is not None:
        fields["metadata"] = [json.dumps(entry) for entry in settings.metadata]
    deadline = time.monotonic() + settings.timeout_s
    with ExitStack() as stack:
        files = [("image", (str(path), stack.enter_context(path.open("rb")))) for path in images]
        answer = _ask(client, "POST", "/v1/score", data=fields, files=files)
    job = parse_model(ScoreResponse, answer.content, "answer")
    while job.state in (JobState.QUEUED, JobState.RUNNING):
        if time.monotonic() > deadline:
            raise CommandError(f"no scores within {settings.timeout_s:g} s: see {client.base_url}v1/jobs/{job.id}")
        answer = _ask(client, "GET", f"/v1/jobs/{job.id}", params={"wait": 10})
        job = parse_model(ScoreResponse, answer.content, "answer")
    return job


# --- files and tables


def _images(paths: Sequence[Path]) -> list[Path]:
    """The files, and the images of the folders in order of name."""
    images: list[Path] = []
    for path in paths:
        if path.is_dir():
            images += sorted(file for file in path.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)
        elif path.is_file():
            images.append(path)
        else:
            raise CommandError(f"{path}: no such file or folder")
    if not images:
        raise CommandError("no images: name files or folders, reward-server score IMAGES --prompt TEXT")
    return images


def _prompts(settings: ScoreSettings, images: Sequence[Path]) -> list[str]:
    """One prompt per image: the same for all, or a line of a file each, or the text file beside each image."""
    if settings.prompt is not None:
        return [settings.prompt] * len(images)
    if settings.prompts is not None:
        lines = [line.strip() for line in _read(settings.prompts).splitlines() if line.strip()]
        if len(lines) != len(images):
            raise CommandError(f"{settings.prompts} has {len(lines)} prompts for {len(images)} images")
        return lines
    return [_read(image.with_suffix(".txt")).strip() for image in images]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CommandError(
            f"{path}: no such file; give --prompt, --prompts FILE, or a .txt beside each image"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read as text: {error}") from error


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


# --- entry


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "up": up,
    "gateway": gateway,
    "worker": worker,
    "list": list_rewards,
    "score": score,
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"  {name:9} {command.__doc__}" for name, command in COMMANDS.items()]
        print("usage: reward-server COMMAND [--setting value ...]\n\nScore images by reward models over HTTP.\n")
        print("commands:", *lines, "\nreward-server COMMAND --help lists a command's settings.", sep="\n")
        return 0 if arguments else 2
    command = COMMANDS.get(arguments[0])
    if command is None:
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        print(f"reward-server: error: no command {arguments[0]!r}; {hint}known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return command(arguments[1:])
    except EmbeddedServerError as error:
        print(f"reward-server {arguments[0]}: {error}", file=sys.stderr)
        return 1
    except (CommandError, ContractError) as error:
        print(f"reward-server {arguments[0]}: error: {error}", file=sys.stderr)
        return 2
