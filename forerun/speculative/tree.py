r"""Token trees: what a step asks the target to score.

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
from operator import add, sub

import numpy as np

from forerun.types import AnyArray, Floats, Ints, Words

_NO_TOKENS: Ints = np.zeros(0, np.int32)
_NO_SCORE: Floats = np.zeros(0, np.float32)


class DraftSource(IntEnum):
    """Who proposed a draft token. For statistics and traces only: nothing is decided by it."""

    UNKNOWN = 0
    NGRAM = 1
    """What followed earlier in the text."""
    TABLE = 2
    """The n-gram table: what the target usually says."""
    DRAFT_MODEL = 3
    GRAMMAR = 4
    """Alone can follow in a grammar."""
    TOKEN_PRIOR = 5
    """Usually follows where a grammar leaves a choice."""
    PREDICTION = 6
    """What follows in the text that the client expects."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens below one root, in an order where a parent precedes its children.

    tokens   int32[K]   target-vocabulary ids
    parents  int32[K]   index of the parent among these draft tokens; -1 = the root
    score    float32[K] the drafter's estimate that the whole path to the node is right,
                        in (0, 1]; 0 where the drafter has no opinion
    source   int32[K]   a DraftSource for each, or one for all
    free     what the drafters that cost nothing would have proposed alone, where others were asked
             too; None = nobody knows
    """

    tokens: Ints = field(default_factory=lambda: _NO_TOKENS)
    parents: Ints = field(default_factory=lambda: _NO_TOKENS)
    score: Floats = field(default_factory=lambda: _NO_SCORE)
    source: Ints | DraftSource = DraftSource.UNKNOWN
    free: "Draft | None" = None

    def __len__(self) -> int:
        return len(self.tokens)

    def source_of(self, part: slice | AnyArray) -> Ints | DraftSource:
        """The source of what a slice, index or bool[K] selects: int32[.], or one for all."""
        return self.source if isinstance(self.source, DraftSource) else self.source[part]

    def sources(self) -> list[int]:
        """K numbers of DraftSource members, one per draft token."""
        if isinstance(self.source, DraftSource):
            return [self.source] * len(self.tokens)
        sources: list[int] = self.source.tolist()
        return sources


NO_DRAFT = Draft()
"""Most drafts of a busy server: one object for all of them."""


@dataclass(frozen=True)
class TreeBatch:
    """The trees of all rows of a step, flattened row after row.

    tokens   int32[M]
    parents  int32[M]    flat index of the parent; -1 for the first node of a row
    start    int32[B+1]  row b owns nodes start[b]:start[b+1]
    known    int32[B]    the first known[b] nodes of row b are its known chain (>= 1)
    depth    int32[M]    distance from the row's first node; position = kv_len[b] + depth
    drafts   B drafts    what hangs below the roots, with scores and sources; () where only the
                         device has them
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
        """int32[B]: flat index of every row's root, which is its last known node."""
        first_draft_tokens = map(add, self.start.tolist(), self.known.tolist())
        return np.array(list(map((-1).__add__, first_draft_tokens)), np.int32)

    @property
    def n_draft_tokens(self) -> Ints:
        """int32[B]: how many draft tokens hang below every root."""
        nodes = map(sub, self.start[1:].tolist(), self.start.tolist())
        return np.array(list(map(sub, nodes, self.known.tolist())), np.int32)

    def root(self, row: int) -> int:
        """Flat index of the root of `row`, which is its last known node."""
        return int(self.start[row] + self.known[row] - 1)

    def nodes(self, row: int) -> range:
        """Flat indices of all nodes of `row`, known ones first."""
        return range(int(self.start[row]), int(self.start[row + 1]))


NO_TREES = TreeBatch(_NO_TOKENS, _NO_TOKENS, np.zeros(1, np.int32), _NO_TOKENS, _NO_TOKENS)
"""Of no rows: where the host does not know the trees of a round yet."""


@dataclass(frozen=True, slots=True)
class NodeMasks:
    """Grammar masks, deduplicated: several nodes may share a row.

    row    int32[M]          which mask a node uses; -1 = everything allowed
    bits   uint32[R,ceil(V/32)] token t is allowed iff bits[r, t//32] >> (t%32) & 1
    """

    row: Ints
    bits: Words


def batch(known: Sequence[Ints] | Ints, drafts: Sequence[Draft] = ()) -> TreeBatch:
    """Hang B drafts below the ends of B known chains int32[.], or int32[B,1], and flatten them, row
    after row. No drafts: none of any row.

    Raises ValueError where a chain is empty or a draft's parent does not precede its child.
    """
    if isinstance(known, np.ndarray) and not any(map(len, drafts)):
        return TreeBatch(known[:, 0], *_decode_only(len(known)))
    rows = list(zip(known, drafts or [NO_DRAFT] * len(known), strict=True))
    if all(len(chain) == 1 and not len(draft) for chain, draft in rows):
        tokens = np.concatenate(known, dtype=np.int32, casting="unsafe")
        return TreeBatch(tokens, *_decode_only(len(known)))
    # Plain Python: NumPy's calls take ten times as long right after a forward pass.
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
    """K, the nodes of a full tree: `width` below the root, then on each further level `width` below
    each of `width` nodes.
    """
    return width + (levels - 1) * width * width if levels else 0


@lru_cache(maxsize=64)
def _decode_only(rows: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Everything but the tokens of a step of one known token per row, read-only."""
    arrays = (
        np.full(rows, -1, np.int32),
        np.arange(rows + 1, dtype=np.int32),
        np.ones(rows, np.int32),
        np.zeros(rows, np.int32),
    )
    for array in arrays:
        array.flags.writeable = False
    return arrays
