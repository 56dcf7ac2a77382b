"""One connection, from its beginning until nothing of it is kept."""

import asyncio
import gc
import json
import socket
import struct
import weakref
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.server import ServerState

from forerun.serve.http.connection import connections
from forerun.serve.server import listen
from tests.counted import lines


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


def talk(talking, patience=1000.0, idle=1000, app=app):
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


def test_a_request_long_after_the_connection_is_answered():
    """Though a head may take no time at all."""

    async def late(reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return await reader.readuntil(b"hi")

    assert talk(late, 0.0, 1000).startswith(b"HTTP/1.1 200")


def test_a_begun_head_has_to_end():
    async def begun(reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n")
        return await reader.read()

    assert talk(begun, 0.0, 1000) == b""


def test_a_client_without_a_request_is_dropped():
    async def silent(reader, writer):
        return reader.at_eof()

    assert talk(silent, 1000.0, 0)


async def echo(scope, receive, send):
    """Answer with the request itself, chunked."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    names = sorted({name.decode(): value.decode() for name, value in scope["headers"]}.items())
    seen = [scope["path"], scope["query_string"].decode(), names, body.decode()]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(seen).encode()})


def echoed(data, until=b"0\r\n\r\n", times=1):
    """Return the requests that `echo` reads from these bytes."""

    async def one(reader, writer):
        writer.write(data)
        answers = [await reader.readuntil(until) for _ in range(times)]
        return [
            json.loads(answer[answer.index(b"[") : answer.rindex(b"]") + 1]) for answer in answers
        ]

    return talk(one, app=echo)


def refused(data):
    """What is answered to these bytes before the connection ends."""

    async def one(reader, writer):
        writer.write(data)
        return await reader.read()

    return talk(one, app=echo)


HEAD = b"POST /a HTTP/1.1\r\nHost: x\r\n"
NEXT = b"GET /b HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def test_chunks_of_one_byte_are_read_in_turns():
    """So many that one read holds 43,690 of them."""
    kind = connections(1000.0)
    config = uvicorn.Config(app, http=kind, log_config=None)
    config.load()

    async def one():
        protocol = kind(config=config, server_state=ServerState(), app_state={})
        transport = Mock(asyncio.Transport)
        transport.get_extra_info.return_value = None
        transport.is_closing.return_value = False
        protocol.connection_made(transport)
        protocol.data_received(CHUNKED)
        data = b"1\r\nx\r\n" * ((1 << 18) // 6)
        count = lines(lambda: protocol.data_received(data))
        assert transport.pause_reading.called
        protocol.connection_lost(None)
        return count

    assert asyncio.run(one()) < 40_000


def test_a_body_in_chunks_of_one_byte_arrives():
    assert echoed(CHUNKED + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n")[0][3] == "x" * 50_000


@pytest.mark.parametrize(
    "data",
    [
        CHUNKED + (b"1;" + b"a" * 1000 + b"\r\nx\r\n") * 40,
        CHUNKED + b"1\r\nx\r\n0\r\n" + b"a: b\r\n" * 10_000,
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + NEXT,
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + NEXT,
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"a: b\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"a" * (1 << 17) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        CHUNKED + b"x\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["extensions", "trailers", "both", "both, turned", "two", "negative", "headers", "target",
         "no size", "connect"],
)  # fmt: skip
def test_what_is_refused_ends_the_connection(data):
    answer = refused(data)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1


def test_a_target_with_scheme_and_host():
    answer = echoed(b"GET http://real:80/a/b?c=d HTTP/1.1\r\nHost: other\r\n\r\n")
    assert answer == [["/a/b", "c=d", [["host", "real:80"]], ""]]
    assert echoed(b"GET http://real HTTP/1.1\r\nHost: other\r\n\r\n")[0][0] == "/"


def test_what_stands_behind_a_body_is_no_header():
    data = CHUNKED + b"2\r\nab\r\n0\r\nauthorization: x\r\n\r\n"
    assert echoed(data) == [["/a", "", [["host", "x"], ["transfer-encoding", "chunked"]], "ab"]]


def test_requests_in_advance_are_answered_in_order():
    """A few at a time, so that thousands in one read are no thousands of tasks."""
    data = b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(3000))
    assert [one[0] for one in echoed(data, times=3000)] == [f"/{number}" for number in range(3000)]


def test_an_upgrade_that_is_not_taken_changes_nothing():
    """As Java's client asks with each request."""
    asks = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: a\r\n"
    data = HEAD + asks + b"Content-Length: 2\r\n\r\nab"
    answer = echoed(data + data + b"GET /c HTTP/1.1\r\nHost: x\r\n" + asks + b"\r\n", times=3)
    assert [(one[0], one[3]) for one in answer] == [("/a", "ab"), ("/a", "ab"), ("/c", "")]


def test_http_1_0_has_no_chunks():
    head, _, body = refused(b"GET /a HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert b"chunked" not in head and json.loads(body)[0] == "/a"


def slow(seconds, ended):
    async def app(scope, receive, send):
        await receive()
        waiting = asyncio.create_task(receive())
        await asyncio.wait([waiting], timeout=seconds)
        ended.append(waiting.done())
        waiting.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"late"})

    return app


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_client_that_ends_its_half_gets_its_answer(version):
    async def one(reader, writer):
        writer.write(b"GET /a HTTP/" + version + b"\r\nHost: x\r\n\r\n")
        writer.write_eof()
        return await reader.read()

    ended = []
    answer = talk(one, app=slow(0.3, ended))
    assert b" 200 OK" in answer and answer.count(b"late") == 1 and ended == [False]


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_one_that_is_gone_is_noticed(version):
    async def one(reader, writer):
        writer.write(b"GET /a HTTP/" + version + b"\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.05)
        writer.close()
        while not ended:
            await asyncio.sleep(0.01)

    ended = []
    talk(one, app=slow(300, ended))
    assert ended == [True]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_send_at_once(host):
    """Nagle's algorithm is off: it would hold the end of an answer back for an acknowledgement."""
    options = []

    class Connection(asyncio.Protocol):
        def connection_made(self, transport):
            options.append(transport)

    async def one():
        with listen(host, 0) as listening:
            server = await asyncio.get_running_loop().create_server(Connection, sock=listening)
            async with server:
                _, writer = await asyncio.open_connection(*listening.getsockname()[:2])
                while not options:
                    await asyncio.sleep(0)
                taken_in = options[0].get_extra_info("socket")
                option = taken_in.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                options[0].close()
                writer.close()
                return option

    assert asyncio.run(one()) != 0
