"""llama.cpp's routes: /completion, /infill, /props, /slots, /apply-template, counts of tokens."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from forerun.serve.answers.answering import (
    Json,
    answering,
    received,
    rendered,
    service_of,
)
from forerun.serve.answers.service import Served, Service
from forerun.serve.bodies.dialogue import dialogue
from forerun.serve.bodies.fields import read
from forerun.serve.bodies.schema import ChatBody
from forerun.serve.dialects.llama.completion import CompletionsDialect, InfillDialect
from forerun.serve.dialects.llama.embeddings import EitherEmbeddings, LlamaEmbeddings
from forerun.serve.dialects.names import llama_defaults
from forerun.text.tokenizer import Tokenizer
from forerun.types import Ints
from forerun.version import __version__


async def adapters(request: Request) -> Response:
    """GET /lora-adapters: the adapters that requests may name as their model. 503 while no request
    can be answered.
    """
    found = service_of(request).enter().loaded.info.get("adapters", ())
    return Json([{"id": i, **one, "scale": 1.0} for i, one in enumerate(found)])


async def props(request: Request) -> Response:
    """GET /props: the model, its template, and its default sampling parameters."""
    service = service_of(request)
    return Json(_properties(service.enter(), service))


async def slots(request: Request) -> Response:
    """GET /slots: slots for sequences, and how many of them are taken. 503 while no request can be
    answered.
    """
    served = service_of(request).enter()
    loaded, running = served.loaded, (await served.engine.stats()).load.running
    return Json(
        [
            {
                "id": place,
                "n_ctx": loaded.context,
                "speculative": loaded.config.speculates,
                "is_processing": place < running,
            }
            for place in range(loaded.config.max_sequences)
        ]
    )


async def apply_template(request: Request) -> Response:
    """POST /apply-template: the prompt of such a request to /v1/chat/completions, as text. 400
    names a field that cannot be accepted.
    """
    value, data = await received(request)
    service = service_of(request)
    return Json({"prompt": await rendered(service, len(data), _as_text, value, service)})


async def input_tokens(request: Request) -> Response:
    """POST /v1/chat/completions/input_tokens: the number of tokens in the prompt of such a
    request.
    """
    value, data = await received(request)
    service = service_of(request)
    return Json(await rendered(service, len(data), _counted, value, service))


LLAMA_ROUTES = [
    answering("/completion", CompletionsDialect),
    answering("/completions", CompletionsDialect),
    answering("/infill", InfillDialect),
    answering("/embedding", LlamaEmbeddings),
    answering("/embeddings", EitherEmbeddings),
    Route("/lora-adapters", adapters),
    Route("/props", props),
    Route("/slots", slots),
    Route("/apply-template", apply_template, methods=["POST"]),
    Route("/v1/chat/completions/input_tokens", input_tokens, methods=["POST"]),
]


def _prompt(value: Any, service: Service) -> tuple[Ints, Tokenizer]:
    body = read(ChatBody, value)
    loaded = service.named(body.model).loaded
    return dialogue(body, loaded, service.settings).prompt, loaded.tokenizer


def _as_text(value: Any, service: Service) -> str:
    prompt, tokenizer = _prompt(value, service)
    return tokenizer.decode(prompt.tolist(), skip_special=False)


def _counted(value: Any, service: Service) -> dict[str, Any]:
    prompt, _ = _prompt(value, service)
    return {"object": "response.input_tokens", "input_tokens": len(prompt)}


def _properties(served: Served, service: Service) -> dict[str, Any]:
    loaded = served.loaded
    tokenizer = loaded.tokenizer
    texts = {name: tokenizer.names.get(name, "") for name in ("bos_token", "eos_token")}
    params = {**llama_defaults(loaded), "n_predict": int(loaded.sampling.get("max_tokens", -1))}
    params["speculative.n_max"] = max(loaded.config.speculative_num_steps or 0, 0)
    return {
        "default_generation_settings": {"params": params, "n_ctx": loaded.context},
        "total_slots": loaded.config.max_sequences,
        "model_path": str(loaded.config.model),
        "model_alias": served.name,
        "chat_template": loaded.chat.source if loaded.chat is not None else "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"forerun {__version__}",
        "is_sleeping": False,
        "webui": service.settings.ui,
        **texts,
    }
