"""Around every request: authorisation, errors, and one line in the log."""

import asyncio
import hashlib
import hmac
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.errors import ForerunError
from forerun.serve.answers.record import RequestRecord
from forerun.serve.bodies.fields import UNKNOWN_FIELD
from forerun.serve.bodies.wire import dump_json
from forerun.serve.dialects.anthropic.errors import error_body as anthropic_error
from forerun.serve.dialects.ollama.errors import error_body as ollama_error
from forerun.serve.http.errors import ApiError, ClientGoneError, api_error
from forerun.serve.http.errors import error_body as openai_error
from forerun.serve.http.hosts import AllowedHosts
from forerun.serve.observe.logs import FIELDS

log = logging.getLogger("forerun.serve")

OPEN_PATHS = ("/health", "/v1/health", "/")
"""Paths that need no key."""
OPEN_PREFIX = "/ui/"
"""Files of the web UI need no key either: they are the same everywhere, and ask the user for it."""
MOST_HEADERS = 256
"""Most headers of a request; clients send fewer than a tenth of that."""

MOST_UNREAD = 1 << 16
"""Bytes of a body that are still read, and discarded, after its request is answered."""
_ENDS = (b"connection", b"close")

PIECE = 1 << 16
"""Bytes of an answer that are written at once, asyncio's own limit of what waits to be sent."""

LINGER_SECONDS = 5.0
"""Seconds that a client whose request was rejected while it was still sending has to read the
answer and to close the connection; as nginx's lingering_timeout.
"""

ANTHROPIC, OLLAMA = "/v1/messages", "/api/"
"""Path prefixes of dialects other than OpenAI's: an error before a route reads the request has the
format of its path's dialect.
"""

Traces = Callable[[RequestRecord, str, str, Mapping[str, str]], None]
"""Called with the record, method, path and headers of a request that has ended."""


class RequestMiddleware:
    """ASGI middleware for authorisation, errors and the log.

    keys      the API keys; empty = no key is needed
    hosts     the names that requests may use for the server
    traces    called for every request that is logged
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str],
        hosts: AllowedHosts,
        traces: Traces | None = None,
    ) -> None:
        self._app = app
        self._traces = traces
        self._hosts = hosts
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request to the application, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = RequestRecord.of(headers)
        scope.setdefault("state", {})["record"] = record

        body = _BodyToCome(headers, receive)
        ends = False

        async def stamped(message: Message) -> None:
            nonlocal ends
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", record.id.encode()),
                    *_own_ids(scope["path"], record.id),
                    *record.headers(),
                ]
                if body.large and _ENDS not in message["headers"]:
                    message["headers"].append(_ENDS)
                ends = _ENDS in message["headers"]
            elif ends and not message.get("more_body", False):
                await stamped({**message, "more_body": True})
                await body.discard()
                message = {"type": "http.response.body", "body": b""}
            for part in _pieces(message):
                await send(part)

        try:
            with ExitStack() as scope["state"]["until_answered"]:
                await self._pass(scope, body.receive, stamped, record)
        except ClientGoneError as error:
            record.note = f"the client is gone: {error}" if str(error) else "the client is gone"
        finally:
            record.route = _route(scope)
            self._note(record, scope["method"], scope["path"], headers)

    def _note(self, record: RequestRecord, method: str, path: str, headers: Headers) -> None:
        """Log and trace the request. A request that only reads state, and succeeds or gets 503, has
        the level debug: monitors, pages and clients send one every few seconds.
        """
        status = record.answered()
        poll = method in ("GET", "HEAD", "OPTIONS") and (status < 400 or status == 503)
        found = record.fields()
        fields = {"method": method, "path": path, "status": status, **found}
        if record.note:
            fields["note"] = record.note
        level = logging.DEBUG if poll else logging.INFO
        log.log(level, record.line(method, path, found), extra={FIELDS: fields})
        if self._traces is not None and not poll:
            self._traces(record, method, path, headers)

    async def _pass(
        self, scope: Scope, receive: Receive, send: Send, record: RequestRecord
    ) -> None:
        try:
            self._admit(scope)
            await self._app(scope, receive, send)
        except ClientGoneError:
            raise
        except ApiError as error:
            await _answer(scope["path"], error, send, record)
        except ForerunError as error:
            await _answer(scope["path"], api_error(error), send, record)
        except Exception:
            log.exception("request %s failed", record.id)
            if record.status is not None:
                raise
            message = f"The server failed; see its log for request {record.id}."
            failed = ApiError(500, message, "internal_error")
            await _answer(scope["path"], failed, send, record)

    def _admit(self, scope: Scope) -> None:
        """Raise ApiError if the request is not accepted: 505 and 431 for other versions and too
        many headers, 403 for a host name that is not this server's, 401 for a missing or wrong key.
        Takes the same time for any key.
        """
        if scope["http_version"] not in ("1.0", "1.1"):
            message = f"This server speaks HTTP/1.1, not HTTP/{scope['http_version']}."
            raise ApiError(505, message, "http_version")
        if len(scope["headers"]) > MOST_HEADERS:
            message = f"The request has more than {MOST_HEADERS} headers."
            raise ApiError(431, message, "too_many_headers")
        path, headers = scope["path"], Headers(scope=scope)
        host = headers.get("host")
        if not self._hosts.admits(host):
            raise ApiError(
                403,
                f"This server does not accept the host name {ascii(host)[:200]}. Ask it by its "
                "address, or start it with --allowed-hosts and the name that requests come under.",
                "host_not_allowed",
            )
        if not self._keys or path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        given_key = given.strip().encode("latin-1", "replace")
        known = [hmac.compare_digest(given_key, key) for key in self._keys]
        if not any(known):
            problem = "The API key is wrong." if given else "No API key was given."
            raise ApiError(
                401,
                f"{problem} Send the header: Authorization: Bearer KEY.",
                "invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        # By the key itself: what is kept on disk outlives the order of keys.
        scope["state"]["tenant"] = hashlib.sha256(self._keys[known.index(True)]).hexdigest()


def _route(scope: Scope) -> str | None:
    """Return the path with names in place of its parameters; None if it is no route."""
    if "path_params" not in scope:
        return None
    path: str = scope["path"]
    for name, value in scope["path_params"].items():
        path = path.replace(f"/{value}", f"/{{{name}}}", 1)
    return path


def _pieces(message: Message) -> Iterator[Message]:
    """Yield a message, with a long body in parts: sending one waits until the one before is
    read.
    """
    body = message.get("body", b"")
    more = message.get("more_body", False)
    for start in range(0, len(body), PIECE):
        rest = more or start + PIECE < len(body)
        yield {**message, "body": body[start : start + PIECE], "more_body": rest}
    if not body:
        yield message


def _own_ids(path: str, id: str) -> list[tuple[bytes, bytes]]:
    """Return the headers with the request id that a dialect's clients expect, besides
    x-request-id.
    """
    return [(b"request-id", id.encode())] if path.startswith(ANTHROPIC) else []


def _error_body(path: str, error: ApiError) -> Any:
    """Return the JSON of an error in the format of its path's dialect."""
    if path.startswith(ANTHROPIC):
        return anthropic_error(error)
    return ollama_error(error) if path.startswith(OLLAMA) else openai_error(error)


_DECLARED = re.compile(r"[a-z_]+(\[\d+\])*")
"""The part of a field's path whose names are declared: what follows may be a client's text."""


async def _answer(path: str, error: ApiError, send: Send, record: RequestRecord) -> None:
    """Send an error body."""
    field = _DECLARED.match(error.param or "")
    known = field is not None and not str(error).startswith(UNKNOWN_FIELD)
    record.note = record.note or f"{error.code or ''} {field[0] if field and known else ''}".strip()
    body = dump_json(_error_body(path, error))
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    pairs = [(k.encode(), v.encode()) for k, v in (headers | error.headers).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


class _BodyToCome:
    """The unread part of a request's body. An answer sent before it is read ends the connection if
    more than MOST_UNREAD remains, or an unknown amount.
    """

    def __init__(self, headers: Headers, receive: Receive) -> None:
        length = headers.get("content-length", "0")
        self._receive = receive
        self._left = int(length) if length.isdigit() else 0
        self._chunked = "transfer-encoding" in headers

    @property
    def large(self) -> bool:
        """Whether sending an answer now closes the connection."""
        return self._chunked or self._left > MOST_UNREAD

    async def receive(self) -> Message:
        """See ASGI."""
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if not message.get("more_body", False):
            self._left, self._chunked = 0, False
        return message

    async def discard(self) -> None:
        """Read and discard what the client still sends, until it ends or for LINGER_SECONDS, while
        the client reads the answer: unread bytes would reset the connection, and the answer would
        be lost.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while (await self.receive()).get("more_body", False):
                    pass
