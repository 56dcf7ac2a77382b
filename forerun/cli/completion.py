"""`forerun completion`: shell completion of the options."""

import argparse
import re

import shtab

from forerun.cli.command_line import build_parser
from forerun.options.flags import Note


def main(arguments: argparse.Namespace) -> int:
    """Run the command: prints the completion script for a shell. Returns 0."""
    print(shtab.complete(_with_values(build_parser()), arguments.shell))
    return 0


def _with_values(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the same parser, with the values that a shell can suggest and one line of help per
    option. Only for shells: when parsing, our own checks give better errors than argparse's.
    """
    for action in parser._actions:
        if isinstance(action, Note) and action.help not in (None, argparse.SUPPRESS):
            text = action.help.removeprefix(f"one of {', '.join(action.values)}: ")
            action.help = re.split(r"[:;(]", text)[0].strip()
            if action.values and action.nargs != 0:
                action.choices = action.values
        for command in action.choices.values() if isinstance(action.choices, dict) else ():
            _with_values(command)
    return parser
