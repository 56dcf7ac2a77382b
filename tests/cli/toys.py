"""A small toy target, opened as a user's program would."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from forerun.build.engine import Loaded, load
from forerun.build.target import Target, open_target
from forerun.executors.toy import ToyExecutor
from forerun.options.config import EngineConfig

CONFIG = EngineConfig(model="toy", max_sequences=8, kv_tokens=8192, context=1024)


@contextmanager
def toy_target(config: EngineConfig = CONFIG, delay: float = 0.0) -> Iterator[Target]:
    target = open_target(config)
    if delay:
        target = replace(target, executor=ToyExecutor(target.memory.limits, delay))
    try:
        yield target
    finally:
        target.close()


@contextmanager
def toy_loaded(config: EngineConfig = CONFIG) -> Iterator[Loaded]:
    with closing(load(config)) as loaded:
        yield loaded
        loaded.engine.check()
