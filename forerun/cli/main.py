"""The command line: names, flags, errors, exit codes. What a command does is in the other files
here.

Flags are derived from the dataclasses in `config.py`. Nothing heavy is imported before the
command is known, so `--help` answers at once.

Exit codes:
    0    done
    1    the command ran and its verdict is negative (`prove` diverged, `bench` saw errors)
    2    the command line or a request is wrong
    3    the model cannot be used or fetched
    4    it does not fit into memory
    5    the engine failed
    6    a process that shares the model (--tp-size) was ended or stopped
    130  interrupted; 141 our output cannot be written: its reader went away, or the disk is full
"""

import argparse
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from forerun.cli import verbs
from forerun.cli.commands import COMMANDS, SHOWN
from forerun.cli.layers import settle
from forerun.cli.parser import Parser
from forerun.errors import (
    ConfigError,
    EngineError,
    ForerunError,
    MemoryPlanError,
    ModelError,
    RankError,
    RequestError,
)
from forerun.options.aliases import OPTIONS
from forerun.options.flags import add_aliases
from forerun.version import __version__

EXIT_CODES: tuple[tuple[type[ForerunError], int], ...] = (
    (ConfigError, 2),
    (RequestError, 2),
    (ModelError, 3),
    (MemoryPlanError, 4),
    (RankError, 6),
    (EngineError, 5),
)
INTERRUPTED, NO_OUTPUT = 130, 141

EXTRAS = {"torch": "torch", "matplotlib": "plots", "opentelemetry": "otel", "ray": "ray"}
"""Packages that a plain installation leaves out, and the extra that brings each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, translate errors into a sentence on stderr and an exit code."""
    try:
        parser = build_parser()
        words = verbs.expanded(sys.argv[1:] if argv is None else argv)
        passed_on = verbs.for_others(words)
        arguments = parser.parse_args(words)
        arguments.passed_on = passed_on
        if arguments.command is None:
            parser.print_help()
            return 0
        settle(arguments)
        # Measuring without a server needs torch, which takes seconds to import.
        sized = getattr(arguments, "random_weights", None) is not None
        name = "sized" if sized else arguments.command
        name = "bench_grid" if getattr(arguments, "speculative_grid", False) else name
        name = "replicas" if getattr(arguments, "replicas", 1) > 1 else name
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
        print(
            f"forerun: this needs {package}, which is not installed: pip install "
            f"'forerun[{EXTRAS[package]}]', or `make tools` in a checkout.",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if error.errno == errno.ENOSPC:
            print(f"forerun: the output cannot be written: {error.strerror}.", file=sys.stderr)
        # Python would complain again while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_OUTPUT
    except ForerunError as error:
        for line in str(error).splitlines():
            print(f"forerun: {line}", file=sys.stderr)
        return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), 5)
    return code


def console() -> None:
    """Entry point of the `forerun` command."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # Under nohup it is ignored.
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    # A terminal that cannot show a letter of an answer gets another in its place.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.exit(main())


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(
        prog="forerun",
        description="LLM inference whose heart is speculative decoding: same text, only sooner.",
    )
    parser.add_argument("--version", action="version", version=f"forerun {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (summary, flags) in COMMANDS.items():
        words, examples = SHOWN.get(name, ("", ()))
        told = "".join(f"\n    {line}" for line in examples)
        command = commands.add_parser(
            name,
            help=summary,
            usage=f"%(prog)s {words}[options]",
            description=summary + (f"\n\nexamples:{told}" if told else ""),
        )
        flags(command)
        if command.get_default("options"):
            add_aliases(command, OPTIONS)
            command.add_argument(
                "--config",
                metavar="FILE",
                help="YAML file of option names and values; flags and FORERUN_* go before it",
            )
        command.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser
