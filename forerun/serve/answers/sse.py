"""Answers in pieces, in a dialect's words: server-sent events or lines of JSON.

What a dialect writes after a silence keeps proxies from closing the connection.
"""

from contextlib import aclosing

from starlette.types import Send

from forerun.serve.answers.contract import Dialect
from forerun.serve.answers.session import GenerationSession
from forerun.serve.http.errors import ApiError
from forerun.serve.http.workers import Workers

HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class EventStream:
    """Writes one answer to its client."""

    def __init__(
        self, session: GenerationSession, dialect: Dialect, workers: Workers, send: Send
    ) -> None:
        self._session = session
        self._workers = workers
        self._dialect = dialect
        self._send = send
        self._started = False

    async def run(self) -> None:
        """Write until the end. Raises ApiError only where nothing was written before."""
        session, dialect = self._session, self._dialect
        try:
            async with aclosing(session.news()) as pieces:
                async for news in pieces:
                    ended = session.ended
                    events = dialect.ping
                    if news:
                        size, told = dialect.size(news), (news, session.tally, ended)
                        events = await self._workers.run(size, dialect.events, *told)
                    if not ended:
                        await self._write(events)
            await self._write(events + dialect.end(None), last=True)
        except ApiError as error:
            if not self._started:
                raise
            await self._write(dialect.end(error), last=True)

    async def _write(self, data: bytes, last: bool = False) -> None:
        """Send; waits while the client's buffers are full."""
        if not data and not last:
            return
        if not self._started:
            self._started = True
            kind = (b"content-type", self._dialect.media_type)
            start = {"type": "http.response.start", "status": 200}
            await self._send({**start, "headers": [kind, *HEADERS]})
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
