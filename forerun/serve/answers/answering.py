"""Answers a request in every dialect: receive the body, parse it, submit it to the engine, write
the answer.
"""

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from forerun.errors import ForerunError
from forerun.serve.answers.contract import Dialect, News, ParsedRequest, Ready
from forerun.serve.answers.record import RequestRecord
from forerun.serve.answers.service import Served, Service
from forerun.serve.answers.session import GenerationSession
from forerun.serve.bodies.prepare import Generation, within
from forerun.serve.bodies.wire import Received, dump_json, parse_json
from forerun.serve.http.connection import CHUNKS, Chunks
from forerun.serve.http.errors import ApiError, api_error
from forerun.serve.http.workers import LARGE

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


FIT_HEADER = "x-forerun-fit-max-tokens"
"""Request header: `true` has the effect of the option fit-max-tokens."""

STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class Json(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode `content` as compact JSON in UTF-8. Raises TypeError or ValueError for values that
        JSON cannot represent.
        """
        return dump_json(content)


class Generated(Response):
    """An answer that the engine generates: in one piece or as a stream. Ends when its client
    disconnects.
    """

    def __init__(self, service: Service, dialect: Dialect, parsed: ParsedRequest) -> None:
        super().__init__()
        self._service = service
        self._dialect = dialect
        self._parsed = parsed
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit the request, and send the answer as its deltas arrive."""
        settings = self._service.settings
        generation, served = self._parsed.generation, self._parsed.served
        with GenerationSession(generation, served, settings, receive) as session:
            record = scope["state"]["record"]
            record.session, record.model = session, served.name
            running: set[GenerationSession] = scope["app"].state.running
            running.add(session)
            try:
                if generation.stream:
                    await self._stream(session, send, scope["state"].get(CHUNKS))
                else:
                    await (await self._answer_at_once(session))(scope, receive, send)
            finally:
                running.discard(session)
        _observe(session, served)

    async def _stream(self, session: GenerationSession, send: Send, chunks: Chunks | None) -> None:
        """Answer with a stream: server-sent events or lines of JSON. A dialect's ping after a
        silence keeps proxies from closing the connection. Raises ApiError and ForerunError only if
        nothing was written before.

        chunks  the connection, if it can write at once
        """
        dialect, workers = self._dialect, self._service.workers

        def pass_on(news: News) -> bool:
            if not (chunks and self._started and chunks.writable and dialect.size(news) <= LARGE):
                return False
            for _, delta in news:
                session.tally.add(delta)
            chunks.write(dialect.events(news, session.tally, False))
            return True

        try:
            async with aclosing(session.deltas(pass_on)) as pieces:
                async for news in pieces:
                    ended = session.ended
                    if news:
                        events = await workers.run(
                            dialect.size(news), dialect.events, news, session.tally, ended
                        )
                    else:
                        events = dialect.ping()
                    if not ended:
                        await self._write(send, events)
            await self._write(send, events + dialect.end(None), last=True)
        except (ApiError, ForerunError) as error:
            if not self._started:
                raise
            final = error if isinstance(error, ApiError) else api_error(error)
            await self._write(send, dialect.end(final), last=True)

    async def _write(self, send: Send, data: bytes, last: bool = False) -> None:
        """Send a part of the answer; waits while the client's buffers are full."""
        if not data and not last:
            return
        if not self._started:
            self._started = True
            headers = [(b"content-type", self._dialect.media_type), *STREAM_HEADERS]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _answer_at_once(self, session: GenerationSession) -> Response:
        """Answer in one piece; a large answer is encoded outside the event loop."""
        dialect, choices = self._dialect, await session.collect()
        data = await self._service.workers.run(
            dialect.size(choices),
            lambda: dump_json(dialect.full_response(choices, session.tally)),
        )
        return Response(data, media_type=Json.media_type)


async def generated(request: Request, dialect: Dialect) -> Response:
    """Answer a request for text, in one piece or as a stream, in the format of `dialect`. Raises
    RequestError and ApiError before the first byte; later errors end the stream in the dialect's
    format.
    """
    service = service_of(request)
    value, data = await received(request)
    size = len(data) + dialect.stored(value)
    parsed = await rendered(service, size, dialect.parse, value, service)
    record: RequestRecord = request.scope["state"]["record"]
    record.ignored += parsed.ignored
    if isinstance(parsed, Ready):
        return Json(parsed.body)
    generation, served = parsed.generation, parsed.served
    if service.settings.fit_max_tokens or request.headers.get(FIT_HEADER) == "true":
        generation, cut = fitted(generation, served.loaded.context)
        record.ignored += cut
    record.ignored += generation.ignored
    record.lossy = generation.lossy
    client = request.client.host if request.client is not None else ""
    tenant = request.scope["state"].get("tenant", "")
    generation = generation.sent_by(client, tenant, served.adapter)
    if generation.rules is not None:
        compiled = await service.compiled(served, generation.rules, client)
        generation = generation.under(compiled)
        record.unenforced = generation.unenforced
    return Generated(service, dialect, replace(parsed, generation=generation))


def fitted(generation: Generation, context: int) -> tuple[Generation, tuple[str, ...]]:
    """Lower max_tokens to what the context has room for. Returns the generation, and a notice if
    something was lowered.
    """
    found = within(generation, context)
    before, left = (
        [request.stopping.max_tokens for request in one.requests] for one in (generation, found)
    )
    return found, () if before == left else (f"max_tokens (cut to {min(left)})",)


async def received(request: Request) -> tuple[Any, bytes]:
    """Receive a body; return its JSON and its bytes. A drain waits for this request. Raises
    ApiError, also if no request can be answered.
    """
    service = service_of(request)
    service.enter()
    state = request.scope["state"]
    read: Received | None = state.get("received")
    data = read.data if read is not None else await service.bodies.receive(request)
    service.enter()  # It may have begun to drain while the body came.
    state["until_answered"].enter_context(service.busy())
    if read is None:
        return await service.workers.run(len(data), parse_json, data), data
    if read.fault is not None:
        raise read.fault
    return read.value, read.data


async def rendered(
    service: Service,
    size: int,
    work: Callable[Parameters, Result],
    *args: Parameters.args,
    **kwargs: Parameters.kwargs,
) -> Result:
    """Run `work`, which may render a conversation, for a body of `size` bytes, on a worker that
    suits this size.
    """
    chat, workers = service.served().loaded.chat, service.workers
    apart = chat is not None and chat.waits
    return await (workers.apart if apart else workers.run)(size, work, *args, **kwargs)


def service_of(request: Request) -> Service:
    """Return the service that all routes of the request's app share."""
    service: Service = request.app.state.service
    return service


def _observe(session: GenerationSession, served: Served) -> None:
    """Record the speed of a completed answer."""
    first, last, generation = session.tally.first, session.events.last, session.generation
    tokens = session.tally.output_tokens / (len(generation.requests) * generation.n)
    if first is not None and last is not None and tokens > 1:
        served.meter.per_token.add((last - first) / (tokens - 1))


def answering(path: str, dialect: type[Dialect]) -> Route:
    """Return the POST route of a dialect, whose docstring describes it in /openapi.json."""

    async def endpoint(request: Request) -> Response:
        return await generated(request, dialect())

    endpoint.__doc__ = dialect.__doc__
    return Route(path, endpoint, methods=["POST"])
