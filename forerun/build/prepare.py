"""Prepares a loaded target before its costs are measured and the first request comes."""

from collections.abc import Callable

from forerun.draft_shape import DraftShape
from forerun.interface.executor import Executor
from forerun.options.config import EngineConfig


def prepare(
    config: EngineConfig,
    executor: Executor,
    within: bool,
    progress: Callable[[str, int, int], None] | None,
) -> None:
    """Have the executor compile and capture all that steps will run, once the draft model is
    attached: attaching it later would invalidate that.

    within    a draft is loaded whose trees steps grow by themselves
    progress  called with (what, done, total); None = not called
    """
    shape = config.draft_shape
    drafts = shape.nodes if config.speculates else 0
    levels = min(drafts, shape.depth) if within else 0
    width = shape.width if levels else 0

    executor.warm_up(DraftShape(drafts, width, levels), progress or (lambda *_: None))
