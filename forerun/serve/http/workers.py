"""Chooses where a request's work outside the engine runs: on the event loop, or on another
thread.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from forerun.machine import trim_memory
from forerun.serve.http.errors import shutting_down

LARGE = 1 << 14
"""Bodies above this many bytes are parsed and encoded on another thread, so that other requests
continue.
"""

HUGE = 1 << 20
"""Bodies above this many bytes are processed one at a time, and their memory is returned to the
system afterwards: glibc keeps some 200 bytes for each byte of a text that was encoded, 800 MB after
4 MB.
"""

SMALL_AT_ONCE, LARGE_AT_ONCE = 4, 2
"""Threads for small bodies whose work waits for another process, and threads for large bodies."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Workers:
    """Threads next to the event loop. A body never waits for one of a larger class."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(SMALL_AT_ONCE, "forerun-small")
        self._large = ThreadPoolExecutor(LARGE_AT_ONCE, "forerun-large")
        self._huge = ThreadPoolExecutor(1, "forerun-huge")

    def close(self) -> None:
        """Accept no more work; waiting work is cancelled, running work is not waited for."""
        for pool in (self._small, self._large, self._huge):
            pool.shutdown(wait=False, cancel_futures=True)

    async def run(
        self,
        size: int,
        work: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """Run `work` for a body of `size` bytes, on another thread if that may take long. Raises
        ApiError (503) after `close`, also for waiting work.
        """
        if size <= LARGE:
            return work(*args, **kwargs)
        call = partial(work, *args, **kwargs)
        if size <= HUGE:
            return await _on(self._large, call)
        return await _on(self._huge, partial(_and_memory_back, call))

    async def apart(
        self,
        size: int,
        work: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """Run `work` as `run` does, but always on a thread, because it waits for another
        process.
        """
        if size > LARGE:
            return await self.run(size, work, *args, **kwargs)
        return await _on(self._small, partial(work, *args, **kwargs))


async def _on(pool: ThreadPoolExecutor, call: Callable[[], Result]) -> Result:
    try:
        found = pool.submit(call)
    except RuntimeError:  # The pool is closed.
        raise shutting_down() from None
    try:
        return await asyncio.wrap_future(found)
    except asyncio.CancelledError:
        # The request itself is not cancelled: the pool was closed while the work waited.
        task = asyncio.current_task()
        if found.cancelled() and task is not None and not task.cancelling():
            raise shutting_down() from None
        raise


def _and_memory_back(call: Callable[[], Result]) -> Result:
    try:
        return call()
    finally:
        trim_memory()
