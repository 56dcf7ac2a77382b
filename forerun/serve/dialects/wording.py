"""Error formats by path: an error before any route reads the request has the format of its path's
dialect.
"""

from collections.abc import Callable
from typing import Any

from forerun.serve.dialects.anthropic.errors import error_body as anthropic_error
from forerun.serve.dialects.ollama.errors import error_body as ollama_error
from forerun.serve.dialects.openai.errors import error_body as openai_error
from forerun.serve.http.errors import ApiError

_FAMILIES: tuple[tuple[str, Callable[[ApiError], Any]], ...] = (
    ("/v1/messages", anthropic_error),
    ("/api/", ollama_error),
)
"""Beginnings of paths, with the words of their clients."""


def error_body(path: str, error: ApiError) -> Any:
    """Return the JSON of an error on a path; in OpenAI's format unless the path belongs to another
    dialect.
    """
    for prefix, body in _FAMILIES:
        if path.startswith(prefix):
            return body(error)
    return openai_error(error)


def request_ids(path: str, id: str) -> list[tuple[bytes, bytes]]:
    """Return headers by which a family's clients know a request, beside x-request-id."""
    return [(b"request-id", id.encode())] if path.startswith("/v1/messages") else []
