"""Errors in Anthropic's format."""

from typing import Any

from forerun.serve.http.errors import ApiError

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
    """Return the JSON of an error: `{"type": "error", "error": {...}}`, its type by the status."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _KINDS.get(error.status, kind)
    found: dict[str, Any] = {"type": kind, "message": _message(error)}
    if error.param == "thread":  # At this the clients send the whole conversation instead.
        found["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": found}


def _message(error: ApiError) -> str:
    """Return the message. If a prompt is too long, or leaves no room for max_tokens, it begins with
    the words by which Anthropic's clients recognise that.
    """
    if error.lengths is None:
        return str(error)
    prompt, max_tokens, context = error.lengths
    if prompt >= context:
        return f"prompt is too long: {prompt} tokens > {context} maximum. {error}"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {max_tokens} > {context}, "
        f"decrease input length or `max_tokens` and try again. {error}"
    )
