"""Errors as Anthropic's clients expect them."""

from typing import Any

from forerun.serve.errors import ApiError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    """`{"type": "error", "error": {...}}`."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _KINDS.get(error.status, kind)
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
