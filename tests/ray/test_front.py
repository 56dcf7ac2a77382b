"""A front whose client goes before its answer begins."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from starlette.responses import StreamingResponse

from forerun.options.config import ServeSettings
from forerun.ray import front
from forerun.serve.http.errors import ClientGoneError


class Cancelled(Exception):
    """What Ray raises where a wait is cancelled."""


class Waiting:
    """An answer that does not begin."""

    def __init__(self):
        self.cancelled = False

    def cancel(self):
        self.cancelled = True

    async def __anext__(self):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Cancelled from None


def test_a_client_that_goes_first_leaves_no_error_behind():
    left, answer = [], Waiting()

    async def gone():
        return {"type": "http.disconnect"}

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: left.append(context))
        head = await front._first(answer, SimpleNamespace(receive=gone))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return head

    assert asyncio.run(run()) is None
    assert answer.cancelled and not left


@pytest.mark.parametrize("version", ["2.3", "2.4"])
def test_a_client_that_reads_nothing_is_no_error_of_the_door(version):
    """Its connection raises where it would wait for ever; the replica gets its disconnect."""
    ended = []

    async def parts():
        try:
            while True:
                yield b"a"
        finally:
            ended.append(True)

    async def send(message):
        if message["type"] == "http.response.body":
            raise ClientGoneError("it read nothing of the answer for 3 s")

    async def run():
        async def answers(_):
            return StreamingResponse(parts())

        door = front.Door(answers, ServeSettings())
        scope = {"type": "http", "asgi": {"spec_version": version}, "headers": []}
        await door(scope, asyncio.Event().wait, send)
        assert await door.drain(0.0), "it is busy with nothing"

    asyncio.run(run())
    assert ended == [True]
