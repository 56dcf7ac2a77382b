"""What the routes share: the loaded model once there is one, and who may come in when."""

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from forerun.build.engine import Loaded
from forerun.constrain.grammar.calls import Rules
from forerun.constrain.isolation.compile import MAX_WAITING
from forerun.constrain.matcher.matcher import Compiled
from forerun.errors import RankError
from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.bridge import Bridge
from forerun.serve.decode_log import DecodeLog
from forerun.serve.errors import ApiError, stuck, unavailable
from forerun.serve.metrics import Meter, Metrics
from forerun.serve.wire import Bodies
from forerun.serve.workers import Workers
from forerun.version import __version__

Loader = Callable[[], Loaded]

log = logging.getLogger("forerun.serve")


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model on the event loop.

    name         what requests call it, and answers do
    names        all that it is called
    created      when it was loaded, in seconds since 1970
    fingerprint  changes when the model, the configuration or the version does
    """

    loaded: Loaded
    name: str
    names: tuple[str, ...]
    created: int
    fingerprint: str
    meter: Meter
    bridge: Bridge


class Service:
    """Loads in the background, lets requests in while it can answer them, and drains.

    source   a loaded model, or the function that loads it
    metrics  where it is shown; None = in some of its own
    arrived, failed  set when it is loaded; when it cannot be, or can run no step any more
    """

    def __init__(
        self, source: Loaded | Loader, settings: ServeSettings, metrics: Metrics | None = None
    ) -> None:
        self.settings = settings
        self.bodies = Bodies(settings.max_body_bytes, settings.send_seconds)
        self.workers = Workers()
        self.metrics = metrics or Metrics(settings.sglang_metrics)
        self.failure: Exception | None = None
        self.failed = asyncio.Event()
        self.arrived = asyncio.Event()
        self._source = source
        self._served: Served | None = None
        self._draining = False
        self._active = 0
        self._idle = asyncio.Event()
        self._logging: asyncio.Task[None] | None = None
        # One more than may wait: the compiler itself says when there are too many.
        self._compiling = ThreadPoolExecutor(MAX_WAITING + 1, "forerun-compile")

    def start(self) -> None:
        """Begin to load, on the running event loop."""
        loop = asyncio.get_running_loop()
        if isinstance(self._source, Loaded):
            self._arrived(self._source)
            return
        # Not the loop's pool: that is waited for at exit, and a download can take minutes.
        load = (loop, self._source)
        threading.Thread(target=self._load, args=load, name="forerun-load", daemon=True).start()

    @property
    def state(self) -> str:
        """One of loading, ok, stuck, draining, stopped."""
        if self._draining:
            return "draining"
        if self._served is None:
            return "loading"
        engine = self._served.loaded.engine
        if not engine.alive:
            return "stopped"
        return "stuck" if stuck(engine.step_began, self.settings.watchdog_seconds) else "ok"

    def served(self) -> Served:
        """What was loaded, whether it answers or not. Raises ApiError (503) before that."""
        if self._served is None:
            raise unavailable("The model is still loading.", "loading", 2.0)
        return self._served

    def enter(self) -> Served:
        """What a request needs. Raises ApiError (503) while there is nothing to answer it."""
        if self._draining:
            raise unavailable("The server is shutting down.", "shutting_down")
        served = self.served()
        if not served.loaded.engine.alive:
            raise unavailable("The engine has stopped; see the server's log.", "engine_stopped")
        if error := stuck(served.loaded.engine.step_began, self.settings.watchdog_seconds):
            raise error
        return served

    def named(self, model: str | None, strict: bool = False) -> Served:
        """The same for a request that names a model. With one model any name is its name, unless
        `strict`, or --strict-model-names: then ApiError, 404 for another.
        """
        served = self.enter()
        strict = strict or self.settings.strict_model_names
        if strict and model is not None and model not in served.names:
            known = ", ".join(map(repr, served.names))
            raise ApiError(
                404,
                f"The model {model!r} does not exist; this server serves {known}.",
                "model_not_found",
                "model",
            )
        return served

    async def compiled(self, served: Served, rules: Rules, client: str) -> Compiled:
        """Compile on another thread, on behalf of `client`. Raises RequestError naming the place,
        BusyError.
        """
        loop = asyncio.get_running_loop()
        compile = partial(served.loaded.target.compile, client=client)
        return await loop.run_in_executor(self._compiling, rules.compiled, compile)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around an answer that `drain` should wait for."""
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def drain(self, seconds: float) -> bool:
        """Let no request in any more and wait for those that run. True if all ended."""
        self._draining = True
        self._idle.clear()
        if not self._active:
            return True
        log.info("draining: %d requests have %g s to finish", self._active, seconds)
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop the engine, which ends what still runs, and release the model."""
        self._draining = True
        if self._logging is not None:
            self._logging.cancel()
        self.workers.close()
        self._compiling.shutdown(wait=False, cancel_futures=True)
        served, self._served = self._served, None
        if served is not None:
            self.metrics.remove(served.meter)
            await asyncio.to_thread(served.loaded.close)

    def _load(self, loop: asyncio.AbstractEventLoop, load: Loader) -> None:
        try:
            loaded = load()
        except Exception as error:
            log.debug("loading failed", exc_info=True)
            _call_soon(loop, partial(self._fail, error))
            return
        if not _call_soon(loop, partial(self._arrived, loaded)):
            loaded.close()

    def _lost(self, loop: asyncio.AbstractEventLoop, why: str) -> None:
        """A process that shares the model is gone. On the engine's thread."""
        _call_soon(loop, partial(self._fail, RankError(why)))

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self.failed.set()

    def _arrived(self, loaded: Loaded) -> None:
        names = self.settings.served_name or model_names(loaded.name, loaded.config.model)
        name = names[0]
        facts = f"{name} {loaded.config} {__version__}".encode()
        engine, cache = loaded.engine, cache_facts(loaded.config)
        loop = asyncio.get_running_loop()
        engine.when_lost(partial(self._lost, loop))
        meter = self.metrics.add(name, engine.stats, lambda: engine.fault, cache)
        self._served = Served(
            loaded=loaded,
            name=name,
            names=names,
            created=int(time.time()),
            fingerprint="fp_" + hashlib.sha256(facts).hexdigest()[:10],
            meter=meter,
            bridge=Bridge(loop, meter.gap),
        )
        self.arrived.set()
        log.info("serving %s", name)
        if self.settings.decode_log_interval:
            decode_log = DecodeLog(self.settings.decode_log_interval, loaded.engine.stats)
            self._logging = loop.create_task(decode_log.run())


def cache_facts(config: EngineConfig) -> dict[str, Any]:
    """The key/value cache under vLLM's names: a block is a page."""
    return {
        "block_size": config.page_size,
        "num_gpu_blocks": (config.kv_tokens or 0) // config.page_size,
        "cache_dtype": config.kv_dtype,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": config.mem_fraction_static,
    }


def model_names(name: str, given: str) -> tuple[str, ...]:
    """What a model is called where nobody said so: its own name, how the command line named it, and
    the last part of that.
    """
    return tuple(dict.fromkeys((name, given, given.rstrip("/").rpartition("/")[2])))


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> bool:
    """Call from another thread. False where the loop has ended meanwhile."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        return False
    return True
