"""A guard: what happens inside must be quick, small, and fail with nothing but ModelError."""

import gc
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from forerun.errors import ModelError

FUZZ = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


class Verdict:
    """`error` is the ModelError raised inside, or None."""

    error: ModelError | None = None


@contextmanager
def bounded(loops: float = 30, megabytes: float | None = 32.0) -> Iterator[Verdict]:
    """Any other exception passes through and fails the test.

    loops      processor time of this thread at most, in what a million additions in Python take
               it: neither a slow nor a busy machine fails the test, nor what other tests have
               left to other threads and to the garbage collector, which rests meanwhile
    megabytes  allocated at most; counting them makes allocation ten times slower; None = do not
    """
    verdict = Verdict()
    peak = 0
    if megabytes is not None:
        tracemalloc.start()
    gc.disable()
    began = time.thread_time()
    try:
        yield verdict
    except ModelError as error:
        verdict.error = error
    finally:
        took = time.thread_time() - began
        gc.enable()
        if megabytes is not None:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert took < loops * _loop(), f"took {took:.2f} s, {took / _loop():.0f} loops"
    assert megabytes is None or peak < megabytes * 1e6, f"allocated {peak / 1e6:.0f} MB"
    assert verdict.error is None or len(str(verdict.error)) < 5000


@cache
def _loop() -> float:
    """Seconds of processor time that a million additions take here."""
    times = []
    for _ in range(3):
        began, total = time.thread_time(), 0
        for number in range(1_000_000):
            total += number
        times.append(time.thread_time() - began)
    return min(times)


def touch(checkpoint) -> None:
    """Read every tensor."""
    for name in checkpoint.names():
        assert checkpoint.tensor(name).shape == checkpoint.shape(name)
        checkpoint.packed(name)


@st.composite
def flipped(draw, content: bytes, begin: int, most: int = 4) -> bytes:
    """The file with one to `most` bits of its header, which ends at `begin`, turned round."""
    damaged = bytearray(content)
    for _ in range(draw(st.integers(1, most))):
        bit = draw(st.integers(0, 8 * begin - 1))
        damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)
