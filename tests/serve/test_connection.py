"""One connection, from its beginning until nothing of it is kept."""

import asyncio
import gc
import socket
import struct
import weakref

import pytest
import uvicorn
from uvicorn.server import ServerState

from forerun.serve.connection import connections
from forerun.serve.server import listen


async def app(scope, receive, send):
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hi"})


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
def test_nothing_of_a_lost_connection_is_kept(reset):
    """The timer of keep-alive, 1,000 s here, would keep it."""
    kind, state, made = connections(1000.0), ServerState(), []
    config = uvicorn.Config(app, http=kind, log_config=None, timeout_keep_alive=1000)
    config.load()

    def connection():
        protocol = kind(config=config, server_state=state, app_state={})
        made.append(weakref.ref(protocol))
        return protocol

    async def one():
        server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200")
            assert state.connections
            if reset:
                client = writer.get_extra_info("socket")
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()
            while state.connections:
                await asyncio.sleep(0)
            await asyncio.sleep(0)  # The transport lets go of it in what called connection_lost.
            gc.collect()
            return [kept() for kept in made]

    assert asyncio.run(one()) == [None]


def talk(talking, patience, idle):
    """What `talking` makes of a connection, given its two ends and how to let the server go on."""
    kind, state = connections(patience), ServerState()
    config = uvicorn.Config(app, http=kind, log_config=None, timeout_keep_alive=idle)
    config.load()

    async def settled():
        for _ in range(20):  # Of a loop: what is due at once has happened.
            await asyncio.sleep(0)

    async def one():
        def connection():
            return kind(config=config, server_state=state, app_state={})

        server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            while not state.connections:
                await asyncio.sleep(0)
            await settled()
            try:
                return await talking(reader, writer)
            finally:
                writer.close()

    return asyncio.run(one())


def test_who_connects_and_asks_later_is_answered():
    """Though a head may take no time at all."""

    async def late(reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return await reader.readuntil(b"hi")

    assert talk(late, 0.0, 1000).startswith(b"HTTP/1.1 200")


def test_who_begins_a_head_has_to_end_it():
    async def begun(reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n")
        return await reader.read()

    assert talk(begun, 0.0, 1000) == b""


def test_who_never_asks_is_let_go():
    async def silent(reader, writer):
        return reader.at_eof()

    assert talk(silent, 1000.0, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_send_at_once(host):
    """Nagle's algorithm is off: it would hold the end of an answer back for an acknowledgement."""
    found = []

    class Connection(asyncio.Protocol):
        def connection_made(self, transport):
            found.append(transport)

    async def one():
        with listen(host, 0) as listening:
            server = await asyncio.get_running_loop().create_server(Connection, sock=listening)
            async with server:
                _, writer = await asyncio.open_connection(*listening.getsockname()[:2])
                while not found:
                    await asyncio.sleep(0)
                taken_in = found[0].get_extra_info("socket")
                option = taken_in.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                found[0].close()
                writer.close()
                return option

    assert asyncio.run(one()) != 0
