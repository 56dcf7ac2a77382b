"""The state that routes share: the model once it is loaded, and whether requests are accepted."""

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from forerun.build.engine import Frontend, Loaded
from forerun.build.target import open_text
from forerun.client.adapters import adapter_names, adapter_number
from forerun.client.engine_client import Constraint, EngineClient, LocalEngine, call_soon
from forerun.client.engine_process import EngineCommand, EngineProcess
from forerun.constrain.grammar.calls import Rules
from forerun.constrain.grammar.tags import TagRules
from forerun.errors import RequestError
from forerun.hub.catalog import is_here
from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.bodies.dialogue import keeps_budgets
from forerun.serve.bodies.wire import Bodies
from forerun.serve.http.errors import shutting_down, stuck, unavailable, unknown_model
from forerun.serve.http.in_flight import InFlight
from forerun.serve.http.tasks import start_task
from forerun.serve.http.workers import Workers
from forerun.serve.observe.decode_log import DecodeLog
from forerun.serve.observe.draft_alarm import watch
from forerun.serve.observe.metrics import Meter, Metrics
from forerun.text.chat import ChatTemplate
from forerun.text.tokenizer import Tokenizer
from forerun.version import __version__

Loader = Callable[[], Loaded]

Start = Loaded | Loader | EngineCommand
"""A loaded model, a function that loads it in this process, or the command that starts a process
for it.
"""

LATEST = ":latest"
"""The tag that Ollama's clients append to the name of a model."""

log = logging.getLogger("forerun.serve")


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model, as used on the event loop.

    name         its name in requests and answers
    names        all names that requests may use
    created      when it was loaded, in seconds since 1970
    fingerprint  changes with the model, the configuration and the version
    adapters     names of its adapters, by number
    adapter      number of the adapter that requests of this name run with; -1 = none
    """

    loaded: Frontend
    engine: EngineClient
    name: str
    names: tuple[str, ...]
    created: int
    fingerprint: str
    meter: Meter
    adapters: list[str]
    adapter: int = -1


class Service(InFlight):
    """Loads a model in the background, accepts requests while it can answer them, and drains.

    metrics  the registry to use; None = a new one
    loading  the current stage of loading, as text for users; "" if unknown
    arrived  set when the model is loaded
    failed   set when it cannot be loaded, or can run no more steps
    """

    def __init__(
        self, source: Start, settings: ServeSettings, metrics: Metrics | None = None
    ) -> None:
        super().__init__()
        self.settings = settings
        self.bodies = Bodies(settings.max_body_bytes, settings.send_seconds)
        self.workers = Workers()
        self.metrics = metrics or Metrics(settings.sglang_metrics)
        self.failure: Exception | None = None
        self.loading = ""
        self.failed = asyncio.Event()
        self.arrived = asyncio.Event()
        self._source = source
        self._served: Served | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to load, on the running event loop; returns at once. An error is stored in
        `failure`.
        """
        loop = asyncio.get_running_loop()
        if isinstance(self._source, Loaded):
            self._arrived(self._source, LocalEngine(self._source))
            return
        if isinstance(self._source, EngineCommand):
            self._tasks.append(start_task(self._launch(self._source), "loading"))
            return
        # Not the loop's pool: that is waited for at exit, and a download can take minutes.
        load = (loop, self._source)
        threading.Thread(target=self._load, args=load, name="forerun-load", daemon=True).start()

    @property
    def state(self) -> str:
        """One of loading, ok, stuck, draining, stopped; stuck: a step takes longer than the
        watchdog allows.
        """
        if self.draining:
            return "draining"
        if self._served is None:
            return "loading"
        engine = self._served.engine
        if not engine.alive:
            return "stopped"
        return "stuck" if stuck(engine.step_began, self.settings.watchdog_seconds) else "ok"

    def served(self) -> Served:
        """Return the loaded model, whether it answers or not. Raises ApiError (503) before that."""
        if self._served is None:
            doing = f" ({self.loading})" if self.loading else ""
            raise unavailable(f"The model is still loading{doing}.", "loading", 2.0)
        return self._served

    def enter(self) -> Served:
        """Return the loaded model, for a request. Raises ApiError (503) while it cannot answer."""
        if self.draining:
            raise shutting_down()
        served = self.served()
        if not served.engine.alive:
            raise unavailable("The engine has stopped; see the server's log.", "engine_stopped")
        if error := stuck(served.engine.step_began, self.settings.watchdog_seconds):
            raise error
        return served

    def named(self, model: str | None, strict: bool = False) -> Served:
        """Return the loaded model, for a request that names one. With one model any name is
        accepted, unless `strict` or --strict-model-names: then another name raises ApiError (404).
        Raises as `enter`.
        """
        served = self.enter()
        adapters = served.adapters
        for name in spellings(model):
            if name in adapters:
                return replace(served, name=name, adapter=adapters.index(name))
            if name in served.names:
                return served
        if model is not None and (strict or self.settings.strict_model_names):
            raise unknown_model(model, (*served.names, *adapters))
        return served

    def answering(self, model: str | None, lora_path: str, lora: tuple[int, ...] = ()) -> Served:
        """Return the loaded model, with the adapter that the request names or numbers. Raises
        RequestError for an unknown adapter, and as `named`.
        """
        served = self.named(model)
        if lora_path:
            lora = (adapter_number(served.loaded.info, lora_path, "lora_path"),)
        if not lora:
            return served
        (number,) = lora
        if number >= len(served.adapters):
            raise RequestError(f"lora: there is no adapter of number {number}.", "lora")
        return replace(served, adapter=number)

    async def compiled(self, served: Served, rules: Rules, client: str) -> Constraint:
        """Compile a constraint, charged to `client`. Raises RequestError that names the faulty
        part, BusyError.
        """
        if isinstance(rules, TagRules):
            rules = rules.with_control(served.loaded.tokenizer.control_within)
        return await rules.compiled(lambda grammar: served.engine.compile(grammar, client))

    async def close(self) -> None:
        """Stop the engine, which ends the running requests, and release the model. Waits for
        both.
        """
        self.draining = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.workers.close()
        served, self._served = self._served, None
        if served is not None:
            self.metrics.remove(served.meter)
            await served.engine.close()
            if served.loaded.chat is not None:
                await asyncio.to_thread(served.loaded.chat.close)

    async def metrics_page(self) -> bytes:
        """Return the current text of /metrics; before the model is loaded, only that of HTTP."""
        if self._served is not None:
            await self._served.engine.stats()
        return self.metrics.page()

    async def _launch(self, command: EngineCommand) -> None:
        """Start the process that loads the model. Meanwhile this process opens the tokenizer: at
        once if the model is local, else when the other process has fetched it.
        """
        start = command.begun
        began = time.monotonic() if start is None or start.taken else start.began
        text = partial(open_text, command.config)
        here = is_here(command.config.model)
        loading_text = asyncio.create_task(asyncio.to_thread(text)) if here else None
        engine: EngineProcess | None = None
        try:
            engine, ready = await EngineProcess.open(command, self._at)
            tokenizer, chat = await (loading_text or asyncio.to_thread(text))
        except BaseException as error:
            if engine is not None:
                await engine.close()
            elif loading_text is not None:
                loading_text.add_done_callback(_discard)
            if not isinstance(error, Exception):
                raise
            log.debug("loading failed", exc_info=True)
            self._fail(error)
            return
        facts = (ready.name, ready.context, ready.config, ready.info, ready.sampling)
        command.arrived(ready.facts, time.monotonic() - began)
        self._arrived(Frontend(tokenizer, chat, *facts), engine)

    def _at(self, loading: str) -> None:
        self.loading = loading

    def _load(self, loop: asyncio.AbstractEventLoop, load: Loader) -> None:
        try:
            loaded = load()
        except Exception as error:
            log.debug("loading failed", exc_info=True)
            call_soon(loop, partial(self._fail, error))
            return
        if not call_soon(loop, partial(self._loaded, loaded)):
            loaded.close()

    async def _watch(self, engine: EngineClient) -> None:
        await engine.lost.wait()
        assert engine.loss is not None
        self._fail(engine.loss)

    def _loaded(self, loaded: Loaded) -> None:
        self._arrived(loaded, LocalEngine(loaded))

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self.failed.set()

    def _arrived(self, loaded: Frontend, engine: EngineClient) -> None:
        names = self.settings.served_name or model_names(loaded.name, loaded.config.model)
        name = names[0]
        facts = f"{name} {loaded.config} {__version__}".encode()
        cache = cache_facts(loaded.config)
        meter = self.metrics.add(name, lambda: engine.last_stats, lambda: engine.fault, cache)
        self._served = Served(
            loaded=loaded,
            engine=engine,
            name=name,
            names=names,
            created=int(time.time()),
            fingerprint="fp_" + hashlib.sha256(facts).hexdigest()[:10],
            meter=meter,
            adapters=adapter_names(loaded.info),
        )
        self._tasks.append(start_task(self._watch(engine), "the watch over the engine"))
        self.arrived.set()
        log.info("serving %s", name)
        if self.settings.thinking_budget >= 0 and not keeps_budgets(loaded, self.settings):
            log.warning(
                "--thinking-budget changes nothing: no marks around thoughts are known of %s; "
                "--reasoning-end names the closing one",
                name,
            )
        if loaded.config.algorithm.model:
            self._tasks.append(start_task(watch(engine.stats), "the watch over the draft model"))
        if self.settings.decode_log_interval:
            decode_log = DecodeLog(self.settings.decode_log_interval, engine.last_stats)
            self._tasks.append(start_task(decode_log.run(engine.stats), "the decode log"))


def _discard(loading_text: "asyncio.Task[tuple[Tokenizer, ChatTemplate | None]]") -> None:
    """Close the tokenizer after loading failed; the engine's own error has the reason."""
    if loading_text.cancelled() or loading_text.exception() is not None:
        return
    _, chat = loading_text.result()
    if chat is not None:
        chat.close()


def spellings(model: str | None) -> tuple[str, ...]:
    """Return the names that a request's name may mean, the likelier first: the name itself, and
    without Ollama's tag. None: the request names no model.
    """
    return () if model is None else (model, model.removesuffix(LATEST))


def cache_facts(config: EngineConfig) -> dict[str, Any]:
    """Return facts about the key/value cache under vLLM's names, where a block is a page."""
    return {
        "block_size": config.page_size,
        "num_gpu_blocks": (config.kv_tokens or 0) // config.page_size,
        "cache_dtype": config.kv_dtype,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": config.mem_fraction_static,
    }


def model_names(name: str, given: str) -> tuple[str, ...]:
    """Return the default names of a model: its own name, its name on the command line, and the last
    part of that.
    """
    return tuple(dict.fromkeys((name, given, given.rstrip("/").rpartition("/")[2])))
