"""`forerun stop`: explains how to end a server, since none runs in the background."""

import argparse

from forerun.cli.console import say
from forerun.cli.running import get_json


def main(arguments: argparse.Namespace) -> int:
    """Run the command: prints how to end a server. Returns 2, because it ends none."""
    name = get_json(arguments.url, "/server_info", arguments.api_key).get("model", "a model")
    say(
        f"{arguments.url} serves {name} until its own process is ended: press Ctrl+C in its "
        "terminal, or send it SIGTERM; running requests finish first. There is no server in the "
        "background that would start it again."
    )
    return 2
