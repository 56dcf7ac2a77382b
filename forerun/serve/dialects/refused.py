"""Routes that other servers have and that this one answers with a sentence."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from forerun.serve.http.errors import ApiError

EMBEDDINGS = (
    "/v1/embeddings",
    "/embeddings",
    "/api/embed",
    "/api/embeddings",
    "/encode",
    "/embedding",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/reranking",
    "/reranking",
    "/v1/score",
    "/score",
    "/v1/classify",
    "/classify",
    "/pooling",
)


async def embeddings(request: Request) -> Response:
    """Embeddings and scores: 501 always, this server only writes text."""
    raise ApiError(
        501,
        "This server writes text and makes no embeddings or scores; use an embedding server beside "
        "it, such as text-embeddings-inference or llama.cpp with --embeddings.",
        "not_implemented",
    )


OF_LLAMA = {
    "/slots/{id}": "Caches of sequences are not saved or restored one by one: with --kv-store "
    "the server keeps those of prompts on disk and finds them by itself; prefixes in memory are "
    "cached automatically, and /flush_cache drops them.",
    "/lora-adapters": "There is one set of weights, and no adapters.",
    "/props": "Properties are those that the server was started with.",
}
"""Routes of llama.cpp's server that change things, and why this server has none."""


def _says(message: str) -> Callable[[Request], Awaitable[Response]]:
    async def says(request: Request) -> Response:
        raise ApiError(501, message, "not_implemented")

    return says


REFUSED_ROUTES = [
    *(Route(path, embeddings, methods=["POST"]) for path in EMBEDDINGS),
    *(Route(path, _says(why), methods=["POST"]) for path, why in OF_LLAMA.items()),
]
