"""The sizes of captured rounds, and the size that a step runs as.

A captured round has fixed shapes. So a few sizes are declared and captured before the first
request, and a step is padded to the cheapest that is large enough; no size is captured later. With
few nodes padding costs little, because the weights are read once in any case; above eight rows,
rows and nodes are padded to 1.5 times at most.
"""

from collections.abc import Callable, Iterable, Iterator

from forerun.draft_shape import DraftShape
from forerun.executors.torch.captured.shaped_rows import CUT, REPORTS
from forerun.executors.torch.sizes import Size
from forerun.interface.executor import ExecutorLimits

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of rows of rounds; above, multiples of FURTHER_ROWS."""

FURTHER_ROWS = 32

NODES = (1, 2, 4, 6, 9, 12, 16, 24, 32, 48, 64)
"""Numbers of nodes of a row if drafts of any length come from the host, up to the longest."""

FORCED = 16
"""Nodes of a row for tokens that a grammar forces beyond the longest draft, in rounds of FREE
nodes.
"""

FREE = 64


def padded_rows(rows: int) -> int:
    """Return the rows in the tables of a round for `rows` sequences: the least declared number that
    is not smaller.
    """
    return next((count for count in ROWS if count >= rows), -(-rows // FURTHER_ROWS) * FURTHER_ROWS)


Fits = Callable[[Size], bool]
"""Whether the draft model has scratch for the trees of a size."""


def declared(
    limits: ExecutorLimits, draft: DraftShape, fits: Fits = lambda _: True
) -> tuple[Size, ...]:
    """Return the sizes to capture before the first step, without duplicates, the most expensive
    first. The depth of trees is limited to what `fits` allows for the number of rows, to one level
    if that fits. There are three kinds, by the sampling of their rows: only a temperature; any
    parameter; grammars and log-probabilities too. Of the last kind, in which the host does most of
    the work, only rounds of one node and of the most nodes.
    """
    most = limits.scored_nodes
    rows = [count for count in row_counts(limits.slots) if count <= most]
    plain = [size for count in rows for size in _of_rows(count, most // count, draft, fits)]
    masked = [size for count in rows for size in _of_masked(count, most // count, draft, fits)]
    cut = [size._replace(shaping=CUT) for size in plain]
    reports = min(REPORTS[-1], limits.vocab)
    masked = [size._replace(shaping=CUT, masked=1, reports=reports) for size in masked]
    return tuple(dict.fromkeys([*plain, *cut, *masked]))


def row_counts(slots: int) -> list[int]:
    """Return the numbers of rows of the declared rounds, ascending, to which 1 to `slots` rows are
    padded; `slots` at most.
    """
    return sorted({min(padded_rows(rows), slots) for rows in range(1, slots + 1)})


def row_nodes(limits: ExecutorLimits, draft: DraftShape) -> tuple[int, ...]:
    """Return the most nodes that a row may have in a step of 1, 2, ... rows that can run as a
    round.
    """
    counts, most = row_counts(limits.slots), limits.scored_nodes
    padded = (next(n for n in counts if n >= rows) for rows in range(1, limits.slots + 1))
    return tuple(max(1, min(_longest(count, draft), most // count)) for count in padded)


def covering(size: Size, captured: Iterable[Size]) -> Size | None:
    """Return the cheapest of `captured` that can run a round of `size`; None if none can. It may
    have more rows, nodes and levels, and support more sampling parameters.
    """

    def fits(other: Size) -> bool:
        pairs = list(zip(size, other, strict=True))
        pairs.pop(3)  # The width is the same if there are trees.
        return (not size.levels or other.width == size.width) and all(a <= b for a, b in pairs)

    fitting = filter(fits, captured)
    return min(fitting, key=lambda other: (other.levels, other.total, *other[4:]), default=None)


def _of_rows(rows: int, room: int, draft: DraftShape, fits: Fits) -> Iterator[Size]:
    """Yield rounds of `rows` rows, each of at most `room` nodes."""
    longest = min(1 + draft.nodes, room)
    counts = [nodes for nodes in NODES if nodes < longest]
    if draft.depth:  # Drafts of a head are as long as it grows them; of others there are fewer.
        counts = [nodes for nodes in counts if nodes in (1, 4)]
    yield from (Size(rows, nodes) for nodes in [*counts, longest])
    yield from _growing(rows, longest, draft, fits)


def _of_masked(rows: int, room: int, draft: DraftShape, fits: Fits) -> Iterator[Size]:
    yield Size(rows, 1)
    for nodes in (1 + draft.nodes, _longest(rows, draft)):
        yield Size(rows, min(nodes, room))
        yield from _growing(rows, min(nodes, room), draft, fits)[-1:]


def _growing(rows: int, longest: int, draft: DraftShape, fits: Fits) -> list[Size]:
    """Return rounds that verify drafts of the sizes that fit, and build as many levels; the last
    has `longest` nodes and the most levels. A path has at most as many levels as there are draft
    tokens, so deeper trees are useless.
    """
    sizes, above = list[Size](), 0
    for nodes, width, levels in draft.declared() if draft.depth else ():
        size = Size(rows, 1 + nodes, levels, width)
        if above < max(longest - 1, 1) and fits(size):
            sizes.append(size)
        above = levels
    last = [size._replace(nodes=longest) for size in sizes[-1:]]
    return [size for size in sizes[:-1] if size.nodes < longest] + last


def _longest(rows: int, draft: DraftShape) -> int:
    """Return the nodes of a row in the largest declared round of `rows` rows, without regard to
    scratch.
    """
    forced = FORCED if draft.nodes and rows * FORCED <= FREE else 1
    return max(1 + draft.nodes, forced)
