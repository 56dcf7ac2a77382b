"""Answers in pieces: server-sent events, in OpenAI's order.

    data: {role} ... data: {text} ... data: {finish_reason}, of each choice
    data: {usage}, with no choice, where stream_options ask for it
    data: [DONE]

A comment (": ping") after a silence keeps proxies from closing the connection.
"""

import asyncio
from contextlib import aclosing
from typing import Any

from starlette.types import Send

from forerun.engine.request import Delta
from forerun.serve.errors import ApiError, ClientGoneError
from forerun.serve.session import GenerationSession
from forerun.serve.wire import dump_json

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


class EventStream:
    """Writes one exchange to its client.

    envelope  what every chunk says: id, object, created, model
    patience  seconds a client may read nothing
    """

    def __init__(
        self, session: GenerationSession, envelope: dict[str, Any], send: Send, patience: float
    ) -> None:
        options = session.generation.stream
        assert options is not None
        self._session = session
        self._envelope = envelope
        self._send = send
        self._patience = patience
        self._options = options
        self._started = False

    async def run(self) -> None:
        """Write until the end. Raises ApiError only where nothing was written before."""
        try:
            async with aclosing(self._session.news()) as pieces:
                async for news in pieces:
                    events = _events(self._chunks(news)) if news else PING
                    if not self._session.ended:
                        await self._write(events)
            await self._write(events + DONE, last=True)
        except ApiError as error:
            if not self._started:
                raise
            await self._write(_events([error.body()]) + DONE, last=True)

    def _chunks(self, news: list[tuple[int, Delta]]) -> list[dict[str, Any]]:
        """One chunk per choice and kind of news; the very last carries what was asked beside."""
        session, options = self._session, self._options
        shape = session.generation.shape
        chunks = [
            {**self._envelope, "choices": [choice]}
            for index, delta in news
            for choice in shape.chunks(index, delta)
        ]
        if options.include_usage:
            counts = session.tally.usage() if options.continuous_usage_stats else None
            chunks = [{**chunk, "usage": counts} for chunk in chunks]
        if session.ended and options.include_usage:
            chunks.append({**self._envelope, "choices": [], "usage": session.tally.usage()})
        if session.ended and session.generation.stats:
            chunks[-1]["metrics"] = session.tally.metrics()
        return chunks

    async def _write(self, data: bytes, last: bool = False) -> None:
        """Send; waits while the client's buffers are full, but not for ever."""
        if not data:
            return
        try:
            async with asyncio.timeout(self._patience):
                if not self._started:
                    self._started = True
                    start = {"type": "http.response.start", "status": 200, "headers": HEADERS}
                    await self._send(start)
                body = {"type": "http.response.body", "body": data, "more_body": not last}
                await self._send(body)
        except TimeoutError:
            raise ClientGoneError(f"it read nothing for {self._patience:g} s") from None


def _events(chunks: list[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + dump_json(chunk) + b"\n\n" for chunk in chunks)
