"""A proxy that slows, cuts and half-closes: a bad network between client and server."""

import asyncio
import random
import socket
import struct
import threading
from contextlib import contextmanager


class Proxy:
    """Listens on a port and passes on what comes, spoilt in one way.

    drip   a few bytes at a time, in both directions
    cut    reset both connections somewhere in the answer
    half   the client's side is shut as soon as its request went through
    """

    def __init__(self, upstream: tuple[str, int], how: str, seed: int) -> None:
        self._upstream, self._how, self._random = upstream, how, random.Random(seed)
        self.port = 0

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        async with server:
            await stop.wait()

    async def _connected(self, client, gone) -> None:
        server, sent = await asyncio.open_connection(*self._upstream)
        limit = self._random.randrange(1, 600) if self._how == "cut" else None
        pumps = [
            asyncio.ensure_future(self._pump(client, sent, None, self._how == "half")),
            asyncio.ensure_future(self._pump(server, gone, limit, False)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        if self._how == "half" and not pumps[1].done():
            await asyncio.wait(pumps[1:])
        for pump in pumps:
            pump.cancel()
        for writer in (gone, sent):
            if limit is not None:  # A reset, not an orderly end.
                linger = struct.pack("ii", 1, 0)
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()

    async def _pump(self, source, target, limit, shut) -> None:
        """Pass on until the end, or until `limit` bytes; `shut`: the first piece, then no more."""
        passed = 0
        try:
            while data := await source.read(65536):
                data = data[: None if limit is None else limit - passed]
                size = self._random.randrange(1, 8) if self._how == "drip" else len(data)
                for start in range(0, len(data), size):
                    target.write(data[start : start + size])
                    await target.drain()
                    await asyncio.sleep(0)
                passed += len(data)
                if limit is not None and passed >= limit:
                    return
                if shut:
                    target.write_eof()
                    return
        except (ConnectionError, asyncio.CancelledError):
            return


@contextmanager
def proxied(upstream: tuple[str, int], how: str, seed: int = 1):
    """The port of a proxy that runs meanwhile."""
    proxy, ready = Proxy(upstream, how, seed), threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    thread = threading.Thread(
        target=loop.run_until_complete, args=(proxy.serve(ready, stop),), daemon=True
    )
    thread.start()
    assert ready.wait(30)
    try:
        yield proxy.port
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
