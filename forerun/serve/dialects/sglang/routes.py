"""SGLang's routes, and some of vLLM's for operators."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from forerun.engine.stats import Stats
from forerun.serve.answers.answering import Json, answering, received, service_of
from forerun.serve.answers.service import Served
from forerun.serve.answers.session import GenerationSession
from forerun.serve.bodies.fields import Declaration, Unused, accept, boolean, read, text, whatever
from forerun.serve.bodies.prepare import completion_generation
from forerun.serve.bodies.schema import CompletionBody
from forerun.serve.bodies.wire import check_same_site
from forerun.serve.dialects.sglang.generate import GenerateDialect
from forerun.serve.http.errors import ApiError
from forerun.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortBody(Declaration):
    """POST /abort_request: one request, by the client's name for it or by its id, or all."""

    rid: str | None = accept(text(2**16))
    abort_all: bool = accept(boolean, False)

    renamed: ClassVar[dict[str, str]] = {"request_id": "rid"}
    unused: ClassVar[dict[str, Unused]] = {"abort_reason": Unused(whatever)}


async def model_info(request: Request) -> Response:
    """GET /model_info: facts about the loaded model, in SGLang's format. 503 while no request can
    be answered.
    """
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
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }
    )


async def server_info(request: Request) -> Response:
    """GET /server_info: the version, options and statistics of this server."""
    service = service_of(request)
    served = service.served()
    settings = asdict(service.settings)
    settings["api_keys"] = len(service.settings.api_keys)
    stats = await served.engine.stats()
    return Json(
        {
            "version": __version__,
            "model": served.name,
            "context": served.loaded.context,
            "state": service.state,
            "settings": settings,
            **_sglang_names(served, stats),
            **served.loaded.info,
            **await served.engine.describe(),
            "stats": asdict(stats),
        }
    )


async def health_generate(request: Request) -> Response:
    """GET /health_generate: 200 only if a token was really generated; else the error that prevented
    it.
    """
    service = service_of(request)
    served = service.enter()
    body = CompletionBody(prompt=((0,),), max_tokens=1, temperature=0.0)
    generation = completion_generation(body, served.loaded, service.settings)
    with GenerationSession(generation, served, service.settings, request.receive) as session:
        await session.collect()
    return Json({"status": service.state})


async def ping(request: Request) -> Response:
    """GET or POST /ping: 200 only if requests are accepted; else 503."""
    service_of(request).enter()
    return Response(status_code=200)


async def flush_cache(request: Request) -> Response:
    """GET or POST /flush_cache: evict all cached prefixes that no running sequence holds. 403 for
    pages of other sites.
    """
    check_same_site(request)
    service_of(request).enter().engine.forget_prefixes()
    return PlainTextResponse("Prefixes that no sequence holds are dropped before the next step.\n")


async def abort_request(request: Request) -> Response:
    """POST /abort_request: end running requests; their clients get an error that names the
    reason.
    """
    value, _ = await received(request)
    body = read(AbortBody, value)
    if body.rid is None and not body.abort_all:
        raise ApiError(400, "Give rid, or abort_all as true.", "invalid_value", "rid")
    running: set[GenerationSession] = request.app.state.running
    found = [one for one in running if body.abort_all or _is_called(one, body.rid or "")]
    for session in found:
        session.abort()
    return Json({"aborted": len(found)})


async def load(request: Request) -> Response:
    """GET /load: how many requests run or wait (vLLM). 503 while no request can be answered."""
    engine = service_of(request).enter().engine
    running: set[GenerationSession] = request.app.state.running
    return Json({"server_load": sum(one.engine is engine for one in running)})


async def get_load(request: Request) -> Response:
    """GET /get_load: running and waiting sequences, and the tokens they hold. 503 while no request
    can be answered.
    """
    served = service_of(request).enter()
    now = (await served.engine.stats()).load
    held = now.pages_held * served.loaded.config.page_size
    counts = {"num_reqs": now.running + now.waiting, "num_waiting_reqs": now.waiting}
    return Json([{"dp_rank": 0, **counts, "num_tokens": held}])


SGLANG_ROUTES = [
    answering("/generate", GenerateDialect),
    Route("/get_model_info", model_info, name="get_model_info"),
    Route("/model_info", model_info),
    Route("/server_info", server_info),
    Route("/get_server_info", server_info, name="get_server_info"),
    Route("/health_generate", health_generate),
    Route("/ping", ping, methods=["GET", "POST"]),
    Route("/flush_cache", flush_cache, methods=["GET", "POST"]),
    Route("/abort_request", abort_request, methods=["POST"]),
    Route("/load", load),
    Route("/get_load", get_load),
]


def _is_called(session: GenerationSession, name: str) -> bool:
    generation = session.generation
    return name == generation.id or name in generation.client_ids


def _sglang_names(served: Served, stats: Stats) -> dict[str, Any]:
    """Return facts that SGLang's clients and benchmarks read, under its names."""
    config = served.loaded.config
    mean = 1 + stats.accepted / stats.drafts if stats.drafts else None
    now = {"avg_spec_accept_length": mean, "num_running_reqs": stats.load.running}
    return {
        "avg_spec_accept_length": mean,
        "model_path": config.model,
        "tokenizer_path": config.model,
        "served_model_name": served.name,
        "context_length": served.loaded.context,
        "max_total_num_tokens": config.kv_tokens,
        "max_running_requests": config.max_sequences,
        "chunked_prefill_size": config.chunked_prefill_size,
        "speculative_algorithm": config.speculative_algorithm,
        "speculative_draft_model_path": config.speculative_draft_model_path,
        "speculative_num_steps": config.speculative_num_steps,
        "speculative_eagle_topk": config.speculative_eagle_topk,
        "speculative_num_draft_tokens": config.speculative_num_draft_tokens,
        "internal_states": [now],
    }
