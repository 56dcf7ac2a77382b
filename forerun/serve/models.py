"""Serves several models at one address: loaded when a request names them, unloaded by memory and
time.

Every model is a `Service` of its own with the routes of a server of one model, so a failure of one
does not affect another. The application here determines the model of a request, loads it, and
forwards the request; it answers itself only what concerns all models.
"""

import asyncio
import logging
import math
import re
from collections.abc import Callable
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
from forerun.serve.answers.service import Served, Service, Start, spellings
from forerun.serve.bodies.fields import text
from forerun.serve.bodies.wire import Bodies, Received, parse_json
from forerun.serve.http.errors import (
    ApiError,
    api_error,
    shutting_down,
    unavailable,
    unknown_model,
)
from forerun.serve.http.tasks import start_task
from forerun.serve.http.workers import Workers
from forerun.serve.observe.metrics import Metrics

SIZE_OF_WORK = 1.25
"""Least memory of a model, as a multiple of its file's size: its cache takes about a quarter
more.
"""
FOR_EVER = 3e13
"""Seconds: a million years."""
LOOK_SECONDS = 1.0
"""Seconds between checks whether a model has been unused for too long."""
BODILESS = ("/flush_cache",)
"""Paths of POST requests that need no body."""
_text = text(2**31 - 1)
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "": 1.0}
_PART = re.compile(r"(?<![\d.])(\d++(?:\.\d*+)?+)(ms|us|ns|h|m|s)")
_DURATION = re.compile(rf"-?(?:{_PART.pattern})+|-?\d+(?:\.\d*)?")
"""Durations as Go has them, such as 1h30m, and plain numbers of seconds."""
LONGEST_DURATION = 32

log = logging.getLogger("forerun.serve")


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be served.

    name      its name in requests, besides `others`
    size      bytes of its file or files; 0 = unknown
    load      loads it, also after it was unloaded
    adapters  (name, folder) of each LoRA adapter; requests may use these names, too
    """

    name: str
    others: tuple[str, ...]
    size: int
    load: Start
    adapters: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Entry:
    """A model and its state. Used on the event loop.

    state    unloaded, loading, loaded or failed
    loading  the task that loads it, while that runs: all requests for it wait for this one
    fault    why it could not be loaded the last time
    active   requests that it answers or that wait for it
    used     when the last request came or ended, on the monotonic clock
    keep     seconds that it stays loaded after its last request
    """

    source: Source
    keep: float
    app: Starlette | None = None
    state: str = "unloaded"
    loading: "asyncio.Task[None] | None" = None
    fault: str | None = None
    active: int = 0
    used: float = 0.0

    @property
    def service(self) -> Service:
        """The service of a model that is loaded or being loaded; raises AssertionError for
        others.
        """
        assert self.app is not None
        service: Service = self.app.state.service
        return service

    @property
    def served(self) -> Served | None:
        """The loaded model; None if it is not loaded."""
        return self.service.served() if self.state == "loaded" else None

    @property
    def ready(self) -> bool:
        """Whether it is loaded and its engine has not stopped."""
        return self.state == "loaded" and self.service.state != "stopped"

    @property
    def needed(self) -> int:
        """Least bytes of memory that it takes."""
        return int(self.source.size * SIZE_OF_WORK)

    @property
    def until(self) -> float:
        """The time at which it is unloaded unless a request uses it, in seconds on the monotonic
        clock.
        """
        return self.used + self.keep


@dataclass(slots=True)
class Models:
    """An ASGI application that forwards requests to the applications of models. Has the methods of
    a Service that `server` uses.

    make    service -> the application of one model, not started yet
    known   whether such an application has a route for a request; raises HTTPException (405) for
            a method that it does not accept
    memory  returns the bytes that are free now
    clock   seconds, monotonic
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
    _bodies: Bodies = field(init=False)
    _workers: Workers = field(init=False)
    _watcher: "asyncio.Task[None] | None" = None

    def start(self) -> None:
        """Start on the running event loop. A model is loaded when the first request names it."""
        for source in self.sources:
            entry = Entry(source, self.settings.unload_after or math.inf)
            self.entries[source.name] = entry
            for name in (source.name, *source.others, *(name for name, _ in source.adapters)):
                self._names.setdefault(name, entry)
        self._bodies = Bodies(self.settings.max_body_bytes, self.settings.send_seconds)
        self._workers = Workers()
        self._watcher = start_task(self._watch(), "unloading by time")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request with the model that it names; without a name with the one used last.
        Requests that only read (GET, `?model=NAME`) load nothing, and keep nothing loaded.
        """
        if self.draining:
            raise shutting_down()
        if not self.known(scope):
            raise HTTPException(404)
        if scope["method"] in ("GET", "HEAD"):
            entry = self.named(QueryParams(scope["query_string"]).get("model"))
            if entry.app is None or entry.state != "loaded":
                raise _not_loaded(entry)
            await entry.app.router({**scope, "app": entry.app}, receive, send)
            return
        request = Request(scope, receive)
        received = await self._received(request)
        if self.draining:  # It may have begun to while the body came.
            raise shutting_down()
        body = received.value if isinstance(received.value, dict) else {}
        entry = self.named(body.get("model") or body.get("name"))
        if received.fault is not None and not entry.ready:  # Any web page may send no body.
            raise _not_loaded(entry) if scope["path"] in BODILESS else received.fault
        keep = self._kept(body["keep_alive"]) if "keep_alive" in body else None

        async def sending(message: Message) -> None:
            taken = message["type"] == "http.response.start" and message["status"] < 400
            if taken and keep is not None and scope["path"].startswith("/api/"):
                entry.keep = keep
            await send(message)

        entry.active += 1
        try:
            if not entry.ready:
                with self._bodies.holding(request, len(received.data)):
                    await self._load_once(entry)
            assert entry.app is not None
            scope["state"]["received"] = received
            await entry.app.router({**scope, "app": entry.app}, receive, sending)
        finally:
            entry.active -= 1
            entry.used = self.clock()

    def named(self, name: Any) -> Entry:
        """Return the model of that name. Without a name: the model used last, or else the first,
        preferring loaded ones, then loading, then unloaded, then failed ones. Raises ApiError (404
        for an unknown name; 400 if it is not a text).
        """
        if name is None or name == "":
            order = ("failed", "unloaded", "loading", "loaded")
            return max(self.entries.values(), key=lambda one: (order.index(one.state), one.used))
        _text(name, "model")
        for one in spellings(name):
            if one in self._names:
                return self._names[one]
        raise unknown_model(name, self.entries)

    async def let_go(self) -> None:
        """Unload every model that has been unused for too long. Waits for loads and unloads in
        progress.
        """
        for entry in self.entries.values():
            if entry.state == "loaded" and not entry.active and self.clock() >= entry.until:
                async with self._changing:
                    # One may have used it meanwhile.
                    unused = not entry.active and self.clock() >= entry.until
                    if entry.state == "loaded" and unused:
                        await self._unload(entry, "no request has used it")

    async def drain(self, seconds: float) -> bool:
        """Reject new requests and wait at most `seconds` for running ones. Returns True if all
        ended.
        """
        self.draining = True
        loaded = [entry.service for entry in self.entries.values() if entry.app is not None]
        return all(await asyncio.gather(*(service.drain(seconds) for service in loaded)))

    async def close(self) -> None:
        """Unload all models, whatever their state, and accept no more requests."""
        self.draining = True
        if self._watcher is not None:
            self._watcher.cancel()
        for entry in self.entries.values():
            if entry.loading is not None:
                entry.loading.cancel()
            if entry.app is not None:
                await entry.service.close()
        self._workers.close()

    async def metrics_page(self) -> bytes:
        """Return the current text of /metrics, for all models that are loaded."""
        served = [entry.served for entry in self.entries.values()]
        await asyncio.gather(*(one.engine.stats() for one in served if one is not None))
        return self.metrics.page()

    async def _load_once(self, entry: Entry) -> None:
        """Wait until the model answers; it is loaded once for all requests that wait. Raises
        ApiError if it cannot be loaded.
        """
        if entry.loading is None:
            entry.loading = asyncio.create_task(self._load(entry))
        loading = entry.loading
        await asyncio.wait([loading])
        if loading.cancelled():
            raise shutting_down()
        loading.result()

    async def _load(self, entry: Entry) -> None:
        try:
            async with self._changing:
                if entry.state == "loaded":
                    await self._unload(entry, "its engine has stopped")
                await self._make_room(entry)
                service = self._begin(entry)
            await self._arrive(entry, service)
        finally:
            entry.loading = None

    def _begin(self, entry: Entry) -> Service:
        names = (entry.source.name, *entry.source.others)
        settings = replace(self.settings, served_name=names)
        service = Service(entry.source.load, settings, self.metrics)
        entry.app, entry.state, entry.fault = self.make(service), "loading", None
        service.start()
        return service

    async def _arrive(self, entry: Entry, service: Service) -> None:
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
        """Unload unused models, the least recently used first, until this one fits beside those
        that are being loaded.
        """
        limit = self.settings.max_loaded_models
        while True:
            loaded = [one for one in self.entries.values() if one.state == "loaded"]
            coming = [one for one in self.entries.values() if one.state == "loading"]
            free = self.memory() - sum(one.needed for one in coming)
            few = not limit or len(loaded) + len(coming) < limit
            if few and free >= entry.needed:
                return
            idle = [one for one in loaded if not one.active]
            if not idle and not loaded and not coming:
                return  # Its own plan reports what does not fit, and what to lower.
            if not idle and coming:  # They may fail, or take less.
                waiting = [one.loading for one in coming if one.loading is not None]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                continue
            if not idle:
                names = ", ".join(one.source.name for one in loaded)
                needed_gb, left = f"{entry.needed / 1e9:.1f}", f"{free / 1e9:.1f}"
                why = f"which takes about {needed_gb} GB of {left} that are free"
                if not few:
                    why = f"since {limit} models may be loaded (max-loaded-models)"
                raise unavailable(
                    f"There is no room for {entry.source.name}, {why}, while {names} answer; try "
                    "again later.",
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
        """Return the seconds of Ollama's keep_alive; negative values, and FOR_EVER, mean
        forever.
        """
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value) if 0 <= value < FOR_EVER else math.inf
        known = isinstance(value, str) and len(value) <= LONGEST_DURATION
        if not known or not _DURATION.fullmatch(value):
            return self.settings.unload_after or math.inf
        parts = _PART.findall(value) or [(value.lstrip("-"), "")]
        seconds = sum(float(count) * _SECONDS[unit] for count, unit in parts)
        return math.inf if value.startswith("-") and seconds else seconds

    async def _received(self, request: Request) -> Received:
        """Receive the request's body, once for this application and for the route. Without a body,
        the route decides whether it needs one. Raises what `Bodies.receive` and `parse_json` raise.
        """
        length = request.headers.get("content-length", "0")
        sent = length != "0" or "transfer-encoding" in request.headers
        data = await self._bodies.receive(request) if sent else b""
        try:
            value = await self._workers.run(len(data), parse_json, data)
        except ApiError as fault:
            if data:
                raise
            return Received(data, fault=fault)
        return Received(data, value)


def _not_loaded(entry: Entry) -> ApiError:
    """Return the 503 for a request that does not load a model; does not raise it."""
    message = f"{entry.source.name} is not loaded; the first request for it loads it."
    return unavailable(message, "not_loaded")
