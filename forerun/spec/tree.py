r"""Token trees: what a step asks the target to score.

A row is a chain of *known* tokens (a prompt chunk, or just the last token) whose end is
the *root*, followed by guesses that hang below the root:

    known[0] -> known[1] -> ... -> root -> guess
                                        \-> guess -> guess

Plain decoding is one known token and no guess; a prefill chunk is many known tokens and
no guess. There are no phases, only trees.
"""

from dataclasses import dataclass, field

import numpy as np

from forerun.types import Floats, Ints, Words


def _no_tokens() -> Ints:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses below one root, in an order where a parent precedes its children.

    tokens   int32[K]   target-vocabulary ids
    parents  int32[K]   index of the parent among these guesses; -1 = the root
    score    float32[K] the drafter's estimate that the whole path to the node is right,
                        in (0, 1]; 0 where the drafter has no opinion
    """

    tokens: Ints = field(default_factory=_no_tokens)
    parents: Ints = field(default_factory=_no_tokens)
    score: Floats = field(default_factory=lambda: np.zeros(0, np.float32))

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """The trees of all rows of a step, flattened row after row.

    tokens   int32[M]
    parents  int32[M]    flat index of the parent; -1 for the first node of a row
    start    int32[B+1]  row b owns nodes start[b]:start[b+1]
    known    int32[B]    the first known[b] nodes of row b are its known chain (>= 1)
    depth    int32[M]    distance from the row's first node; position = kv_len[b] + depth
    """

    tokens: Ints
    parents: Ints
    start: Ints
    known: Ints
    depth: Ints

    @property
    def rows(self) -> int:
        """Number of rows B."""
        return len(self.known)

    def root(self, row: int) -> int:
        """Flat index of the root of `row` (the last known node)."""
        return int(self.start[row] + self.known[row] - 1)

    def nodes(self, row: int) -> range:
        """Flat indices of all nodes of `row`."""
        return range(int(self.start[row]), int(self.start[row + 1]))


@dataclass(frozen=True, slots=True)
class NodeMasks:
    """Grammar masks, deduplicated: several nodes may share a row.

    row    int32[M]          which mask a node uses; -1 = everything allowed
    bits   uint32[R,ceil(V/32)] token t is allowed iff bits[r, t//32] >> (t%32) & 1
    """

    row: Ints
    bits: Words


def batch(known: list[Ints], drafts: list[Draft]) -> TreeBatch:
    """Hang each draft below the end of its known chain and flatten.

    Raises ValueError where a chain is empty or a draft's parent does not precede its child.
    """
    tokens: list[Ints] = []
    parents: list[Ints] = []
    depths: list[Ints] = []
    start = np.zeros(len(known) + 1, np.int32)
    for row, (chain, draft) in enumerate(zip(known, drafts, strict=True)):
        count, base = len(chain), int(start[row])
        if count == 0:
            raise ValueError(f"row {row} has no known token")
        legal = (draft.parents >= -1) & (draft.parents < np.arange(len(draft)))
        if not legal.all():
            raise ValueError(f"row {row}: a parent is neither the root nor an earlier guess")
        chain_parents = np.arange(base - 1, base - 1 + count, dtype=np.int32)
        chain_parents[0] = -1
        # A guess's parent -1 is the root, which sits just before the guesses.
        tokens += [chain, draft.tokens]
        parents += [chain_parents, (draft.parents + base + count).astype(np.int32)]
        depths.append(_depths(count, draft.parents))
        start[row + 1] = base + count + len(draft)
    return TreeBatch(
        tokens=np.concatenate(tokens).astype(np.int32),
        parents=np.concatenate(parents).astype(np.int32),
        start=start,
        known=np.array([len(chain) for chain in known], np.int32),
        depth=np.concatenate(depths),
    )


def _depths(known: int, parents: Ints) -> Ints:
    """Depth of every node of one row: the chain counts up, a guess is its parent's plus one."""
    depth = list(range(known))
    for parent in parents.tolist():
        depth.append(depth[known + parent] + 1)
    return np.array(depth, np.int32)
