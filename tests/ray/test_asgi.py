"""An application that gets requests as values answers as over HTTP, and stops when no client
listens.
"""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from forerun.ray.asgi import Head, HttpRequest, answered


def request(path, method="GET", body=b"", query=b""):
    return HttpRequest(method, path, query, ((b"host", b"x"), (b"x-a", b"b")), body)


async def echo(request: Request):
    return JSONResponse(
        {
            "body": (await request.body()).decode(),
            "query": dict(request.query_params),
            "a": request.headers["x-a"],
            "method": request.method,
        },
        status_code=418,
        headers={"x-made": "here"},
    )


async def collected(app, request):
    return [part async for part in answered(app, request)]


def test_an_answer_is_a_head_and_a_body():
    app = Starlette(routes=[Route("/e", echo, methods=["POST"])])
    head, *body = asyncio.run(collected(app, request("/e", "POST", b"hello", b"q=1")))
    assert isinstance(head, Head) and head.status == 418
    assert (b"x-made", b"here") in head.headers
    assert head.body == b'{"body":"hello","query":{"q":"1"},"a":"b","method":"POST"}'
    assert not body


def test_a_stream_comes_piece_by_piece_and_stops_without_a_client():
    ended = []

    received = asyncio.Event()

    async def pieces():
        try:
            for index in range(1000):
                yield f"{index}\n"
                await received.wait()
                received.clear()
            raise AssertionError("it was not stopped")
        finally:
            ended.append(True)

    async def endless(request):
        return StreamingResponse(pieces())

    async def three_of():
        parts = answered(Starlette(routes=[Route("/s", endless)]), request("/s"))
        pieces = []
        for _ in range(3):
            pieces.append(await anext(parts))
            received.set()
        await parts.aclose()
        return pieces

    head, *body = asyncio.run(three_of())
    assert (head.status, head.body, body) == (200, b"0\n", [b"1\n", b"2\n"])
    assert ended == [True]


def test_waiting_pieces_are_taken_as_one():
    """Every message costs a hop of its own through Ray."""

    async def at_once():
        for index in range(100):
            yield f"{index}\n"

    async def whole(request):
        return StreamingResponse(at_once())

    head, *body = asyncio.run(collected(Starlette(routes=[Route("/w", whole)]), request("/w")))
    assert head.body + b"".join(body) == b"".join(b"%d\n" % index for index in range(100))
    assert len(body) < 10


def test_what_fails_is_raised():
    async def fails(scope, receive, send):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(collected(fails, request("/")))
