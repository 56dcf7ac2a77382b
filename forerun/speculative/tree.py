r"""Token trees, which a step has the target score.

A row is a chain of *known* tokens (a prompt chunk, or just the last token) whose end is
the *root*, followed by draft tokens that hang below the root:

    known[0] -> known[1] -> ... -> root -> draft token
                                        \-> draft token -> draft token

Plain decoding is one known token and no draft token; a prefill chunk is many known tokens and
no draft token. There are no phases, only trees.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, lru_cache

import numpy as np

from forerun.types import AnyArray, Floats, Ints, Words

_NO_TOKENS: Ints = np.zeros(0, np.int32)
_NO_SCORE: Floats = np.zeros(0, np.float32)


class DraftSource(IntEnum):
    """The drafter that proposed a draft token. Used for statistics and traces only."""

    UNKNOWN = 0
    NGRAM = 1
    """A continuation from earlier in the text."""
    TABLE = 2
    """The n-gram table: the target's usual continuation."""
    DRAFT_MODEL = 3
    GRAMMAR = 4
    """The only token that a grammar allows."""
    TOKEN_PRIOR = 5
    """The usual token at a place where a grammar allows several."""
    PREDICTION = 6
    """The continuation in the text that the client expects."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens below one root, in an order where a parent precedes its children.

    tokens   int32[K]   target-vocabulary ids
    parents  int32[K]   index of the parent among these draft tokens; -1 = the root
    score    float32[K] the drafter's estimate that the whole path to the node is right, in (0, 1];
             0 = no estimate
    source   int32[K]   a DraftSource for each, or one for all
    free     what the drafters without a draft model would have proposed alone, if a draft model
             proposed too; None = unknown
    """

    tokens: Ints = field(default_factory=lambda: _NO_TOKENS)
    parents: Ints = field(default_factory=lambda: _NO_TOKENS)
    score: Floats = field(default_factory=lambda: _NO_SCORE)
    source: Ints | DraftSource = DraftSource.UNKNOWN
    free: "Draft | None" = None

    def __len__(self) -> int:
        return len(self.tokens)

    def source_of(self, part: slice | AnyArray) -> Ints | DraftSource:
        """Return the source of the tokens that a slice, index or bool[K] selects: int32[.], or one
        for all.
        """
        return self.source if isinstance(self.source, DraftSource) else self.source[part]

    def sources(self) -> list[int]:
        """Return K numbers of DraftSource members, one per draft token."""
        if isinstance(self.source, DraftSource):
            return [self.source] * len(self.tokens)
        sources: list[int] = self.source.tolist()
        return sources


NO_DRAFT = Draft()
"""The empty draft: one object for all rows that have none."""


@dataclass(frozen=True)
class TreeBatch:
    """The trees of all rows of a step, flattened row after row.

    tokens   int32[M]
    parents  int32[M]    flat index of the parent; -1 for the first node of a row
    start    int32[B+1]  row b owns nodes start[b]:start[b+1]
    known    int32[B]    the first known[b] nodes of row b are its known chain (>= 1)
    depth    int32[M]    distance from the row's first node; position = kv_len[b] + depth
    drafts   B drafts below the roots, with scores and sources; () if only the device has them
    """

    tokens: Ints
    parents: Ints
    start: Ints
    known: Ints
    depth: Ints
    drafts: Sequence[Draft] = ()

    @property
    def rows(self) -> int:
        """B, the number of trees."""
        return len(self.known)

    @property
    def decode_only(self) -> bool:
        """Whether every row is one known node without draft tokens: plain decoding."""
        return len(self.tokens) == len(self.known)

    @cached_property
    def roots(self) -> Ints:
        """int32[B] flat index of every row's root, its last known node; a view if `decode_only`."""
        if self.decode_only:
            return self.start[:-1]
        rows = zip(self.start.tolist(), self.known.tolist(), strict=False)
        return np.array([first + known - 1 for first, known in rows], np.int32)

    @property
    def n_draft_tokens(self) -> Ints:
        """int32[B] number of draft tokens below every root."""
        if self.decode_only:
            return np.zeros(self.rows, np.int32)
        start = self.start.tolist()
        rows = zip(start[1:], start, self.known.tolist(), strict=False)
        return np.array([end - first - known for end, first, known in rows], np.int32)

    def root(self, row: int) -> int:
        """Return the flat index of the root of `row`, its last known node."""
        return int(self.start[row] + self.known[row] - 1)

    def nodes(self, row: int) -> range:
        """Return the flat indices of all nodes of `row`, known ones first."""
        return range(int(self.start[row]), int(self.start[row + 1]))


NO_TREES = TreeBatch(_NO_TOKENS, _NO_TOKENS, np.zeros(1, np.int32), _NO_TOKENS, _NO_TOKENS)
"""No rows: for a round whose trees the host does not know yet."""


@dataclass(frozen=True, slots=True)
class NodeMasks:
    """Grammar masks, deduplicated: several nodes may share a row.

    row    int32[M]          row of `bits` that a node uses; -1 = every token is allowed
    bits   uint32[R,ceil(V/32)] token t is allowed iff bits[r, t//32] >> (t%32) & 1
    """

    row: Ints
    bits: Words


def unpadded(tokens: Ints, parents: Ints, counts: Ints) -> tuple[TreeBatch, Ints]:
    """Convert padded trees of B rows to a TreeBatch.

    tokens   int32[B,N]
    parents  int32[B,N] within the row, below 0 for its root, the one known node
    counts   int32[B] how many nodes of each row exist

    Returns the trees, and int32[M], the padded index of each flat node: row * N + its number in the
    row.
    """
    rows, nodes = tokens.shape
    if nodes == 1:
        return batch(tokens), np.arange(rows, dtype=np.int32)
    row, node = np.nonzero(np.arange(nodes) < counts[:, None])
    start = np.append(0, np.cumsum(counts)).astype(np.int32)
    above = parents[row, node]
    above = np.where(above < 0, -1, above + start[row]).astype(np.int32)
    depth = np.zeros(len(row), np.int32)
    for _ in range(int(counts.max()) - 1):  # A level each, at least.
        deeper = np.where(above < 0, 0, depth[above] + 1).astype(np.int32)
        if (deeper == depth).all():
            break
        depth = deeper
    trees = TreeBatch(tokens[row, node], above, start, np.ones(rows, np.int32), depth)
    return trees, (row * nodes + node).astype(np.int32)


def batch(known: Sequence[Ints] | Ints, drafts: Sequence[Draft] = ()) -> TreeBatch:
    """Attach B drafts to the ends of B known chains int32[.], or int32[B,1], and flatten them, row
    after row. An empty `drafts` means no draft tokens.

    Raises ValueError if a chain is empty or a draft's parent does not precede its child.
    """
    if isinstance(known, np.ndarray) and not any(map(len, drafts)):
        return TreeBatch(known[:, 0], *_decode_only(len(known)))
    rows = list(zip(known, drafts or [NO_DRAFT] * len(known), strict=True))
    # Lists, no arrays: NumPy's calls take ten times as long right after a forward pass.
    flat: list[int] = []
    parents: list[int] = []
    depth: list[int] = []
    start = [0]
    for row, (chain, draft) in enumerate(rows):
        first, length = len(flat), len(chain)
        if not length:
            raise ValueError(f"row {row} has no known token")
        flat += chain.tolist()
        flat += draft.tokens.tolist()
        parents.append(-1)
        parents += range(first, first + length - 1)
        depth += range(length)
        for draft_token, parent in enumerate(draft.parents.tolist()):
            if not -1 <= parent < draft_token:
                raise ValueError(
                    f"row {row}: a parent is neither the root nor an earlier draft token"
                )
            above = first + length + parent  # The root comes right before the draft tokens.
            parents.append(above)
            depth.append(depth[above] + 1)
        start.append(len(flat))
    lengths = list(map(len, known))
    return TreeBatch(
        tokens=np.array(flat, np.int32),
        parents=np.array(parents, np.int32),
        start=np.array(start, np.int32),
        known=np.array(lengths, np.int32),
        depth=np.array(depth, np.int32),
        drafts=drafts,
    )


def full_size(width: int, levels: int) -> int:
    """Return K, the nodes of a full tree: `width` below the root, then on each further level
    `width` below each of `width` nodes.
    """
    return width + (levels - 1) * width * width if levels else 0


@lru_cache(maxsize=64)
def _decode_only(rows: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return all fields but `tokens` of a step of one known token per row, read-only."""
    arrays = (
        np.full(rows, -1, np.int32),
        np.arange(rows + 1, dtype=np.int32),
        np.ones(rows, np.int32),
        np.zeros(rows, np.int32),
    )
    for array in arrays:
        array.flags.writeable = False
    return arrays
