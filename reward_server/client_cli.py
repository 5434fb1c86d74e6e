"""The commands ``list`` and ``score`` of ``reward-server``, which talk to a server over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from reward_server.commands import ClientSettings, CommandError, ListSettings, ScoreSettings, load_settings, table
from reward_server.contract import ContractError, ErrorResponse, JobState, RewardList, ScoreResponse, parse_model
from reward_server.environments import description, place
from reward_server.rewards.base import available

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def list_rewards(argv: Sequence[str]) -> int:
    """List the rewards that can be served, or those that a server serves (--url)"""
    settings = load_settings(
        ListSettings,
        argv,
        "list",
        "List the rewards that this installation can serve, or, with --url, those that a server serves.",
        aliases={"json": "json_output"},
    )
    if settings.url is None:
        _list_local(settings)
        return 0
    with _client(settings, settings.url) as client:
        answer = _ask(client, "GET", "/v1/rewards")
    rewards = parse_model(RewardList, answer.content, "answer").rewards
    if settings.json_output:
        print(json.dumps([reward.model_dump() for reward in rewards], indent=1))
        return 0
    rows = [[r.name, r.revision[:12], r.workers, r.depth, ",".join(r.needs) or "-", r.description] for r in rewards]
    print(table(["reward", "revision", "workers", "waiting", "needs", ""], rows))
    return 0


def score(argv: Sequence[str]) -> int:
    """Score image files on a running server"""
    settings = load_settings(
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
        print(table(["image", *settings.rewards, ""], rows))
    scored = any(score is not None for result in job.results.values() for score in result.scores)
    return 0 if scored else 1


def _list_local(settings: ListSettings) -> None:
    found = [
        {"name": name, "environment": place(name, settings.envs), "description": description(name)}
        for name in available()
    ]
    if settings.json_output:
        print(json.dumps(found, indent=1))
    else:
        print(table(["reward", "environment", ""], [list(row.values()) for row in found]))


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


# --- files


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
