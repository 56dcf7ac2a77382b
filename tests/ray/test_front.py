"""A front whose client goes before its answer begins."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from forerun.ray import front


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
