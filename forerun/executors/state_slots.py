"""Bookkeeping of recurrent states: which row of an executor's pool has the state after which text.
The executor owns the arrays.

A layer with a recurrent state (layer_spec.GatedDelta) cannot continue after an arbitrary cached
page: it needs the state after the page's last token. So besides the state of each slot's sequence
an executor has checkpoints, copies of states at ends of pages, keyed by their text and its salt
(`SlotInit.salt`), compared exactly. Rows of the pool:

    0 .. slots - 1               of the sequence in each slot
    slots .. + checkpoints - 1   checkpoints; the least recently used is evicted first

Each sequence has checkpoints at the two page ends where another is likely to continue: the last in
its prompt that is at least one token before the prompt's end, for a repeated prompt; and the last
in its answer so far, for the next turn of a conversation, and for itself after a preemption. If a
prompt begins with cached pages beyond the last checkpoint, their end gets one too: two texts share
it, so a third may (such as the system prompt of many requests).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from forerun.errors import EngineError
from forerun.interface.executor import ExecutorLimits
from forerun.interface.slot_init import SequenceText, SlotInit
from forerun.types import Ints

Key = tuple[bytes, bytes]
"""The salt of a text, and its tokens as the bytes of int32."""


@dataclass(slots=True, eq=False)
class StateCheckpoint:
    """A copy of the recurrent state after a text.

    row   its row of the pool
    key   the text: salt, and tokens as the bytes of int32
    used  whether a sequence has continued from it
    """

    row: int
    key: Key
    used: bool = False

    @property
    def length(self) -> int:
        """Tokens of its text; the state is that after the last one."""
        return len(self.key[1]) // 4


@dataclass(frozen=True, slots=True)
class Claim:
    """A state checkpoint that the coming step will write.

    row     of the pool
    length  tokens that it covers
    key     its salt and text
    kind    "prompt" or "answer": it becomes the sequence's newest checkpoint of this kind; None:
            the end of a shared prefix
    """

    row: int
    length: int
    key: Key
    kind: str | None


@dataclass(slots=True)
class _Open:
    """A slot's sequence.

    length   tokens that its state covers; -1 while a step changes it
    prompt   tokens of its prompt
    shared   tokens whose pages were cached when it started
    own      the newest checkpoint of its prompt and of its answer
    salt     of its text
    """

    text: SequenceText
    length: int
    prompt: int
    shared: int
    own: dict[str, StateCheckpoint]
    salt: bytes


class StateSlots:
    """The bookkeeping of one pool of states. Not thread-safe."""

    def __init__(self, limits: ExecutorLimits) -> None:
        self._size, self._slots = limits.page_size, limits.slots
        self._free = list(range(limits.slots + limits.checkpoints - 1, limits.slots - 1, -1))
        self._checkpoints: OrderedDict[Key, StateCheckpoint] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._open: dict[int, _Open] = {}

    def reusable_prefix_len(self, tokens: Ints, salt: bytes = b"") -> int:
        """Return the length, in tokens, of the longest prefix of `tokens` int32[T] of this salt
        that has a checkpoint.
        """
        checkpoint = self._longest(tokens, salt)
        return 0 if checkpoint is None else checkpoint.length

    def lengths(self, tokens: Ints, salt: bytes = b"") -> list[int]:
        """Return the lengths, ascending, of the prefixes of `tokens` int32[T] of this salt that
        have a checkpoint.
        """
        _, data = _key(tokens, salt)
        lengths = [each for each in sorted(self._lengths) if 4 * each <= len(data)]
        return [each for each in lengths if (salt, data[: 4 * each]) in self._checkpoints]

    def row(self, tokens: Ints, salt: bytes = b"") -> int | None:
        """Return the row of the checkpoint of `tokens` int32[T] of this salt; None if it has
        none.
        """
        checkpoint = self._checkpoints.get(_key(tokens, salt))
        return None if checkpoint is None else checkpoint.row

    def insert(self, tokens: Ints, salt: bytes = b"") -> int | None:
        """Create a checkpoint of `tokens` int32[T] of this salt, which has none. Returns its row,
        to which the caller has to write the state; None if there is no room. Between steps only.
        """
        row = self._take()
        if row is not None:
            self._add(StateCheckpoint(row, _key(tokens, salt)))
        return row

    def remove(self, tokens: Ints, salt: bytes = b"") -> None:
        """Remove the checkpoint of `tokens` int32[T] of this salt. Raises KeyError without one."""
        self._evict(self._checkpoints[_key(tokens, salt)])

    def open(self, slot_init: SlotInit) -> int | None:
        """Bind a sequence to a slot. Returns the row to copy its state from; None: its state is
        zeros. Raises EngineError if its cached tokens have no checkpoint.
        """
        checkpoint, slot, salt = None, slot_init.slot, slot_init.salt
        if slot_init.cached:
            checkpoint = self._longest(slot_init.text.tokens[: slot_init.cached], salt)
            if checkpoint is None or checkpoint.length != slot_init.cached:
                raise EngineError(
                    f"slot {slot} cannot continue behind {slot_init.cached} cached tokens: they "
                    "have no checkpoint of the recurrent state"
                )
            checkpoint.used = True
            self._checkpoints.move_to_end(checkpoint.key)
        self._open[slot] = _Open(
            text=slot_init.text,
            length=slot_init.cached,
            prompt=slot_init.prompt_len,
            shared=slot_init.shared,
            own={},
            salt=salt,
        )
        return None if checkpoint is None else checkpoint.row

    def close(self, slot: int) -> None:
        """Discard the slot's sequence; its checkpoints stay. A closed slot is ignored."""
        self._open.pop(slot, None)

    def begin(self, slot: int, length: int) -> None:
        """Begin a step that changes the slot's state. Raises EngineError as `check_length`."""
        self.check_length(slot, length)
        self._open[slot].length = -1

    def check_length(self, slot: int, length: int) -> None:
        """Raise EngineError unless the slot's state covers exactly `length` tokens."""
        state = self._open[slot]
        if state.length != length:
            raise EngineError(
                f"slot {slot} has the recurrent state after {state.length} tokens; a step "
                f"continues behind {length}"
            )

    def end(self, slot: int, length: int) -> None:
        """End a step of the slot: its state covers the first `length` tokens. Raises KeyError for a
        slot that is not open.
        """
        self._open[slot].length = length

    def claims(self, slot: int, begin: int, end: int, emitted: Sequence[int] = ()) -> list[Claim]:
        """Return the checkpoints to create of a slot's sequence between its tokens `begin` and
        `end`. Their rows are reserved, without contents, until `register` or `drop`.

        emitted  tokens that the running step decided, which follow those of the text
        """
        made: list[Claim] = []
        for length, kind in self._places(self._open[slot], begin, end):
            tokens = np.append(self._open[slot].text.tokens, np.array(emitted, np.int32))
            key = self._open[slot].salt, tokens[:length].tobytes()
            known = self._checkpoints.get(key)
            if known is not None:
                self._checkpoints.move_to_end(key)
                continue
            self._replace(self._open[slot], kind)
            if (row := self._take()) is not None:
                made.append(Claim(row, length, key, kind))
        return made

    def register(self, slot: int, claims: list[Claim]) -> None:
        """Turn `claims` of this slot into checkpoints, since their rows now have their states. If a
        text has got a checkpoint meanwhile, the row is freed.
        """
        for claim in claims:
            if claim.key in self._checkpoints:  # Another row of the step has created it.
                self._free.append(claim.row)
                continue
            checkpoint = self._add(StateCheckpoint(claim.row, claim.key))
            if claim.kind:
                self._open[slot].own[claim.kind] = checkpoint

    def drop(self, rows: Iterable[int]) -> None:
        """Free reserved rows after their step failed."""
        self._free += rows

    def reserve(self, slot: int, end: int) -> int | None:
        """Reserve a row for the state at the last page end, up to token `end` of the slot's
        sequence, that gets a checkpoint and that a round may reach. Returns None if there is no
        such page end or no room. The row has no contents until `settle` or `drop`.
        """
        state = self._open[slot]
        if not self._places(state, state.length, end):
            return None
        if not self._free:  # Evict its own old checkpoint first.
            self._replace(state, "answer")
        return self._take()

    def settle(self, slot: int, row: int | None, end: int, emitted: Sequence[int]) -> None:
        """End a round of the slot, whose state now covers the first `end` tokens. Turns `row`, from
        `reserve`, into a checkpoint if the round has passed a page end that gets one: it has the
        state at the last of these.

        emitted  tokens that the round decided, which follow those of the text
        """
        state = self._open[slot]
        begin, state.length = state.length, end
        if row is None:
            return
        length, places = end // self._size * self._size, dict(self._places(state, begin, end))
        if length not in places:
            self._free.append(row)
            return
        tokens, kind = np.append(state.text.tokens, np.array(emitted, np.int32)), places[length]
        self._replace(state, kind)
        key = state.salt, tokens[:length].tobytes()
        self.register(slot, [Claim(row, length, key, kind)])

    def check(self) -> None:
        """Raise AssertionError if a row leaked. Between steps only."""
        rows = [each.row for each in self._checkpoints.values()] + self._free
        assert len(set(rows)) == len(rows), "a row has two states"
        assert +self._lengths == Counter(each.length for each in self._checkpoints.values())

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
        _, data = _key(tokens, salt)
        for length in sorted(self._lengths, reverse=True):
            if 4 * length <= len(data) and (
                checkpoint := self._checkpoints.get((salt, data[: 4 * length]))
            ):
                return checkpoint
        return None

    def _take(self) -> int | None:
        """Return a free row, or that of the least recently used checkpoint, which is evicted; None
        without any.
        """
        if not self._free and self._checkpoints:
            self._evict(next(iter(self._checkpoints.values())))
        return self._free.pop() if self._free else None

    def _add(self, checkpoint: StateCheckpoint) -> StateCheckpoint:
        self._checkpoints[checkpoint.key] = checkpoint
        self._lengths[checkpoint.length] += 1
        return checkpoint

    def _replace(self, state: _Open, kind: str | None) -> None:
        """Evict a sequence's checkpoint of this kind unless another has continued from it."""
        old = state.own.pop(kind, None) if kind else None
        if old is not None and not old.used and self._checkpoints.get(old.key) is old:
            self._evict(old)

    def _evict(self, checkpoint: StateCheckpoint) -> None:
        del self._checkpoints[checkpoint.key]
        self._lengths[checkpoint.length] -= 1
        if not self._lengths[checkpoint.length]:
            del self._lengths[checkpoint.length]
        self._free.append(checkpoint.row)


def _key(tokens: Ints, salt: bytes) -> Key:
    return salt, np.ascontiguousarray(tokens, np.int32).tobytes()


def rows_of(limits: ExecutorLimits) -> int:
    """Return the number of rows of the pool: one per slot, and the checkpoints."""
    return limits.slots + limits.checkpoints
