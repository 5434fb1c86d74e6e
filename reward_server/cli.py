"""The ``reward-server`` command: run the server whole or in parts, list rewards, score image files.

Each command's ``--help`` lists all its settings. Errors of the user are one line and exit code 2; a failure of the
server is exit code 1.
"""

from __future__ import annotations

import difflib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence

from reward_server import docker_cli
from reward_server.client_cli import list_rewards, score
from reward_server.commands import CommandError, EnvSettings, UpSettings, load_settings, log_to_stderr
from reward_server.contract import ContractError
from reward_server.embedded import EmbeddedServer, EmbeddedServerError, EmbeddedServerMistake
from reward_server.environments import NoEnvironmentError, own
from reward_server.rewards.base import RewardLoadError
from reward_server.settings import GatewaySettings, WorkerSettings
from reward_server.upkeep import prefetch, selftest


def up(argv: Sequence[str]) -> int:
    """Run everything in the foreground: Redis (bundled), gateway and workers"""
    settings = load_settings(
        UpSettings,
        argv,
        "up",
        "Run a whole reward server in the foreground until Ctrl-C: a bundled Redis unless one is given, the gateway\n"
        "and the workers. When all is ready, one line of JSON with the URL goes to stdout; all else goes to stderr.",
    )
    log_to_stderr(settings.log_level)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        if settings.backend == "docker":
            docker_cli.serve(settings, _say_ready)
            return 0
        with EmbeddedServer(settings, open_access=True) as server:
            _say_ready(server.url, list(server.names.values()), server.token)
            server.wait()
            server.check()
    except EmbeddedServerMistake as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return 0


def _say_ready(url: str, rewards: list[str], token: str | None) -> None:
    header = ' -H "Authorization: Bearer $REWARD_SERVER_TOKEN"' if token else ""
    variable = "TRAINER_REWARD__TOKEN=<the token> " if token else ""
    names = ",".join(rewards)
    print(json.dumps({"url": url, "rewards": rewards}), flush=True)
    print(
        f"Reward server at {url} serves {names}. Ctrl-C stops it. From another terminal:\n"
        f'  curl{header} -F image=@image.png -F prompt="a red circle" -F reward={names} {url}/v1/score\n'
        f"  {variable}python trainer/run.py --config configs/train/small.yaml --reward-url {url} --reward {rewards[0]}",
        file=sys.stderr,
        flush=True,
    )


def gateway(argv: Sequence[str]) -> int:
    """Run the HTTP API alone"""
    settings = load_settings(
        GatewaySettings,
        argv,
        "gateway",
        "Run the HTTP API in front of a Redis; workers that use the same Redis serve the rewards.\n"
        "When it accepts requests, one line of JSON with the URL goes to stdout.",
    )
    log_to_stderr(settings.log_level)
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
    settings = load_settings(
        WorkerSettings,
        argv,
        "worker",
        "Serve one reward model: take images from Redis in batches, score them, store the scores.",
        positionals=["reward"],
    )
    log_to_stderr(settings.log_level)
    from reward_server import worker as server  # here, so that other commands need not load Redis

    server.run(settings)
    return 0


def env(argv: Sequence[str]) -> int:
    """Make or check a reward's own environment"""
    settings = load_settings(
        EnvSettings,
        argv,
        "env",
        "Make the virtual environment of a reward from its lock file, docker/requirements/NAME.txt, unless that is\n"
        "done; `reward-server up` then runs the reward in it. The path of its Python goes to stdout.",
        positionals=["reward"],
    )
    if not settings.reward:
        raise CommandError("which reward? reward-server env NAME")
    environment = own(settings.reward, settings.envs)
    if not settings.check:
        environment.make()
    differences = environment.differences()
    if differences:
        print(*differences, sep="\n", file=sys.stderr)
        return 1
    print(environment.python)
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "up": up,
    "gateway": gateway,
    "worker": worker,
    "docker": docker_cli.docker,
    "env": env,
    "prefetch": prefetch,
    "selftest": selftest,
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
        code = command(arguments[1:])
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"reward-server {arguments[0]}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `reward-server list | head`: who read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except EmbeddedServerError as error:
        print(f"reward-server {arguments[0]}: {error}", file=sys.stderr)
        return 1
    except (CommandError, ContractError, NoEnvironmentError, RewardLoadError) as error:
        print(f"reward-server {arguments[0]}: error: {error}", file=sys.stderr)
        return 2
