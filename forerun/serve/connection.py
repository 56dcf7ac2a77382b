"""One HTTP/1.1 connection, given up when the head of a request does not arrive in time."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def connections(patience: float) -> type[H11Protocol]:
    """Uvicorn's connections, closed when a request's head takes longer than `patience` seconds to
    arrive: a client that sends a byte now and then would hold one for ever (slowloris). The clock
    runs from the head's first byte. Before that a connection is idle, a new one as one whose
    request was answered: who connects ahead, or is slow to begin, has done nothing wrong.
    """

    class Connection(H11Protocol):
        """See `connections`."""

        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """See asyncio.Protocol."""
            super().connection_made(transport)
            idle, end = self.timeout_keep_alive, self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(idle, end)

        def data_received(self, data: bytes) -> None:
            """See asyncio.Protocol."""
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE or not self.conn.trailing_data[0]:
                self._arrived()
            elif self._waiting is None:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            """See asyncio.Protocol."""
            self._arrived()
            super().connection_lost(exc)
            # Uvicorn leaves the timer of keep-alive running where the client reset the connection,
            # and with it all that belongs to the connection.
            if self.timeout_keep_alive_task is not None:
                self.timeout_keep_alive_task.cancel()

        def timeout_keep_alive_handler(self) -> None:
            """Called when nothing was asked for a while: what is unread by then stays so."""
            if self.transport.get_write_buffer_size():
                self.transport.abort()
            else:
                super().timeout_keep_alive_handler()

        def _wait(self) -> None:
            self._waiting = self.loop.call_later(patience, self.transport.abort)

        def _arrived(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

    return Connection
