"""A real server process on the toy: `python -m tests.e2e.toy_server '{"delay": 0.01, ...}'`.

What it takes beyond settings: a toy that needs `delay` seconds per step, loading that takes
`load_seconds` or fails with `load_error`, an engine that dies of the token `poison`, a drafter
that fails when it is asked for the `drafter_calls`-th time. Another `model` takes none of that.
"""

import json
import logging
import sys
import time

from forerun.build.engine import load
from forerun.errors import ForerunError, ModelError
from forerun.executors.toy import ToyExecutor
from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.server import run


class Poisoned(ToyExecutor):
    """Raises in `begin` for good once a prompt held the token."""

    poison = -1
    dead = False

    def begin(self, plan, trees, masks=None):
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


def main(options):
    settings = ServeSettings(**{"port": 0, **as_tuples(options.get("settings", {}))})

    def loader():
        time.sleep(options.get("load_seconds", 0))
        if "load_error" in options:
            raise ModelError(options["load_error"])
        model = options.get("model", "toy")
        loaded = load(EngineConfig(model=model, **options.get("config", {})))
        if model != "toy":
            return loaded
        executor = loaded.target.executor
        executor.__class__ = Poisoned
        executor.poison, executor.delay = options.get("poison", -1), options.get("delay", 0.0)
        if "drafter_calls" in options:
            failing(loaded.engine._parts.drafter, options["drafter_calls"])
        return loaded

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    try:
        run(loader, settings, lambda url: print(url, flush=True))
    except ForerunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
