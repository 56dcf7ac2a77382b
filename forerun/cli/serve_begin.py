"""The start of `forerun serve`: starts the engine's process before it imports the server, so that
both import their code at the same time. Imports nothing heavy before that.
"""

import argparse
import sys

from forerun.cli.main import STARTED
from forerun.client.engine_start import EngineProgram, EngineStart
from forerun.machine import collected_later
from forerun.options.config import EngineConfig, ServeSettings
from forerun.options.flags import configured_both

ENGINE = (sys.executable, "-m", "forerun.cli.engine_process")
"""The command that starts the process of an engine."""


def main(arguments: argparse.Namespace) -> int:
    """Run the command; see `serve.main`. With several models, no engine is started before a request
    names one.
    """
    config, settings = configured_both(EngineConfig, ServeSettings, arguments)
    several = arguments.more_models or arguments.models_dir or arguments.models_file
    program = _program(settings)
    begun = None if several or program is None else EngineStart(program.command, STARTED)
    try:
        if begun is not None and program is not None:
            from forerun.client import messages

            begun.send(messages.encode(messages.Start(config, program.options)))
        with collected_later():
            from forerun.cli import serve

        return serve.main(arguments, program, begun)
    finally:
        if begun is not None:
            begun.discard()


def _program(settings: ServeSettings) -> EngineProgram | None:
    """Return the program of the engine's process; None if the engine runs in this process, by
    option or on Windows.
    """
    if not settings.engine_process or sys.platform == "win32":
        return None
    options = {"level": settings.log_level, "format": settings.log_format}
    return EngineProgram(ENGINE, options)
