"""Work, counted: the same number on every machine, however slow or busy."""

import gc
import sys
from collections.abc import Callable
from typing import Any


def lines(work: Callable[[], Any]) -> int:
    """Lines of Python that `work()` executes on this thread, those of what it calls included.

    The garbage collector rests meanwhile: what it finalises (objects of an earlier test, say) is
    no work of `work()`'s.
    """
    count, before, collecting = 0, sys.gettrace(), gc.isenabled()

    def trace(_frame: Any, event: str, _arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        if collecting:
            gc.enable()
    return count
