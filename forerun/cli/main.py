"""The command line: names, flags, errors, exit codes. What a command does is in the other files
here.

Nothing heavy is imported before the command is known, so `--help` answers at once, and nearly
nothing before `main`, where an interrupt is a word and not a traceback.

Exit codes:
    0    done
    1    the command ran and its verdict is negative (`prove` diverged, `bench` saw errors)
    2    the command line or a request is wrong
    3    the model cannot be used or fetched
    4    it does not fit into memory
    5    the engine failed
    6    the engine's process, or one that shares the model (--tp-size), was ended or stopped
    130  interrupted; 141 our output cannot be written: its reader went away, or the disk is full
"""

import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from types import FrameType

from forerun.errors import (
    ConfigError,
    EngineError,
    EngineLostError,
    ForerunError,
    MemoryPlanError,
    ModelError,
    RankError,
    RequestError,
    unusable,
)

resource = None if sys.platform == "win32" else importlib.import_module("resource")

EXIT_CODES: tuple[tuple[type[ForerunError], int], ...] = (
    (ConfigError, 2),
    (RequestError, 2),
    (ModelError, 3),
    (MemoryPlanError, 4),
    (RankError, 6),
    (EngineLostError, 6),
    (EngineError, 5),
)
INTERRUPTED, NO_OUTPUT = 130, 141

STARTED = monotonic()
"""When this process began, but for Python itself, in seconds on the monotonic clock."""

_DENIED = ("failed to map segment", "cannot allocate memory", "can't start new thread")
"""What the loader of libraries and Python say where there is no memory."""

EXTRAS = {"torch": "torch", "matplotlib": "plots", "opentelemetry": "otel", "ray": "ray"}
"""Packages that a plain installation leaves out, and the extra that brings each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, translate errors into a sentence on stderr and an exit code."""
    try:
        # Here, so that an interrupt meanwhile is one.
        command_line = importlib.import_module("forerun.cli.command_line")
        arguments = command_line.parsed(sys.argv[1:] if argv is None else argv)
        if arguments is None:
            return 0
        name = "replicas" if getattr(arguments, "replicas", 1) > 1 else arguments.command
        name = "serve_begin" if name == "serve" else name
        command = importlib.import_module(f"forerun.cli.{name}")
        code: int = command.main(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    except (ForerunError, ImportError, OSError, MemoryError, RuntimeError) as error:
        code = explained(error)
    return code


def explained(error: Exception) -> int:
    """Print on stderr what an error means; return the exit code. Re-raises our own bugs."""
    package = (getattr(error, "name", None) or "").split(".")[0]
    if isinstance(error, ImportError) and package in EXTRAS:
        tools = "" if package == "ray" else ", or `make tools` in a checkout"
        missing = f"this needs {package}, which is not installed: pip install "
        _complain(f"{missing}'forerun[{EXTRAS[package]}]'{tools}.")
        code = 2
    elif isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.ENOSPC):
        if error.errno == errno.ENOSPC:
            _complain(f"the output cannot be written: {error.strerror}.")
        # Python would complain again while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = NO_OUTPUT
    elif isinstance(known := unusable(error) or error, ForerunError):
        for line in str(known).splitlines():
            _complain(line)
        code = next((code for kind, code in EXIT_CODES if isinstance(known, kind)), 5)
    else:
        _complain(_want_of_memory(error))
        code = 4
    return code


def _want_of_memory(error: Exception) -> str:
    """Return a sentence that the system gave this process no memory. Raises any other error
    again.
    """
    reasons = [
        line for line in str(error).splitlines() if any(one in line.lower() for one in _DENIED)
    ]
    if not reasons and not isinstance(error, MemoryError):
        raise error
    limit = "" if resource is None else _limit(resource.getrlimit(resource.RLIMIT_AS)[0])
    return ": ".join((f"the system gives this process no more memory{limit}", *reasons[:1]))


def _limit(size: int) -> str:
    return "" if size < 0 else f" than {size >> 10} kB, its limit (ulimit -v)"


def _complain(sentence: str) -> None:
    """Say on stderr what is wrong."""
    wrap = importlib.import_module("forerun.cli.wrap")
    print(wrap.wrapped(f"forerun: {sentence}"), file=sys.stderr)


def _interrupt(sent: int, frame: FrameType | None) -> None:
    """Interrupt what runs. A second signal ends the process at once. So does the first where a
    server does not run yet: it has nothing to finish, and an import may catch what is raised in it.
    """
    if "forerun.cli.serve_begin" in sys.modules:
        _end(sent, frame)
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, _end)
    raise KeyboardInterrupt


def _end(_sent: int, _frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def console() -> None:
    """Run the `forerun` command and end the process with `main`'s code. SIGTERM and SIGHUP end it
    as Ctrl+C does.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    for each in (signal.SIGINT, signal.SIGHUP):  # Ignored in the background, and under nohup.
        if signal.getsignal(each) != signal.SIG_IGN:
            signal.signal(each, _interrupt)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # Closed by what started us, as by `>&-`.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    # A terminal that cannot show a letter of an answer gets another in its place.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.exit(main())
