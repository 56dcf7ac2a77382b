"""Routes that a server of several models answers itself: lists of models, their state, metrics."""

import hashlib
import math
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from forerun.serve.answers.answering import Json
from forerun.serve.dialects.anthropic.models import listed, model_card
from forerun.serve.dialects.ollama import models as ollama
from forerun.serve.http.errors import shutting_down
from forerun.serve.models import Entry, Models
from forerun.serve.routes import card, version


async def models(request: Request) -> Response:
    """GET /v1/models: all models, with `state`: unloaded, loading, loaded or failed, and their
    adapters.
    """
    entries = _of(request).entries.values()
    if "anthropic-version" in request.headers:
        return Json(listed([_anthropics(one, name) for one in entries for name in _cards(one)]))
    cards = [card for one in entries for card in _cards(one).values()]
    return Json({"object": "list", "data": cards})


async def model(request: Request) -> Response:
    """GET /v1/models/{name}: one of them. 404 for an unknown name."""
    name = request.path_params["name"]
    entry = _of(request).named(name)
    if "anthropic-version" in request.headers:
        return Json(_anthropics(entry, name))
    cards = _cards(entry)
    return Json(cards.get(name, cards[entry.source.name]))


async def tags(request: Request) -> Response:
    """GET /api/tags: all models, loaded or not, and their adapters, in Ollama's format."""
    entries = _of(request).entries.values()
    return Json({"models": [_tag(one, name) for one in entries for name in _cards(one)]})


async def ps(request: Request) -> Response:
    """GET /api/ps: the loaded models, and when each will be unloaded."""
    every = _of(request)
    found = []
    for one in every.entries.values():
        if one.served is not None:
            left = max(0.0, one.until - every.clock())
            never = datetime(9999, 12, 31, tzinfo=UTC)
            until = never if math.isinf(left) else datetime.now(UTC) + timedelta(seconds=left)
            more = {"size_vram": 0, "context_length": one.served.loaded.context}
            found.append(
                {**_tag(one, one.source.name), **more, "expires_at": ollama.time_of(until)}
            )
    return Json({"models": found})


async def health(request: Request) -> Response:
    """GET /health: 200 while requests are accepted, even if single models have failed."""
    every = _of(request)
    if every.draining:
        raise shutting_down()
    states = {name: one.state for name, one in every.entries.items()}
    faults = {name: one.fault for name, one in every.entries.items() if one.fault}
    loaded = [one for one in every.entries.values() if one.served is not None]
    pids = {one.source.name: one.service.served().engine.pid for one in loaded}
    about = {"models": states, "faults": faults, "server_pid": os.getpid(), "engine_pids": pids}
    return Json({"status": "ok", **about})


async def ping(request: Request) -> Response:
    """GET or POST /ping: 200 while requests are accepted; else 503."""
    if _of(request).draining:
        raise shutting_down()
    return Response(status_code=200)


async def metrics(request: Request) -> Response:
    """GET /metrics: of every loaded model, in Prometheus' text format."""
    page = await _of(request).metrics_page()
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


MODELS_ROUTES = [
    Route("/v1/models", models),
    Route("/models", models, name="llama_models"),
    Route("/v1/models/{name:path}", model),
    Route("/api/tags", tags),
    Route("/api/ps", ps),
    Route("/health", health),
    Route("/v1/health", health, name="llama_health"),
    Route("/metrics", metrics),
    Route("/version", version),
    Route("/api/version", version, name="ollama_version"),
    Route("/ping", ping, methods=["GET", "POST"]),
]


def _of(request: Request) -> Models:
    found: Models = request.app.state.service
    return found


def _cards(entry: Entry) -> dict[str, dict[str, Any]]:
    """Return the entries of a model and of its adapters in OpenAI's list, by name."""
    source, own = entry.source, _card(entry)
    adapters = {
        name: own | {"id": name, "root": path, "parent": source.name}
        for name, path in source.adapters
    }
    return {source.name: own, **adapters}


def _anthropics(entry: Entry, name: str) -> dict[str, Any]:
    """Return a model's entry in Anthropic's list, under one of its names."""
    served = entry.served
    loaded = (0, None) if served is None else (served.created, served.loaded.context)
    return model_card(name, *loaded)


def _card(entry: Entry) -> dict[str, Any]:
    about: dict[str, Any] = {"id": entry.source.name, "object": "model", "created": 0}
    about["owned_by"] = "forerun"
    if entry.served is not None:
        about = card(entry.served, entry.source.name)
    more = {"fault": entry.fault} if entry.fault else {}
    return {**about, "state": entry.state, "size": entry.source.size, **more}


def _tag(entry: Entry, name: str) -> dict[str, Any]:
    """Return a model's entry in Ollama's list, under its name or an adapter's."""
    if entry.served is not None:
        return ollama.card(replace(entry.served, name=name))
    name = ollama.tagged(name)
    digest = hashlib.sha256(name.encode()).hexdigest()
    moment = ollama.time_of(datetime.fromtimestamp(0, UTC))
    about = {"format": "", "family": "", "families": [], "parameter_size": ""}
    details = {"parent_model": "", **about, "quantization_level": ""}
    return {"name": name, "model": name, "modified_at": moment, "size": entry.source.size,
            "digest": digest, "details": details}  # fmt: skip
