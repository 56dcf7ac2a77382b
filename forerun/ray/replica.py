"""One replica: the application of `forerun serve`, with an engine of its own."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from ray import serve

from forerun.build.engine import Loaded, load
from forerun.errors import EngineError, ForerunError
from forerun.options.config import EngineConfig, ServeSettings
from forerun.ray.asgi import Head, HttpRequest, answered
from forerun.serve.app import create_app

READY_SECONDS = 1800.0
"""Seconds in which a replica must have loaded its model, or it is given up; the same as for a rank,
and as Kubernetes' probe in docs/deploy.
"""


class Replica:
    """One replica's actor, which loads the model in its constructor.

    Raises EngineError, with the replica's name and process id, if the model or an option is at
    fault, or if loading takes longer than `ready` seconds: Ray then starts another.
    """

    def __init__(
        self, config: EngineConfig, settings: ServeSettings, ready: float = READY_SECONDS
    ) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        self._loaded = self._within(ready, config)
        self._app = create_app(self._loaded, settings)
        self._beginning = asyncio.Lock()
        self._lifespan: AbstractAsyncContextManager[Any] | None = None

    async def forward(self, request: HttpRequest) -> AsyncIterator[Head | bytes]:
        """Yield the answer to a request: a Head with this replica's name, then its body as it
        arrives. Starts the app at the first request.
        """
        await self._begin()
        async for part in answered(self._app, request):
            yield replace(part, replica=self._name) if isinstance(part, Head) else part

    async def whole(self, request: HttpRequest) -> Head:
        """Return the answer to a request in one piece, for requests that are sent to every
        replica.
        """
        parts = [part async for part in self.forward(request)]
        head = parts[0]
        assert isinstance(head, Head)
        rest = (part for part in parts[1:] if isinstance(part, bytes))
        return replace(head, body=head.body + b"".join(rest))

    async def check_health(self) -> None:
        """Raise RuntimeError if this replica must be restarted: its engine has ended, or one of its
        steps hangs. Called by Ray Serve.
        """
        head = await self.whole(HttpRequest("GET", "/health", b"", ((b"host", b"127.0.0.1"),), b""))
        if head.status != 200:
            raise RuntimeError(head.body.decode())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for QueueAndCache: `cache`, the share of the KV cache's pages that
        sequences hold, 0 to 1. Called by Ray Serve.
        """
        await self._begin()
        load = (await self._app.state.service.served().engine.stats()).load
        return {"cache": load.pages_held / load.pages}

    def load(self, config: EngineConfig) -> Loaded:
        """Open the model and its engine. Raises ForerunError if that fails."""
        return load(config)

    def _within(self, seconds: float, config: EngineConfig) -> Loaded:
        """Run `load` on a thread, which is abandoned if it takes too long: Ray ends the process
        with it.
        """
        who = f"replica {self._name} (process {os.getpid()})"
        found: list[Loaded | BaseException] = []
        over = threading.Event()

        def run() -> None:
            try:
                found.append(self.load(config))
            except BaseException as error:  # noqa: BLE001 - it is raised anew.
                found.append(error)
            over.set()

        threading.Thread(target=run, name="forerun-load", daemon=True).start()
        if not over.wait(seconds):
            raise EngineError(f"{who} did not load its model within {seconds:,.0f} seconds.")
        (loaded,) = found
        if isinstance(loaded, ForerunError):
            raise EngineError(f"{who}: {loaded}") from loaded
        if isinstance(loaded, BaseException):
            raise loaded
        return loaded

    async def _begin(self) -> None:
        """Start the application if it has not been started; it runs until this replica's process
        ends.
        """
        async with self._beginning:
            if self._lifespan is None:
                self._lifespan = self._app.router.lifespan_context(self._app)
                await self._lifespan.__aenter__()

    def __del__(self) -> None:
        """Release the model when Ray Serve ends this replica."""
        if hasattr(self, "_loaded"):
            self._loaded.close()
