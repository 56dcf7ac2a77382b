"""What operators may order an engine to do between two steps."""

from forerun.engine.core import EngineCore
from forerun.engine.thread import Engine


def forget_prefixes(engine: Engine) -> None:
    """Forget, before the next step, all pages that no running sequence holds."""
    engine.before_step(_forget)


def _forget(core: EngineCore) -> None:
    index = core.scheduler.index
    for page in index.take(index.available) or ():
        index.release(page)
