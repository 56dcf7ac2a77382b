"""Bytes to JSON and back: sizes, depths and numbers are checked before anything uses them."""

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from forerun.serve.errors import ApiError, ClientGoneError

DISCARDED = 16
"""A body that is too large is read, and thrown away, up to so many times the limit: a client
that is still sending would not see the answer. Beyond that the connection is cut."""


async def read_body(request: Request, limit: int, patience: float) -> bytes:
    """The body of a request that says it is JSON, at most `limit` bytes.

    patience  seconds the client may be silent while it sends

    Raises ApiError (400, 408, 413, 415) and ClientGoneError.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Web pages can post any other type to a server on this machine without asking it.
        raise ApiError(415, "The body must be JSON, with content-type: application/json.")
    return await _received(request, limit, patience)


def parse_json(body: bytes) -> Any:
    """JSON without NaN, infinity, absurd depth or invalid UTF-8. Raises ApiError."""
    try:
        return json.loads(body, parse_constant=_not_json)
    except RecursionError:
        problem = "it is nested too deeply"
    except UnicodeDecodeError as error:
        problem = f"it is not valid UTF-8 (byte {error.start})"
    except ValueError as error:
        problem = str(error)
    raise ApiError(400, f"The body cannot be read as JSON: {problem}.", "invalid_json")


def dump_json(value: Any) -> bytes:
    """Compact JSON in UTF-8; what is not valid Unicode becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


async def _received(request: Request, limit: int, patience: float) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = declared.isdigit() and int(declared) > limit
    if too_large and "expect" in request.headers:
        raise _too_large(limit)  # It asked before sending: the answer saves it the work.
    body, received = bytearray(), 0
    stream = request.stream()
    try:
        while True:
            async with asyncio.timeout(patience):
                chunk = await anext(stream, None)
            if chunk is None:
                break
            received += len(chunk)
            if received > limit * DISCARDED:
                break
            too_large = too_large or received > limit
            if too_large:
                body.clear()
            else:
                body += chunk
    except TimeoutError:
        raise ApiError(408, f"The body stopped arriving for {patience:g} s.", "timeout") from None
    except ClientDisconnect:
        raise ClientGoneError from None
    if too_large:
        raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {limit} bytes, the limit of this server (--max-body-bytes).",
        "body_too_large",
        headers={"connection": "close"},
    )
