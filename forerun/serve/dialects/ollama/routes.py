"""Ollama's routes."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from forerun.errors import RequestError
from forerun.serve.answers.answering import Json, answering, received, service_of
from forerun.serve.answers.service import spellings
from forerun.serve.bodies.fields import read
from forerun.serve.bodies.wire import line
from forerun.serve.dialects.ollama.answers import OllamaChat, OllamaGenerate
from forerun.serve.dialects.ollama.embeddings import OllamaEmbed, OllamaOldEmbed
from forerun.serve.dialects.ollama.models import PullBody, ShowBody, listed, running, shown
from forerun.serve.http.errors import ApiError
from forerun.version import __version__

KEPT_MODELS = "This server has the model that it was started with; models are not added or removed."
KEPT = ("push", "create", "copy", "delete", "blobs/{digest}")
"""Routes that change the models of a server; this one keeps the model it was started with."""


async def tags(request: Request) -> Response:
    """GET /api/tags: the model that is loaded. 503 while no request can be answered."""
    return Json(listed(service_of(request).enter()))


async def ps(request: Request) -> Response:
    """GET /api/ps: the model that runs. 503 while no request can be answered."""
    return Json(running(service_of(request).enter()))


async def show(request: Request) -> Response:
    """POST /api/show: facts about the model. 400 without a name."""
    value, _ = await received(request)
    body = read(ShowBody, value)
    if body.model is None and body.name is None:
        raise RequestError("model is missing.", "model")
    return Json(shown(service_of(request).named(body.model or body.name)))


async def pull(request: Request) -> Response:
    """POST /api/pull: success if the model is served, in one piece or as a stream of one line; 404
    for others. 400 without a name.
    """
    value, _ = await received(request)
    body, service = read(PullBody, value), service_of(request)
    name = body.model or body.name
    if name is None:
        raise RequestError("model is missing.", "model")
    served = service.enter()
    if not {*served.names, *served.adapters}.intersection(spellings(name)):
        raise ApiError(404, KEPT_MODELS, "not_found")
    done = {"status": "success"}
    return Response(line(done), media_type="application/x-ndjson") if body.stream else Json(done)


async def version(request: Request) -> Response:
    """GET /api/version: Forerun's version, `{"version": ...}`."""
    return Json({"version": __version__})


async def kept(request: Request) -> Response:
    """Answer 501 to requests that would change the models: this server keeps the one that it was
    started with.
    """
    raise ApiError(501, KEPT_MODELS, "not_implemented")


OLLAMA_ROUTES = [
    answering("/api/chat", OllamaChat),
    answering("/api/generate", OllamaGenerate),
    answering("/api/embed", OllamaEmbed),
    answering("/api/embeddings", OllamaOldEmbed),
    Route("/api/tags", tags),
    Route("/api/ps", ps),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/pull", pull, methods=["POST"]),
    Route("/api/version", version),
]
KEPT_ROUTES = [Route(f"/api/{name}", kept, methods=["POST", "DELETE", "HEAD"]) for name in KEPT]
