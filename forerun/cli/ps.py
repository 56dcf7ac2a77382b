"""`forerun ps`: shows the models of a running server."""

import argparse

from rich.table import Table

from forerun.build.memory import human
from forerun.cli.console import emit_json, out
from forerun.cli.running import get_json


def main(arguments: argparse.Namespace) -> int:
    """Run the command: prints the models that a server has loaded, as a table or as JSON. Returns
    0. Raises ConfigError if no server answers.
    """
    models = get_json(arguments.url, "/api/ps", arguments.api_key).get("models", [])
    if arguments.json:
        emit_json(models)
        return 0
    table = Table(box=None)
    for heading in ("model", "size", "context"):
        table.add_column(heading, overflow="fold")
    for model in models:
        name = str(model["name"]).removesuffix(":latest")
        table.add_row(name, human(model.get("size", 0)), f"{model.get('context_length', 0):,}")
    out.print(table)
    return 0
