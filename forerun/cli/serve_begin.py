"""`forerun serve` until its own code is loaded: the engine's process is begun first, so that both
load theirs at the same time. Nothing heavy is imported before that.
"""

import argparse
import sys
from typing import Any

from forerun.client.engine_start import EngineStart
from forerun.options.config import EngineConfig, ServeSettings
from forerun.options.flags import configured_both

ENGINE = (sys.executable, "-m", "forerun.cli.engine_process")
"""Starts the process of an engine."""


def main(arguments: argparse.Namespace) -> int:
    """Run the command; see `serve.main`. A server of several models begins none before it is asked
    for.
    """
    config, settings = configured_both(EngineConfig, ServeSettings, arguments)
    several = arguments.more_models or arguments.models_dir or arguments.models_file
    begun = None if several or not has_process(settings) else EngineStart(ENGINE)
    try:
        if begun is not None:
            from forerun.client import messages

            options = engine_options(settings, arguments.probe)
            begun.send(messages.encode(messages.Start(config, options)))
        from forerun.cli import serve

        return serve.main(arguments, begun)
    finally:
        if begun is not None:
            begun.discard()


def has_process(settings: ServeSettings) -> bool:
    """Whether the engine runs in a process of its own: where that is wanted, but on Windows."""
    return settings.engine_process and sys.platform != "win32"


def engine_options(settings: ServeSettings, probe: bool) -> dict[str, Any]:
    """What `engine_process.load_started` reads, as JSON values."""
    return {"probe": probe, "level": settings.log_level, "format": settings.log_format}
