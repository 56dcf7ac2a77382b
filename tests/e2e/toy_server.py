"""A real server process on the toy: `python -m tests.e2e.toy_server '{"delay": 0.01, ...}'`.

What it takes beyond settings: a toy that needs `delay` seconds per step, loading that takes
`load_seconds` or fails with `load_error`, an engine that dies of the token `poison`, a drafter
that fails when it is asked for the `drafter_calls`-th time, a file `steps` that grows by a byte
per step, or a `script` that it writes (scripted.py). Another `model` takes none of that. The engine
runs in a process of its own (toy_engine) unless the setting `engine_process` says no.
"""

import json
import logging
import sys
import time
from functools import partial
from pathlib import Path

from forerun.build import engine as engine_module
from forerun.build.engine import load
from forerun.cli.main import EXIT_CODES
from forerun.client.engine_process import EngineCommand
from forerun.errors import ForerunError, ModelError
from forerun.executors.toy import ToyExecutor
from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.server import run
from tests.e2e.scripted import Scripted

LONG = 1 << 18
ENGINE = (sys.executable, "-m", "tests.e2e.toy_engine")


class Poisoned(ToyExecutor):
    """Raises in `begin` for good once a prompt held the token."""

    poison = -1
    dead = False
    steps = None

    def begin(self, plan, trees, masks=None):
        if self.steps is not None:
            with Path(self.steps).open("ab") as file:
                file.write(b".")
        self.dead = self.dead or self.poison in trees.tokens
        if self.dead:
            raise RuntimeError("the toy was poisoned")
        return super().begin(plan, trees, masks)


def failing(drafter, calls):
    """Make the drafter's `propose` raise at its `calls`-th call."""
    propose, left = drafter.propose, iter(range(calls - 1))

    def fail(plan):
        if next(left, None) is None:
            raise RuntimeError("the draft caught fire")
        return propose(plan)

    drafter.propose = fail


def as_tuples(settings):
    """JSON has lists where settings have tuples."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}


def load_toy(options):
    """Load what the options say, wherever the engine runs."""
    time.sleep(options.get("load_seconds", 0))
    if "load_error" in options:
        raise ModelError(options["load_error"])
    if "script" in options:
        engine_module.TOY_CONTEXT = LONG  # Programs begin with prompts of 80 kB.
    loaded = load(config_of(options))
    if not loaded.config.toy:
        return loaded
    executor = loaded.target.executor
    executor.__class__ = Poisoned
    if "script" in options:
        executor.__class__, executor.script = Scripted, options["script"]
    executor.poison, executor.delay = options.get("poison", -1), options.get("delay", 0.0)
    executor.steps = options.get("steps")
    if "drafter_calls" in options:
        failing(loaded.engine._parts.drafter, options["drafter_calls"])
    return loaded


def config_of(options):
    return EngineConfig(model=options.get("model", "toy"), **options.get("config", {}))


def configure_logs():
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")


def main(options):
    settings = ServeSettings(**{"port": 0, **as_tuples(options.get("settings", {}))})
    configure_logs()
    source = EngineCommand(ENGINE, config_of(options), options)
    if not settings.engine_process:
        source = partial(load_toy, options)
    try:
        run(source, settings, lambda url: print(url, flush=True))
    except ForerunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(next(code for kind, code in EXIT_CODES if isinstance(error, kind)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
