"""The front of the replicas: receives a whole request, forwards it to a replica, and streams the
answer back.
"""

import asyncio
import json
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from forerun.options.config import ServeSettings
from forerun.ray.affinity import affinity_of
from forerun.ray.asgi import Head, HttpRequest
from forerun.ray.metrics import merged
from forerun.ray.router import PrefixRouter
from forerun.serve.http.errors import ClientGoneError
from forerun.serve.http.in_flight import InFlight

log = logging.getLogger("forerun.ray")

TRIES = 2
"""Replicas tried before the client gets status 503, since the first may have died. A retry is safe:
no part of an answer has been sent yet, and every replica gives the same answer to the same request.
"""
GONE = "The replica that was answering has died. Send the request again."
NO_REPLICA = "No replica is ready: Ray is starting others in their place. Try again later."
LOOK = 1.0
"""Seconds between two checks whether any replica is left, while a request waits for one."""
RESPONSE = re.compile(rb"resp_[0-9a-f]{32}")
"""The id of an answer of /v1/responses, which is stored only by the replica that gave it."""
RESPONSES = 100_000
"""How many such ids are remembered; the oldest are dropped first. Fronts do not share them."""


METRICS_SECONDS = 5.0
"""Seconds for all replicas to return their metrics; Prometheus waits ten seconds."""


class Front:
    """The application's ingress deployment. replicas: handle of the Replica deployment."""

    def __init__(self, replicas: DeploymentHandle, settings: ServeSettings) -> None:
        self._replicas = replicas.options(stream=True)
        self._all = replicas
        self._most = settings.max_body_bytes
        self._stored: OrderedDict[str, str] = OrderedDict()

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._most:
                return refused(413, f"A body may have {self._most:,} bytes.", "body_too_large")
        http_request = self._http_request(request, bytes(body))
        if http_request.path == "/metrics":
            return await self._metrics(http_request)
        for _ in range(TRIES):
            forwarded = self._replicas.forward.remote(http_request)
            try:
                head = await _first(forwarded, request)
            except NoReplicaError:
                return refused(503, NO_REPLICA, "no_replica")
            except (RayError, StopAsyncIteration) as error:
                log.warning("a replica did not answer: %s", error)
                continue
            if head is None:
                return Response(status_code=499)  # The client has disconnected.
            parts = _from(head.body, forwarded)
            if http_request.path == "/v1/responses":
                parts = self._remembered(parts, head.replica)
            return answer(head, parts)
        return refused(503, GONE, "replica_died")

    async def _metrics(self, http_request: HttpRequest) -> Response:
        """Return the metrics of all replicas as one page; if a replica refuses, its answer
        instead.
        """
        if PrefixRouter.running == 0:
            return refused(503, NO_REPLICA, "no_replica")
        try:
            heads = await self._all.broadcast("whole", http_request).results_async(
                timeout_s=METRICS_SECONDS
            )
        except (RayError, TimeoutError) as error:
            log.warning("a replica did not return its metrics: %s", error)
            return refused(503, "A replica did not return its metrics. Try again.", "replica_died")
        for head in heads:
            if head.status != 200:
                return _response(head, Response(head.body, head.status))
        page = merged({head.replica: head.body.decode() for head in heads})
        return Response(page, media_type=dict(heads[0].headers)[b"content-type"].decode())

    def _http_request(self, request: Request, body: bytes) -> HttpRequest:
        path: str = request.scope["path"]
        affinity = affinity_of(dict(request.headers), body)
        previous = affinity.previous or path.removeprefix("/v1/responses/").split("/")[0]
        affinity = replace(affinity, replica=self._stored.get(previous, ""))
        return HttpRequest(
            request.method,
            path,
            request.scope["query_string"],
            tuple(request.scope["headers"]),
            body,
            request.scope["client"],
            affinity,
        )

    async def _remembered(self, parts: AsyncIterator[bytes], replica: str) -> AsyncIterator[bytes]:
        """Yield the parts unchanged, and remember which replica gave the answer whose id is in the
        first part.
        """
        known = False
        async for part in parts:
            if not known and (found := RESPONSE.search(part)):
                known = True
                self._stored[found[0].decode()] = replica
                while len(self._stored) > RESPONSES:
                    self._stored.popitem(last=False)
            yield part


def answer(head: Head, parts: AsyncIterator[bytes]) -> Response:
    """Return a replica's answer as a stream; if the replica dies before its end, the stream ends
    with an error in its own format.
    """
    kind = dict(head.headers).get(b"content-type", b"").decode()
    return _response(head, StreamingResponse(_or_error(parts, kind), head.status))


def _response(head: Head, response: Response) -> Response:
    """Return the response with the replica's headers."""
    response.raw_headers = [*head.headers, (b"x-forerun-replica", head.replica.encode())]
    return response


class NoReplicaError(Exception):
    """No replica is left; Ray would wait without a limit for a new one."""


async def _first(forwarded: DeploymentResponseGenerator, request: Request) -> Head | None:
    """Return the first part of an answer; None if the client disconnected before it, which is
    reported to the replica. Raises the replica's error, and NoReplicaError.
    """
    head = asyncio.ensure_future(anext(forwarded))
    gone = asyncio.ensure_future(request.receive())  # The body was read: next is the disconnect.
    try:
        while not (head.done() or gone.done()):
            if PrefixRouter.running == 0:
                raise NoReplicaError
            await asyncio.wait((head, gone), timeout=LOOK, return_when=asyncio.FIRST_COMPLETED)
        found: Head | None = head.result() if head.done() else None
        return found
    finally:
        gone.cancel()
        if not head.done():
            # Ray ends a cancelled wait with an exception of its own, which is ignored.
            head.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            head.cancel()
            forwarded.cancel()


async def _from(first: bytes, forwarded: DeploymentResponseGenerator) -> AsyncIterator[bytes]:
    """Yield the body. If the generator is closed early, the request is cancelled at the replica
    too.
    """
    try:
        if first:
            yield first
        async for part in forwarded:
            yield part
    except (GeneratorExit, asyncio.CancelledError):
        forwarded.cancel()
        raise


async def _or_error(parts: AsyncIterator[bytes], kind: str) -> AsyncIterator[bytes]:
    try:
        async for part in parts:
            yield part
    except RayError as error:
        log.warning("a replica died while it answered: %s", error)
        fault = {"message": GONE, "type": "server_error", "code": "replica_died"}
        error = json.dumps({"type": "error", "error": fault})
        if kind.startswith("text/event-stream"):
            yield f"event: error\ndata: {error}\n\n".encode()
        elif "ndjson" in kind:
            yield f"{error}\n".encode()
        else:  # A whole answer whose length was promised: the connection has to break.
            raise


def refused(status: int, message: str, code: str) -> JSONResponse:
    """Return the answer to a request that no replica receives: an error in OpenAI's format, with
    the type of that status.
    """
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": code}}, status)


class Door(InFlight):
    """A front as an ASGI application in this process, for `forerun serve --replicas`, in place of
    Ray's proxy.

    failed   never set: the components that fail here are replicas, which Ray restarts
    """

    def __init__(self, front: Front, settings: ServeSettings) -> None:
        super().__init__()
        self.settings, self.failed = settings, asyncio.Event()
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an HTTP request, or the events of an ASGI lifespan."""
        if scope["type"] == "lifespan":
            for what in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{what}.complete"})
            return
        if self.draining:
            response: Response = refused(503, "The server is shutting down.", "shutting_down")
            await response(scope, receive, send)
            return
        with self.busy(), suppress(ClientGoneError):  # One that reads nothing; its replica logs it.
            response = await self._front(Request(scope, receive))
            await response(scope, receive, send)

    async def close(self) -> None:
        """Refuse requests from now on. There is nothing else to close."""
        self.draining = True
