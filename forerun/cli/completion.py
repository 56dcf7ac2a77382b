"""`forerun completion`: what makes a shell complete the options."""

import argparse
from importlib import import_module

import shtab


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    parser = import_module("forerun.cli.main").build_parser()
    print(shtab.complete(parser, arguments.shell))
    return 0
