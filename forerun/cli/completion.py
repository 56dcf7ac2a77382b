"""`forerun completion`: what makes a shell complete the options."""

import argparse

import shtab

from forerun.cli.command_line import build_parser


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    print(shtab.complete(build_parser(), arguments.shell))
    return 0
