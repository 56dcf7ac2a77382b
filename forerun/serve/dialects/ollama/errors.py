"""Errors in Ollama's format."""

from forerun.serve.http.errors import ApiError


def error_body(error: ApiError) -> dict[str, str]:
    """Return the JSON of an error: `{"error": "..."}`."""
    return {"error": str(error)}
