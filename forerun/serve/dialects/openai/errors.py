"""Errors as OpenAI's clients expect them: `{"error": {...}}`."""

from typing import Any

from forerun.serve.http.errors import ApiError

INVALID = "invalid_request_error"
SERVER = "server_error"
BUSY = "rate_limit_error"


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON of an error: `{"error": {message, type, param, code}}`, its type by the
    status.
    """
    kind = SERVER if error.status >= 500 else INVALID
    kind = BUSY if error.status == 429 else kind
    found = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"error": found}
