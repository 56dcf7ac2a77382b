"""The parser of the whole command line and its result. Flags are derived from the dataclasses in
`options/config.py`.
"""

import argparse
import logging
from collections.abc import Collection, Sequence

from forerun.cli import verbs
from forerun.cli.commands import COMMANDS, SHOWN
from forerun.cli.layers import settle
from forerun.cli.parser import Parser
from forerun.options.aliases import OPTIONS
from forerun.options.flags import add_aliases
from forerun.version import __version__


def parsed(words: Sequence[str]) -> argparse.Namespace | None:
    """Return the parsed command line, with options from files and variables; None if it has no
    command, in which case the help was printed. Logs which options have no effect; `serve` logs
    these `notices` once its logging is set up. Raises ConfigError if an option or a value is
    invalid.
    """
    words = verbs.expanded(words)
    parser = build_parser([word for word in words if word in COMMANDS][:1])
    passed_on = verbs.for_others(words)
    arguments = parser.parse_args(words)
    arguments.passed_on = passed_on
    if arguments.command is None:
        parser.print_help()
        return None
    held, handlers = _Held(), logging.getLogger().handlers
    before, handlers[:] = handlers[:], [held]
    try:
        settle(arguments)
    finally:
        handlers[:] = before
    arguments.notices = held.records
    if arguments.command != "serve":
        log_notices(arguments)
    return arguments


class _Held(logging.Handler):
    """Collects log records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def log_notices(arguments: argparse.Namespace) -> None:
    """Log the collected notices about options, once."""
    for record in arguments.notices:
        logging.getLogger(record.name).handle(record)
    arguments.notices = []


def build_parser(having: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Return the parser of the whole command line. Commands not in `having` get a name but no
    options, which takes a sixth of the time.
    """
    parser = Parser(
        prog="forerun",
        description="LLM inference with speculative decoding: the same text, sooner.",
    )
    parser.add_argument("--version", action="version", version=f"forerun {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (summary, flags) in COMMANDS.items():
        words, examples = SHOWN.get(name, ("", ()))
        epilog = "".join(f"\n    {line}" for line in examples)
        command = commands.add_parser(
            name,
            help=summary,
            usage=f"%(prog)s {words}[options]",
            description=summary + (f"\n\nexamples:{epilog}" if epilog else ""),
        )
        if name not in having:
            continue
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
