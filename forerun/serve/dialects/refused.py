"""Routes of other servers that this one does not have and answers with an explanation."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from forerun.serve.http.errors import ApiError

SCORES = (
    "/encode",
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


async def scores(request: Request) -> Response:
    """Answer 501 to scoring, classification and other poolings."""
    raise ApiError(
        501,
        "This server writes text and makes embeddings (/v1/embeddings), but no scores or classes; "
        "use another server beside it for them, such as text-embeddings-inference.",
        "not_implemented",
    )


OF_LLAMA = {
    "/slots/{id}": "Caches of sequences are not saved or restored one by one: with --kv-store "
    "the server keeps those of prompts on disk and finds them by itself; prefixes in memory are "
    "cached automatically, and /flush_cache drops them.",
    "/lora-adapters": "Adapters are named when the server starts (--lora-modules), and chosen "
    "by the model's name.",
    "/props": "Properties are those that the server was started with.",
}
"""Routes of llama.cpp's server that change its state, and why this server has no such route."""


def _says(message: str) -> Callable[[Request], Awaitable[Response]]:
    async def says(request: Request) -> Response:
        raise ApiError(501, message, "not_implemented")

    return says


REFUSED_ROUTES = [
    *(Route(path, scores, methods=["POST"]) for path in SCORES),
    *(Route(path, _says(why), methods=["POST"]) for path, why in OF_LLAMA.items()),
]
