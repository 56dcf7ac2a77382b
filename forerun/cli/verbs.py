"""Verbs of other tools, and the commands that query a running server."""

import argparse
from collections.abc import Callable, Sequence

Flags = Callable[[argparse.ArgumentParser], None]

SAME: dict[str, tuple[str, ...]] = {
    "pull": ("models", "pull"),
    "fetch": ("models", "pull"),
    "list": ("models", "list"),
    "ls": ("models", "list"),
    "show": ("models", "show"),
    "rm": ("models", "rm"),
    "help": ("--help",),
}
"""Verbs of ollama and of shells, and their equivalents here."""

URL = "http://127.0.0.1:8000"
AGENTS = ("claude", "codex", "cline", "continue", "opencode", "qwen", "aider", "open-webui")


def expanded(words: Sequence[str]) -> list[str]:
    """Return a command line with another tool's verb translated. `help COMMAND` becomes `COMMAND
    --help`.
    """
    if not words or words[0] not in SAME:
        return [*words]
    verb, *rest = words
    if verb == "help" and rest:
        return [*expanded(rest[:1]), "--help"]
    return [*SAME[verb], *rest]


def for_others(words: list[str]) -> list[str]:
    """Remove the words after `--` from a `launch` command line and return them: they are for the
    launched program.
    """
    if words[:1] != ["launch"] or "--" not in words:
        return []
    at = words.index("--")
    rest = words[at + 1 :]
    del words[at:]
    return rest


def _server_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=URL, metavar="URL", help=f"the server (default: {URL})")
    parser.add_argument(
        "--api-key", metavar="KEY", default="", help="API key, if the server needs one"
    )


def _stop_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="ignored: a server serves until it is stopped")
    _server_flags(parser)


def _launch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "agent",
        choices=AGENTS,
        metavar=f"{{{','.join(AGENTS)}}}",
        help="the program to start; arguments after -- are passed to it",
    )
    _server_flags(parser)
    parser.add_argument(
        "--model", metavar="NAME", help="one of the server's models (default: the first)"
    )
    parser.add_argument(
        "--config-only", action="store_true", help="write or show the configuration, start nothing"
    )


COMMANDS: dict[str, tuple[str, Flags]] = {
    "ps": ("Show what a running server serves.", _server_flags),
    "stop": ("Show how to stop a running server.", _stop_flags),
    "launch": ("Start a coding agent on a running server.", _launch_flags),
}
