"""Grammars on trees: one mask per node, and drafts under a grammar.

A matcher walks each tree from the root, ahead and back. Speculation cannot stall a constrained
sequence: the root's own mask always applies, so each step emits at least the target's best legal
token, whatever was drafted.

A matcher that takes too long, or reaches a limit, continues in a process of its own (RemoteState).
The sequence then misses the steps for which it has no mask yet, and others do not wait for it.
"""

import logging
import threading
from collections.abc import Iterable, Sequence

import numpy as np

from forerun.constrain.matcher.grammar_draft import GrammarState, children, filter_and_extend
from forerun.constrain.matcher.limits import SLOW, SLOW_STEPS
from forerun.constrain.matcher.matcher import CompiledGrammar, words
from forerun.constrain.matcher.remote_state import RemoteState
from forerun.constrain.matcher.token_prior import shared_places
from forerun.drafts.ngram_table import NgramTable
from forerun.errors import RequestError
from forerun.interface.grammars import Committed
from forerun.speculative.tree import NO_DRAFT, Draft, NodeMasks, TreeBatch
from forerun.types import Ints, Words

log = logging.getLogger("forerun.engine")


class TreeGrammars:
    """The Grammars of an engine with structured output. Used on the engine's thread only.

    vocab  V of the target: masks have a bit for each of its ids, padding included
    table  n-gram table of the target's usual continuations; None = no table
    """

    def __init__(self, vocab: int, table: NgramTable | None = None) -> None:
        self._table = table
        self._words = -(-vocab // 32)
        self._states: dict[int, GrammarState] = {}
        self._remote: dict[int, RemoteState] = {}
        self._answered = threading.Event()
        self._compiled: dict[int, CompiledGrammar] = {}
        self._places = shared_places()

    def open(self, slot: int, grammar: object, output: Iterable[int], tenant: int = 0) -> None:
        """Start a new matcher in `slot` and advance it over the output so far, in a process of its
        own if the grammar is expensive or fails here. tenant: as in SlotInit. Raises RequestError
        if `grammar` is not a CompiledGrammar.
        """
        if not isinstance(grammar, CompiledGrammar):
            raise RequestError("the grammar of a request must be compiled", "grammar")
        tokens = [*output]
        self._compiled[slot] = grammar
        if not grammar.expensive:
            state = self._states[slot] = GrammarState(grammar, self._places, self._table, tenant)
            if not state.commit(tokens).error:
                return
            del self._states[slot]
        self._remote[slot] = RemoteState(grammar, self._answered.set, tokens)

    def close(self, slot: int) -> None:
        """Discard the slot's matcher and end its process, if it has any."""
        compiled = self._compiled.pop(slot, None)
        if self._states.pop(slot, None) is not None and compiled is not None:
            compiled.translated.stayed()
        remote = self._remote.pop(slot, None)
        if remote is not None:
            remote.close()

    def ready(self, slot: int, grammar: object) -> bool:
        """Return whether the slot's mask is known or can be computed here at once; only a matcher
        in a process of its own may not be ready.
        """
        remote = self._remote.get(slot)
        if remote is not None:
            return remote.ready
        opens_alone = isinstance(grammar, CompiledGrammar) and grammar.expensive
        return slot in self._states or not opens_alone

    def wait(self, seconds: float) -> None:
        """Block until a matcher in a process of its own has answered, or `seconds` have passed;
        returns at once if one is ready.
        """
        self._answered.clear()
        if not any(state.ready for state in self._remote.values()):
            self._answered.wait(seconds)

    def filter_and_extend_drafts(
        self, slots: Ints, drafts: list[Draft], nodes: Ints, depth: Ints
    ) -> list[Draft]:
        """Return B drafts under the grammars of slots int32[B]: without illegal tokens, with forced
        and likely ones, at most nodes[b] draft tokens and depth[b] levels. A row whose matcher is
        in another process gets no draft. Unconstrained rows and those with nodes[b] = 0 are
        unchanged.
        """
        guided = list(drafts)
        for row, slot in enumerate(slots.tolist()):
            state = self._states.get(slot)
            if slot in self._remote:
                guided[row] = NO_DRAFT
            elif state is not None and nodes[row] > 0:
                guided[row] = NO_DRAFT
                with state.guarded():
                    draft = filter_and_extend(state, drafts[row], int(depth[row]))
                    guided[row] = draft.best(int(nodes[row]))
        return guided

    def mask(self, slot: int) -> bytes | None:
        """Return the mask of tokens that may follow next in `slot`, one bit per id; None if every
        token may.
        """
        if slot in self._remote:
            return self._remote[slot].mask()
        mask = None
        if (state := self._states.get(slot)) is not None:
            with state.guarded():
                mask = state.mask(())
        return mask

    def predicted(self, slots: Ints, min_prob: float) -> list[list[float]]:
        """Return, by slot of int32[B], the scores of the tokens that its grammar predicts with a
        probability of `min_prob` or more, best first (control.policy.Lookahead); [] without a
        grammar.
        """
        scores: list[list[float]] = []
        for slot in slots.tolist():
            found = list[float]()
            if (state := self._states.get(slot)) is not None:
                with state.guarded():
                    found = [draft_token.score for draft_token in state.predicted(min_prob)]
            scores.append(found)
        return scores

    def masks(self, slots: Ints, trees: TreeBatch) -> NodeMasks | None:
        """Return masks for the reachable nodes of every constrained row; None if no row of slots
        int32[B] is constrained. Matchers return to their positions.
        """
        rows = [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in self._compiled]
        if not rows:
            return None
        table = _MaskTable(self._words, len(trees.tokens))
        for row, slot in rows:
            if slot in self._remote:
                table.add(trees.root(row), self._remote[slot].mask())
                continue
            with self._states[slot].guarded():
                _mask_row(self._states[slot], trees, row, table)
        return table.masks()

    def commit(self, slot: int, tokens: Sequence[int]) -> Committed:
        """Advance the slot's matcher over emitted tokens. One that failed, or had a second slow
        step within SLOW_STEPS, moves to a process of its own. Raises KeyError for a slot without a
        matcher.
        """
        if slot in self._remote:
            return self._remote[slot].commit(tokens)
        state, compiled = self._states[slot], self._compiled[slot]
        with state.timed():
            committed = state.commit(tokens)
        failed = state.failed or state.matcher.error
        if committed.error and failed and not compiled.free:
            # A process, whose limits are wider, decides whether it is an error at all.
            compiled.translated.moved(limit=True)
            return Committed(committed.valid, must_reopen=True)
        slow, state.seconds = state.seconds > SLOW, 0.0
        state.slow = state.slow + 1.0 if slow else max(0.0, state.slow - 1.0 / SLOW_STEPS)
        if state.slow > 1.0 and not (committed.complete or compiled.free):
            log.info("a grammar is slow: a process of its own follows it, without draft tokens")
            compiled.translated.moved(limit=False)
            del self._states[slot]
            self._remote[slot] = RemoteState(compiled, self._answered.set, state.output)
        return committed


class _MaskTable:
    """Collects the masks of a step; equal ones are stored once."""

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


def _mask_row(state: GrammarState, trees: TreeBatch, row: int, table: _MaskTable) -> None:
    """Compute the masks of one tree, depth first. A node below an illegal draft token is
    unreachable and gets no mask, nor does one after a complete text or where the matcher fails (see
    GrammarState.commit): tokens emitted there do not count. Other nodes are not affected.
    """
    root, matcher = trees.root(row), state.matcher
    below = children(range(root + 1, int(trees.start[row + 1])), trees.parents)
    table.add(root, state.mask(()))
    path: list[int] = []
    todo = [(node, 0) for node in reversed(below.get(root, []))]
    while todo and () not in state.failed:
        node, depth = todo.pop()
        matcher.back(len(path) - depth)
        del path[depth:]
        token = int(trees.tokens[node])
        if matcher.complete or not matcher.advance(token):
            continue
        path.append(token)
        if not matcher.complete:
            table.add(node, state.mask(tuple(path)))
            if not matcher.error:
                todo += [(child, depth + 1) for child in reversed(below.get(node, []))]
    matcher.back(len(path))
