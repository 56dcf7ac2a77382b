"""SGLang's routes."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from forerun.serve.answering import Json, generated, service_of
from forerun.serve.dialects.sglang.generate import GenerateDialect
from forerun.serve.prepare import completion_generation
from forerun.serve.schema import CompletionBody
from forerun.serve.session import GenerationSession


async def generate(request: Request) -> Response:
    """POST /generate."""
    return await generated(request, GenerateDialect())


async def get_model_info(request: Request) -> Response:
    """GET /get_model_info."""
    served = service_of(request).enter()
    path = served.loaded.config.model
    return Json(
        {
            "model_path": path,
            "tokenizer_path": path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "served_model_name": served.name,
            "max_context_length": served.loaded.context,
        }
    )


async def health_generate(request: Request) -> Response:
    """GET /health_generate: 200 only where a token was really made."""
    service = service_of(request)
    served = service.enter()
    body = CompletionBody(prompt=((0,),), max_tokens=1, temperature=0.0)
    generation = completion_generation(body, served.loaded, service.settings)
    events, engine = served.bridge.events(), served.loaded.engine
    with GenerationSession(
        generation, engine, events, service.settings, request.receive
    ) as session:
        await session.whole()
    return Json({"status": service.state})


SGLANG_ROUTES = [
    Route("/generate", generate, methods=["POST"]),
    Route("/get_model_info", get_model_info),
    Route("/health_generate", health_generate),
]
