"""What a step drafted for one row, and which of it was accepted: for metrics and for traces."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forerun.speculative.tree import DraftSource, TreeBatch

MAX_NODES = 64
"""Draft tokens that a trace shows of one step at most; the accepted path is always among them."""
MAX_STEPS = 2048
"""Steps of one choice that are traced at most; later ones are not."""


class DraftRow(NamedTuple):
    """The draft tokens of one row, parents before children, and what became of them.

    parents   index of the parent among these; -1 = the root
    depth     1 below the root
    scores    as in Draft; zeros where only the device has them
    sources   DraftSource of each
    accepted  the accepted path, from below the root downwards
    """

    tokens: list[int]
    parents: list[int]
    depth: list[int]
    scores: list[float]
    sources: list[int]
    accepted: list[int]


NO_DRAFT_ROW = DraftRow([], [], [], [], [], [])


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step of one choice.

    number    of the step among those of this choice that decided a token, from 0
    position  place in the output of the first token that it decided
    tokens    what it decided and counts: accepted draft tokens, then one of the target's own,
              which is missing where a stop condition cut the step short
    nodes     the draft tokens it verified, at most MAX_NODES; `accepted` are indices of these
    left_out  draft tokens beyond that
    allowed   draft tokens that the row might have carried, and why so many, in words
    ms        time of the whole step, which other requests may have shared
    """

    number: int
    position: int
    tokens: tuple[int, ...]
    nodes: DraftRow
    left_out: int
    allowed: int
    reason: str
    ms: float


def source_name(source: int) -> str:
    """What statistics and traces call a DraftSource."""
    return DraftSource(source).name.lower()


def draft_row(trees: TreeBatch, row: int, accepted: Sequence[int]) -> DraftRow:
    """The draft tokens of a row of which the path with the tokens `accepted` was kept."""
    if trees.drafts:
        draft = trees.drafts[row]
        tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
        scores, sources = draft.score.tolist(), draft.sources()
    else:
        root, end = trees.root(row), int(trees.start[row + 1])
        tokens = trees.tokens[root + 1 : end].tolist()
        parents = (trees.parents[root + 1 : end] - (root + 1)).tolist()
        scores, sources = [0.0] * len(tokens), [int(DraftSource.UNKNOWN)] * len(tokens)
    depth: list[int] = []
    for parent in parents:
        depth.append(depth[parent] + 1 if parent >= 0 else 1)
    return DraftRow(tokens, parents, depth, scores, sources, _path(tokens, parents, accepted))


def bounded(row: DraftRow, most: int = MAX_NODES) -> DraftRow:
    """The first draft tokens of a row, `most` at most, and whatever was accepted."""
    if len(row.tokens) <= most:
        return row
    path = row.accepted[:most]
    others = [node for node in range(len(row.tokens)) if node not in set(path)]
    kept = sorted(path + others[: most - len(path)])
    place = {node: index for index, node in enumerate(kept)} | {-1: -1}
    return DraftRow(
        [row.tokens[node] for node in kept],
        [place[row.parents[node]] for node in kept],
        [row.depth[node] for node in kept],
        [row.scores[node] for node in kept],
        [row.sources[node] for node in kept],
        [place[node] for node in path],
    )


def _path(tokens: list[int], parents: list[int], accepted: Sequence[int]) -> list[int]:
    """The nodes that lead from below the root along these tokens, as far as there are any."""
    path: list[int] = []
    node = -1
    for token in accepted:
        at = range(node + 1, len(tokens))  # A parent precedes its children.
        found = next((n for n in at if parents[n] == node and tokens[n] == token), None)
        if found is None:
            break
        path.append(found)
        node = found
    return path
