"""Every error of the HTTP API is JSON: {"error": {"code", "message", "where"}}."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from reward_server.contract import ContractError, ErrorDetail, ErrorResponse
from reward_server.receive import TooLargeError, UnsupportedTypeError

RETRY_AFTER_S = 1

Handler = Callable[[Request, Any], Coroutine[Any, Any, Response]]


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self, status: int, code: str, message: str, where: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.detail = ErrorDetail(code=code, message=message, where=where)

    def response(self) -> Response:
        body = ErrorResponse(error=self.detail).model_dump_json()
        return Response(body, self.status, self.headers, media_type="application/json")


def come_back(status: int, code: str, message: str) -> ApiError:
    """An error that will pass: the client should try again after a while."""
    return ApiError(status, code, message, headers={"Retry-After": str(RETRY_AFTER_S)})


def no_job(job_id: str) -> ApiError:
    message = f"no job {job_id!r}: never sent, forgotten after its time, or deleted"
    return ApiError(404, "unknown_job", message, "path.id")


def handlers() -> dict[int | type[Exception], Handler]:
    """By exception: the answer that it becomes."""

    def answer(make: Callable[[Any], ApiError]) -> Handler:
        async def handler(request: Request, error: Any) -> Response:
            return make(error).response()

        return handler

    def invalid_query(error: RequestValidationError) -> ApiError:
        first = error.errors()[0]
        return ApiError(422, "malformed", first["msg"], ".".join(map(str, first["loc"])))

    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    return {
        ApiError: answer(lambda error: error),
        ContractError: answer(lambda error: ApiError(422, "malformed", str(error), error.where)),
        TooLargeError: answer(lambda error: ApiError(413, "too_large", str(error), error.where)),
        UnsupportedTypeError: answer(
            lambda error: ApiError(415, "unsupported_type", str(error), "header Content-Type")
        ),
        RequestValidationError: answer(invalid_query),
        HTTPException: answer(lambda error: ApiError(error.status_code, "http", str(error.detail))),
        RedisError: answer(lambda error: come_back(503, "redis_away", f"the queue is away: {error}")),
        ClientDisconnect: gone,
    }
