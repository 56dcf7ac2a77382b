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
    """Follows one sequence through a grammar, ahead over guesses and back again.

    No automaton is ever rolled back (see Automaton). One takes what is decided and nothing else;
    guesses are taken by copies, which are thrown away. Where the matcher came back to a place
    between guesses, a copy is kept there until it goes back further, for others to go on from.

    An automaton that fails (a limit was reached) says so in `error` as long as the matcher stands
    there. It is never shown an id that the tokenizer does not have.
    """

    def __init__(self, compiled: Compiled) -> None:
        self._automaton = compiled.prototype.fork()
        self._vocab = compiled.vocab
        self._start = compiled.start
        self._seen = 0
        # Of each guess, how much of the start had been seen before it; None = it is for the
        # automaton. Those tokens; copies kept behind so many of them; the copy behind all of them
        # that goes on with the next, None where that is a new one.
        self._trail: list[int | None] = []
        self._guesses: list[int] = []
        self._kept: dict[int, Automaton] = {}
        self._tip: Automaton | None = None

    @property
    def waiting(self) -> bool:
        """Whether the constraint has not begun."""
        return self._seen < len(self._start)

    @property
    def complete(self) -> bool:
        """Whether the text is whole and nothing but its end may follow."""
        return not self.waiting and self._here().complete and not self.error

    @property
    def error(self) -> str:
        """Why the automaton failed here; empty while it has not."""
        return self._here().error

    def commit(self, token: int) -> bool:
        """Step over `token`, which is decided; guesses are forgotten. False where it does not fit;
        then nothing else has changed.
        """
        self.back(len(self._trail))
        if self.waiting:
            self._seen = self._progress(token)
            return True
        return 0 <= token < self._vocab and self._automaton.take(token)

    def advance(self, token: int) -> bool:
        """Step over `token`, a guess. False where it does not fit; then nothing has changed."""
        if self.waiting:
            self._trail.append(self._seen)
            self._seen = self._progress(token)
            return True
        if not 0 <= token < self._vocab:
            return False
        here = self._tip or self._here().fork()
        if not here.take(token):
            if here.error:
                self._tip = None  # It is of no more use; another is made where it is needed.
            return False
        self._tip = here
        self._guesses.append(token)
        self._trail.append(None)
        return True

    def back(self, steps: int) -> None:
        """Undo the last `steps` advances."""
        for _ in range(steps):
            seen = self._trail.pop()
            if seen is not None:
                self._seen = seen
                continue
            self._guesses.pop()
            self._tip = None
        self._kept = {n: copy for n, copy in self._kept.items() if n <= len(self._guesses)}

    def forced(self) -> list[int]:
        """Tokens that alone can follow, in order; often none."""
        return [] if self.waiting else self._here().forced()

    def mask(self) -> bytes | None:
        """Bits of the tokens that may follow, one per known id; None = all may."""
        return None if self.waiting else self._here().mask()

    def _here(self) -> Automaton:
        """The automaton where the matcher stands."""
        count = len(self._guesses)
        if count == 0:
            return self._automaton
        if self._tip is not None:
            return self._tip
        if count not in self._kept:
            nearest = max(self._kept, default=0)
            copy = self._kept.get(nearest, self._automaton).fork()
            for token in self._guesses[nearest:]:
                copy.take(token)
            self._kept[count] = copy
        return self._kept[count]

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
