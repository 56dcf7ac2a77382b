"""Errors as Ollama's clients expect them."""

from forerun.serve.errors import ApiError


def error_body(error: ApiError) -> dict[str, str]:
    """`{"error": "..."}`."""
    return {"error": str(error)}
