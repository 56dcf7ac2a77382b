"""The entry point of the command line: dispatch, errors, exit codes. The commands are in the other
files here.

Nothing heavy is imported before the command is known, so `--help` answers at once, and nearly
nothing before `main`, where an interrupt is a word and not a traceback.

Exit codes:
    0    done
    1    the command ran with a negative result (`prove` diverged, `bench` had errors)
    2    the command line or a request is wrong
    3    the model cannot be used or fetched
    4    it does not fit into memory
    5    the engine failed
    6    the engine's process, or one that shares the model (--tp-size), ended or was stopped
    130  interrupted; 141 our output cannot be written: its reader went away, or the disk is full
"""

import errno
import faulthandler
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
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a write fails with on a full disk, beyond a quota and beyond the largest file allowed."""

STARTED = monotonic()
"""When this process began, after Python's own start, in seconds on the monotonic clock."""

_DENIED = ("failed to map segment", "cannot allocate memory", "can't start new thread")
"""Fragments of the messages of Python and of the dynamic linker if there is no memory."""

EXTRAS = {"torch": "torch", "matplotlib": "plots", "opentelemetry": "otel", "ray": "ray"}
"""Packages that a plain installation does not include, and the extra that installs each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run the command. Errors become a sentence on stderr and the exit
    code.
    """
    try:
        # Imported here, so that an interrupt during the import is handled.
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
    """Print on stderr what an error means and return the exit code. Re-raises unexpected errors."""
    package = (getattr(error, "name", None) or "").split(".")[0]
    if isinstance(error, ImportError) and package in EXTRAS:
        tools = "" if package == "ray" else ", or `make tools` in a checkout"
        missing = f"this needs {package}, which is not installed: pip install "
        _print_error(f"{missing}'forerun[{EXTRAS[package]}]'{tools}.")
        code = 2
    elif isinstance(error, OSError) and error.errno in (errno.EPIPE, *FULL):
        if error.errno != errno.EPIPE:
            _print_error(f"the output cannot be written: {error.strerror}.")
        # Otherwise Python reports the error again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = NO_OUTPUT
    elif isinstance(known := unusable(error) or error, ForerunError):
        for line in str(known).splitlines():
            _print_error(line)
        code = next((code for kind, code in EXIT_CODES if isinstance(known, kind)), 5)
    else:
        _print_error(_memory_message(error))
        code = 4
    return code


def _memory_message(error: Exception) -> str:
    """Return the message for an error that means a lack of memory. Re-raises any other error."""
    reasons = [
        line for line in str(error).splitlines() if any(one in line.lower() for one in _DENIED)
    ]
    if not reasons and not isinstance(error, MemoryError):
        raise error
    limit = "" if resource is None else _limit(resource.getrlimit(resource.RLIMIT_AS)[0])
    return ": ".join((f"the system gives this process no more memory{limit}", *reasons[:1]))


def _limit(size: int) -> str:
    return "" if size < 0 else f" than {size >> 10} kB, its limit (ulimit -v)"


def _print_error(sentence: str) -> None:
    """Print an error message on stderr."""
    wrap = importlib.import_module("forerun.cli.wrap")
    print(wrap.wrapped(f"forerun: {sentence}"), file=sys.stderr)


def _interrupt(sent: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; a second signal ends the process at once. So does the first while a
    server is still starting: it has nothing to finish, and an import may catch the exception.
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
    """Run the `forerun` command and exit with `main`'s code. SIGTERM and SIGHUP end it as Ctrl+C
    does; SIGBUS (a model's file is cut while it is read) and SIGSEGV print what ran.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    for each in (signal.SIGINT, signal.SIGHUP):  # Ignored in the background and by nohup.
        if signal.getsignal(each) != signal.SIG_IGN:
            signal.signal(each, _interrupt)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # Closed by the parent, as by `>&-`.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    faulthandler.enable()
    # Characters that the terminal cannot show are replaced.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.exit(main())
