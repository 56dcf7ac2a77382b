"""A guard: what happens inside must be quick, small, and fail with nothing but ModelError."""

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from forerun.errors import ModelError


class Verdict:
    """`error` is the ModelError raised inside, or None."""

    error: ModelError | None = None


@contextmanager
def bounded(seconds: float = 1.0, megabytes: float | None = 32.0) -> Iterator[Verdict]:
    """Any other exception passes through and fails the test.

    Seconds are of this process's CPU: a busy machine does not fail the test. Counting megabytes
    makes allocation ten times slower; None = do not count.
    """
    verdict = Verdict()
    peak = 0
    if megabytes is not None:
        tracemalloc.start()
    began = time.process_time()
    try:
        yield verdict
    except ModelError as error:
        verdict.error = error
    finally:
        took = time.process_time() - began
        if megabytes is not None:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert took < seconds, f"took {took:.2f} s"
    assert megabytes is None or peak < megabytes * 1e6, f"allocated {peak / 1e6:.0f} MB"
    assert verdict.error is None or len(str(verdict.error)) < 5000
