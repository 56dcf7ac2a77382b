"""An HTTP/1.1 connection that takes turns with others, and is closed if a request's head does not
arrive in time.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from forerun.serve.http.errors import ClientGoneError

PIECE = 1 << 13
"""Bytes that are parsed in one turn of the event loop, except for bodies without chunks: the cost
is per request or chunk, and this many bytes have some hundreds of them.
"""
LONGEST_HEAD = 1 << 16
EXCESS = 1 << 14
"""Bytes of a chunked body that may be something else than content, its chunks' sizes, and a little
more.
"""
SPARED = 16
"""Bytes around a chunk that are not counted; in addition, two for each byte of content. As in Go's
net/http.
"""
CHUNKS = "chunks"
"""Key in a scope's `state`: the connection's Chunks, if it can write an answer in chunks."""
PROBES = 0.1
"""Seconds between two checks whether a client that sends no more still reads."""
LAST_SECONDS = 1.0
"""Seconds for the answer to a client of HTTP/1.0 that sends no more, and so may be gone."""


def connections(patience: float) -> type[HttpToolsProtocol]:
    """Return a class of Uvicorn's connections that are closed if a request's head takes longer than
    `patience` seconds to arrive: a client that sends a byte now and then would hold one forever
    (slowloris). The time begins with the head's first byte. Before that a connection is idle,
    whether it is new or its last request was answered.
    """
    return type("Connection", (_Connection,), {"patience": patience})


def close_idle(connections: Iterable[Any], count: int) -> None:
    """Close at most `count` connections, those that have had no request for the longest time."""
    idle = [one for one in connections if one.timeout_keep_alive_task is not None]
    idle.sort(key=lambda one: one.timeout_keep_alive_task.when())
    for connection in idle[:count]:
        connection.timeout_keep_alive_handler()


class _Connection(HttpToolsProtocol):
    """See `connections`. Data is parsed in parts of PIECE bytes, up to a request that has to wait
    for the answer before it.
    """

    patience: float
    _waiting: asyncio.TimerHandle | None = None
    _probing: asyncio.TimerHandle | None = None
    _feeding: asyncio.Handle | None = None
    _in_head = False
    _going_on = False  # With the body of a request for an upgrade.
    _refused = False
    _chunked = False
    _complete = True  # The request that was read last.
    _head = _left = _excess = _content = _chunks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self.flow = self._flow = Chunks(transport, self.patience)
        self._unread = bytearray()
        self._keep_for_a_while()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._unread += data
        if self._feeding is None:
            self._feed()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open while an answer is being written: its client may only have
        closed its own half. If the client is gone, writing fails.
        """
        answering = self.cycle is not None and not self.cycle.response_complete
        if not answering or not self._complete or self.pipeline or self.scheme == "https":
            return False
        self.cycle.keep_alive = False
        old = self.cycle.scope["http_version"] == "1.0"
        look = self._end if old else self._probe
        self._probing = self.loop.call_later(LAST_SECONDS if old else PROBES, look)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._arrived()
        self._unread.clear()
        for timer in (self._feeding, self._probing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        # Uvicorn leaves the timer of keep-alive running where the client reset the connection,
        # and with it all that belongs to the connection.
        self._unset_keepalive_if_required()

    def on_message_begin(self) -> None:
        """See httptools."""
        if self._going_on:
            return
        super().on_message_begin()
        self._in_head, self._complete = True, False
        self._head = self._left = self._excess = 0

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        if not self._going_on:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools. Fields after a body (trailers) are ignored."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See httptools."""
        if self._going_on:
            self._going_on = False
            return
        self._in_head = False
        self._arrived()
        self._resolve_target()
        given = dict(self.headers)
        self._chunked = b"transfer-encoding" in given
        self._left = 0 if self._chunked else int(given.get(b"content-length", b"0"))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._content += len(body)
        self._chunks += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        self._going_on = self.parser.should_upgrade() and (self._chunked or self._left > 0)
        if not self._going_on:
            self._complete = True
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Continue with unread data after an answer is written."""
        super().on_response_complete()
        if self._unread:
            self._feed_soon()
        elif self._in_head:
            self._wait()

    def send_400_response(self, msg: str) -> None:
        """Reject data that is not HTTP; an answer that is being written ends unchanged."""
        self._unread.clear()
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            if self.pipeline or self.cycle.response_started:
                self.cycle.keep_alive = False
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = msg.encode()
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body)
        )
        # Bytes that are not read reset a connection that is closed, and the answer is lost.
        self._arrived()
        self._probing = self.loop.call_later(LAST_SECONDS, self.transport.close)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection after a time without a request; unread data is dropped."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _feed(self) -> None:
        """Parse the next part, and schedule the rest."""
        self._feeding = None
        if self.transport.is_closing() or not self._unread:
            return
        plain = not self._chunked and not self._complete and not self._in_head
        size = max(PIECE, self._left) if plain else PIECE
        piece = bytes(self._unread[:size])
        del self._unread[:size]
        self._parse(piece)
        if self._unread and not self.pipeline:
            self._feed_soon()
        self._flow.held = bool(self._unread)
        if self._flow.held:
            self._flow.pause_reading()
        elif not self.pipeline and (self.cycle is None or len(self.cycle.body) <= HIGH_WATER_LIMIT):
            self._flow.resume_reading()

    def _feed_soon(self) -> None:
        if self._feeding is None:
            self._feeding = self.loop.call_soon(self._feed)

    def _parse(self, piece: bytes) -> None:
        chunked, self._content, self._chunks = self._chunked and not self._complete, 0, 0
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:  # To what is not spoken here.
            self._unread[:0] = piece[upgrade.args[0] :]
            if self._going_on:  # The parser has skipped the body: this is a head for it.
                kind = b"transfer-encoding: chunked" if self._chunked else None
                length = b"content-length: %d" % self._left
                self.parser.feed_data(b"POST / HTTP/1.1\r\n" + (kind or length) + b"\r\n\r\n")
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._in_head:
            self._head += len(piece)
            if self._head > LONGEST_HEAD:
                self.send_400_response(f"The head of the request has over {LONGEST_HEAD} bytes.")
            elif self.cycle is None or self.cycle.response_complete:
                self._wait()
        elif chunked and not self._complete:
            spared = SPARED * self._chunks + 3 * self._content
            self._excess = max(0, self._excess + len(piece) - spared)
            if self._excess > EXCESS:
                self.send_400_response("The body is chunked into too little in too much.")
        else:
            self._left -= self._content

    def _resolve_target(self) -> None:
        """Resolve a target with scheme and host, as sent to proxies: it takes precedence over the
        Host header (RFC 9112, 3.2.2).
        """
        if self.url.lower().startswith((b"http://", b"https://")):
            target = httptools.parse_url(self.url)
            port = b"" if target.port is None else b":%d" % target.port
            self.headers[:] = [pair for pair in self.headers if pair[0] != b"host"]
            self.headers.append((b"host", target.host + port))
            self.url = (target.path or b"/") + (b"?" + target.query if target.query else b"")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = _unchunked(app, cycle)
        else:
            cycle.scope["state"][CHUNKS] = self._flow
        super()._start_asgi_task(cycle, app)

    def _keep_for_a_while(self) -> None:
        idle, end = self.timeout_keep_alive, self.timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(idle, end)

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(self.patience, self.transport.abort)

    def _arrived(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _probe(self) -> None:
        """Write bytes that a client skips, which fails if the client is gone."""
        if not self.cycle.response_started and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._probing = self.loop.call_later(PROBES, self._probe)

    def _end(self) -> None:
        if not self.cycle.response_started:
            self.transport.abort()


class Chunks(FlowControl):
    """Uvicorn's flow control, which does not resume reading while there is unread data, waits no
    longer than `patience` seconds for a client, and writes chunks of an answer.
    """

    held = False

    def __init__(self, transport: asyncio.Transport, patience: float) -> None:
        super().__init__(transport)
        self._patience = patience

    @property
    def writable(self) -> bool:
        """Whether a chunk can be written at once: the client reads what it gets."""
        return not self.write_paused and not self._transport.is_closing()

    def write(self, chunk: bytes) -> None:
        """Write a part of an answer that has begun and has no content-length; b"" is ignored."""
        if chunk:
            self._transport.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))

    async def drain(self) -> None:
        """Wait until the client has read enough. Raises ClientGoneError if it does not read."""
        try:
            async with asyncio.timeout(self._patience):
                await super().drain()
        except TimeoutError:
            message = f"it read nothing of the answer for {self._patience:g} s"
            raise ClientGoneError(message) from None

    def resume_reading(self) -> None:
        """Resume reading, unless there is unread data."""
        if not self.held:
            super().resume_reading()


def _unchunked(app: Any, cycle: RequestResponseCycle) -> Any:
    """Return an application that ends an answer of unknown length by closing the connection, for
    HTTP/1.0.
    """

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        sized = True

        async def sending(message: Any) -> None:
            nonlocal sized
            if message["type"] == "http.response.start":
                sized = any(name.lower() == b"content-length" for name, _ in message["headers"])
                cycle.chunked_encoding = None if sized else False
            elif not sized:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sending)

    return answer
