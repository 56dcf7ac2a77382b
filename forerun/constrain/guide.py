"""Drafts that know the grammar: no illegal guess, and all that the grammar makes certain or likely.

Two sources are put together. What the drafter guessed is checked node by node. What the grammar
itself says of the next tokens is a chain: tokens that alone can follow ("forced", certain), and
between them those that habit makes likely.
"""

from collections.abc import Iterable
from time import thread_time

import numpy as np

from forerun.constrain.habits import Habits, Last, Places, legal
from forerun.constrain.matcher import Compiled, Matcher
from forerun.errors import EngineError
from forerun.spec.tree import Draft
from forerun.types import Ints

MAX_AHEAD = 32
"""Tokens that the chain has at most."""
LEAST = 0.1
"""Probability of its whole path below which the chain ends, however cheap a node is."""
LIKELY = 0.35
"""The same where nobody knows what a node costs."""
PATIENCE = 0.01
"""Seconds of work after which no more is drafted for a sequence: hostile grammars need 20 ms for
a node. Guesses change no text, so neither does the clock."""


class Walker:
    """One sequence's matcher, and what is known of the step under way.

    A path is the tuple of tokens below the root of the step's tree; masks are kept by path until
    the root moves on, so no state is asked twice.
    """

    def __init__(self, compiled: Compiled, shared: Places) -> None:
        self.matcher = Matcher(compiled)
        self._masks: dict[tuple[int, ...], bytes] = {}
        self._habits = Habits(shared)
        self._last: Last = (-1, -1)
        self._chain: list[tuple[int, float]] | None = None

    def mask(self, path: tuple[int, ...]) -> bytes | None:
        """The mask where the matcher now stands, at the end of `path`; None = all may follow."""
        found = self._masks.get(path)
        if found is None:
            found = self.matcher.mask()
            if found is not None:
                self._masks[path] = found
        return found

    def chain(self, least: float = LIKELY) -> list[tuple[int, float]]:
        """Certain and likely tokens below the root, each with the probability of its path, which
        is `least` or more. It is looked for once per step.
        """
        if self._chain is None:
            self._chain = self._look(least)
        return self._chain

    def commit(self, tokens: Iterable[int]) -> int | None:
        """Move the root over `tokens`. How many there were when the text was complete, or None.

        Raises EngineError when a token does not fit.
        """
        matcher, masks = self.matcher, self._masks
        path: tuple[int, ...] = ()
        for count, token in enumerate(tokens, 1):
            if not matcher.advance(token):
                reason = matcher.error or f"token {token} does not fit"
                raise EngineError(f"the grammar's matcher gave up: {reason}")
            if masks:  # None where the output of a resumed sequence is read again.
                if path in masks:
                    self._habits.learn(masks[path], self._last, token)
                path = (*path, token)
            self._last = (self._last[1], token)
            if matcher.complete:
                return count
        matcher.settle()
        self._masks, self._chain = {}, None
        return None

    def _look(self, least: float) -> list[tuple[int, float]]:
        """Walk ahead as long as the grammar or habit says where."""
        matcher, score, end = self.matcher, 1.0, thread_time() + PATIENCE
        chain: list[tuple[int, float]] = []
        fits = True
        while fits and len(chain) < MAX_AHEAD and not (matcher.waiting or matcher.complete):
            tokens = matcher.forced()[: MAX_AHEAD - len(chain)]
            if not tokens:
                # Nothing is as likely as what is forced, so with `least` 1 nobody is asked.
                path = tuple(token for token, _ in chain)
                likely = self._likely(path) if least < 1.0 else None
                if likely is None or score * likely[1] < least:
                    break
                tokens, score = [likely[0]], score * likely[1]
            for token in tokens:
                fits = fits and thread_time() < end and matcher.advance(token)
                if fits:
                    chain.append((token, score))
        matcher.back(len(chain))
        return chain

    def _likely(self, path: tuple[int, ...]) -> tuple[int, float] | None:
        """The likeliest token where the matcher stands, and its probability."""
        mask = self.mask(path)
        before, last = (*self._last, *path[-2:])[-2:]
        return None if mask is None else self._habits.guess(mask, (before, last))


def guide(walker: Walker, draft: Draft, nodes: int, depth: int) -> Draft:
    """The best `nodes` of: the chain, what is legal of `draft`, and what is forced below that.

    No path is longer than `depth`.
    """
    growth = _Growth()
    node = -1
    for token, score in walker.chain()[:depth]:
        node = growth.hang(token, node, score, -1)
    if len(draft):
        _check(walker, draft, depth, growth)
    return growth.best(nodes)


def children(nodes: Iterable[int], parents: Ints) -> dict[int, list[int]]:
    """Nodes by their parents, in order."""
    below: dict[int, list[int]] = {}
    for node in nodes:
        below.setdefault(int(parents[node]), []).append(node)
    return below


def _check(walker: Walker, draft: Draft, depth: int, growth: "_Growth") -> None:
    """Hang into `growth` what is legal of a draft, and what is forced below it."""
    matcher = walker.matcher
    below, tokens = children(range(len(draft)), draft.parents), draft.tokens.tolist()
    path: list[int] = []
    # What is still to hang: guesses of the draft and the node above them.
    todo, end = [(below[-1], -1)], thread_time() + PATIENCE
    while todo and thread_time() < end and not matcher.error:
        guesses, parent = todo.pop()
        above = growth.path(parent)
        _move(matcher, path, above)
        if matcher.complete or len(above) >= depth:
            continue
        node = parent
        forced = matcher.forced()
        for token in forced[: depth - len(above)]:
            node = growth.hang(token, node, 1.0, growth.rank[parent])
        mask = walker.mask(tuple(above)) if guesses and not forced else None
        for guess in guesses:
            token = tokens[guess]
            if legal(mask, token) if not forced else token == forced[0]:
                hung = growth.hang(token, parent, float(draft.score[guess]), guess)
                todo.append((below.get(guess, []), hung))
    matcher.back(len(path))


def _move(matcher: Matcher, path: list[int], wanted: list[int]) -> None:
    """Move the matcher from the end of `path` to that of `wanted`, over their common ancestor."""
    common = 0
    while common < min(len(path), len(wanted)) and path[common] == wanted[common]:
        common += 1
    matcher.back(len(path) - common)
    for token in wanted[common:]:
        matcher.advance(token)
    path[:] = wanted


class _Growth:
    """The guided draft of one row while it grows, parents before children.

    rank  place in the drafter's own order: a forced token takes its parent's, the chain is first
    """

    def __init__(self) -> None:
        self.rank: dict[int, int] = {-1: -1}
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._score: list[float] = []
        self._place: dict[tuple[int, int], int] = {}

    def hang(self, token: int, parent: int, score: float, rank: int) -> int:
        """Hang a token below `parent` (-1 = root), or find it there; a path is no likelier than
        its beginning.
        """
        node = self._place.setdefault((parent, token), len(self._tokens))
        score = min(score, self._score[parent] if parent >= 0 else 1.0)
        if node == len(self._tokens):
            self._tokens.append(token)
            self._parents.append(parent)
            self._score.append(score)
            self.rank[node] = rank
        self._score[node] = max(score, self._score[node])
        return node

    def path(self, node: int) -> list[int]:
        """Tokens from below the root down to `node`."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self._tokens[node])
            node = self._parents[node]
        tokens.reverse()
        return tokens

    def best(self, nodes: int) -> Draft:
        """The `nodes` likeliest. Ties go to what the drafter named first, so paths stay whole."""
        order = sorted(
            range(len(self._tokens)), key=lambda node: (-self._score[node], self.rank[node], node)
        )
        kept = sorted(order[:nodes])
        place = {node: index for index, node in enumerate(kept)}
        return Draft(
            np.array([self._tokens[node] for node in kept], np.int32),
            np.array([place.get(self._parents[node], -1) for node in kept], np.int32),
            np.array([self._score[node] for node in kept], np.float32),
        )
