"""Records of single steps, for requests with a trace."""

from dataclasses import dataclass
from typing import NamedTuple

from forerun.speculative.tree import DraftSource, TreeBatch
from forerun.types import Ints

MAX_NODES = 64
"""Most draft tokens in the trace of one step; the accepted path is always among them."""
MAX_STEPS = 2048
"""Most traced steps of one choice; later ones are not recorded."""


class DraftRow(NamedTuple):
    """The draft tokens of one row, parents before children, and which were accepted.

    parents   index of the parent among these; -1 = the root
    depth     1 below the root
    scores    as in Draft; zeros if only the device has them
    sources   DraftSource of each
    accepted  the accepted path, from the root down
    """

    tokens: list[int]
    parents: list[int]
    depth: list[int]
    scores: list[float]
    sources: list[DraftSource]
    accepted: list[int]


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step of one choice.

    number    of the step, from 0, among the steps of this choice that decided a token
    position  output position of the first token that it decided
    tokens    accepted draft tokens, then one of the target's own, which is missing if a stop
              condition cut the step short
    nodes     the draft tokens it verified, at most MAX_NODES; `accepted` are indices of these
    left_out  number of draft tokens beyond MAX_NODES
    allowed   most draft tokens that the row was allowed to carry
    reason    of that number, as text for users
    ms        milliseconds of the whole step, which other requests may have shared
    """

    number: int
    position: int
    tokens: tuple[int, ...]
    nodes: DraftRow
    left_out: int
    allowed: int
    reason: str
    ms: float


def bounded(row: DraftRow, max_nodes: int = MAX_NODES) -> DraftRow:
    """Return the first draft tokens of a row, at most `max_nodes`, and all accepted ones."""
    if len(row.tokens) <= max_nodes:
        return row
    path = row.accepted[:max_nodes]
    others = [node for node in range(len(row.tokens)) if node not in set(path)]
    shown = sorted(path + others[: max_nodes - len(path)])
    place = {node: index for index, node in enumerate(shown)} | {-1: -1}
    return DraftRow(
        [row.tokens[node] for node in shown],
        [place[row.parents[node]] for node in shown],
        [row.depth[node] for node in shown],
        [row.scores[node] for node in shown],
        [row.sources[node] for node in shown],
        [place[node] for node in path],
    )


def draft_row(trees: TreeBatch, row: int, path: Ints) -> DraftRow:
    """Return the draft tokens of a row, of which the nodes `path`, int32[.] of `trees`, were
    accepted.
    """
    first, end = trees.root(row) + 1, int(trees.start[row + 1])
    tokens = trees.tokens[first:end].tolist()
    parents = (trees.parents[first:end] - first).tolist()
    depth = (trees.depth[first:end] - trees.depth[first - 1]).tolist()
    scores, sources = [0.0] * len(tokens), [DraftSource.UNKNOWN] * len(tokens)
    if trees.drafts:
        scores = trees.drafts[row].score.tolist()
        sources = list(map(DraftSource, trees.drafts[row].sources()))
    return DraftRow(tokens, parents, depth, scores, sources, (path - first).tolist())
