"""Which sizes are captured before the first step, and what steps of other sizes run as."""

from collections.abc import Iterable, Iterator

from forerun.executors.torch.captured.buffers import Size
from forerun.executors.torch.captured.shaped_rows import CUT, REPORTS
from forerun.executors.torch.captured.sizes import padded_size
from forerun.interface.executor import DraftShape, ExecutorLimits

ASKED = ((0, 0, 0), (CUT, 0, 0), (0, 1, REPORTS[-1]), (CUT, 1, REPORTS[-1]))
"""What rows may ask for in captured rounds (Size.shaping, masked, reports): any of the sampler's
parameters or none, a grammar and log-probabilities or neither. Whoever asks for less runs along.
"""


def declared(limits: ExecutorLimits, draft: DraftShape) -> tuple[Size, ...]:
    """What is captured before the first step, each size once; those of few rows come first.

    Every size that rows of up to draft.nodes draft tokens are padded to. Where a head drafts in
    rounds also, with every number of levels: rounds that verify what the round before has grown,
    and rounds of rows that were not drafted for yet. Then all of these again, as ASKED.
    """
    found: dict[Size, None] = {}
    for rows in range(1, limits.slots + 1):
        for nodes in range(1, draft.nodes + 2):
            size = padded_size(rows, nodes, limits.scored_nodes)
            if size is not None:
                found.update(dict.fromkeys(_with_levels(size, nodes, draft)))
    return tuple(
        size._replace(shaping=shaping, masked=masked, reports=min(reports, limits.vocab))
        for shaping, masked, reports in ASKED
        for size in found
    )


def covering(size: Size, captured: Iterable[Size]) -> Size | None:
    """The cheapest of `captured` that does what a round of `size` does; None where none does.

    The trees that are grown are the same; rows, nodes and what else is asked for may be more.
    """
    grown = size.levels, size.width

    def fits(other: Size) -> bool:
        asked = zip(size[4:], other[4:], strict=True)
        larger = other.rows >= size.rows and other.nodes >= size.nodes
        return (other.levels, other.width) == grown and larger and all(a <= b for a, b in asked)

    found = filter(fits, captured)
    return min(found, key=lambda other: (other.total, *other[4:]), default=None)


def _with_levels(size: Size, nodes: int, draft: DraftShape) -> Iterator[Size]:
    yield size
    for levels in range(1, draft.levels + 1):
        if nodes == 1 or draft.width > 1 or levels == nodes - 1:
            yield size._replace(levels=levels, width=draft.width)
