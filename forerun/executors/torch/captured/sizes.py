"""Which sizes captured rounds have: how a step is padded, and what is captured before the first.

A captured round has fixed shapes, so a step is padded to the next size. Up to FREE nodes padding
costs little: the weights are read once either way. Above that every node is work, and a step is
never padded to more than MOST_PADDING times its nodes.
"""

from collections.abc import Iterator

from forerun.executors.torch.captured.buffers import Size
from forerun.interface.executor import DraftShape, ExecutorLimits

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Rows of captured rounds; beyond, multiples of FURTHER_ROWS."""

FURTHER_ROWS = 32

NODES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64)
"""Nodes of a row: up to 8 draft tokens exactly."""

MOST_NODES = NODES[-1]
"""Nodes of a row, at most, in a captured round."""

FREE = 64
MOST_PADDING = 1.5


def padded_size(rows: int, nodes: int, max_nodes: int) -> Size | None:
    """The size that runs `rows` rows of which the largest has `nodes` nodes; None where no round
    of at most `max_nodes` nodes does.

    The tables' rows and nodes where that is not too much padding, else one of the two exactly as
    asked for, else both.
    """
    if nodes > MOST_NODES or rows * nodes > max_nodes:
        return None
    most = min(max_nodes, max(FREE, int(MOST_PADDING * rows * nodes)))
    table = next(
        (count for count in ROWS if count >= rows), -(-rows // FURTHER_ROWS) * FURTHER_ROWS
    )
    room = next(count for count in NODES if count >= nodes)
    tried = (Size(table, room), Size(table, nodes), Size(rows, room), Size(rows, nodes))
    return next(size for size in tried if size.total <= most)


def declared(limits: ExecutorLimits, draft: DraftShape) -> tuple[Size, ...]:
    """What is captured before the first step, each size once; those of few rows come first.

    Every size that rows of up to draft.nodes draft tokens are padded to. Where a head drafts in
    rounds also, with every number of levels: rounds that verify what the round before has grown,
    and rounds of rows that were not drafted for yet. What else comes up is captured when it comes
    up for the second time.
    """
    found: dict[Size, None] = {}
    for rows in range(1, limits.slots + 1):
        for nodes in range(1, draft.nodes + 2):
            size = padded_size(rows, nodes, limits.max_nodes)
            if size is not None:
                found.update(dict.fromkeys(_with_levels(size, nodes, draft)))
    return tuple(found)


def _with_levels(size: Size, nodes: int, draft: DraftShape) -> Iterator[Size]:
    yield size
    for levels in range(1, draft.levels + 1):
        if nodes == 1 or draft.width > 1 or levels == nodes - 1:
            yield size._replace(levels=levels, width=draft.width)
