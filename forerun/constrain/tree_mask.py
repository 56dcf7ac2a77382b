"""Grammars over trees: one mask per node, and drafts that know the grammar.

A matcher walks each tree from the root, ahead and back. Speculation cannot stall a
constrained sequence: the root's own mask always holds, so each step emits at least the
target's best legal token, whatever was guessed.
"""

from collections.abc import Iterable

import numpy as np

from forerun.constrain.guide import Growth, Walker, children, guide
from forerun.constrain.habits import shared_places
from forerun.constrain.matcher import Compiled, words
from forerun.constrain.share import Share
from forerun.errors import RequestError
from forerun.models.ngram_table import NgramTable
from forerun.spec.costs import StepCosts
from forerun.spec.tree import Draft, NodeMasks, TreeBatch
from forerun.types import Ints, Words


class TreeGrammars:
    """The Grammars of an engine with structured output. Used on the engine's thread only.

    vocab  V of the target: masks have a bit for each of its ids, also for those that pad it
    costs  what steps cost on this machine; None = a node costs next to nothing
    table  what the target usually says; None = nobody counted
    """

    def __init__(
        self, vocab: int, costs: StepCosts | None = None, table: NgramTable | None = None
    ) -> None:
        self._share, self._table = Share(costs), table
        self._words = -(-vocab // 32)
        self._walkers: dict[int, Walker] = {}
        self._places = shared_places()
        self._failed: dict[int, str] = {}

    def open(self, slot: int, grammar: object, output: Iterable[int]) -> None:
        """Start a fresh matcher in `slot` and advance it over the output so far.

        Raises RequestError where `grammar` is not a compiled one, EngineError where the output
        does not fit it.
        """
        if not isinstance(grammar, Compiled):
            raise RequestError("the grammar of a request must be compiled", "grammar")
        self._walkers[slot] = Walker(grammar, self._places, self._table)
        self._walkers[slot].commit(output)

    def close(self, slot: int) -> None:
        """Forget the slot's matcher, if it has one."""
        self._walkers.pop(slot, None)
        self._failed.pop(slot, None)

    def guide(self, slots: Ints, drafts: list[Draft], nodes: Ints, depth: Ints) -> list[Draft]:
        """Drafts without illegal guesses, with forced and likely tokens; others pass unchanged."""
        if not self._walkers:
            return drafts
        grown: dict[int, Growth] = {}
        for row, slot in enumerate(slots.tolist()):
            walker = self._walkers.get(slot)
            if walker is not None and nodes[row] > 0:
                grown[row] = guide(walker, drafts[row], int(depth[row]))
        others = sum(len(draft) for row, draft in enumerate(drafts) if row not in grown)
        scores = [growth.scores(int(nodes[row])) for row, growth in grown.items()]
        counts = self._share.of(len(slots), others, scores) if scores else []
        guided = list(drafts)
        for (row, growth), count in zip(grown.items(), counts, strict=True):
            guided[row] = growth.best(count)
        self._share.made(len(slots), others + sum(counts))
        return guided

    @property
    def held(self) -> bool:
        """Whether a grammar holds any slot."""
        return bool(self._walkers)

    def mask(self, slot: int) -> bytes | None:
        """Bits of what may follow next; None where everything may."""
        walker = self._walkers.get(slot)
        return walker.mask(()) if walker is not None else None

    def room(self, slots: Ints) -> list[int]:
        """How many nodes are worth giving to each row for what is certain to follow there or
        likely; none where no grammar holds the slot.
        """
        walkers = [self._walkers.get(slot) for slot in slots.tolist()]
        least = self._share.least(len(walkers))
        scores = [
            [guess.score for guess in walker.ahead(least)] if walker else [] for walker in walkers
        ]
        return self._share.of(len(walkers), 0, scores)

    def masks(self, slots: Ints, trees: TreeBatch) -> NodeMasks | None:
        """One mask per reachable node of every constrained row; None when none is."""
        rows = [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in self._walkers]
        if not rows:
            return None
        table = _MaskTable(self._words, len(trees.tokens))
        for row, slot in rows:
            walker = self._walkers[slot]
            _mask_row(walker, trees, row, table)
            if () in walker.failed:
                self._failed[slot] = walker.failed[()]
        return table.masks()

    def commit(self, slot: int, tokens: Iterable[int]) -> int | None:
        """Advance over emitted tokens. See Grammars.commit.

        Raises EngineError for this slot alone when a token does not fit.
        """
        said = list(tokens)
        self._share.brought(len(said))
        return self._walkers[slot].commit(said)

    def errors(self) -> dict[int, str]:
        """Slots whose matcher failed since the last call, with the message; clears them."""
        failed, self._failed = self._failed, {}
        return failed


class _MaskTable:
    """Collects masks, equal ones once."""

    def __init__(self, size: int, nodes: int) -> None:
        self._size = size
        self._index: dict[bytes, int] = {}
        self.row: Ints = np.full(nodes, -1, np.int32)

    def add(self, node: int, mask: bytes | None) -> None:
        if mask is not None:
            self.row[node] = self._index.setdefault(mask, len(self._index))

    def masks(self) -> NodeMasks:
        bits: list[Words] = [words(mask, self._size) for mask in self._index]
        empty = np.zeros((0, self._size), np.uint32)
        return NodeMasks(self.row, np.stack(bits) if bits else empty)


def _mask_row(walker: Walker, trees: TreeBatch, row: int, table: _MaskTable) -> None:
    """Walk one tree depth first. Nodes under an illegal guess are out of reach: no mask.

    Behind a complete text, nothing that a node emits is kept: no mask either. Nor is anything kept
    that follows where the matcher fails (see Walker.commit); the other nodes are as they would be.
    """
    root, matcher = trees.root(row), walker.matcher
    below = children(range(root + 1, int(trees.start[row + 1])), trees.parents)
    table.add(root, walker.mask(()))
    path: list[int] = []
    todo = [(node, 0) for node in reversed(below.get(root, []))]
    while todo and () not in walker.failed:
        node, depth = todo.pop()
        matcher.back(len(path) - depth)
        del path[depth:]
        token = int(trees.tokens[node])
        if matcher.complete or not matcher.advance(token):
            continue
        path.append(token)
        if not matcher.complete:
            table.add(node, walker.mask(tuple(path)))
            if not matcher.error:
                todo += [(child, depth + 1) for child in reversed(below.get(node, []))]
    matcher.back(len(path))
