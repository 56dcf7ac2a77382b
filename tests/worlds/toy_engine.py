"""The process of a toy server's engine: `python -m tests.worlds.toy_engine FD`."""

import logging
import sys
import time
from pathlib import Path

from forerun.build import engine as engine_module
from forerun.build import target as target_module
from forerun.client.engine_worker import run
from forerun.errors import ModelError
from forerun.executors.toy import ToyExecutor
from forerun.options.config import EngineConfig
from tests.e2e.scripted import Scripted

LONG = 1 << 18


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


def load_toy(options):
    """Load what the options say, wherever the engine runs."""
    while not Path(options.get("load_when", ".")).exists():
        time.sleep(0.01)
    if "load_error" in options:
        raise ModelError(options["load_error"])
    if "script" in options:
        target_module.TOY_CONTEXT = LONG  # Programs begin with prompts of 80 kB.
    loaded = engine_module.load(config_of(options))
    if not loaded.config.toy:
        return loaded
    executor = loaded.target.executor
    executor.__class__ = Poisoned
    if "script" in options:
        executor.__class__, executor.script = Scripted, options["script"]
    executor.poison, executor.delay = options.get("poison", -1), options.get("delay", 0.0)
    executor.steps = options.get("steps")
    if "drafter_calls" in options:
        failing(loaded.engine._parts.drafter._drafter, options["drafter_calls"])
    return loaded


def config_of(options):
    return EngineConfig(model=options.get("model", "toy"), **options.get("config", {}))


def configure_logs():
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")


def load(start, report):
    configure_logs()
    for words in start.options.get("loading", ()):
        report(*words)
    return load_toy(start.options), {}


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), load))
