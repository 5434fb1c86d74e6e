"""A compose file's services as arguments of the Docker API: what ``reward-server docker`` needs, and no more.

Variables are filled in as Compose does (``${NAME:-default}``, ``${NAME:?why}``, ``$$``), service by service, so that
one that is not started may want variables that are not set. What is not understood is an error, never passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_VARIABLE = re.compile(r"\$(?:(?P<escaped>\$)|(?P<plain>\w+)|\{(?P<name>\w+)(?:(?P<how>:?[-?])(?P<word>[^}]*))?\})")
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class ComposeFileError(Exception):
    """The file, or a variable that it wants, cannot be used; the message says which."""


@dataclass(frozen=True)
class Build:
    """How an image is made from the project's folder."""

    context: Path
    dockerfile: str
    args: dict[str, str]


@dataclass(frozen=True)
class Service:
    name: str
    image: str
    build: Build | None
    create: dict[str, Any]
    """Arguments of docker's ``containers.create`` beside image, name, labels and networks"""
    networks: list[str]
    volumes: list[str]
    """Named volumes"""
    after: dict[str, str]
    """Services that must have started (service_started) or be well (service_healthy) first"""
    stop_s: float
    """Time that SIGTERM gives it, seconds"""
    published: list[str] = field(default_factory=list)
    """host:port, once for each published port"""


class ComposeFile:
    """The project of a compose file and of overrides of it."""

    def __init__(
        self, files: Sequence[Path], variables: Mapping[str, str], overrides: Mapping[str, Any] | None = None
    ) -> None:
        """
        Args:
            files: the compose file, and others that change it.
            variables: what ``${NAME}`` stands for; ``.env`` beside the first file has the rest.
            overrides: the content of one more file.

        Raises:
            ComposeFileError: a file is missing or is no compose file.
        """
        self.folder = files[0].resolve().parent
        self._variables = {**_dotenv(self.folder / ".env"), **variables}
        self._content: dict[str, Any] = {}
        for path in files:
            try:
                content = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (OSError, yaml.YAMLError) as error:
                raise ComposeFileError(f"{path} cannot be read: {error}") from error
            if not isinstance(content, dict) or not isinstance(content.get("services"), dict):
                raise ComposeFileError(f"{path} is no compose file: it has no services")
            self._content = _merged(self._content, content)
        self._content = _merged(self._content, overrides or {})
        self.project = self._fill(self._content.get("name", self.folder.name), "name")

    @property
    def services(self) -> list[str]:
        return list(self._content["services"])

    def variable(self, name: str) -> str | None:
        """A variable's value, from ``.env`` or the environment; None if it is unset or empty."""
        return self._variables.get(name) or None

    def service(self, name: str) -> Service:
        """
        Raises:
            ComposeFileError: there is no such service, it wants a variable that is not set, or says what is not
                understood here.
        """
        if name not in self._content["services"]:
            raise ComposeFileError(f"no service {name!r}; there are {', '.join(self.services)}")
        where = f"services.{name}"
        content = self._fill(self._content["services"][name], where)
        after = content.pop("depends_on", {})
        if isinstance(after, list):
            after = {other: {"condition": "service_started"} for other in after}
        build = content.pop("build", None)
        ports = [str(port) for port in content.pop("ports", [])]
        volumes = [self._bind(volume) for volume in content.pop("volumes", [])]
        content.pop("profiles", None)
        stop = content.pop("stop_grace_period", "10s")
        image = content.pop("image", f"{self.project}-{name}")
        networks = content.pop("networks", ["default"])
        create: dict[str, Any] = {"volumes": volumes, "ports": dict(map(_port, ports))}
        for key, value in content.items():
            if key not in _OPTIONS:
                raise ComposeFileError(f"{where}.{key} is not understood here: use `docker compose`")
            create |= _OPTIONS[key](value)
        return Service(
            name=name,
            image=image,
            build=None if build is None else self._build(build),
            create=create,
            networks=list(networks),
            volumes=[source for source, _, _ in (v.partition(":") for v in volumes) if not source.startswith("/")],
            after={other: how["condition"] for other, how in after.items()},
            stop_s=seconds(stop),
            published=[port.rpartition(":")[0] for port in ports],
        )

    def volume(self, name: str) -> dict[str, Any]:
        """Arguments of docker's ``volumes.create`` for a named volume."""
        return self._part("volumes", name, {"driver", "driver_opts"})

    def network(self, name: str) -> dict[str, Any]:
        """Arguments of docker's ``networks.create`` for a network."""
        return self._part("networks", name, {"driver", "internal"})

    def _part(self, kind: str, name: str, known: set[str]) -> dict[str, Any]:
        content: dict[str, Any] = self._fill((self._content.get(kind) or {}).get(name) or {}, f"{kind}.{name}")
        if unknown := content.keys() - known:
            raise ComposeFileError(f"{kind}.{name}.{min(unknown)} is not understood here: use `docker compose`")
        return content

    def _build(self, build: dict[str, Any]) -> Build:
        # an argument without a value takes that of the variable of its name, if there is one
        given = {key: self._variables.get(key) if value is None else value for key, value in build["args"].items()}
        arguments = {key: str(value) for key, value in given.items() if value is not None}
        return Build((self.folder / build["context"]).resolve(), build["dockerfile"], arguments)

    def _bind(self, volume: str) -> str:
        return f"{self.folder}{volume[1:]}" if volume.startswith("./") else volume

    def _fill(self, value: Any, where: str) -> Any:
        if isinstance(value, dict):
            return {key: self._fill(item, f"{where}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [self._fill(item, where) for item in value]
        if not isinstance(value, str):
            return value

        def text(found: re.Match[str]) -> str:
            if found["escaped"]:
                return "$"
            name, how, word = found["plain"] or found["name"], found["how"] or "-", found["word"] or ""
            value = self._variables.get(name)
            if value is None or (how.startswith(":") and not value):
                if how.endswith("?"):
                    raise ComposeFileError(f"{name} is not set: {word or f'{where} needs it'}")
                return word
            return value

        return _VARIABLE.sub(text, value)


def _dotenv(path: Path) -> dict[str, str]:
    """The variables of a ``.env`` file; a comment begins with `` #``."""
    if not path.is_file():
        return {}
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    pairs = (line.removeprefix("export ").partition("=") for line in lines if line and not line.startswith("#"))
    return {name.strip(): re.split(r"\s+#", value)[0].strip().strip("\"'") for name, _, value in pairs}


def _merged(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{key: _merged(below[key], value) if key in below else value for key, value in above.items()}}
    if isinstance(below, list) and isinstance(above, list):
        return below + above
    return above


def seconds(duration: str) -> float:
    """``1m30s`` as 90.0."""
    parts = re.findall(r"([\d.]+)(us|ms|s|m|h)", duration)
    if not parts or "".join(number + unit for number, unit in parts) != duration:
        raise ComposeFileError(f"{duration!r} is no duration such as 10s or 2m")
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def _port(published: str) -> tuple[str, Any]:
    """``127.0.0.1:8000:8000`` as container port and where it is published; a range of host ports is passed as it is."""
    host, _, inside = published.rpartition(":")
    address, _, port = host.rpartition(":")
    return f"{inside}/tcp", (address, port) if address else port


def _healthcheck(value: dict[str, Any]) -> dict[str, Any]:
    times = {key: round(seconds(value[key]) * 1e9) for key in ("interval", "timeout", "start_period") if key in value}
    rest = {key: value[key] for key in ("test", "retries") if key in value}
    if unknown := value.keys() - times.keys() - rest.keys():
        raise ComposeFileError(f"healthcheck.{min(unknown)} is not understood here: use `docker compose`")
    return {"healthcheck": {**times, **rest}}


def _devices(value: dict[str, Any]) -> dict[str, Any]:
    devices = value["resources"]["reservations"]["devices"]
    requests = [
        {
            "Driver": device.get("driver", ""),
            "Count": -1 if device.get("count") == "all" else int(device.get("count", -1)),
            "Capabilities": [device["capabilities"]],
        }
        for device in devices
    ]
    return {"device_requests": requests}


def _environment(value: dict[str, Any]) -> dict[str, Any]:
    return {"environment": {key: str(item) for key, item in value.items() if item is not None}}


def _logging(value: dict[str, Any]) -> dict[str, Any]:
    return {"log_config": {"Type": value["driver"], "Config": value.get("options", {})}}


def _same(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: value}


_OPTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    **{
        name: _same(name)
        for name in ("cap_drop", "command", "entrypoint", "init", "mem_limit", "pids_limit", "read_only")
    },
    **{name: _same(name) for name in ("security_opt", "shm_size", "user", "working_dir")},
    "deploy": _devices,
    "environment": _environment,
    "healthcheck": _healthcheck,
    "logging": _logging,
    "restart": lambda value: {"restart_policy": {"Name": str(value)}},
    "tmpfs": lambda value: {"tmpfs": dict.fromkeys(value, "")},
}
