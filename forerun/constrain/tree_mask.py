"""Grammars over trees: one mask per node, drafts without illegal guesses, forced tokens free.

A matcher walks each tree from the root with advance and rollback. Speculation cannot stall a
constrained sequence: the root's own mask always holds, so each step emits at least the
target's best legal token, whatever was guessed.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from forerun.constrain.matcher import Compiled, Matcher, words
from forerun.errors import EngineError, RequestError
from forerun.spec.tree import Draft, NodeMasks, TreeBatch
from forerun.types import Ints, Words


class TreeGrammars:
    """The Grammars of an engine with structured output. Used on the engine's thread only.

    vocab  V of the target: masks have a bit for each of its ids, also for those that pad it
    """

    def __init__(self, vocab: int) -> None:
        self._words = -(-vocab // 32)
        self._matchers: dict[int, Matcher] = {}
        self._failed: dict[int, str] = {}

    def open(self, slot: int, grammar: object, output: Iterable[int]) -> None:
        """Start a fresh matcher in `slot` and advance it over the output so far.

        Raises RequestError where `grammar` is not a compiled one, EngineError where the output
        does not fit it.
        """
        if not isinstance(grammar, Compiled):
            raise RequestError("the grammar of a request must be compiled", "grammar")
        self._matchers[slot] = Matcher(grammar)
        self.commit(slot, output)

    def close(self, slot: int) -> None:
        """Forget the slot's matcher, if it has one."""
        self._matchers.pop(slot, None)
        self._failed.pop(slot, None)

    def guide(self, slots: Ints, drafts: list[Draft], nodes: Ints, depth: Ints) -> list[Draft]:
        """Drafts without illegal guesses and with forced tokens; others pass unchanged."""
        guided = list(drafts)
        for row, slot in enumerate(slots.tolist()):
            matcher = self._matchers.get(slot)
            if matcher is not None and nodes[row] > 0:
                guided[row] = _guide(matcher, drafts[row], int(nodes[row]), int(depth[row]))
        return guided

    def forced(self, slot: int) -> int:
        """How many tokens are the only ones that can follow; 0 where no grammar holds the slot."""
        matcher = self._matchers.get(slot)
        return len(matcher.forced()) if matcher is not None else 0

    def masks(self, slots: Ints, trees: TreeBatch) -> NodeMasks | None:
        """One mask per reachable node of every constrained row; None when none is."""
        rows = [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in self._matchers]
        if not rows:
            return None
        table = _MaskTable(self._words, len(trees.tokens))
        for row, slot in rows:
            matcher = self._matchers[slot]
            _mask_row(matcher, trees, row, table)
            if matcher.error:
                self._failed[slot] = f"the grammar's matcher gave up: {matcher.error}"
        return table.masks()

    def commit(self, slot: int, tokens: Iterable[int]) -> int | None:
        """Advance over emitted tokens. See Grammars.commit.

        Raises EngineError for this slot alone when a token does not fit.
        """
        matcher = self._matchers[slot]
        for count, token in enumerate(tokens, 1):
            if not matcher.advance(token):
                reason = matcher.error or f"token {token} does not fit"
                raise EngineError(f"the grammar's matcher gave up: {reason}")
            if matcher.complete:
                return count
        matcher.settle()
        return None

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


def _mask_row(matcher: Matcher, trees: TreeBatch, row: int, table: _MaskTable) -> None:
    """Walk one tree depth first. Nodes under an illegal guess are out of reach: no mask.

    Behind a complete text, nothing that a node emits is kept: no mask either.
    """
    root = trees.root(row)
    children = _children(range(root + 1, int(trees.start[row + 1])), trees.parents)
    table.add(root, matcher.mask())
    path: list[int] = []
    todo = [(node, 0) for node in reversed(children.get(root, []))]
    while todo and not matcher.error:
        node, depth = todo.pop()
        matcher.back(len(path) - depth)
        del path[depth:]
        if matcher.complete or not matcher.advance(int(trees.tokens[node])):
            continue
        path.append(node)
        if not matcher.complete:
            table.add(node, matcher.mask())
            todo += [(child, depth + 1) for child in reversed(children.get(node, []))]
    matcher.back(len(path))


def _children(nodes: Iterable[int], parents: Ints) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node in nodes:
        children.setdefault(int(parents[node]), []).append(node)
    return children


class _Growth:
    """The guided draft of one row while it grows, parents before children.

    rank  place in the drafter's own order; a forced token takes its parent's
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._score: list[float] = []
        self._rank: list[int] = []

    def guess(self, token: int, parent: int, score: float, rank: int) -> int:
        """Hang a guess below `parent` (-1 = root); a path is no likelier than its beginning."""
        self.tokens.append(token)
        self.parents.append(parent)
        self._score.append(min(score, self._score[parent] if parent >= 0 else 1.0))
        self._rank.append(rank)
        return len(self.tokens) - 1

    def force(self, token: int, parent: int) -> int:
        """Hang a token that alone can follow: as likely as its parent."""
        rank = self._rank[parent] if parent >= 0 else -1
        return self.guess(token, parent, 1.0, rank)

    def best(self, nodes: int) -> Draft:
        """The `nodes` likeliest. Ties go to what the drafter named first, so paths stay whole."""
        order = sorted(
            range(len(self.tokens)), key=lambda node: (-self._score[node], self._rank[node], node)
        )
        kept = sorted(order[:nodes])
        place = {node: index for index, node in enumerate(kept)}
        return Draft(
            np.array([self.tokens[node] for node in kept], np.int32),
            np.array([place.get(self.parents[node], -1) for node in kept], np.int32),
            np.array([self._score[node] for node in kept], np.float32),
        )


def _guide(matcher: Matcher, draft: Draft, nodes: int, depth: int) -> Draft:
    """Rebuild a draft from the root: legal guesses stay, forced tokens come in as chains."""
    growth = _Growth()
    children = _children(range(len(draft)), draft.parents)
    tokens: Sequence[int] = draft.tokens.tolist()
    path: list[int] = []
    # What is still to hang: guesses of the draft, their parent in the growth, its depth.
    todo = [(children.get(-1, []), -1, 0)]
    while todo and not matcher.error:
        guesses, parent, level = todo.pop()
        _return_to(matcher, path, growth, parent)
        if matcher.complete or level >= depth:
            continue
        forced = matcher.forced()
        agreed = [guess for guess in guesses if forced and tokens[guess] == forced[0]][:1]
        if forced and not agreed:
            for token in forced[: min(depth - level, nodes)]:
                parent = growth.force(token, parent)
            continue
        for guess in agreed or guesses:
            if matcher.advance(tokens[guess]):
                matcher.back(1)
                score = 1.0 if agreed else float(draft.score[guess])
                node = growth.guess(tokens[guess], parent, score, guess)
                todo.append((children.get(guess, []), node, level + 1))
    matcher.back(len(path))
    return growth.best(nodes)


def _return_to(matcher: Matcher, path: list[int], growth: _Growth, node: int) -> None:
    """Move the matcher from the end of `path` to `node`, over their common ancestor."""
    wanted: list[int] = []
    while node >= 0:
        wanted.append(node)
        node = growth.parents[node]
    wanted.reverse()
    common = 0
    while common < min(len(path), len(wanted)) and path[common] == wanted[common]:
        common += 1
    matcher.back(len(path) - common)
    for step in wanted[common:]:
        matcher.advance(growth.tokens[step])
    path[:] = wanted
