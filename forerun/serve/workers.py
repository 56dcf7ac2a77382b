"""Where the work of a request is done that is not the engine's: on the event loop, or beside it."""

import asyncio
import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

LARGE = 1 << 14
"""Bodies above this many bytes are parsed and encoded on another thread: others go on."""

HUGE = 1 << 20
"""After a body above this many bytes the memory that its work took is given back to the system:
glibc keeps some 200 bytes for each byte of a text that was encoded, 800 MB after 4 MB."""

SMALL_AT_ONCE, LARGE_AT_ONCE = 4, 2
"""Threads for small bodies whose work waits for another process, and for large bodies."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Workers:
    """Threads beside the event loop. Small bodies never wait for large ones."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(SMALL_AT_ONCE, "forerun-small")
        self._large = ThreadPoolExecutor(LARGE_AT_ONCE, "forerun-large")

    def close(self) -> None:
        """Take no more work; what is under way is not waited for."""
        self._small.shutdown(wait=False, cancel_futures=True)
        self._large.shutdown(wait=False, cancel_futures=True)

    async def run(
        self,
        size: int,
        work: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """Do `work` for a body of `size` bytes, on another thread where that may take long."""
        if size <= LARGE:
            return work(*args, **kwargs)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._large, partial(work, *args, **kwargs))
        finally:
            if size > HUGE:
                await loop.run_in_executor(self._large, give_memory_back)

    async def apart(
        self,
        size: int,
        work: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """The same for work that waits for another process, which is never done here."""
        if size > LARGE:
            return await self.run(size, work, *args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._small, partial(work, *args, **kwargs))


def give_memory_back() -> None:
    """Return free memory to the system, where its C library can: glibc keeps it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
