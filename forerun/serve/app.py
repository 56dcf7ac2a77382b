"""The ASGI application: routes, the middleware around them, and a model that loads in the
background.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Mount
from starlette.types import Scope

from forerun.options.config import ServeSettings
from forerun.serve.answers.service import Service, Start
from forerun.serve.answers.session import GenerationSession
from forerun.serve.dialects.llama.routes import LLAMA_ROUTES
from forerun.serve.dialects.ollama.routes import KEPT_ROUTES, OLLAMA_ROUTES
from forerun.serve.dialects.refused import REFUSED_ROUTES
from forerun.serve.dialects.responses.store import ResponseStore
from forerun.serve.dialects.sglang.routes import SGLANG_ROUTES
from forerun.serve.http.errors import ApiError
from forerun.serve.http.hosts import AllowedHosts
from forerun.serve.http.static_files import ui_routes
from forerun.serve.middleware import RequestMiddleware
from forerun.serve.models import Models, Source
from forerun.serve.models_routes import MODELS_ROUTES
from forerun.serve.observe.metrics import Metrics
from forerun.serve.openapi import openapi_route
from forerun.serve.routes import ROUTES, STORED_ROUTES

HONOURED = (*ROUTES, *OLLAMA_ROUTES, *SGLANG_ROUTES, *LLAMA_ROUTES)
_API = (*HONOURED, *KEPT_ROUTES, *REFUSED_ROUTES, openapi_route(HONOURED))


def create_app(source: Start, settings: ServeSettings) -> Starlette:
    """Return the server for one model; its routes share `app.state.service`.

    source  a loaded model, or what loads it here or in a process of its own, while the server
            answers 503. The application closes the model when it ends.
    """
    service = Service(source, settings)
    app = _guarded([*_API, *(ui_routes() if settings.ui else ())], service, settings)
    return _with_state(app, ResponseStore(), set())


def create_models_app(sources: Sequence[Source], settings: ServeSettings) -> Starlette:
    """Return the server for several models, each loaded on first use; `app.state.service` manages
    them.
    """
    metrics = Metrics(settings.sglang_metrics)
    # Shared by all models: conversations continue with another one, and outlive an unloaded one.
    shared = ResponseStore(), set[GenerationSession]()
    make = partial(_one_of_several, shared)
    models = Models(tuple(sources), settings, metrics, make, _known)
    unneeded = [*STORED_ROUTES, *KEPT_ROUTES, *REFUSED_ROUTES]  # They need no model.
    about = [*MODELS_ROUTES, *unneeded, openapi_route(HONOURED)]
    own = [*about, *(ui_routes() if settings.ui else ()), Mount("", app=models)]
    return _with_state(_guarded(own, models, settings), *shared)


def _known(scope: Scope) -> bool:
    """Return whether a model's application has a route for a request. Raises HTTPException (405) if
    the route takes other methods.
    """
    found = [(route.matches(scope)[0], route.methods or ()) for route in _API]
    partly = (methods for match, methods in found if match is Match.PARTIAL)
    others = {method for methods in partly for method in methods}
    if any(match is Match.FULL for match, _ in found):
        return True
    if others:
        raise HTTPException(405, headers={"Allow": ", ".join(sorted(others))})
    return False


def _one_of_several(
    shared: tuple[ResponseStore, set[GenerationSession]], service: Service
) -> Starlette:
    app = Starlette(routes=_API)
    app.router.redirect_slashes = False
    app.state.service = service
    return _with_state(app, *shared)


def _with_state(
    app: Starlette, responses: ResponseStore, running: set[GenerationSession]
) -> Starlette:
    """Set the stored answers and the running requests that an application's routes share."""
    app.state.responses, app.state.running = responses, running
    return app


def _guarded(
    routes: Sequence[BaseRoute], service: Service | Models, settings: ServeSettings
) -> Starlette:
    """Return an application of the routes inside the middleware, which starts and closes
    `service`.
    """
    hosts = AllowedHosts(settings.host, settings.allowed_hosts)
    traces = _traces(settings)
    guard = Middleware(
        RequestMiddleware,
        keys=settings.api_keys,
        hosts=hosts,
        traces=traces and traces.ended,
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        await service.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)

    app = Starlette(
        routes=routes,
        middleware=[*_browsers(settings), guard],
        exception_handlers={HTTPException: _refused},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _traces(settings: ServeSettings) -> Any:
    """Return the sender of spans if an endpoint is set; only then OpenTelemetry is loaded. Raises
    ImportError if it is not installed.
    """
    if settings.otlp_traces_endpoint is None:
        return None
    from forerun.serve.answers.tracing import RequestTraces

    return RequestTraces(settings.otlp_traces_endpoint)


def _browsers(settings: ServeSettings) -> list[Middleware]:
    """Return the middleware that allows requests from pages of the allowed origins (CORS). It comes
    before the check of keys, since a preflight has none.
    """
    if not settings.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=(
                "x-request-id",
                "retry-after",
                "x-forerun-ignored",
                "x-forerun-unenforced",
                "x-forerun-lossy",
            ),
        )
    ]


async def _refused(request: Request, error: Exception) -> Response:
    """Answer unknown paths and methods with an error in OpenAI's format."""
    assert isinstance(error, HTTPException)
    path = ascii(request.url.path[:200])[1:-1]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message, code = f"{path} takes {allowed}, not {request.method}.", "method_not_allowed"
    else:
        near = f"/v1{request.url.path}"
        known = any(getattr(route, "path", None) == near for route in _API)
        hint = f"did you mean /v1{path}?" if known else "see /openapi.json."
        message, code = f"There is no route {path}; {hint}", "unknown_url"
    raise ApiError(error.status_code, message, code, headers=error.headers)
