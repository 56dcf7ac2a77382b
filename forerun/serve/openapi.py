"""GET /openapi.json: the routes and their bodies, generated from the declarations.

Whatever the schema of a body forbids is rejected with a 4xx. What it allows may still be rejected,
if fields contradict each other or the model.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from forerun.serve.answers.answering import Json
from forerun.serve.bodies.embedding import EmbeddingBody
from forerun.serve.bodies.fields import body_schema
from forerun.serve.bodies.schema import ChatBody, CompletionBody
from forerun.serve.dialects.anthropic.schema import CountBody, MessagesBody
from forerun.serve.dialects.llama.embeddings import EmbeddingsBody, LlamaEmbeddingBody
from forerun.serve.dialects.llama.schema import InfillBody, NativeBody
from forerun.serve.dialects.ollama.embeddings import EmbedBody, OldEmbedBody
from forerun.serve.dialects.ollama.models import PullBody, ShowBody
from forerun.serve.dialects.ollama.schema import OllamaChatBody, OllamaGenerateBody
from forerun.serve.dialects.responses.schema import ResponsesBody
from forerun.serve.dialects.sglang.routes import AbortBody
from forerun.serve.dialects.sglang.schema import GenerateBody
from forerun.serve.tokens import DetokenizeBody, TokenizeBody
from forerun.version import __version__

BODIES: dict[str, type[Any]] = {
    "/v1/chat/completions": ChatBody,
    "/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
    "/embeddings": EmbeddingsBody,
    "/embedding": LlamaEmbeddingBody,
    "/api/embed": EmbedBody,
    "/api/embeddings": OldEmbedBody,
    "/v1/chat/completions/input_tokens": ChatBody,
    "/apply-template": ChatBody,
    "/completion": NativeBody,
    "/completions": NativeBody,
    "/infill": InfillBody,
    "/abort_request": AbortBody,
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/api/chat": OllamaChatBody,
    "/api/generate": OllamaGenerateBody,
    "/api/show": ShowBody,
    "/api/pull": PullBody,
    "/generate": GenerateBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/tokenize": TokenizeBody,
    "/v1/detokenize": DetokenizeBody,
}
ANSWERS = {"/metrics": ("text/plain",), "/flush_cache": ("text/plain",), "/ping": ()}
"""Routes whose answer is not JSON, with its types; () = an empty body."""
STREAMS = dict.fromkeys(("/api/chat", "/api/generate", "/api/pull"), "application/x-ndjson")

_REFUSED = {
    "400": "The request cannot be honoured; the message names the field.",
    "401": "An API key is required.",
    "404": "There is no such model or answer.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "Too many requests wait.",
    "503": "The model is loading, or the server is shutting down.",
}


def openapi_route(routes: Sequence[Route]) -> Route:
    """Return the route /openapi.json, which describes `routes`; the document is generated on first
    use.
    """

    @cache
    def written() -> dict[str, Any]:
        return document(routes)

    async def openapi(request: Request) -> Response:
        """Return the server's OpenAPI document."""
        return Json(written())

    return Route("/openapi.json", openapi)


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of some routes, from their bodies' declarations and
    docstrings.
    """
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, path, method)
    schemes = {
        "key": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Forerun", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": schemes},
        "security": [{}, {"key": []}, {"x-api-key": []}],
    }


def _operation(route: Route, path: str, method: str) -> dict[str, Any]:
    about = " ".join((route.endpoint.__doc__ or "").split())
    names = re.findall(r"{(\w+)}", path)
    kinds = [*ANSWERS.get(path, ("application/json",))]
    body = BODIES.get(path) if method == "POST" else None
    found: dict[str, Any] = {
        "operationId": f"{method.lower()}_{re.sub(r'[^a-z0-9]+', '_', path.lower()).strip('_')}",
        "summary": about,
    }
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if body is not None:
        schema = body_schema(body)
        if "stream" in schema["properties"]:
            kinds.append(STREAMS.get(path, "text/event-stream"))
        taken = {"application/json": {"schema": schema}}
        found["requestBody"] = {"required": True, "content": taken}
    error = {"application/json": {"schema": {"type": "object", "required": ["error"]}}}
    refused = {code: {"description": why, "content": error} for code, why in _REFUSED.items()}
    answers: dict[str, Any] = {"description": "The answer."}
    if kinds:
        answers["content"] = {kind: {} for kind in kinds}
    found["responses"] = {"200": answers, **refused}
    return found
