"""A real server process on the toy: `python -m tests.worlds.toy_server '{"delay": 0.01, ...}'`.

What it takes beyond settings: a toy that needs `delay` seconds per step, loading that waits for a
file `load_when` or fails with `load_error`, an engine that dies of the token `poison`, a drafter
that fails at its `drafter_calls`-th call, a file `steps` that grows by a byte
per step, or a `script` that it writes (scripted.py). With `models` it is one of several names, each
a toy like that. Another `model` takes none of that. The engine
runs in a process of its own (toy_engine) unless the setting `engine_process` says no.
"""

import json
import sys
from functools import partial

from forerun.cli.main import EXIT_CODES
from forerun.client.engine_process import EngineCommand
from forerun.client.engine_start import EngineProgram
from forerun.errors import ForerunError
from forerun.options.config import ServeSettings
from forerun.serve.models import Source
from forerun.serve.server import run
from tests.worlds.toy_engine import config_of, configure_logs, load_toy

ENGINE = (sys.executable, "-m", "tests.worlds.toy_engine")


def as_tuples(settings):
    """JSON has lists where settings have tuples."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}


def main(options, report):
    settings = ServeSettings(**{"port": 0, **as_tuples(options.get("settings", {}))})
    configure_logs()
    source = EngineCommand(EngineProgram(ENGINE, options), config_of(options))
    if not settings.engine_process:
        source = partial(load_toy, options)
    if names := options.get("models"):
        source = [Source(name, (), 0, source) for name in names]
    try:
        run(source, settings, report)
    except ForerunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(next(code for kind, code in EXIT_CODES if isinstance(error, kind)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), partial(print, flush=True))
