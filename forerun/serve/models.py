"""Several models behind one address: loaded when a request names them, let go by memory and time.

Every model is a `Service` of its own with the routes of a server of one model, so nothing that
happens to one reaches another. This door reads which model a request is for, has it loaded, and
hands the request on; it answers by itself only what concerns all.
"""

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from forerun.errors import ForerunError
from forerun.machine import memory_available
from forerun.options.config import ServeSettings
from forerun.serve.errors import ApiError, api_error, unavailable
from forerun.serve.metrics import Metrics
from forerun.serve.service import Served, Service, Start
from forerun.serve.wire import Bodies

SIZE_OF_WORK = 1.25
"""Memory that a model takes at least, in sizes of its file: with its cache about a quarter more."""
LOOK_SECONDS = 1.0
"""How often to check whether a model's time is over."""
ON_THE_LOOP = 1 << 16
"""Bytes of a body that are parsed on the event loop."""
_DURATION = re.compile(r"(-?\d+(?:\.\d+)?)(ms|s|m|h|)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}

log = logging.getLogger("forerun.serve")


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be served.

    name   what requests call it, beside `others`
    size   bytes of its file or files; 0 = not known
    load   loads it, and again after it was let go
    """

    name: str
    others: tuple[str, ...]
    size: int
    load: Start


@dataclass(slots=True)
class Entry:
    """A model and what became of it. On the event loop.

    state    unloaded, loading, loaded or failed
    fault    why it could not be loaded the last time
    active   requests that it answers or that wait for it
    used     when the last request came or ended, on the monotonic clock
    keep     seconds that it stays after its last request
    """

    source: Source
    keep: float
    app: Starlette | None = None
    state: str = "unloaded"
    fault: str | None = None
    active: int = 0
    used: float = 0.0

    @property
    def service(self) -> Service:
        """The service of a model that is loaded or being loaded; AssertionError for others."""
        assert self.app is not None
        service: Service = self.app.state.service
        return service

    @property
    def served(self) -> Served | None:
        """The loaded model; None before and after."""
        return self.service.served() if self.state == "loaded" else None

    @property
    def until(self) -> float:
        """When to unload it unless a request uses it, in seconds on the monotonic clock."""
        return self.used + self.keep


@dataclass(slots=True)
class Models:
    """An ASGI application: the door. Offers `server` what a Service does.

    make    the application of one model, not yet begun, of its service
    known   whether such an application has a route for a request
    memory  bytes that are free now
    clock   seconds that only grow
    """

    sources: tuple[Source, ...]
    settings: ServeSettings
    metrics: Metrics
    make: Callable[[Service], Starlette]
    known: Callable[[Scope], bool]
    memory: Callable[[], int] = memory_available
    clock: Callable[[], float] = monotonic
    failure: Exception | None = None
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    draining: bool = False
    entries: dict[str, Entry] = field(default_factory=dict)
    _names: dict[str, Entry] = field(default_factory=dict)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _watcher: "asyncio.Task[None] | None" = None

    def start(self) -> None:
        """Begin, on the running event loop. Loads no model until a request names it."""
        for source in self.sources:
            entry = Entry(source, self.settings.unload_after or math.inf)
            self.entries[source.name] = entry
            for name in (source.name, *source.others):
                self._names.setdefault(name, entry)
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request by the model that it names; without a name by the one used last. What
        only looks (GET, `?model=NAME`) loads nothing, and keeps nothing loaded.
        """
        if self.draining:
            raise unavailable("The server is shutting down.", "shutting_down")
        if not self.known(scope):
            raise HTTPException(404)
        if scope["method"] in ("GET", "HEAD"):
            entry = self.named(QueryParams(scope["query_string"]).get("model"))
            if entry.app is None or entry.state != "loaded":
                told = f"{entry.source.name} is not loaded; the first request for it loads it."
                raise unavailable(told, "not_loaded")
            await entry.app.router({**scope, "app": entry.app}, receive, send)
            return
        body, receive = await self._body(scope, receive)
        asked = await _object(body)
        entry = self.named(asked.get("model") or asked.get("name"))
        entry.active += 1
        try:
            app = await self._ready(entry)
            if scope["path"].startswith("/api/") and "keep_alive" in asked:
                entry.keep = self._kept(asked["keep_alive"])
            await app.router({**scope, "app": app}, receive, send)
        finally:
            entry.active -= 1
            entry.used = self.clock()

    def named(self, name: Any) -> Entry:
        """The model of that name; of none, the one that was used last, or else the first, rather
        one that is loaded than one that is not, and one that failed last. Raises ApiError (404;
        400 where a name is no text).
        """
        if name is None or name == "":
            order = ("failed", "unloaded", "loading", "loaded")
            return max(self.entries.values(), key=lambda one: (order.index(one.state), one.used))
        if not isinstance(name, str):
            message = f"model must be a string, not {type(name).__name__}."
            raise ApiError(400, message, "invalid_value", "model")
        entry = self._names.get(name) or self._names.get(name.removesuffix(":latest"))
        if entry is None:
            known = ", ".join(map(repr, self.entries))
            message = f"The model {name!r} does not exist; this server serves {known}."
            raise ApiError(404, message, "model_not_found", "model")
        return entry

    async def let_go(self) -> None:
        """Unload every unused model whose time is over. Waits for loads and unloads in progress."""
        for entry in self.entries.values():
            if entry.state == "loaded" and not entry.active and self.clock() >= entry.until:
                async with self._changing:
                    if not entry.active:
                        await self._unload(entry, "nobody asked for it")

    async def drain(self, seconds: float) -> bool:
        """Let no request in any more and wait for those that run. True if all ended."""
        self.draining = True
        loaded = [entry.service for entry in self.entries.values() if entry.app is not None]
        return all(await asyncio.gather(*(service.drain(seconds) for service in loaded)))

    async def close(self) -> None:
        """Let all models go, whatever they do, and take no more requests."""
        self.draining = True
        if self._watcher is not None:
            self._watcher.cancel()
        for entry in self.entries.values():
            if entry.app is not None:
                await entry.service.close()

    async def metrics_page(self) -> bytes:
        """The text of /metrics, of all models that are loaded, counted now."""
        served = [entry.served for entry in self.entries.values()]
        await asyncio.gather(*(one.engine.stats() for one in served if one is not None))
        return self.metrics.page()

    async def _ready(self, entry: Entry) -> Starlette:
        """The model's application once it answers. Raises ApiError if it cannot be loaded."""
        async with self._changing:
            if entry.state == "loaded" and entry.service.state == "stopped":
                await self._unload(entry, "its engine has stopped")
            if entry.state != "loaded":
                await self._load(entry)
            assert entry.app is not None
            return entry.app

    async def _load(self, entry: Entry) -> None:
        await self._make_room(entry)
        names = (entry.source.name, *entry.source.others)
        settings = replace(self.settings, served_name=names)
        service = Service(entry.source.load, settings, self.metrics)
        entry.app, entry.state, entry.fault = self.make(service), "loading", None
        service.start()
        ends = [asyncio.create_task(e.wait()) for e in (service.arrived, service.failed)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
        if service.failure is None:
            entry.state, entry.used = "loaded", self.clock()
            return
        await service.close()
        entry.app, entry.state, entry.fault = None, "failed", str(service.failure)
        log.error("%s cannot be loaded: %s", entry.source.name, entry.fault)
        if isinstance(service.failure, ForerunError):
            found = api_error(service.failure)
            raise ApiError(503, str(found), "model_not_loaded", "model") from service.failure
        raise service.failure

    async def _make_room(self, entry: Entry) -> None:
        """Unload unused models, the least recently used first, until this one fits."""
        needed = int(entry.source.size * SIZE_OF_WORK)
        while True:
            loaded = [one for one in self.entries.values() if one.state == "loaded"]
            most = self.settings.max_loaded_models
            free = self.memory()
            if (not most or len(loaded) < most) and free >= needed:
                return
            idle = [one for one in loaded if not one.active]
            if not idle and not loaded:
                return  # Its own plan says what does not fit, and what to lower.
            if not idle:
                names = ", ".join(one.source.name for one in loaded)
                raise unavailable(
                    f"There is no room for {entry.source.name}, which takes about "
                    f"{needed / 1e9:.1f} GB of {free / 1e9:.1f} that are free, while {names} "
                    "answer; try again later.",
                    "no_room",
                    5.0,
                )
            oldest = min(idle, key=lambda one: one.used)
            await self._unload(oldest, f"there is to be room for {entry.source.name}")

    async def _unload(self, entry: Entry, why: str) -> None:
        service, entry.state = entry.service, "unloaded"
        entry.app, entry.keep = None, self.settings.unload_after or math.inf
        await service.close()
        log.info("unloaded %s: %s", entry.source.name, why)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.let_go()

    def _kept(self, value: Any) -> float:
        """Seconds of Ollama's keep_alive; less than 0 is for ever."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value if value >= 0 else math.inf
        found = _DURATION.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            return self.settings.unload_after or math.inf
        seconds = float(found[1]) * _SECONDS[found[2]]
        return seconds if seconds >= 0 else math.inf

    async def _body(self, scope: Scope, receive: Receive) -> tuple[bytes, Receive]:
        """The request's body, and what gives it once more. Raises what `Bodies.receive` raises."""
        request = Request(scope, receive)
        length = request.headers.get("content-length", "0")
        if length == "0" and "transfer-encoding" not in request.headers:
            return b"", receive
        bodies = Bodies(self.settings.max_body_bytes, self.settings.send_seconds)
        body = await bodies.receive(request)
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return given.pop() if given else await receive()

        return body, again


async def _object(body: bytes) -> Mapping[str, Any]:
    """Return the JSON object of a body; empty if it is not one: the route reports the fault."""
    value: Any = None
    with suppress(ValueError, RecursionError):
        if len(body) > ON_THE_LOOP:
            value = await asyncio.to_thread(json.loads, body)
        elif body:
            value = json.loads(body)
    return value if isinstance(value, dict) else {}
