"""What a step costs that grows draft tokens level by level with a drafter that takes time."""

import numpy as np

from forerun.control.cost_model import LiveCosts
from forerun.types import Ints


def levels_ms(
    costs: LiveCosts, kv_len: Ints, owners: Ints, width: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of a step, drafting included, with no level, the first, the first two, ...: what
    is believed, and what it may take if that is wrong.

    kv_len  int32[B], cached tokens of the rows
    owners  int[n], the row of each level
    width   draft tokens of a level
    """
    draft_tokens = width * np.arange(len(owners) + 1)
    nodes = len(kv_len) + draft_tokens
    cached = np.cumsum(np.append(kv_len.sum(), width * kv_len[owners]))
    drafting = (
        costs.measured.follow_ms * (draft_tokens > 0) + costs.measured.draft_ms * draft_tokens
    )
    ms: list[float] = (costs.many(nodes, cached) + costs.pace * drafting).tolist()
    steps = zip(nodes.tolist(), cached.tolist(), ms, strict=True)
    return ms, [costs.at_most(*step) for step in steps]
