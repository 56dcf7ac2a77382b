"""Bad networks and bad clients against a real server process. See Real.unharmed."""

import asyncio
import contextlib
import json
import random

import httpx
import pytest

from tests.chaos.proxy import proxied
from tests.worlds.real_server import NIGHTLY, PATIENCE, Load, constant, forerun_serve, wait_for
from tests.worlds.servers import request_bytes

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]
CONNECTIONS = 10_000 if NIGHTLY else 1_000
AT_ONCE = 64
SLOW = 300
NAMES = ("greedy", "drawn", "chat", "schema", "regex")


@pytest.fixture(scope="module")
def server(tmp_path_factory, models):
    folder = tmp_path_factory.mktemp("network")
    with forerun_serve(folder, "--send-seconds", "5", models=models) as server:
        server.warm_up()
        yield server
        assert "Traceback" not in server.logged()


@pytest.fixture(autouse=True)
def afterwards(server):
    files = server.files()
    yield
    server.unharmed()
    # A client that has gone holds no file. Clients of `server` itself keep theirs.
    assert wait_for(lambda: server.files() <= files + 4), (server.files(), files)


@pytest.mark.parametrize("how", ["drip", "cut", "half"])
def test_a_bad_network(server, how):
    names = server.named(NAMES)
    answered = broken = 0
    with proxied(server.address, how) as port:
        for number in range(40 if not NIGHTLY else 400):
            name = names[number % len(names)]
            route, body = server.requests[name]
            try:
                with httpx.Client(timeout=PATIENCE, trust_env=False) as http:
                    answer = http.post(f"http://127.0.0.1:{port}{route}", json=body)
            except httpx.TransportError:
                broken += 1
                continue
            answered += 1
            assert constant(answer, body) == server.golden[name]
    assert answered + broken >= 40
    if how == "drip":
        assert not broken
    if how == "cut":
        assert broken


async def one(address, names, number, luck, server):
    """One connection: an answer compared, or a client that leaves somewhere in it."""
    name = names[number % len(names)]
    route, body = server.requests[name]
    reader, writer = await asyncio.open_connection(*address)
    stream = luck.random() < 0.5
    leaves = luck.random() < 0.2
    try:
        body = {**body, "stream": True} if stream else body
        data = request_bytes(route, body, connection="close")
        if leaves and luck.random() < 0.3:
            writer.write(data[: luck.randrange(len(data))])
            await writer.drain()
            return "left"
        writer.write(data)
        await writer.drain()
        if leaves:
            await asyncio.wait_for(reader.read(luck.randrange(1, 400)), PATIENCE)
            return "left"
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        head, _, rest = answer.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if status == 429:
            return "busy"
        assert status == 200, answer
        if stream:
            assert b"data: [DONE]" in rest
        else:
            # Identity encoding with a length: the body is the rest.
            assert json.loads(rest)["choices"] == server.golden[name][1][0]
        return "answered"
    finally:
        writer.transport.abort()


def test_connections_of_which_a_fifth_leave(server):
    luck = random.Random(7)

    async def everybody():
        room = asyncio.Semaphore(AT_ONCE)

        async def guarded(number):
            async with room:
                return await one(server.address, server.named(NAMES), number, luck, server)

        return await asyncio.gather(*map(guarded, range(CONNECTIONS)))

    ends = asyncio.run(everybody())
    assert 0.15 * CONNECTIONS < ends.count("left") < 0.25 * CONNECTIONS
    assert ends.count("answered") > 0.7 * CONNECTIONS


def test_slow_heads_are_given_up(server):
    """Hundreds send a byte now and then: others are served, and they do not stay for ever."""
    slow = [server.connect() for _ in range(SLOW)]
    for sock in slow:
        sock.settimeout(PATIENCE)
    try:
        with Load(server, names=NAMES) as load:
            for turn, byte in enumerate(b"GET /health HTTP/1.1\r\nX-Slow: "):
                for sock in slow:
                    # On a slow machine some are given up while the last bytes are sent.
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        sock.send(bytes([byte]))
                before = load.done
                assert wait_for(lambda before=before: load.done > before), turn
            # Each is closed without an answer: recv returns nothing, or it was reset.
            for sock in slow:
                with contextlib.suppress(ConnectionResetError):
                    assert sock.recv(100) == b""
        assert not load.wrong and not load.broken and not load.refused
    finally:
        for sock in slow:
            sock.close()


def test_slow_bodies_are_given_up(server):
    slow = [server.connect() for _ in range(SLOW)]
    for sock in slow:
        sock.settimeout(PATIENCE)
    try:
        for sock in slow:
            sock.sendall(request_bytes("/v1/completions", b'{"prompt": ', content_length="500"))
        for sock in slow:
            answer = sock.recv(65536)
            assert answer.startswith(b"HTTP/1.1 408"), answer
    finally:
        for sock in slow:
            sock.close()
