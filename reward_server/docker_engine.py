"""The containers of a compose file's services, by the Docker API.

They carry Compose's labels, so that ``docker compose ps``, ``logs`` and ``down`` see the same containers.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from reward_server.compose_file import ComposeFile, Service

if TYPE_CHECKING:
    import docker
    from docker.models.containers import Container

_LABEL = "com.docker.compose."
_POLL_S = 0.5


class DockerError(Exception):
    """Docker is not there, or could not do what it was asked; the message is one line."""


def connect() -> docker.DockerClient:
    """The daemon of ``DOCKER_HOST``, or of this machine.

    Raises:
        DockerError: the SDK is not installed, or no daemon answers.
    """
    try:
        import docker  # here, since it is an extra
        import docker.errors  # without it, a folder named docker passes for the package
    except ImportError as error:
        raise DockerError("the Docker SDK is not installed: pip install 'mar-grpo[docker]'") from error
    try:
        client = docker.from_env(version="auto")  # which asks it
    except docker.errors.DockerException as error:
        raise DockerError(
            f"no Docker daemon answers ({_one_line(error)}): start it, or set DOCKER_HOST; "
            "`reward-server up` needs none"
        ) from error
    return client


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


class Engine:
    """Builds, starts, scales and stops the services of one project."""

    def __init__(self, client: docker.DockerClient, file: ComposeFile, say: Callable[[str], None]) -> None:
        """``say`` gets the progress, line by line."""
        self._client = client
        self._file = file
        self._say = say

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def containers(self, service: str | None = None) -> list[Container]:
        """The project's containers, stopped ones too, by service and number."""
        labels = [f"{_LABEL}project={self._file.project}", f"{_LABEL}oneoff=False"]
        labels += [f"{_LABEL}service={service}"] if service else []
        found = self._client.containers.list(all=True, filters={"label": labels}, ignore_removed=True)
        return sorted(found, key=lambda container: (container.labels[f"{_LABEL}service"], number(container)))

    def up(self, scale: Mapping[str, int], *, build: bool, timeout_s: float) -> None:
        """Start these services, so many containers of each, after those that they depend on; return when all are well.

        Images that are missing are built, all of them with ``build``. Containers that run already stay, unless they
        were started here with other settings or another image: those are replaced.

        Raises:
            DockerError: an image could not be made, or a container did not become healthy within ``timeout_s``.
            ComposeFileError: see :meth:`ComposeFile.service`.
        """
        order = [self._file.service(name) for name in self.in_order(scale)]  # all mistakes before anything starts
        for service in order:
            self._make_image(service, build)
        deadline = time.monotonic() + timeout_s
        for service in order:
            for other, condition in service.after.items():
                if condition == "service_healthy":
                    self._wait_healthy(other, deadline)
            self._remove(service, [c for c in self.containers(service.name) if self._is_outdated(c, service)])
            self.scale(service, scale.get(service.name, 1))
        for service in order:
            self._wait_healthy(service.name, deadline)

    def scale(self, service: Service, count: int) -> None:
        """Start or stop containers until ``count`` run; the highest numbers go first.

        Raises:
            DockerError: Docker refused.
        """
        with _refusals():
            existing = self.containers(service.name)
            self._remove(service, existing[count:])
            for container in existing[:count]:
                if container.status != "running":
                    self._say(f"{container.name}: starting")
                    container.start()
            taken = {number(container) for container in existing[:count]}
            free = (n for n in range(1, count + len(taken) + 1) if n not in taken)
            for _ in range(count - len(existing)):
                self._start(service, next(free))

    def stop(self, services: Sequence[str]) -> None:
        """Stop and remove the containers of these services, the last one first; volumes stay."""
        for name in reversed(services):
            self.scale(self._file.service(name), 0)

    def logs(self, container: Container, tail: int, follow: bool) -> Iterator[str]:
        """Lines that a container wrote."""
        with _refusals():
            rest = b""
            for chunk in container.logs(stream=True, follow=follow, tail=tail):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            if rest:
                yield rest.decode(errors="replace")

    def in_order(self, names: Mapping[str, int]) -> list[str]:
        """These services and all that they depend on, each after its own."""
        order: list[str] = []

        def add(name: str) -> None:
            if name not in order:
                for other in self._file.service(name).after:
                    add(other)
                order.append(name)

        for name in names:
            add(name)
        return order

    def _make_image(self, service: Service, build: bool) -> None:
        import docker

        with _refusals():
            try:
                if not (build and service.build):
                    self._client.images.get(service.image)
                    return
            except docker.errors.ImageNotFound:
                pass
            if service.build is None:
                self._say(f"{service.image}: pulling")
                self._client.images.pull(service.image)
                return
            self._say(f"{service.image}: building from {service.build.dockerfile}")
            for event in self._client.api.build(
                path=str(service.build.context),
                dockerfile=service.build.dockerfile,
                buildargs=service.build.args,
                tag=service.image,
                rm=True,
                forcerm=True,
                decode=True,
            ):
                if "error" in event:
                    raise DockerError(f"{service.image} could not be built: {_one_line(event['error'])}")
                for line in event.get("stream", "").splitlines():
                    if line.strip():
                        self._say(f"{service.image}: {line.rstrip()}")

    def _remove(self, service: Service, containers: Sequence[Container]) -> None:
        with _refusals():
            for container in containers:
                self._say(f"{container.name}: stopping")
                container.stop(timeout=round(service.stop_s))
                container.remove()

    def _hash(self, service: Service) -> str:
        """Of all that a container of the service is made from."""
        image = self._client.images.get(service.image).id
        content = json.dumps([image, service.create, service.networks], sort_keys=True)
        return f"reward-server-{hashlib.sha256(content.encode()).hexdigest()}"

    def _is_outdated(self, container: Container, service: Service) -> bool:
        made_from = container.labels.get(f"{_LABEL}config-hash", "")
        return made_from.startswith("reward-server-") and made_from != self._hash(service)

    def _start(self, service: Service, index: int) -> None:
        from docker.types import EndpointConfig

        project = self._file.project
        name = f"{project}-{service.name}-{index}"
        networks = [self._network(network) for network in service.networks]
        volumes = [self._named(volume) for volume in service.create["volumes"]]
        for volume in service.volumes:
            self._make_volume(volume)
        endpoint = EndpointConfig(self._client.api.api_version, aliases=[service.name])
        labels = {
            "project": project,
            "service": service.name,
            "container-number": str(index),
            "oneoff": "False",
            "config-hash": self._hash(service),  # Compose passes over containers without one
            "project.working_dir": str(self._file.folder),
        }
        self._say(f"{name}: starting")
        container = self._client.containers.create(
            service.image,
            name=name,
            labels={f"{_LABEL}{key}": value for key, value in labels.items()},
            network=networks[0],
            networking_config={networks[0]: endpoint},
            **{**service.create, "volumes": volumes},
        )
        for network in networks[1:]:
            self._client.networks.get(network).connect(container, aliases=[service.name])
        container.start()

    def _named(self, volume: str) -> str:
        return volume if volume.startswith("/") else f"{self._file.project}_{volume}"

    def _make_volume(self, name: str) -> None:
        labels = {f"{_LABEL}project": self._file.project, f"{_LABEL}volume": name}
        self._client.volumes.create(self._named(name), labels=labels, **self._file.volume(name))  # or finds it

    def _network(self, name: str) -> str:
        full = f"{self._file.project}_{name}"
        if not self._client.networks.list(names=[f"^{full}$"]):
            labels = {f"{_LABEL}project": self._file.project, f"{_LABEL}network": name}
            self._client.networks.create(full, labels=labels, **self._file.network(name))
        return full

    def _wait_healthy(self, service: str, deadline: float) -> None:
        """
        Raises:
            DockerError: a container ended, or is not well at the deadline (monotonic seconds); its last lines are told.
        """
        with _refusals():
            for container in self.containers(service):
                while True:
                    container.reload()
                    state, well = container.status, health(container)
                    if state == "running" and well in ("healthy", "none"):
                        break
                    if state in ("exited", "dead") or time.monotonic() > deadline:
                        problem = "has ended" if state != "running" else f"is not healthy but {well}"
                        last = container.logs(tail=5).decode(errors="replace").strip()
                        raise DockerError(f"{container.name} {problem}; its log ends:\n{last}")
                    time.sleep(_POLL_S)


def number(container: Container) -> int:
    """Which of its service's containers it is, from 1."""
    return int(container.labels.get(f"{_LABEL}container-number", 0))


def service_of(container: Container) -> str:
    return str(container.labels[f"{_LABEL}service"])


def health(container: Container) -> str:
    """``healthy``, ``starting``, ``unhealthy``; ``none`` where nothing checks it."""
    state: dict[str, Any] = container.attrs["State"]
    return str((state.get("Health") or {"Status": "none"})["Status"])


class _refusals:  # noqa: N801
    """What Docker refuses, as :class:`DockerError`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        import docker
        import requests

        if isinstance(error, docker.errors.APIError):
            raise DockerError(f"Docker refused: {_one_line(error.explanation or error)}") from error
        if isinstance(error, docker.errors.DockerException | requests.RequestException):
            raise DockerError(f"Docker failed: {_one_line(error)}") from error
