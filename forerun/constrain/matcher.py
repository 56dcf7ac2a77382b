"""One sequence's place in a grammar: what may follow, step forward, step back."""

from dataclasses import dataclass

import numpy as np

from forerun.constrain.automaton import Automaton
from forerun.types import Words


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar ready to run: what a request carries to the engine.

    prototype  an automaton that has taken nothing; every sequence gets a copy
    start      the constraint begins after these token ids; empty = at once
    vocab      ids below this are known to the automaton
    """

    prototype: Automaton
    start: tuple[int, ...]
    vocab: int


class Matcher:
    """Follows one sequence through a grammar, ahead over draft tokens and back again.

    A matcher that fails (a limit was reached) says so in `error` and stays failed. It is never
    shown an id that the tokenizer does not have.
    """

    def __init__(self, compiled: Compiled) -> None:
        self._automaton = compiled.prototype.fork()
        self._vocab = compiled.vocab
        self._start = compiled.start
        self._seen = 0
        self._trail: list[int | None] = []

    @property
    def waiting(self) -> bool:
        """Whether the constraint has not begun."""
        return self._seen < len(self._start)

    @property
    def complete(self) -> bool:
        """Whether the text is whole and nothing but its end may follow."""
        return not self.waiting and self._automaton.complete and not self.error

    @property
    def error(self) -> str:
        """Why the matcher failed; empty while it has not."""
        return self._automaton.error

    def advance(self, token: int) -> bool:
        """Step over `token`. False where it does not fit; then nothing has changed."""
        if self.waiting:
            self._trail.append(self._seen)
            self._seen = self._progress(token)
            return True
        if not 0 <= token < self._vocab or not self._automaton.take(token):
            return False
        self._trail.append(None)
        return True

    def back(self, steps: int) -> None:
        """Undo the last `steps` advances."""
        taken = 0
        for _ in range(steps):
            seen = self._trail.pop()
            if seen is None:
                taken += 1
            else:
                self._seen = seen
        if taken:
            self._automaton.back(taken)

    def settle(self) -> None:
        """Forget how to step back over what is decided."""
        self._trail.clear()

    def forced(self) -> list[int]:
        """Tokens that alone can follow, in order; often none."""
        return [] if self.waiting else self._automaton.forced()

    def mask(self) -> bytes | None:
        """Bits of the tokens that may follow, one per known id; None = all may."""
        return None if self.waiting else self._automaton.mask()

    def _progress(self, token: int) -> int:
        """How much of the start marker the text ends with once `token` is added."""
        tail = (*self._start[: self._seen], token)
        for size in range(min(len(tail), len(self._start)), 0, -1):
            if tail[-size:] == self._start[:size]:
                return size
        return 0


def words(mask: bytes, size: int) -> Words:
    """uint32[size] of a mask's bits; ids that the matcher does not know are forbidden."""
    out = np.zeros(size * 4, np.uint8)
    bits = np.frombuffer(mask, np.uint8)[: size * 4]
    out[: len(bits)] = bits
    return out.view("<u4").astype(np.uint32, copy=False)
