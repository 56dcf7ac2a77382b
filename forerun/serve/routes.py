"""The server's own routes, and OpenAI's except for generation. `schema` has the bodies."""

import os
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from forerun.serve.answers.answering import (
    Json,
    answering,
    generated,
    received,
    rendered,
    service_of,
)
from forerun.serve.answers.service import Served
from forerun.serve.dialects.anthropic.messages import MessagesDialect, counted
from forerun.serve.dialects.anthropic.models import listed, model_card
from forerun.serve.dialects.openai.completions import ChatDialect, CompletionDialect
from forerun.serve.dialects.openai.embeddings import OpenAIEmbeddings
from forerun.serve.dialects.responses.pages import page
from forerun.serve.dialects.responses.responses import ResponsesDialect, input_tokens
from forerun.serve.dialects.responses.store import ResponseStore, StoredAnswer
from forerun.serve.dialects.responses.truncation import stored_bytes
from forerun.serve.http.errors import ApiError
from forerun.serve.tokens import TOKEN_ROUTES
from forerun.version import __version__


async def responses(request: Request) -> Response:
    """POST /v1/responses: the next items of a conversation. 400 names a field that cannot be
    accepted.
    """
    return await generated(request, ResponsesDialect(_responses(request)))


async def response_tokens(request: Request) -> Response:
    """POST /v1/responses/input_tokens: the number of tokens in the prompt of such a /v1/responses
    request.
    """
    service, store = service_of(request), _responses(request)
    value, data = await received(request)
    size = len(data) + stored_bytes(value, store)
    return Json(await rendered(service, size, input_tokens, value, service, store))


async def response(request: Request) -> Response:
    """GET /v1/responses/{id}: a stored response. 404 if it is not stored."""
    return Json(_stored(request).response)


async def input_items(request: Request) -> Response:
    """GET /v1/responses/{id}/input_items: the items of a stored response's request, the newest
    first, in pages (`limit`, `after`, `order`). 404 if it is not stored.
    """
    return Json(page(_stored(request).input, request.query_params))


async def forget_response(request: Request) -> Response:
    """DELETE /v1/responses/{id}: delete a stored response. 404 if it is not stored."""
    id = _stored(request).response["id"]
    _responses(request).drop(id)
    return Json({"id": id, "object": "response", "deleted": True})


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens: the number of tokens in such a request. 400 names a field
    that cannot be accepted.
    """
    service = service_of(request)
    value, data = await received(request)
    return Json(await rendered(service, len(data), counted, value, service))


async def models(request: Request) -> Response:
    """GET /v1/models: the model under each of its names. 503 while no request can be answered."""
    served = service_of(request).enter()
    names = service_of(request).settings.served_name or (served.name,)
    if "anthropic-version" in request.headers:
        known, context = (*names, *served.adapters), served.loaded.context
        return Json(listed([model_card(name, served.created, context) for name in known]))
    cards = [card(served, name) for name in names]
    cards += [adapter_card(served, one) for one in served.loaded.info.get("adapters", ())]
    return Json({"object": "list", "data": cards})


async def model(request: Request) -> Response:
    """GET /v1/models/{name}: the model of that name. 404 for another."""
    name = request.path_params["name"]
    served = service_of(request).named(name, strict=True)
    if "anthropic-version" in request.headers:
        return Json(model_card(name, served.created, served.loaded.context))
    if served.adapter >= 0:
        base = service_of(request).enter()
        return Json(adapter_card(base, base.loaded.info["adapters"][served.adapter]))
    return Json(card(served, name))


async def health(request: Request) -> Response:
    """GET /health: 200 only if requests are accepted; with the reason if speculation is off."""
    service = service_of(request)
    engine = service.enter().engine
    processes = {"server_pid": os.getpid(), "engine_pid": engine.pid}
    return Json({"status": service.state, "speculation_fault": engine.fault, **processes})


async def metrics(request: Request) -> Response:
    """GET /metrics: counters and times in Prometheus' text format, also while the model loads."""
    page = await service_of(request).metrics_page()
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


async def version(request: Request) -> Response:
    """GET /version: Forerun's version, `{"version": ...}`."""
    return Json({"version": __version__})


STORED_ROUTES = [
    Route("/v1/responses/{id}", response),
    Route("/v1/responses/{id}", forget_response, methods=["DELETE"]),
    Route("/v1/responses/{id}/input_items", input_items),
]
"""Routes of stored answers, which need no model."""

ROUTES = [
    answering("/v1/chat/completions", ChatDialect),
    answering("/chat/completions", ChatDialect),
    answering("/v1/completions", CompletionDialect),
    answering("/v1/embeddings", OpenAIEmbeddings),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/responses/input_tokens", response_tokens, methods=["POST"]),
    *STORED_ROUTES,
    answering("/v1/messages", MessagesDialect),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/models", models),
    Route("/models", models, name="llama_models"),
    Route("/v1/models/{name:path}", model),
    *TOKEN_ROUTES,
    Route("/health", health),
    Route("/v1/health", health, name="llama_health"),
    Route("/metrics", metrics),
    Route("/version", version),
]


def _responses(request: Request) -> ResponseStore:
    """Return the request's tenant's view of the stored answers."""
    store: ResponseStore = request.app.state.responses
    return store.of(request.scope["state"].get("tenant", ""))


def _stored(request: Request) -> StoredAnswer:
    """Return the stored answer named by the path. Raises ApiError (404)."""
    id = request.path_params["id"]
    found = _responses(request).get(id)
    if found is None:
        message = f"There is no response {id[:80]!a}; it was not stored, or is no longer stored."
        raise ApiError(404, message, "response_not_found")
    return found


def card(served: Served, name: str) -> dict[str, Any]:
    """Return a model's entry in OpenAI's list under one of its names, with vLLM's root and
    max_model_len.
    """
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "forerun",
        "root": served.loaded.config.model,
        "parent": None,
        "max_model_len": served.loaded.context,
    }


def adapter_card(served: Served, adapter: dict[str, Any]) -> dict[str, Any]:
    """Return an adapter's entry in OpenAI's list: root is its folder, parent the model, as in
    vLLM.
    """
    return card(served, adapter["name"]) | {"root": adapter["path"], "parent": served.name}
