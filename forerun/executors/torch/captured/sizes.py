"""Which sizes captured rounds have: how a step is padded.

A captured round has fixed shapes, so a step is padded to the next size. Up to FREE nodes padding
costs little: the weights are read once either way. Above that every node is work, and a step is
never padded to more than MOST_PADDING times its nodes.
"""

from forerun.executors.torch.captured.buffers import Size

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Rows of captured rounds; beyond, multiples of FURTHER_ROWS."""

FURTHER_ROWS = 32

NODES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64)
"""Nodes of a row: up to 8 draft tokens exactly."""

MOST_NODES = NODES[-1]
"""Nodes of a row, at most, in a captured round."""

FREE = 64
MOST_PADDING = 1.5


def padded_rows(rows: int) -> int:
    """The tables' rows for so many."""
    return next((count for count in ROWS if count >= rows), -(-rows // FURTHER_ROWS) * FURTHER_ROWS)


def padded_size(rows: int, nodes: int, most: int) -> Size | None:
    """The size that runs `rows` rows of which the largest has `nodes` nodes; None where no round
    of at most `most` nodes does.

    The tables' rows and nodes where that is not too much padding, else one of the two exactly as
    asked for, else both.
    """
    if nodes > MOST_NODES or rows * nodes > most:
        return None
    most = min(most, max(FREE, int(MOST_PADDING * rows * nodes)))
    table, room = padded_rows(rows), next(count for count in NODES if count >= nodes)
    tried = (Size(table, room), Size(table, nodes), Size(rows, room), Size(rows, nodes))
    return next(size for size in tried if size.total <= most)
