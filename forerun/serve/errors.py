"""Errors as OpenAI's clients expect them: a status and `{"error": {...}}`, never a stack trace."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from forerun.errors import BusyError, ContextError, EngineError, ForerunError, RequestError

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """An answer that is an error. `param` names the request field at fault, if one is."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = SERVER if self.status >= 500 else INVALID
        if self.status == 429:
            kind = "rate_limit_error"
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


class ClientGoneError(Exception):
    """The client closed its connection, or reads too slowly; there is nobody to answer."""


def unavailable(message: str, code: str, retry_after: float = 1.0) -> ApiError:
    """A 503 that says when to come back."""
    return ApiError(503, message, code, headers={"retry-after": str(ceil(retry_after))})


def api_error(error: ForerunError) -> ApiError:
    """How one of Forerun's own errors is answered."""
    if isinstance(error, BusyError):
        wait = {"retry-after": str(ceil(error.retry_after))}
        return ApiError(429, str(error), "queue_full", headers=wait)
    if isinstance(error, ContextError):
        return ApiError(400, str(error), "context_length_exceeded", error.field)
    if isinstance(error, RequestError):
        return ApiError(400, str(error), "invalid_value", error.field)
    if isinstance(error, EngineError):
        return unavailable(str(error), "engine_stopped", 10.0)
    return ApiError(500, str(error), "internal_error")
