"""Routes that other servers have and that this one answers with a sentence."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from forerun.serve.errors import ApiError

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
    """No embeddings."""
    raise ApiError(
        501,
        "This server writes text and makes no embeddings or scores; use an embedding server beside "
        "it, such as text-embeddings-inference or llama.cpp with --embeddings.",
        "not_implemented",
    )


REFUSED_ROUTES = [Route(path, embeddings, methods=["POST"]) for path in EMBEDDINGS]
