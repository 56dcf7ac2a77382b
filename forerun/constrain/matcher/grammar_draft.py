"""Drafts under a grammar: without illegal draft tokens, and with those that the grammar makes
certain or likely.

Two sources are merged. The drafter's tokens are checked node by node. The grammar's own predictions
are a tree: tokens that must follow ("forced", certain), and between them those that a token prior
makes likely (see JumpForward).
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import thread_time

import numpy as np

from forerun.constrain.matcher.jump_forward import PATIENCE, JumpForward, PredictedToken, move
from forerun.constrain.matcher.matcher import CompiledGrammar, Matcher
from forerun.constrain.matcher.token_prior import TAIL, Places, TokenPrior, last_of
from forerun.control.policy import FIXED_MIN_PROB
from forerun.drafts.ngram_table import NgramTable
from forerun.interface.grammars import Committed, legal
from forerun.speculative.draft_tree import pruned
from forerun.speculative.tree import Draft, DraftSource
from forerun.types import Ints

log = logging.getLogger("forerun.engine")


class GrammarState:
    """One sequence's matcher, and its state in the current step.

    A path is the tuple of tokens below the root of the step's tree; masks are cached by path until
    the root moves on, so each is computed once.

    failed   by path: why the matcher failed there, computing a mask or within `guarded`
    output   the tokens that were committed
    seconds  of processor time under `timed`, in this step
    slow     slow steps that still count (TreeGrammars.commit)
    """

    def __init__(
        self, grammar: CompiledGrammar, shared: Places, table: NgramTable | None, tenant: int
    ) -> None:
        self.matcher = Matcher(grammar)
        self._masks: dict[tuple[int, ...], bytes] = {}
        self.failed: dict[tuple[int, ...], str] = {}
        self._prior = TokenPrior(shared, table, tenant)
        self._tail: list[int] = []
        self._predicted: list[PredictedToken] | None = None
        self.output: list[int] = []
        self.seconds = self.slow = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the thread's processor time within the context to `seconds`."""
        begun = thread_time()
        yield
        self.seconds += thread_time() - begun

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """As `timed`; in addition, catch an exception of the context: the matcher returns to its
        position, and the root counts as `failed`, so that other sequences do not end with this one.
        """
        try:
            with self.timed():
                yield
        except Exception as error:
            log.exception("a grammar's matcher failed")
            self.matcher.restart()
            self.failed[()] = f"{type(error).__name__}: {error}"

    def mask(self, path: tuple[int, ...]) -> bytes | None:
        """Return the mask at the end of `path`, where the matcher must be; None = every token may
        follow. Cached until the root moves on. If the matcher fails, `failed[path]` has the reason.
        """
        found = self._masks.get(path)
        if found is None:
            found = self.matcher.mask()
            if found is not None:
                self._masks[path] = found
            if self.matcher.error:
                self.failed[path] = self.matcher.error
        return found

    def predicted(self, min_prob: float = FIXED_MIN_PROB) -> list[PredictedToken]:
        """Return certain and likely tokens below the root, parents before children, on paths with a
        probability of at least `min_prob`. Computed once per step; later calls ignore `min_prob`.
        """
        if self._predicted is None:
            self._predicted = JumpForward(self.matcher, self._likely, min_prob).draft_tokens()
        return self._predicted

    def commit(self, tokens: Sequence[int]) -> Committed:
        """Move the root over emitted `tokens`, up to where the text is complete, a token does not
        fit, or no mask could be computed before it; the result has the count and the reason.

        Updates the token prior with the chosen tokens, and clears the step's masks.
        """
        matcher, masks = self.matcher, self._masks
        path: tuple[int, ...] = ()
        for count, token in enumerate(tokens):
            if self.matcher.complete:
                return Committed(count, complete=True)
            if path in self.failed:
                return Committed(count, error=self.failed[path])
            waiting = matcher.waiting
            if not matcher.commit(token):
                return Committed(count, error=matcher.error or f"token {token} does not fit")
            if masks:  # None where the output of a resumed sequence is read again.
                if path in masks and not waiting:
                    self._prior.learn(masks[path], last_of(self._tail), token)
                path = (*path, token)
            self._tail = [*self._tail[1 - TAIL :], token]
            self.output.append(token)
        if matcher.complete:
            return Committed(len(tokens), complete=True)
        self._masks, self.failed, self._predicted = {}, {}, None
        return Committed(len(tokens), unconstrained_from_here=matcher.released)

    def _likely(self, path: tuple[int, ...]) -> list[tuple[int, float]]:
        """Return the likeliest tokens at the end of `path`, where the matcher must be."""
        mask = self.mask(path)
        return [] if mask is None else self._prior.likely(mask, [*self._tail, *path])


def filter_and_extend(state: GrammarState, draft: Draft, depth: int) -> "GuidedDraft":
    """Return the draft of one row under its grammar: the grammar's predictions, the legal part of
    `draft`, and forced tokens below that.

    depth  longest path, in draft tokens

    The matcher returns to its position. After PATIENCE seconds the rest of `draft` is dropped
    unchecked.
    """
    guided = GuidedDraft()
    # By number of the predicted token: its node and depth; -1 = the root.
    hung = {-1: (-1, 0)}
    for number, (token, parent, score, source) in enumerate(state.predicted()):
        above, level = hung.get(parent, (-1, depth))
        if level < depth:
            hung[number] = guided.hang(token, above, score, -1, source), level + 1
    if len(draft):
        _check(state, draft, depth, guided)
    return guided


def children(nodes: Iterable[int], parents: Ints) -> dict[int, list[int]]:
    """Return the given nodes grouped by parent, in order. parents: int32[M] by node."""
    below: dict[int, list[int]] = {}
    for node in nodes:
        below.setdefault(int(parents[node]), []).append(node)
    return below


def _check(state: GrammarState, draft: Draft, depth: int, guided: "GuidedDraft") -> None:
    """Add to `guided` the legal part of a draft, and the forced tokens below it."""
    matcher = state.matcher
    below, tokens = children(range(len(draft)), draft.parents), draft.tokens.tolist()
    sources = draft.sources()
    path: list[int] = []
    # Draft tokens that are still to be added, and the node above them.
    todo, end = [(below[-1], -1)], thread_time() + PATIENCE
    while todo and thread_time() < end and not matcher.error:
        draft_tokens, parent = todo.pop()
        above = guided.path(parent)
        move(matcher, path, above)
        if matcher.complete or len(above) >= depth:
            continue
        node = parent
        forced = matcher.forced()
        for token in forced[: depth - len(above)]:
            node = guided.hang(token, node, 1.0, guided.rank[parent], DraftSource.GRAMMAR)
        mask = state.mask(tuple(above)) if draft_tokens and not forced else None
        for draft_token in draft_tokens:
            token = tokens[draft_token]
            if legal(mask, token) if not forced else token == forced[0]:
                score, source = float(draft.score[draft_token]), sources[draft_token]
                hung = guided.hang(token, parent, score, draft_token, source)
                todo.append((below.get(draft_token, []), hung))
    matcher.back(len(path))


class GuidedDraft:
    """The draft of one row under its grammar while it grows, parents before children.

    rank  position in the drafter's own order: a forced token takes its parent's, the grammar's
          own predictions come first
    """

    def __init__(self) -> None:
        self.rank: dict[int, int] = {-1: -1}
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._score: list[float] = []
        self._source: list[int] = []
        self._place: dict[tuple[int, int], int] = {}

    def hang(self, token: int, parent: int, score: float, rank: int, source: int) -> int:
        """Add a token below node `parent` (-1 = root), unless it exists; return its node number.

        score   probability of its path; the greatest one is kept, limited to the parent's
        rank, source  of the token; those of the first call are kept
        """
        node = self._place.setdefault((parent, token), len(self._tokens))
        score = min(score, self._score[parent] if parent >= 0 else 1.0)
        if node == len(self._tokens):
            self._tokens.append(token)
            self._parents.append(parent)
            self._score.append(score)
            self._source.append(source)
            self.rank[node] = rank
        self._score[node] = max(score, self._score[node])
        return node

    def path(self, node: int) -> list[int]:
        """Return the token ids from below the root down to `node`; [] for the root, -1."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self._tokens[node])
            node = self._parents[node]
        tokens.reverse()
        return tokens

    def best(self, nodes: int) -> Draft:
        """Return a Draft of the `nodes` most probable nodes. Among equal ones the earlier comes
        first, so that paths stay connected.
        """
        order = sorted(
            range(len(self._tokens)), key=lambda node: (-self._score[node], self.rank[node], node)
        )
        return pruned(
            np.array(self._tokens, np.int32),
            np.array(self._parents, np.int32),
            np.array(self._score, np.float32),
            np.array(sorted(order[:nodes]), np.int64),
            np.array(self._source, np.int32),
        )
