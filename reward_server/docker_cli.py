"""``reward-server docker``: compose.yaml's services by the Docker API; and ``reward-server up --backend docker``."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import httpx
from pydantic import BaseModel

from reward_server.commands import (
    ClientSettings,
    CommandError,
    DockerLogsSettings,
    DockerScaleSettings,
    DockerSettings,
    DockerStatusSettings,
    DockerUpSettings,
    UpSettings,
    load_settings,
    table,
)
from reward_server.compose_file import ComposeFile, ComposeFileError
from reward_server.contract import ContractError, RewardList, parse_model
from reward_server.docker_engine import DockerError, Engine, connect, health, service_of
from reward_server.environments import ROOT
from reward_server.settings import ENV_PREFIX

GATEWAY = "reward_server"
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}


def docker(argv: Sequence[str]) -> int:
    """Run the services of compose.yaml: up, status, logs, scale"""
    commands = {"up": up, "status": status, "logs": logs, "scale": scale}
    if not argv or argv[0] not in commands:
        shown = "\n".join(f"  {name:7} {command.__doc__}" for name, command in commands.items())
        wanted = bool(argv) and argv[0] in ("-h", "--help")
        print(
            f"usage: reward-server docker COMMAND [--setting value ...]\n\n{shown}",
            file=sys.stdout if wanted else sys.stderr,
        )
        return 0 if wanted else 2
    try:
        return commands[argv[0]](argv[1:])
    except (ComposeFileError, DockerError) as error:
        raise CommandError(str(error)) from error


def up(argv: Sequence[str]) -> int:
    """Build and start Redis, the gateway and the workers of rewards; return when all are healthy"""
    settings = load_settings(
        DockerUpSettings,
        argv,
        "docker up",
        "Build the images that are missing, start Redis, the gateway and a worker for each reward, and return when\n"
        "all are healthy; one line of JSON with the URL goes to stdout. `docker compose down` stops them.",
        positionals=["rewards"],
    )
    file = _file(settings)
    services = {GATEWAY: 1, **{_worker(file, name): 1 for name in settings.rewards}}
    with _engine(file) as engine:
        engine.up(services, build=settings.build, timeout_s=settings.timeout_s)
    print(json.dumps({"url": _url(file), "rewards": settings.rewards}), flush=True)
    return 0


def status(argv: Sequence[str]) -> int:
    """Show the containers, their health, and each reward's workers and queue"""
    settings = load_settings(DockerStatusSettings, argv, "docker status", status.__doc__ or "")
    file = _file(settings)
    with _engine(file) as engine:
        containers = engine.containers()
    rows = [[service_of(c), c.name, c.status, health(c), c.attrs["Config"]["Image"]] for c in containers]
    print(table(["service", "container", "state", "health", "image"], rows))
    try:
        rewards = _rewards(settings, file).rewards
    except (httpx.HTTPError, ContractError) as error:
        print(f"the gateway does not tell its rewards: {error}", file=sys.stderr)
    else:
        print("\n" + table(["reward", "workers", "waiting"], [[r.name, r.workers, r.depth] for r in rewards]))
    return 0 if rows and all(row[2] == "running" and row[3] in ("healthy", "none") for row in rows) else 1


def logs(argv: Sequence[str]) -> int:
    """Print what the containers wrote"""
    settings = load_settings(DockerLogsSettings, argv, "docker logs", logs.__doc__ or "", positionals=["services"])
    with _engine(_file(settings)) as engine:
        containers = [c for c in engine.containers() if not settings.services or service_of(c) in settings.services]
        if not containers:
            raise CommandError(f"no container of {', '.join(settings.services) or 'this project'}")
        if settings.follow and len(containers) > 1:
            raise CommandError(f"--follow follows one container, not {len(containers)}: `docker compose logs -f`")
        for container in containers:
            for line in engine.logs(container, settings.tail, settings.follow):
                print(f"{container.name} | {line}", flush=settings.follow)
    return 0


class Scaler:
    """How many workers a queue's depth asks for: more at once, fewer one by one after a time of little to do."""

    def __init__(self, settings: DockerScaleSettings) -> None:
        self._settings = settings
        self._low_since: float | None = None

    def wanted(self, workers: int, depth: int, now: float) -> int:
        """
        Args:
            workers: that run.
            depth: images that wait or are being scored.
            now: seconds of a clock that never goes back.
        """
        least, most = self._settings.least, self._settings.most
        wanted = min(max(math.ceil(depth / self._settings.images_per_worker), least), most)
        if wanted >= workers:
            self._low_since = None
            return wanted
        if self._low_since is None:
            self._low_since = now
        if now - self._low_since < self._settings.idle_s and workers <= most:
            return workers
        self._low_since = now
        return workers - 1


def scale(argv: Sequence[str], sleep: Callable[[float], None] = time.sleep) -> int:
    """Run so many workers of a reward, or as many as its queue asks for"""
    settings = load_settings(
        DockerScaleSettings,
        argv,
        "docker scale",
        "With --workers, start or stop workers of a reward until so many run. Without, look at its queue every few\n"
        "seconds until Ctrl-C, and keep between --least and --most workers. One that stops finishes its batch first.",
        positionals=["reward"],
    )
    if settings.least > settings.most:
        raise CommandError(f"least is {settings.least}, more than most, {settings.most}")
    file = _file(settings)
    service = file.service(_worker(file, settings.reward))
    with _engine(file) as engine:
        if settings.workers is not None:
            engine.scale(service, settings.workers)
            return 0
        scaler = Scaler(settings)
        away = False
        while True:
            try:
                depth = next((r.depth for r in _rewards(settings, file).rewards if r.name == settings.reward), 0)
            except (httpx.HTTPError, ContractError) as error:
                if not away:
                    print(f"the gateway is away ({error}); as many workers as there are stay", file=sys.stderr)
                away = True
            else:
                away = False
                workers = len(engine.containers(service.name))
                wanted = scaler.wanted(workers, depth, time.monotonic())
                if wanted != workers:
                    print(f"{settings.reward}: {depth} images, {workers} -> {wanted} workers", file=sys.stderr)
                    engine.scale(service, wanted)
            sleep(settings.every_s)


def serve(settings: UpSettings, on_ready: Callable[[str, list[str], str | None], None]) -> None:
    """``reward-server up --backend docker``: start everything in containers, and stop them when interrupted.

    Args:
        on_ready: gets the URL, the rewards and the token.

    Raises:
        CommandError: a setting cannot be had in containers, or Docker cannot do it.
        KeyboardInterrupt: that of the user, once the containers are stopped.
    """
    try:
        file = _file_for(settings)
        services = {GATEWAY: 1}
        for name, reward in settings.rewards.items():
            services[_worker(file, name)] = reward.workers
        with _engine(file) as engine:
            try:
                engine.up(services, build=settings.build, timeout_s=max(settings.start_timeout_s, 600.0))
                on_ready(_url(file), list(settings.rewards), file.variable(f"{ENV_PREFIX}TOKEN"))
                while all(container.status == "running" for container in engine.containers(GATEWAY)):
                    time.sleep(2.0)
                raise DockerError("the gateway's container has ended: reward-server docker logs reward_server")
            finally:
                engine.stop(engine.in_order(services))
    except (ComposeFileError, DockerError) as error:
        raise CommandError(str(error)) from error


def _file_for(settings: UpSettings) -> ComposeFile:
    """compose.yaml, with these settings on top.

    Raises:
        CommandError: one of them has no meaning in containers.
    """
    for name, reward in settings.rewards.items():
        for key in ("reward", "python"):
            if getattr(reward, key) is not None:
                raise CommandError(
                    f"rewards.{name}.{key} cannot be set with backend docker: an image serves its reward"
                )
    for key in ("redis_url", "cores", "log_dir"):
        if getattr(settings, key) is not None:
            raise CommandError(f"{key} cannot be set with backend docker: edit compose.yaml")
    overrides = {
        _worker_name(name): {"environment": _environment(reward, exclude={"workers"})}
        for name, reward in settings.rewards.items()
    }
    overrides[GATEWAY] = {"environment": _environment(settings.gateway)}
    variables = {**os.environ, "PUBLISH": f"{settings.host}:{settings.port}"}
    if token := settings.bearer_token():
        variables[f"{ENV_PREFIX}TOKEN"] = token
    files = [ROOT / "compose.yaml"]
    if any(reward.device.startswith("cuda") for reward in settings.rewards.values()):
        files.append(ROOT / "docker" / "compose.gpu.yaml")
    return ComposeFile(files, variables, {"services": {k: v for k, v in overrides.items() if v["environment"]}})


def _environment(settings: BaseModel, exclude: set[str] | None = None) -> dict[str, str]:
    """What was set, as the variables that a container reads; a dollar is no variable of the compose file."""
    given = settings.model_dump(mode="json", exclude_unset=True, exclude=exclude)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
    return {f"{ENV_PREFIX}{key.upper()}": text.replace("$", "$$") for key, text in texts.items()}


def _file(settings: DockerSettings) -> ComposeFile:
    variables: Mapping[str, str] = os.environ
    if isinstance(settings, ClientSettings) and (token := settings.bearer_token()):
        variables = {**variables, f"{ENV_PREFIX}TOKEN": token}
    return ComposeFile(settings.files or [ROOT / "compose.yaml"], variables)


def _engine(file: ComposeFile) -> Engine:
    return Engine(connect(), file, lambda line: print(line, file=sys.stderr, flush=True))


def _worker_name(reward: str) -> str:
    return f"worker-{reward}"


def _worker(file: ComposeFile, reward: str) -> str:
    """The service of a reward's workers."""
    service = _worker_name(reward)
    if service not in file.services:
        known = [name.removeprefix("worker-") for name in file.services if name.startswith("worker-")]
        raise CommandError(f"no service serves {reward!r}; rewards: {', '.join(known)}")
    return service


def _url(file: ComposeFile) -> str:
    """Where the gateway is published; the first port of a range."""
    published = file.service(GATEWAY).published[0]
    host, _, ports = published.rpartition(":")
    return f"http://{_LOOPBACK.get(host, host)}:{ports.partition('-')[0]}"


def _rewards(settings: ClientSettings, file: ComposeFile) -> RewardList:
    token = settings.bearer_token() or file.variable(f"{ENV_PREFIX}TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    answer = httpx.get(f"{settings.url or _url(file)}/v1/rewards", headers=headers, timeout=10.0, trust_env=False)
    answer.raise_for_status()
    return parse_model(RewardList, answer.content, "answer")
