"""Who may talk to the gateway: the bearer token, and the rule that without one only this machine is served."""

from __future__ import annotations

import hmac
import ipaddress
import socket

from starlette.types import ASGIApp, Receive, Scope, Send

from reward_server.errors import ApiError

_WHAT_TO_SET = (
    "send this server's token in the header `Authorization: Bearer TOKEN` "
    "(the reward-server command takes it from REWARD_SERVER_TOKEN, the trainer from TRAINER_REWARD__TOKEN)"
)
OPEN_PATHS = frozenset({"/healthz", "/readyz"})


class BearerAuth:
    """Refuses requests without the right token before their body is read."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                headers = {"WWW-Authenticate": "Bearer"}
                problem = "the bearer token is wrong" if given else "a bearer token is needed, and none was sent"
                error = ApiError(401, "unauthorized", f"{problem}: {_WHAT_TO_SET}", "header Authorization", headers)
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def check_exposure(host: str, token: str | None) -> None:
    """Refuse to serve other machines without a token.

    Raises:
        ValueError: ``token`` is None and ``host`` is, or may resolve to, an address that is not loopback.
    """
    if token is not None:
        return
    try:
        addresses = [ipaddress.ip_address(host or "0.0.0.0")]  # an empty host means all addresses
    except ValueError:
        try:
            addresses = [ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, None)]
        except OSError as error:
            raise ValueError(f"host {host!r} cannot be resolved: {error}") from error
    if not all(address.is_loopback for address in addresses):
        raise ValueError(
            f"host {host!r} can be reached from other machines, and no token is set: set token (or token_file), "
            "or listen on 127.0.0.1"
        )
