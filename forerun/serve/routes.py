"""The routes: read the body, ask, answer. What each may say is in `schema`."""

from dataclasses import asdict
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from forerun.build.engine import Loaded
from forerun.errors import RequestError
from forerun.serve.answering import Json, generated, received, rendered, service_of
from forerun.serve.dialects.anthropic.messages import MessagesDialect, counted
from forerun.serve.dialects.anthropic.models import listed, model_card
from forerun.serve.dialects.openai.completions import ChatDialect, CompletionDialect
from forerun.serve.dialects.openai.render import token_text
from forerun.serve.dialects.responses.responses import ResponsesDialect
from forerun.serve.dialects.responses.store import ResponseStore, Stored
from forerun.serve.dialogue import chat_prompt
from forerun.serve.errors import ApiError
from forerun.serve.fields import read
from forerun.serve.prepare import known_tokens
from forerun.serve.schema import DetokenizeBody, TokenizeBody
from forerun.serve.service import Served
from forerun.version import __version__


class Named(Protocol):
    """A body that may name the model it is for."""

    @property
    def model(self) -> str | None:
        """None = whatever is served."""
        ...


Body = TypeVar("Body", bound=Named)


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    return await generated(request, ChatDialect())


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    return await generated(request, CompletionDialect())


async def responses(request: Request) -> Response:
    """POST /v1/responses."""
    return await generated(request, ResponsesDialect(request.app.state.responses))


async def response(request: Request) -> Response:
    """GET /v1/responses/{id}."""
    return Json(_stored(request).response)


async def input_items(request: Request) -> Response:
    """GET /v1/responses/{id}/input_items."""
    items = _stored(request).input
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
    return Json({"object": "list", "data": items, "has_more": False, **ends})


async def forget_response(request: Request) -> Response:
    """DELETE /v1/responses/{id}."""
    id = _stored(request).response["id"]
    request.app.state.responses.drop(id)
    return Json({"id": id, "object": "response", "deleted": True})


async def messages(request: Request) -> Response:
    """POST /v1/messages."""
    return await generated(request, MessagesDialect())


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    service = service_of(request)
    value, data = await received(request)
    return Json(await rendered(service, len(data), counted, value, service))


async def models(request: Request) -> Response:
    """GET /v1/models."""
    served = service_of(request).enter()
    if "anthropic-version" in request.headers:
        return Json(listed([model_card(served)]))
    names = service_of(request).settings.served_name or (served.name,)
    return Json({"object": "list", "data": [_card(served, name) for name in names]})


async def model(request: Request) -> Response:
    """GET /v1/models/{name}."""
    name = request.path_params["name"]
    served = service_of(request).named(name, strict=True)
    anthropic = "anthropic-version" in request.headers
    return Json(model_card(served) if anthropic else _card(served, name))


async def tokenize(request: Request) -> Response:
    """POST /tokenize."""
    body, served, size = await _asked(request, TokenizeBody)
    return Json(await rendered(service_of(request), size, _tokens, body, served.loaded))


async def detokenize(request: Request) -> Response:
    """POST /detokenize."""
    body, served, size = await _asked(request, DetokenizeBody)
    return Json({"prompt": await service_of(request).workers.run(size, _text, body, served.loaded)})


async def tokenizer_info(request: Request) -> Response:
    """GET /tokenizer_info: what a client needs to use /tokenize as its tokenizer."""
    loaded = service_of(request).enter().loaded
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
    service = service_of(request)
    fault = service.enter().loaded.engine.fault
    return Json({"status": service.state, "speculation_fault": fault})


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    served = service_of(request).served()
    return Response(served.meter.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def version(request: Request) -> Response:
    """GET /version."""
    return Json({"version": __version__})


async def server_info(request: Request) -> Response:
    """GET /server_info: what runs here, with which options, and what it has done."""
    service = service_of(request)
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
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/responses/{id}", response),
    Route("/v1/responses/{id}", forget_response, methods=["DELETE"]),
    Route("/v1/responses/{id}/input_items", input_items),
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
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


def _stored(request: Request) -> Stored:
    """The answer that a path names. Raises ApiError (404)."""
    store: ResponseStore = request.app.state.responses
    id = request.path_params["id"]
    found = store.get(id)
    if found is None:
        message = f"There is no response {id[:80]!a}; it was not stored, or is forgotten by now."
        raise ApiError(404, message, "response_not_found")
    return found


def _card(served: Served, name: str) -> dict[str, Any]:
    """A model in OpenAI's list under one of its names, with vLLM's root and max_model_len."""
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "forerun",
        "root": served.loaded.config.model,
        "parent": None,
        "max_model_len": served.loaded.context,
    }


async def _asked(request: Request, kind: type[Body]) -> tuple[Body, Served, int]:
    """The checked body, the model it is for, and its size in bytes."""
    value, data = await received(request)
    body = await service_of(request).workers.run(len(data), read, kind, value)
    return body, service_of(request).named(body.model), len(data)


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
