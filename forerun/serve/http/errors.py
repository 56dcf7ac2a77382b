"""Error answers: a status and a sentence, never a stack trace."""

from collections.abc import Iterable, Mapping
from math import ceil
from time import monotonic
from typing import Any

from forerun.errors import (
    BusyError,
    ContextError,
    EngineError,
    ForerunError,
    RequestError,
    WorkerError,
)

LONGEST_NAME = 80
"""Most characters of a client's name that a message repeats."""
LONGEST_MESSAGE, LONGEST_PARAM = 4000, 400
"""Most characters of an error's message and of its field: either may quote a client's text."""


class ApiError(Exception):
    """An error answer.

    param    the wrong request field, if there is one
    lengths  tokens of the prompt, requested tokens, and the limit of both, if they are too many
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        lengths: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__(_cut(message, LONGEST_MESSAGE))
        self.lengths = lengths
        self.status = status
        self.code = code
        self.param = None if param is None else _cut(param, LONGEST_PARAM)
        self.headers = dict(headers or {})


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON of an error: `{"error": {message, type, param, code}}`, its type by the
    status; OpenAI's clients and most others expect it so.
    """
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if error.status == 429 else kind
    found = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"error": found}


class ClientGoneError(Exception):
    """The client closed its connection, or reads too slowly, so the answer cannot be delivered."""


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 203]}...{text[-200:]}"


def unavailable(message: str, code: str, retry_after: float = 1.0) -> ApiError:
    """Return a 503 with the seconds after which to retry, rounded up; does not raise it."""
    return ApiError(503, message, code, headers={"retry-after": str(ceil(retry_after))})


def shutting_down() -> ApiError:
    """Return the 503 of a server that shuts down; does not raise it."""
    return unavailable("The server is shutting down.", "shutting_down")


def stuck(since: float | None, limit: float) -> ApiError | None:
    """Return a 503 if a step that began at `since` (time.monotonic) has taken more than `limit`
    seconds.
    """
    if since is None or (seconds := monotonic() - since) <= limit:
        return None
    message = f"A step of the engine has been running for {seconds:.0f} s; see the server's log."
    return unavailable(message, "engine_stuck", 30.0)


def api_error(error: ForerunError) -> ApiError:
    """Convert one of Forerun's errors to an ApiError, with its status, code and field; does not
    raise it.
    """
    if isinstance(error, WorkerError):
        return unavailable(str(error), "worker_process_lost")
    if isinstance(error, BusyError):
        return ApiError(429, str(error), "queue_full", headers={"retry-after": "1"})
    if isinstance(error, ContextError):
        lengths = (error.prompt, error.requested, error.context)
        code = "context_length_exceeded"
        # Some clients read the code, others look for it in the message.
        return ApiError(400, f"{error} ({code})", code, error.field, lengths=lengths)
    if isinstance(error, RequestError):
        return ApiError(400, str(error), "invalid_value", error.field)
    if isinstance(error, EngineError):
        return unavailable(str(error), "engine_stopped", 10.0)
    return ApiError(500, str(error), "internal_error")


def unknown_model(name: str, known: Iterable[str]) -> ApiError:
    """Return the 404 for a name that is not in `known`; a long name is cut."""
    cut = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
    names = ", ".join(map(repr, known))
    message = f"The model {cut!a} does not exist; this server serves {names}."
    return ApiError(404, message, "model_not_found", "model")
