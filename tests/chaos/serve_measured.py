"""`forerun serve` that says what memory it uses.

    python -m tests.chaos.serve_measured FD [--impatient] serve ...

At SIGUSR1 it writes a line to file descriptor FD, and so does its engine's process: the bytes that
are in use of all that malloc has, behind a garbage collection. Pages that are only kept for later
do not count, as they do in what the system says of a process. It needs PYTHONMALLOC=malloc, so that
Python asks malloc for everything.

Impatient: a process that was stopped is given up after a multiple of the processor time that its
answer may take; of the chat template's that is two minutes. Here all are seconds.
"""

import ctypes
import functools
import gc
import os
import signal
import sys
from types import FrameType
from typing import ClassVar

from forerun import sandbox
from forerun.cli import serve_begin
from forerun.cli.main import console
from forerun.constrain.matcher.token_prior import Places
from forerun.text import rendering

REMEMBERING = type(functools.cache(len))


class Counts(ctypes.Structure):
    """What mallinfo2 returns: bytes, but for some counts."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "mapped"),
            *("usmblks", "fsmblks", "used", "free", "top"),
        )
    ]


def in_use() -> int:
    """Bytes that malloc has given out, in all arenas and in mappings of their own.

    What is kept up to a bound that thousands of answers reach does not count, and is thrown away:
    results that functions remember, and what was learned of grammars (20 MB). It decides what is
    drafted and how fast, and nothing else.
    """
    for kept in gc.get_objects():
        if isinstance(kept, Places):
            kept._weights.clear()
        elif isinstance(kept, REMEMBERING) and kept.__module__.startswith("forerun."):
            kept.cache_clear()
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Counts
    counts = mallinfo2()
    return int(counts.used + counts.mapped)


def measured(pipe: int, impatient: bool) -> None:
    """Have this process tell what it uses, and give up on others sooner where it is impatient."""
    assert os.environ["PYTHONMALLOC"] == "malloc"

    def tell(_signal: int, _frame: FrameType | None) -> None:
        try:
            os.write(pipe, b"%d\n" % in_use())
        except Exception as error:  # noqa: BLE001 - else the caller would wait for ever
            os.write(pipe, f"{error!r}\n".encode())

    signal.signal(signal.SIGUSR1, tell)
    if impatient:
        sandbox.SILENCE, sandbox.START_SECONDS = 6.0, 60.0
        rendering.SECONDS = 1.0


def main() -> int:
    """Serve."""
    pipe, impatient = int(sys.argv.pop(1)), sys.argv[1] == "--impatient"
    del sys.argv[1 : 1 + impatient]
    measured(pipe, impatient)
    # The same pipe, which this process passes on to no other.
    arguments = [f"/proc/{os.getpid()}/fd/{pipe}", str(int(impatient))]
    serve_begin.ENGINE = (sys.executable, "-m", "tests.chaos.engine_measured", *arguments)
    return console()


if __name__ == "__main__":
    sys.exit(main())
