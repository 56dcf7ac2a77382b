"""Ollama's routes."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from forerun.errors import RequestError
from forerun.serve.answering import Json, generated, received, service_of
from forerun.serve.dialects.ollama.answers import OllamaChat, OllamaGenerate, named
from forerun.serve.dialects.ollama.models import ShowBody, listed, running, shown
from forerun.serve.errors import ApiError
from forerun.serve.fields import read
from forerun.version import __version__

KEPT = ("pull", "push", "create", "copy", "delete", "blobs/{digest}")
"""What changes the models of a server: this one has the one that it was started with."""


async def chat(request: Request) -> Response:
    """POST /api/chat."""
    return await generated(request, OllamaChat())


async def generate(request: Request) -> Response:
    """POST /api/generate."""
    return await generated(request, OllamaGenerate())


async def tags(request: Request) -> Response:
    """GET /api/tags."""
    return Json(listed(service_of(request).enter()))


async def ps(request: Request) -> Response:
    """GET /api/ps."""
    return Json(running(service_of(request).enter()))


async def show(request: Request) -> Response:
    """POST /api/show."""
    value, _ = await received(request)
    body = read(ShowBody, value)
    if body.model is None and body.name is None:
        raise RequestError("model is missing.", "model")
    return Json(shown(named(service_of(request), body.model or body.name)))


async def version(request: Request) -> Response:
    """GET /api/version."""
    return Json({"version": __version__})


async def kept(request: Request) -> Response:
    """Whatever would change the models."""
    message = "This server has the model that it was started with; models do not come or go."
    raise ApiError(501, message, "not_implemented")


OLLAMA_ROUTES = [
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate, methods=["POST"]),
    Route("/api/tags", tags),
    Route("/api/ps", ps),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/version", version),
]
KEPT_ROUTES = [Route(f"/api/{name}", kept, methods=["POST", "DELETE", "HEAD"]) for name in KEPT]
