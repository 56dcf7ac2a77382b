"""A few steps through a grammar in the compiling process, to see what following it will cost."""

from random import Random
from time import thread_time

import numpy as np

from forerun.constrain.matcher.automaton import Automaton

STEPS = 48
"""Tokens of one walk. Of bytes where the compiling process knows no vocabulary."""

WALKS = 6

PATIENCE = 0.1
"""Seconds for all walks."""


def expensive(beginning: Automaton, ends: frozenset[int], slow: float) -> bool:
    """Whether a grammar should be followed in a process of its own: on one of WALKS random walks of
    STEPS tokens it reaches a limit, or a step takes more than `slow` seconds of processor time.

    beginning  stays where it is; copies walk
    ends       end-of-text ids, which are not taken

    Half of the walks repeat a token while they can, the others go anywhere. After PATIENCE seconds
    in all the answer is False.
    """
    end = thread_time() + PATIENCE
    for seed in range(WALKS):
        random, matcher, token = Random(seed), beginning.fork(), -1  # noqa: S311
        for _ in range(STEPS):
            before = thread_time()
            if before > end:
                return False
            legal = _legal(matcher, ends)
            if seed % 2 or token not in legal:
                token = _onward(matcher, random.sample(legal, min(len(legal), 3)))
            taken = token >= 0 and matcher.take(token)
            if matcher.error or thread_time() - before > slow:
                return True
            if not taken:
                break
    return False


def _legal(matcher: Automaton, ends: frozenset[int]) -> list[int]:
    """Tokens that may follow, end of text aside."""
    if matcher.complete:
        return []
    bits = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")
    return [id for id in np.flatnonzero(bits).tolist() if id not in ends]


def _onward(matcher: Automaton, tokens: list[int]) -> int:
    """The first of these behind which the text goes on; -1 where there is none."""
    for token in tokens:
        ahead = matcher.fork()
        if ahead.take(token) and not ahead.complete:
            return token
    return -1
