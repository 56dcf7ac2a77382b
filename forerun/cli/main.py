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

from forerun.errors import (
    ConfigError,
    EngineError,
    EngineLostError,
    ForerunError,
    MemoryPlanError,
    ModelError,
    RankError,
    RequestError,
)

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
        # Measuring without a server needs torch, which takes seconds to import.
        sized = getattr(arguments, "random_weights", None) is not None
        name = "sized" if sized else arguments.command
        name = "bench_grid" if getattr(arguments, "speculative_grid", False) else name
        name = "replicas" if getattr(arguments, "replicas", 1) > 1 else name
        name = "serve_begin" if name == "serve" else name
        command = importlib.import_module(f"forerun.cli.{name}")
        code: int = command.main(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except ImportError as error:
        package = (error.name or "").split(".")[0]
        if package not in EXTRAS:
            raise
        tools = "" if package == "ray" else ", or `make tools` in a checkout"
        missing = f"this needs {package}, which is not installed: pip install "
        _complain(f"{missing}'forerun[{EXTRAS[package]}]'{tools}.")
        return 2
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if error.errno == errno.ENOSPC:
            _complain(f"the output cannot be written: {error.strerror}.")
        # Python would complain again while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_OUTPUT
    except ForerunError as error:
        for line in str(error).splitlines():
            _complain(line)
        return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), 5)
    return code


def _complain(sentence: str) -> None:
    """Say on stderr what is wrong."""
    wrap = importlib.import_module("forerun.cli.wrap")
    print(wrap.wrapped(f"forerun: {sentence}"), file=sys.stderr)


def console() -> None:
    """Entry point of the `forerun` command: ends the process with `main`'s code. SIGTERM and SIGHUP
    end it as Ctrl+C does.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # Under nohup it is ignored.
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    # A terminal that cannot show a letter of an answer gets another in its place.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.exit(main())
