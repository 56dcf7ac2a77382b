"""Tries a few steps of a grammar in the compiling process, to estimate the cost of matching it."""

from collections.abc import Callable, Iterator
from itertools import islice
from math import inf
from random import Random
from time import thread_time

import numpy as np

from forerun.constrain.matcher.automaton import Automaton

STEPS = 48
"""Tokens of one walk; bytes if the compiling process has no vocabulary."""

WALKS = 6

PATIENCE = 0.1
"""Seconds for all walks together."""


def expensive(begin: Callable[[], Automaton], ends: frozenset[int], slow: float) -> bool:
    """Return whether a grammar should be matched in a process of its own: on one of WALKS random
    walks of STEPS tokens it reaches a limit, or one step takes more than `slow` seconds of
    processor time in both of two runs of that walk. (One slow run may be due to the machine, and
    would slow down all later requests with the grammar.)

    begin  returns a new automaton at the beginning that shares nothing with those made before
    ends   end-of-text ids, which are not taken

    Half of the walks repeat a token while they can, the others choose any. After PATIENCE seconds
    in all the answer is False, unless the last step was slow: it is not tried again then.
    """
    end, beginning = thread_time() + PATIENCE, begin()
    for seed in range(WALKS):
        for step, took in enumerate(_walk(beginning.fork(), seed, ends)):
            late = thread_time() > end
            if took > slow and (late or took == inf or _took(begin(), seed, ends, step) > slow):
                return True
            if late:
                return False
    return False


def _took(beginning: Automaton, seed: int, ends: frozenset[int], step: int) -> float:
    """Return the processor seconds of one step of a walk; 0 if the walk does not reach it."""
    return next(islice(_walk(beginning, seed, ends), step, None), 0.0)


def _walk(matcher: Automaton, seed: int, ends: frozenset[int]) -> Iterator[float]:
    """Walk at random, and yield the processor seconds of each step; `inf` if it reached a limit."""
    random, token = Random(seed), -1  # noqa: S311
    for _ in range(STEPS):
        before = thread_time()
        legal = _legal(matcher, ends)
        if seed % 2 or token not in legal:
            token = _onward(matcher, random.sample(legal, min(len(legal), 3)))
        taken = token >= 0 and matcher.take(token)
        yield inf if matcher.error else thread_time() - before
        if not taken:
            return


def _legal(matcher: Automaton, ends: frozenset[int]) -> list[int]:
    """Return the tokens that may follow, except end-of-text tokens."""
    if matcher.complete:
        return []
    bits = np.unpackbits(np.frombuffer(matcher.mask() or b"", np.uint8), bitorder="little")
    return [id for id in np.flatnonzero(bits).tolist() if id not in ends]


def _onward(matcher: Automaton, tokens: list[int]) -> int:
    """Return the first of these tokens after which the text can continue; -1 if there is none."""
    for token in tokens:
        ahead = matcher.fork()
        if ahead.take(token) and not ahead.complete:
            return token
    return -1
