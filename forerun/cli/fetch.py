"""`forerun fetch`: put a model into the cache, so that everything else works offline."""

import argparse

from forerun.build.memory import human
from forerun.cli.console import bars, emit, say
from forerun.hub.catalog import open_model


def main(arguments: argparse.Namespace) -> int:
    """Run the command: download where needed, verify, and say where the files lie."""
    with bars() as report:
        model = open_model(arguments.model, report)
    size = sum(f.stat().st_size for f in model.path.rglob("*") if f.is_file()) or (
        model.path.stat().st_size
    )
    facts = {
        "name": model.name,
        "path": str(model.path),
        "bytes": size,
        "family": model.architecture.family,
        "parameters": model.architecture.parameters,
        "context": model.architecture.context,
    }
    done = f"{model.name} is ready: {human(size)} in {model.path}"
    emit(arguments, facts, lambda: say(done))
    return 0
