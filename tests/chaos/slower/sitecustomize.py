"""Clocks as on a machine three times slower, whose processor is six times slower: put this folder
on PYTHONPATH, and every Python process has them (`make test-slower`). No outcome may change.
"""

import time
from collections.abc import Callable

FACTORS = {"perf_counter": 3, "monotonic": 3, "process_time": 6, "thread_time": 6}


def _faster(clock: Callable[[], float], factor: int) -> Callable[[], float]:
    began = clock()
    return lambda: began + factor * (clock() - began)


for _name, _factor in FACTORS.items():
    setattr(time, _name, _faster(getattr(time, _name), _factor))
