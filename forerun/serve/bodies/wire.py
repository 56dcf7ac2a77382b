"""Decodes and encodes JSON: sizes, depths and numbers are checked before anything uses them."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from forerun.serve.bodies.fields import shown
from forerun.serve.http.errors import ApiError, ClientGoneError
from forerun.text.json_text import JsonFault, read_json

DISCARDED = 16
"""A body that is too large is read and discarded, up to this many times the limit: a client that is
still sending would not see the answer. Beyond that the connection is closed.
"""

AT_ONCE = 16
"""All bodies that are being received may together have this many times the limit of one body, and
those of one client half of what the others leave: no client can use up the room of all.
"""


@dataclass(frozen=True, slots=True)
class Received:
    """A body that was read before its route was chosen.

    value  its JSON value
    fault  the error if it has none
    """

    data: bytes
    value: Any = None
    fault: ApiError | None = None


class Bodies:
    """Receives request bodies, of at most `limit` bytes each and AT_ONCE times that together.

    patience  seconds within which a whole body must arrive
    """

    def __init__(self, limit: int, patience: float) -> None:
        self._limit = limit
        self._patience = patience
        self._held: Counter[str] = Counter()  # Bytes of bodies on their way, by client.

    async def receive(self, request: Request) -> bytes:
        """Receive the body of a request whose type is JSON. Raises ApiError (400, 408, 413, 415,
        429) and ClientGoneError.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and (not _careless(request) or _from_a_page(request)):
            # Web pages can post any other type to a server on this machine without asking it.
            raise ApiError(415, "The body must be JSON, with content-type: application/json.")
        coding = (request.headers.get("content-encoding") or "identity").strip().lower()
        if coding != "identity":
            raise ApiError(
                415, f"content-encoding: {shown(coding)} is not supported; send plain JSON."
            )
        declared = request.headers.get("content-length", "")
        too_large = declared.isdigit() and int(declared) > self._limit
        if too_large and "expect" in request.headers:
            raise self._too_large(sent=False)  # It sent `Expect`: refusing now saves the upload.
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
            self._release(client, len(body))
        return bytes(body)

    @contextmanager
    def holding(self, request: Request, size: int) -> Iterator[None]:
        """Count a received body as being received within this context, because it waits. Raises
        ApiError (429) as `receive`.
        """
        client = "" if request.client is None else request.client.host
        self._hold(client, size)
        try:
            yield
        finally:
            self._release(client, size)

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

    def _release(self, client: str, size: int) -> None:
        self._held[client] -= size
        if not self._held[client]:
            del self._held[client]

    def _too_large(self, sent: bool) -> ApiError:
        """Return the error for a body that is too large. sent: the whole body has arrived, so the
        connection can be used again.
        """
        return ApiError(
            413,
            f"The body is larger than {self._limit} bytes, the limit of this server "
            "(--max-body-bytes).",
            "body_too_large",
            headers={} if sent else {"connection": "close"},
        )


def _careless(request: Request) -> bool:
    """Return whether the content type may be missing: clients of Ollama and llama.cpp, and their
    users with curl, often send none.
    """
    path = request.url.path
    native = ("/completion", "/completions", "/infill", "/embedding", "/embeddings")
    return path.startswith("/api/") or path in native


def check_same_site(request: Request) -> None:
    """Raise ApiError (403) if a page of another site sent a request that needs no body: browsers
    let any page do so without asking the server. Pages of --allowed-origins may.
    """
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
    settings = request.app.state.service.settings
    own = {f"{scheme}://{request.headers.get('host')}" for scheme in ("http", "https")}
    if "*" in settings.allowed_origins or origin in {*own, *settings.allowed_origins}:
        return
    if origin is not None or site not in (None, "none", "same-origin"):
        raise ApiError(403, "A page of another site may not use this route.", "cross_site")


def _from_a_page(request: Request) -> bool:
    """Return whether a web page sent the request: browsers always report the origin, other clients
    do not.
    """
    return "origin" in request.headers or "sec-fetch-site" in request.headers


_AT_ONCE = 4096
"""Parts of an answer that are joined in one call."""


def parse_json(body: bytes) -> Any:
    """Parse a body, as `read_json`. Raises ApiError, also for invalid UTF-8."""
    try:
        return read_json(body.decode(json.detect_encoding(body), "surrogatepass"))
    except UnicodeDecodeError as error:
        problem = f"it is not valid UTF-8 (byte {error.start})"
    except JsonFault as error:
        problem = str(error)
    raise ApiError(400, f"The body cannot be read as JSON: {problem}.", "invalid_json")


def dump_json(value: Any) -> bytes:
    """Encode as compact JSON in UTF-8; a lone surrogate becomes a question mark. Outside the event
    loop it is slower, but releases the interpreter's lock again and again, so that the loop
    continues.
    """
    try:
        asyncio.get_running_loop()
        return msgspec.json.encode(value)
    except (RuntimeError, UnicodeEncodeError):
        pass
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    pieces, parts = encoder.iterencode(value), []
    while part := "".join(islice(pieces, _AT_ONCE)):
        parts.append(part.encode("utf-8", "replace"))
    return b"".join(parts)


def event(data: Any, name: str | None = None) -> bytes:
    """Encode a server-sent event: its name, if it has one, and `data` as JSON in one line."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return b"%sdata: %s\n\n" % (head, dump_json(data))


def line(data: Any) -> bytes:
    """Encode `data` as JSON in one line with a line feed at the end (Ollama's streams)."""
    return dump_json(data) + b"\n"
