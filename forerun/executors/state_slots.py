"""Which recurrent states an executor keeps, and of which texts: bookkeeping, no arrays.

A layer with a recurrent state (layer_spec.GatedDelta) cannot go on from any cached page: what it
needs is the state after the last token before it. So beside the state of each slot's sequence an
executor keeps checkpoints, copies of states at ends of pages, by the text that they stand for and
its salt (`SlotInit.salt`), compared exactly. Rows of states:

    0 .. slots - 1               of the sequence in each slot
    slots .. + checkpoints - 1   checkpoints; where there is no room, the least recently used goes

Of a sequence the last two ends of pages are kept that others are likely to go on from: of its
prompt, one token short of the whole, for who asks the same; and of its answer so far, for the next
turn of a conversation, and for itself where it is preempted. Where a prompt begins with pages that
others have filled beyond the last checkpoint, the end of these is kept as well: two texts have it
in common, so a third may (the system prompt of many requests).
"""

from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np

from forerun.errors import EngineError
from forerun.interface.executor import ExecutorLimits
from forerun.interface.slot_init import SlotInit
from forerun.types import Ints

Key = tuple[bytes, bytes]
"""Salt of a text, and its tokens as int32 bytes."""


@dataclass(slots=True, eq=False)
class StateCheckpoint:
    """A kept state.

    row   where it is
    key   salt, and int32 bytes of the tokens it stands for
    used  whether somebody went on from it
    """

    row: int
    key: Key
    used: bool = False

    @property
    def length(self) -> int:
        """How many tokens its text has; the state stands behind the last."""
        return len(self.key[1]) // 4


@dataclass(frozen=True, slots=True)
class Claim:
    """A checkpoint that a step makes: of the state after `length` tokens, in `row`."""

    row: int
    length: int
    key: Key
    kind: str | None


@dataclass(slots=True)
class _Open:
    """A slot's sequence.

    length   tokens that its state stands for; -1 while a step changes it
    prompt   tokens of its prompt
    shared   tokens whose pages others had filled
    own      what was kept last of its prompt and of its answer
    salt     of its text
    """

    length: int
    prompt: int
    shared: int
    own: dict[str, StateCheckpoint]
    salt: bytes


class StateSlots:
    """The book of a pool of states. One thread."""

    def __init__(self, limits: ExecutorLimits) -> None:
        self._size, self._slots = limits.page_size, limits.slots
        self._free = list(range(limits.slots + limits.checkpoints - 1, limits.slots - 1, -1))
        self._kept: OrderedDict[Key, StateCheckpoint] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._open: dict[int, _Open] = {}

    def resumable(self, tokens: Ints, salt: bytes = b"") -> int:
        """The longest beginning of `tokens` int32[T] of this salt of which there is a checkpoint,
        in tokens.
        """
        found = self._longest(tokens, salt)
        return 0 if found is None else found.length

    def open(self, slot_init: SlotInit) -> int | None:
        """A sequence takes a slot. The row that its state is to be copied from; None: it begins
        with zeros. Raises EngineError where its cached tokens have no checkpoint.
        """
        found, slot, salt = None, slot_init.slot, slot_init.salt
        if slot_init.cached:
            found = self._longest(slot_init.tokens[: slot_init.cached], salt)
            if found is None or found.length != slot_init.cached:
                raise EngineError(
                    f"slot {slot} shall go on behind {slot_init.cached} tokens, of which no "
                    "recurrent state is kept"
                )
            found.used = True
            self._kept.move_to_end(found.key)
        self._open[slot] = _Open(slot_init.cached, slot_init.prompt_len, slot_init.shared, {}, salt)
        return None if found is None else found.row

    def close(self, slot: int) -> None:
        """The sequence is gone; its checkpoints stay. A closed slot is no error."""
        self._open.pop(slot, None)

    def begin(self, slot: int, length: int) -> None:
        """A step changes the slot's state, which stands for `length` tokens. Raises EngineError
        where it does not.
        """
        state = self._open[slot]
        if state.length != length:
            raise EngineError(
                f"slot {slot} has the recurrent state after {state.length} tokens; a step goes on "
                f"from {length}"
            )
        state.length = -1

    def end(self, slot: int, length: int) -> None:
        """A step of the slot is over: its state stands for the first `length` tokens. Raises
        KeyError for a slot that is not open.
        """
        self._open[slot].length = length

    def claims(self, slot: int, text: "array[int]", begin: int, end: int) -> list[Claim]:
        """The checkpoints to make of a slot's sequence between its tokens `begin` and `end`, of
        which `text` are the first. Their rows are free for that: until `keep` or `drop` nobody
        finds anything there.
        """
        made: list[Claim] = []
        for length, kind in self._places(self._open[slot], begin, end):
            key = self._open[slot].salt, memoryview(text)[:length].tobytes()
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                continue
            old = self._open[slot].own.pop(kind, None) if kind else None
            if old is not None and not old.used and self._kept.get(old.key) is old:
                self._forget(old)
            if not self._free and self._kept:
                self._forget(next(iter(self._kept.values())))
            if self._free:
                made.append(Claim(self._free.pop(), length, key, kind))
        return made

    def keep(self, slot: int, claims: list[Claim]) -> None:
        """The rows of `claims`, made for this slot, hold their states now: they can be found by
        their texts. A row whose text another has kept meanwhile is free again.
        """
        for claim in claims:
            if claim.key in self._kept:  # Another row of the same step has it too.
                self._free.append(claim.row)
                continue
            kept = self._kept[claim.key] = StateCheckpoint(claim.row, claim.key)
            self._lengths[kept.length] += 1
            if claim.kind:
                self._open[slot].own[claim.kind] = kept

    def drop(self, claims: list[Claim]) -> None:
        """The step failed: the rows of `claims` are free again."""
        self._free += [claim.row for claim in claims]

    def check(self) -> None:
        """Prove that no row leaked. Raises AssertionError. Between steps only."""
        rows = [kept.row for kept in self._kept.values()] + self._free
        assert len(set(rows)) == len(rows), "a row has two states"
        assert +self._lengths == Counter(kept.length for kept in self._kept.values())

    def _places(self, state: _Open, begin: int, end: int) -> list[tuple[int, str | None]]:
        size = self._size
        wanted: dict[int, str | None] = {}
        if begin < state.shared <= end and state.shared % size == 0:
            wanted[state.shared] = None
        of_prompt = min(end, state.prompt - 1) // size * size
        if of_prompt > begin:
            wanted.setdefault(of_prompt, "prompt")
        of_answer = end // size * size
        if of_answer > begin and of_answer >= state.prompt:
            wanted.setdefault(of_answer, "answer")
        return list(wanted.items())

    def _longest(self, tokens: Ints, salt: bytes) -> StateCheckpoint | None:
        data = np.ascontiguousarray(tokens, np.int32).tobytes()
        for length in sorted(self._lengths, reverse=True):
            if 4 * length <= len(data) and (found := self._kept.get((salt, data[: 4 * length]))):
                return found
        return None

    def _forget(self, kept: StateCheckpoint) -> None:
        del self._kept[kept.key]
        self._lengths[kept.length] -= 1
        if not self._lengths[kept.length]:
            del self._lengths[kept.length]
        self._free.append(kept.row)


def rows_of(limits: ExecutorLimits) -> int:
    """How many states are kept: one per slot, and the checkpoints."""
    return limits.slots + limits.checkpoints
