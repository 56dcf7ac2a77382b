"""Matches one sequence with a grammar: what may follow, a step forward, a step back."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from forerun.constrain.grammar import ThinkingBudget
from forerun.constrain.matcher.automaton import AsyncMatcher, Automaton, FreeText
from forerun.constrain.matcher.start_marker import MarkerPlace, MarkerTokens, StartMarker
from forerun.errors import EngineError
from forerun.types import Words

COPIES = 4
"""Most copies that a matcher holds. One takes 5 kB to 1 MB in a text of 1,000 tokens, more with a
schema of hundreds of properties.
"""

Path = tuple[int, ...]
"""Draft tokens after the decided ones."""


@dataclass(slots=True)
class Translated:
    """A grammar that the compiling process has accepted; all its requests share it.

    text       in the library's own form
    begin      returns a new automaton at the beginning, or as a string why there is none; True: for
               a process of its own, where a step may cost more
    expensive  to be matched in a process of its own
    unenforced paths of the keywords that are left out of a schema
    slow       matchers that took too long on the engine's thread, less an eighth of each that did
               not since
    """

    text: str
    begin: Callable[[bool], Automaton | str]
    expensive: bool
    unenforced: tuple[str, ...] = ()
    slow: float = 0

    def moved(self, limit: bool) -> None:
        """Record that a matcher had to leave the engine's thread, because it reached a limit
        (`limit`) or was slow. After a limit, or a second slow one, the grammar is `expensive`.
        """
        self.slow += 1
        self.expensive |= limit or self.slow > 1

    def stayed(self) -> None:
        """Record that a matcher ended on the engine's thread. Eight of them cancel a slow one,
        since that may have been due to a busy machine.
        """
        self.slow = max(0, self.slow - 1 / 8)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar ready to run; a request carries it to the engine.

    prototype   an automaton at the beginning, for this request alone: every sequence gets a copy;
                None if the grammar is expensive
    start       the text after which the constraint begins; None = it begins at once
    vocab       ids below this are known to the automaton
    ends        end-of-text ids
    remote      opens a matcher in a process of its own; its parameter is called for each answer
    unenforced  keywords of schemas that are not enforced, as paths from the request's body
    budget      of the reasoning before `start`
    call        how tokens spell the budget's `call`
    """

    prototype: Automaton | None
    start: MarkerTokens | None
    vocab: int
    ends: tuple[int, ...]
    translated: Translated
    remote: Callable[[Callable[[], None]], AsyncMatcher]
    unenforced: tuple[str, ...] = ()
    budget: ThinkingBudget | None = None
    call: MarkerTokens | None = None

    @property
    def free(self) -> bool:
        """Whether any text may follow `start`."""
        return isinstance(self.prototype, FreeText)

    @property
    def expensive(self) -> bool:
        """Whether its sequences are matched in processes of their own."""
        return self.prototype is None or self.translated.expensive

    def begin(self) -> Automaton:
        """Return a new automaton at the beginning, created on this thread whatever it costs. Raises
        EngineError if the library cannot create one.
        """
        if self.prototype is not None:
            return self.prototype.fork()
        automaton = self.translated.begin(True)
        if isinstance(automaton, str):
            raise EngineError(f"the grammar's matcher cannot begin: {automaton}")
        return automaton


@dataclass(slots=True)
class _Position:
    """The state after draft tokens; None = not computed.

    fits  by token: whether it fits there
    left  how many copies have moved on from there
    """

    complete: bool | None = None
    forced: list[int] | None = None
    error: str = ""
    left: int = 0
    fits: dict[int, bool] = field(default_factory=dict)


class Matcher:
    """Matches one sequence with a grammar, ahead over draft tokens and back again.

    No automaton is ever rolled back (see Automaton). One takes decided tokens only; draft tokens
    are taken by copies of it, which are dropped with the next decision. Copying takes time in
    proportion to the text. So a copy moves on with the first draft token after a position, the
    results at that position are cached, and another copy is made only for the next draft token or
    question.

    If an automaton fails (a limit was reached), `error` has the reason as long as the matcher is
    there. The automaton never gets an id that the tokenizer does not have.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._automaton = compiled.begin()
        self._vocab = compiled.vocab
        self._free = compiled.free
        self._start = StartMarker(
            compiled.start,
            compiled.ends,
            compiled.vocab,
            compiled.budget,
            compiled.free,
            compiled.call,
        )
        # The constraint's first mask; needed before its start.
        self._first = self._automaton.mask() if self.waiting else b""
        # Where the matcher stood before each draft token: on the way to the start, and below that.
        self._trail: list[tuple[MarkerPlace | None, Path]] = []
        # Draft tokens that copies took, up to here; positions behind such, and copies there.
        self._path: Path = ()
        self._positions: dict[Path, _Position] = {}
        self._copies: dict[Path, Automaton] = {}

    @property
    def waiting(self) -> bool:
        """Whether the constraint has not begun: its start text has not been emitted yet."""
        return self._start.waiting

    @property
    def released(self) -> bool:
        """Whether the reasoning has ended and any text may follow."""
        return self._free and not self.waiting

    @property
    def complete(self) -> bool:
        """Whether the text, draft tokens included, is complete and only its end may follow."""
        if self.waiting:
            return False
        position = self._position()
        if position.complete is None:
            here = self._here()
            position.complete = here.complete and not here.error
        return position.complete

    @property
    def error(self) -> str:
        """Why the automaton failed permanently; "" if it has not."""
        return self._position().error if self._path else self._automaton.error

    def commit(self, token: int) -> bool:
        """Advance the grammar by the decided `token`, after undoing all draft tokens. Returns False
        if the grammar does not allow it; then nothing else has changed.
        """
        self.restart()
        self._positions.clear()
        self._copies.clear()
        place = self._start.place
        given = self._start.take(token)
        if given is None:
            return False
        for under in given:
            known = self._free or 0 <= under < self._vocab
            if not (known and self._automaton.take(under)):
                self._start.place = place
                return False
        return True

    def advance(self, token: int) -> bool:
        """Advance the grammar by draft token `token`. Returns False, and changes nothing, if the
        grammar does not allow it.
        """
        before = self._start.place, self._path
        given = self._start.take(token)
        if given is None:
            return False
        for under in given:
            position = self._position()
            fits = position.fits.get(under)
            if fits is None:
                fits = position.fits[under] = self._try(position, under)
            if not fits:
                self._start.place = before[0]
                return False
            self._path = (*self._path, under)
        self._trail.append(before)
        return True

    def back(self, steps: int) -> None:
        """Undo the last `steps` draft tokens."""
        if steps:
            self._start.place, self._path = self._trail[-steps]
            del self._trail[-steps:]

    def restart(self) -> None:
        """Undo all draft tokens."""
        self.back(len(self._trail))

    def forced(self) -> list[int]:
        """Return the ids that must follow here, in order; often none. While `waiting`, those by
        which a thinking budget ends the reasoning.
        """
        if self.waiting:
            return self._start.forced()
        position = self._position()
        if position.forced is None:
            position.forced = self._here().forced()
            position.error = self._here().error
        return position.forced

    def mask(self) -> bytes | None:
        """Return one bit per known id, set if the token may follow; None = every token may. If the
        automaton fails, `error` has the reason.
        """
        if self.waiting:
            return self._start.mask(self._first)
        mask = self._here().mask()
        self._position().error = self._here().error
        return mask

    def _position(self) -> _Position:
        """Return the state of the matcher's position."""
        position = self._positions.get(self._path)
        if position is None:
            position = self._positions[self._path] = _Position()
        return position

    def _here(self) -> Automaton:
        """Return an automaton at the matcher's position, which must not be changed."""
        if not self._path:
            return self._automaton
        if self._path not in self._copies:
            self._keep(self._path, self._copy())
        return self._copies[self._path]

    def _try(self, position: _Position, token: int) -> bool:
        """Return whether a draft token fits here; if it does, there is a copy after it."""
        if not (self._free or 0 <= token < self._vocab):
            return False
        copy = self._copies.pop(self._path, None) or self._copy()
        position.left += 1
        if self._path and position.left > 2:  # The draft branches here: others will go on from it.
            self._keep(self._path, copy.fork())
        fits = copy.take(token)
        if fits:
            self._keep((*self._path, token), copy)
        elif self._path and not copy.error:
            self._keep(self._path, copy)
        return fits

    def _copy(self) -> Automaton:
        """Return a new copy at the matcher's position."""
        known = range(len(self._path) - 1, 0, -1)
        near = next((size for size in known if self._path[:size] in self._copies), 0)
        copy = (self._copies[self._path[:near]] if near else self._automaton).fork()
        for token in self._path[near:]:
            copy.take(token)
        return copy

    def _keep(self, path: Path, copy: Automaton) -> None:
        """Store a copy, and drop the oldest if there are more than COPIES."""
        self._copies[path] = copy
        if len(self._copies) > COPIES:
            del self._copies[next(iter(self._copies))]


def words(mask: bytes, size: int) -> Words:
    """Return uint32[size] of a mask's bits, as in NodeMasks: bit t % 32 of word t // 32. Ids beyond
    the mask's end are forbidden; bits beyond `size` words are dropped.
    """
    out = np.zeros(size * 4, np.uint8)
    bits = np.frombuffer(mask, np.uint8)[: size * 4]
    out[: len(bits)] = bits
    return out.view("<u4").astype(np.uint32, copy=False)
