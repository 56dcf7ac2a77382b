"""What a loaded target does before its costs are measured and the first request comes."""

from collections.abc import Callable

from forerun.engine.overlap import carrying
from forerun.interface.executor import DraftShape, Executor, OverlapExecutor, PreparedExecutor
from forerun.options.config import EngineConfig


def overlaps(config: EngineConfig, executor: Executor) -> bool:
    """Whether steps overlap where nobody says: with captured rounds (decisions/0022)."""
    return config.device.startswith("cuda") and isinstance(executor, OverlapExecutor)


def prepare(
    config: EngineConfig,
    executor: Executor,
    within: bool,
    progress: Callable[[str, int, int], None] | None,
) -> None:
    """Have all that slows first steps done, in an order in which nothing done is voided: the draft
    head (whose features are asked for when it is loaded) and overlap come before the captures.

    within  whether a draft is loaded whose trees steps grow by themselves
    """
    if config.overlap:
        carrying(executor)
    if not isinstance(executor, PreparedExecutor):
        return
    shape = config.draft_shape
    drafts = shape.nodes if config.speculates else 0
    levels = min(drafts, shape.steps) if within else 0
    width = shape.topk if levels else 0

    executor.warm_up(DraftShape(drafts, width, levels), progress or (lambda *_: None))
