"""Bytes to JSON and back: sizes, depths and numbers are checked before anything uses them."""

import asyncio
import json
import re
import sys
from collections import Counter
from itertools import islice
from math import isfinite
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from forerun.serve.errors import ApiError, ClientGoneError
from forerun.serve.fields import shown

DISCARDED = 16
"""A body that is too large is read, and thrown away, up to so many times the limit: a client
that is still sending would not see the answer. Beyond that the connection is cut."""

AT_ONCE = 16
"""All bodies that are being received may together hold so many times the limit of one, and those
of one client half of what the others leave: no client can take the room of all."""


class Bodies:
    """Receives request bodies, of at most `limit` bytes each and AT_ONCE times that together.

    patience  seconds within which a whole body must arrive
    """

    def __init__(self, limit: int, patience: float) -> None:
        self._limit = limit
        self._patience = patience
        self._held: Counter[str] = Counter()  # Bytes of bodies on their way, by client.

    async def receive(self, request: Request) -> bytes:
        """The body of a request that says it is JSON.

        Raises ApiError (400, 408, 413, 415, 429) and ClientGoneError.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and (not _careless(request) or _from_a_page(request)):
            # Web pages can post any other type to a server on this machine without asking it.
            raise ApiError(415, "The body must be JSON, with content-type: application/json.")
        coding = (request.headers.get("content-encoding") or "identity").strip().lower()
        if coding != "identity":
            raise ApiError(415, f"content-encoding: {shown(coding)} is not read; send plain JSON.")
        declared = request.headers.get("content-length", "")
        too_large = declared.isdigit() and int(declared) > self._limit
        if too_large and "expect" in request.headers:
            raise self._too_large(sent=False)  # It asked first: the answer saves it the work.
        client = "" if request.client is None else request.client.host
        body = bytearray()
        try:
            async with asyncio.timeout(self._patience):
                await self._fill(body, request, client)
        except TimeoutError:
            message = f"The body did not arrive within {self._patience:g} s (--send-seconds)."
            ends = {"connection": "close"}
            raise ApiError(408, message, "timeout", headers=ends) from None
        except ClientDisconnect:
            raise ClientGoneError from None
        finally:
            self._held[client] -= len(body)
            if not self._held[client]:
                del self._held[client]
        return bytes(body)

    async def _fill(self, body: bytearray, request: Request, client: str) -> None:
        received = 0
        async for chunk in request.stream():
            received += len(chunk)
            if received <= self._limit:
                self._hold(client, len(chunk))
                body += chunk
            elif received > self._limit * DISCARDED:
                raise self._too_large(sent=False)
        if received > self._limit:
            raise self._too_large(sent=True)

    def _hold(self, client: str, size: int) -> None:
        free = self._limit * AT_ONCE - self._held.total() - size
        if self._held[client] + size > free:
            wait = {"retry-after": "1", "connection": "close"}
            message = "Too many large bodies arrive at once; try again later."
            raise ApiError(429, message, "too_many_bodies", headers=wait)
        self._held[client] += size

    def _too_large(self, sent: bool) -> ApiError:
        """sent: the whole body has arrived, and the connection can be used again."""
        return ApiError(
            413,
            f"The body is larger than {self._limit} bytes, the limit of this server "
            "(--max-body-bytes).",
            "body_too_large",
            headers={} if sent else {"connection": "close"},
        )


def _careless(request: Request) -> bool:
    """Clients of Ollama and of llama.cpp, and their users with curl, do not say that a body is
    JSON.
    """
    path = request.url.path
    return path.startswith("/api/") or path in ("/completion", "/completions", "/infill")


def _from_a_page(request: Request) -> bool:
    """Browsers say where a request comes from, whatever a page wants; other clients do not."""
    return "origin" in request.headers or "sec-fetch-site" in request.headers


MOST_CONTAINERS = 1 << 17
"""Arrays and objects in one body. Nobody else's bytecode runs while an array is made or freed,
and each costs some .6 microseconds of that."""

_AT_ONCE = 4096
"""Pairs of an object, or pieces of an answer, that are put together in one call of C's."""

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class _UnwantedError(Exception):
    """Python would read it, but it is no JSON, or says two things at once."""


def parse_json(body: bytes) -> Any:
    """JSON without NaN, infinity, absurd depth, repeated keys or invalid UTF-8. Raises ApiError.

    A large body may be parsed on another thread: numbers are made in Python, although C would be
    three times as fast, so that the event loop has its turn between any two of them.
    """
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        _check_containers(text)
        return json.loads(
            text,
            parse_constant=_not_json,
            parse_float=_finite,
            parse_int=_integer,
            object_pairs_hook=_once,
        )
    except RecursionError:
        problem = "it is nested too deeply"
    except UnicodeDecodeError as error:
        problem = f"it is not valid UTF-8 (byte {error.start})"
    except (json.JSONDecodeError, _UnwantedError) as error:
        problem = str(error) if body.strip() else "it is empty"
    except ValueError:
        problem = f"a number has more than {sys.get_int_max_str_digits()} digits"
    raise ApiError(400, f"The body cannot be read as JSON: {problem}.", "invalid_json")


def _check_containers(text: str) -> None:
    """Count arrays and objects outside of strings, where there can be too many."""
    if text.count("[") + text.count("{") <= MOST_CONTAINERS:
        return
    bare = _STRING.sub(lambda _: "", text)  # Calls of Python's again, as in parse_json.
    if bare.count("[") + bare.count("{") > MOST_CONTAINERS:
        raise _UnwantedError(f"it has more than {MOST_CONTAINERS:,} arrays and objects")


def dump_json(value: Any) -> bytes:
    """Compact JSON in UTF-8; what is not valid Unicode becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def dump_large(value: Any) -> bytes:
    """As `dump_json`, for thousands of values: slower, but the interpreter's lock is let go of in
    between.
    """
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    pieces, parts = encoder.iterencode(value), []
    while part := "".join(islice(pieces, _AT_ONCE)):
        parts.append(part.encode("utf-8", "replace"))
    return b"".join(parts)


def event(data: Any, name: str | None = None) -> bytes:
    """A server-sent event, bytes: its name, if it has one, and `data` as JSON in one line."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + dump_json(data) + b"\n\n"


def line(data: Any) -> bytes:
    """`data` as JSON in one line, bytes with a line feed at the end (Ollama's streams)."""
    return dump_json(data) + b"\n"


def _not_json(name: str) -> NoReturn:
    raise _UnwantedError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not isfinite(value):
        raise _UnwantedError(f"the number {digits[:40]} is out of range")
    return value


def _integer(digits: str) -> int:
    """A call of Python's, after which another thread may run: see parse_json."""
    return int(digits)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Of two values under one key, whichever was taken, the other would be lost."""
    found: dict[str, Any] = {}
    for start in range(0, len(pairs), _AT_ONCE):
        found.update(pairs[start : start + _AT_ONCE])
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        name, count = names.most_common(1)[0]
        raise _UnwantedError(f"the key {name[:60]!a} appears {count} times in one object")
    return found
