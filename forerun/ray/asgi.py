"""One request to an ASGI application and its answer, as picklable values."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from forerun.ray.affinity import NOWHERE, Affinity


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """An HTTP request: raw headers, the whole body, and the affinity by which it is routed."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    client: tuple[str, int] | None = None
    affinity: Affinity = NOWHERE


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of an answer: status and headers.

    body     the part of the body that was available at once, which saves the client a message
    replica  name of the replica that sends the answer
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes = b""
    replica: str = ""


async def answered(app: ASGIApp, request: HttpRequest) -> AsyncIterator[Head | bytes]:
    """Yield a Head, then the body as it arrives; parts that are available together are yielded as
    one. Closing the generator is reported to the application as a disconnected client. Raises what
    the application raises.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    gone, given = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(_scope(request), receive, messages.put)
        finally:
            messages.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        ended = False
        while not ended:
            found = [await messages.get()]
            while not messages.empty():
                found.append(messages.get_nowait())
            ended = found[-1] is None
            sent = [message for message in found if message is not None]
            body = b"".join(message.get("body", b"") for message in sent)
            if sent and sent[0]["type"] == "http.response.start":
                yield Head(sent[0]["status"], tuple(map(tuple, sent[0]["headers"])), body)
            elif body:
                yield body
        await running
    finally:
        gone.set()
        with suppress(asyncio.CancelledError):
            await asyncio.shield(running)


def _scope(request: HttpRequest) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": list(request.headers),
        "client": request.client,
        "server": None,
        "state": {},
    }
