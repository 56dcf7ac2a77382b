"""Returns text as it becomes final: whole characters only, and nothing that may still become a stop
string.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from forerun.text.stop_strings import StopStrings
from forerun.text.tokenizer import Tokenizer


class Piece(NamedTuple):
    """The text that became final with one token.

    text     final text, possibly empty
    stopped  the stop string that ended the text, if one did
    """

    text: str
    stopped: str | None = None


class TextStream:
    """Decodes one sequence token by token.

    The pieces and `finish()` joined are `tokenizer.decode(ids, skip_special)`, cut at the stop
    string that is complete first; a control token can be one although its text is skipped. Cost per
    token is O(1), however long the text is.

    before  ids of the text that the sequence continues: the pieces are then the difference between
            decoding both and decoding these
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        before: Iterable[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._joined, self._starts = tokenizer.pieces.joined, tokenizer.pieces.starts
        self._stops = StopStrings(stop) if stop else None
        self._include_stop = include_stop
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._marks = {tokenizer.added[one].id: one for one in stop if one in tokenizer.added}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._begun = any(
            tokenizer.token_bytes(int(id)) for id in before if int(id) not in self._skipped
        )
        self._stopped: str | None = None

    @property
    def passes(self) -> bool:
        """Whether the text of `Tokenizer.whole_tokens` can follow unchanged, without `push`."""
        return (
            self._begun
            and self._stops is None
            and not self._decoder.getstate()[0]
            and self._skipped is self._tokenizer.special_ids
        )

    def push(self, token: int, early: bool = False) -> Piece:
        """Return the text that becomes final with token id `token`; none after a stop string.

        early  a stop string that this token completes counts as ordinary text
        """
        if self._stopped is not None:
            return Piece("", self._stopped)
        if token in self._skipped:
            return (
                self._end_at(self._marks[token])
                if token in self._marks and not early
                else Piece("")
            )
        # The target may have padded its vocabulary.
        piece = (
            self._joined[self._starts[token] : self._starts[token + 1]]
            if token < self._tokenizer.vocab_size
            else b""
        )
        if piece and not self._begun:
            self._begun = True
            piece = self._tokenizer.without_lead(piece)
        return self._release(self._decoder.decode(piece), early)

    def finish(self) -> str:
        """Return the text that was held back, at the end of the sequence; "" after a stop
        string.
        """
        if self._stopped is not None:
            return ""
        tail = self._release(self._decoder.decode(b"", final=True)).text
        if self._stopped is None:
            tail, self._held = tail + self._held, ""
        return tail

    def _end_at(self, mark: str) -> Piece:
        """End the text at a control token that is a stop string."""
        text = self.finish() + mark * self._include_stop
        self._stopped = mark
        return Piece(text, mark)

    def _release(self, text: str, early: bool = False) -> Piece:
        """Feed `text` to the stop strings; hold back what may be part of one."""
        if self._stops is None:
            return Piece(text)
        window = self._held + text
        for index, character in enumerate(text, len(self._held) + 1):
            stop = self._stops.feed(character)
            if stop is not None and not early:
                self._stopped, self._held = stop, ""
                end = index if self._include_stop else index - len(stop)
                return Piece(window[:end], stop)
        cut = len(window) - self._stops.pending
        self._held = window[cut:]
        return Piece(window[:cut])
