"""The routes: read the body, ask, answer. What each may say is in `schema`."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ParamSpec, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from forerun import __version__
from forerun.build.engine import Loaded
from forerun.config import ServeSettings
from forerun.errors import RequestError
from forerun.serve.dialogue import chat_prompt, ignored_fields
from forerun.serve.fields import read
from forerun.serve.prepare import (
    Generation,
    chat_generation,
    completion_generation,
    known_tokens,
)
from forerun.serve.render import token_text
from forerun.serve.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SampledBody,
    TokenizeBody,
    marks_caches,
)
from forerun.serve.service import Served, Service
from forerun.serve.session import GenerationSession
from forerun.serve.sse import EventStream
from forerun.serve.wire import dump_json, parse_json

LARGE = 1 << 14
"""Bodies above this many bytes are parsed and encoded on another thread: others go on."""


class Named(Protocol):
    """A body that may name the model it is for."""

    @property
    def model(self) -> str | None:
        """None = whatever is served."""
        ...


Body = TypeVar("Body", bound=Named)
Sampled = TypeVar("Sampled", bound=SampledBody)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Json(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Compact, in UTF-8."""
        return dump_json(content)


class Generated(Response):
    """An answer that the engine writes: in one piece or as a stream, with its client in view."""

    def __init__(self, service: Service, served: Served, generation: Generation) -> None:
        super().__init__()
        self._service = service
        self._served = served
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit, and answer as the news comes."""
        served, generation, settings = self._served, self._generation, self._service.settings
        self._service.enter()  # The server may have begun to drain while the body came.
        events, engine = served.bridge.events(), served.loaded.engine
        with (
            self._service.busy(),
            GenerationSession(generation, engine, events, settings, receive) as session,
        ):
            scope["state"]["record"].session = session
            if generation.stream is not None:
                envelope = self._envelope(generation.shape.chunk)
                await EventStream(session, envelope, send, settings.send_seconds).run()
            else:
                answer = await self._whole(session)
                await Json(answer)(scope, receive, send)
        _observe(session, served)

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._generation.id,
            "object": kind,
            "created": self._generation.created,
            "model": self._served.name,
            "system_fingerprint": self._served.fingerprint,
        }

    async def _whole(self, session: GenerationSession) -> dict[str, Any]:
        choices = await session.whole()
        answer = self._envelope(self._generation.shape.whole)
        answer |= {"choices": choices, "usage": session.tally.usage()}
        if self._generation.stats:
            answer["metrics"] = session.tally.metrics()
        return answer


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    return await _generated(request, ChatBody, chat_generation)


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    return await _generated(request, CompletionBody, completion_generation)


async def models(request: Request) -> Response:
    """GET /v1/models."""
    return Json({"object": "list", "data": [_card(_service(request).enter())]})


async def model(request: Request) -> Response:
    """GET /v1/models/{name}."""
    return Json(_card(_service(request).named(request.path_params["name"])))


async def tokenize(request: Request) -> Response:
    """POST /tokenize."""
    body, served, size = await _asked(request, TokenizeBody)
    return Json(await _worked(size, _tokens, body, served.loaded))


async def detokenize(request: Request) -> Response:
    """POST /detokenize."""
    body, served, size = await _asked(request, DetokenizeBody)
    return Json({"prompt": await _worked(size, _text, body, served.loaded)})


async def tokenizer_info(request: Request) -> Response:
    """GET /tokenizer_info: what a client needs to use /tokenize as its tokenizer."""
    loaded = _service(request).enter().loaded
    tokenizer = loaded.tokenizer
    eos = next(iter(tokenizer.eos_ids), None)
    ends = {"bos_token": tokenizer.bos_id, "eos_token": eos, "pad_token": eos}
    named = {
        name: None if id is None else token_text(tokenizer.token_bytes(id))
        for name, id in ends.items()
    }
    return Json(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": loaded.context,
            "vocab_size": tokenizer.vocab_size,
            "chat_template": None if loaded.chat is None else loaded.chat.source,
            "additional_special_tokens": [t.text for t in tokenizer.added.values() if t.control],
            **named,
        }
    )


async def health(request: Request) -> Response:
    """GET /health: 200 only where a request would be let in; why speculation is off, if it is."""
    service = _service(request)
    fault = service.enter().loaded.drafter.fault
    return Json({"status": service.state, "speculation_fault": fault})


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    served = _service(request).served()
    return Response(served.meter.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def version(request: Request) -> Response:
    """GET /version."""
    return Json({"version": __version__})


async def server_info(request: Request) -> Response:
    """GET /server_info: what runs here, with which options, and what it has done."""
    service = _service(request)
    served = service.served()
    settings = asdict(service.settings)
    settings["api_keys"] = len(service.settings.api_keys)
    return Json(
        {
            "version": __version__,
            "model": served.name,
            "context": served.loaded.context,
            "state": service.state,
            "settings": settings,
            **served.loaded.info,
            **served.loaded.engine.describe(),
            "stats": asdict(served.loaded.engine.stats()),
        }
    )


ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", model),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info),
    Route("/health", health),
    Route("/metrics", metrics),
    Route("/server_info", server_info),
    Route("/version", version),
]


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _card(served: Served) -> dict[str, Any]:
    """A model in OpenAI's list, with vLLM's max_model_len."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "forerun",
        "max_model_len": served.loaded.context,
    }


async def _generated(
    request: Request,
    kind: type[Sampled],
    prepare: Callable[[Sampled, Loaded, ServeSettings], Generation],
) -> Response:
    service = _service(request)
    body, served, size = await _asked(request, kind)
    generation = await _worked(size, prepare, body, served.loaded, service.settings)
    request.scope["state"]["record"].ignored += ignored_fields(body, served.loaded)
    if generation.rules is not None:
        client = request.client.host if request.client is not None else ""
        compiled = await service.compiled(served, generation.rules, client)
        generation = generation.under(compiled)
    return Generated(service, served, generation)


async def _asked(request: Request, kind: type[Body]) -> tuple[Body, Served, int]:
    """The checked body, the model it is for, and its size in bytes."""
    service = _service(request)
    service.enter()
    data = await service.bodies.receive(request)
    value = await _worked(len(data), parse_json, data)
    body = await _worked(len(data), read, kind, value)
    if marks_caches(value):
        request.scope["state"]["record"].ignored += ("messages.cache_control",)
    return body, service.named(body.model), len(data)


async def _worked(
    size: int,
    work: Callable[Parameters, Result],
    *args: Parameters.args,
    **kwargs: Parameters.kwargs,
) -> Result:
    """Do `work` here, or on another thread where a body of `size` bytes may take long."""
    if size <= LARGE:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def _tokens(body: TokenizeBody, loaded: Loaded) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either prompt or messages.", "prompt")
    if body.prompt is None:
        ids = chat_prompt(body, loaded)
    else:
        ids = loaded.tokenizer.encode(body.prompt, body.parse_special, bos=body.add_special_tokens)
    answer = {"count": len(ids), "max_model_len": loaded.context, "tokens": ids.tolist()}
    if body.return_token_strs:
        pieces = map(loaded.tokenizer.token_bytes, ids.tolist())
        answer["token_strs"] = [token_text(piece) for piece in pieces]
    return answer


def _text(body: DetokenizeBody, loaded: Loaded) -> str:
    ids = known_tokens(body.tokens, loaded, "tokens")
    return loaded.tokenizer.decode(ids.tolist(), skip_special=False)


def _observe(session: GenerationSession, served: Served) -> None:
    """Count the speed of an answer that came to its end."""
    events, generation = session.events, session.generation
    tokens = session.tally.output_tokens / (len(generation.requests) * generation.n)
    if events.first is not None and events.last is not None and tokens > 1:
        served.meter.per_token((events.last - events.first) / (tokens - 1))
