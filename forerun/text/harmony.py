"""Parses the Harmony format of gpt-oss as it comes: messages in channels.

An answer is one message or more, each a header and a text:

    <|channel|>analysis<|message|>The user asks ...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>It rains.<|return|>

Analysis is reasoning. A message to a function is a call of it; models also put the function's name
before the channel. Everything else is content.
"""

import re
from collections.abc import Collection

from forerun.text.reasoning import Marks, overlap
from forerun.text.tool_bodies import CallPiece, ParsedDelta, merged

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
MARKS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
THOUGHTS = Marks(ANALYSIS, END, "")
"""Marks around reasoning that a client begins."""

LONGEST_HEADER = 512
"""Most characters of a header."""

_ENDS = (END, CALL, RETURN, START)
_END = re.compile("|".join(map(re.escape, _ENDS)))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADER = re.compile(r"<\|channel\|>\s*(\w*)")
_BEGINS = (START, CHANNEL, MESSAGE, CONSTRAIN, "to=")


def shows_harmony(template: str) -> bool:
    """Return whether a chat template uses this format."""
    return all(mark in template for mark in (START, CHANNEL, MESSAGE))


def begun_message(prompt_tail: str) -> str | None:
    """Return the message at the end of a prompt, from its mark on; None if the tail shows none."""
    _, mark, rest = prompt_tail.rpartition(START)
    return mark + rest if mark else None


class HarmonyReader:
    """Splits the text of one answer, in pieces of any size, into reasoning, content and calls.

    names  of the offered functions; messages to others are content
    begun  the part of the first message that is in the prompt: a header, or a text as well
    apart  reasoning is separate from the content
    """

    def __init__(self, names: Collection[str], begun: str = START, apart: bool = True) -> None:
        self._names = names
        self._apart = apart
        self._held = ""
        self._kind: str | None = None
        self._fresh = False
        self._calls = 0
        self._argued = True
        self._thoughts: list[str] = []
        self._answered = False
        self.push(begun)
        self._fresh, self._answered = False, False
        self._thoughts.clear()

    @property
    def called(self) -> bool:
        """Whether at least one call has begun."""
        return self._calls > 0

    def push(self, text: str) -> ParsedDelta:
        """Parse the next piece of text, and return what is certain; a possible part of a mark is
        held back.
        """
        self._held += text
        pieces: list[ParsedDelta] = []
        while self._header() if self._kind is None else self._text(pieces):
            pass
        return _joined(pieces)

    def finish(self, cut: bool = False) -> ParsedDelta:
        """Return what was held back, at the end of the text. If the model wrote only reasoning, it
        is the answer as well, unless the text was cut off (`cut`).
        """
        pieces: list[ParsedDelta] = []
        if self._kind is not None:
            self._say(self._held, pieces)
            self._close(pieces)
        elif not _is_header(self._held) and self._held.strip():
            pieces.append(ParsedDelta(content=self._held))
            self._answered = True
        self._held = ""
        if not (cut or self._answered or self.called):
            pieces.append(ParsedDelta(content="".join(self._thoughts)))
        return _joined(pieces)

    def _header(self) -> bool:
        """Parse a header. Returns False if more text is needed."""
        header, mark, rest = self._held.partition(MESSAGE)
        if mark:
            self._held = rest
            self._open(header)
            return True
        if len(self._held) <= LONGEST_HEADER and _is_header(self._held):
            return False
        self._kind, self._fresh = "content", True
        if self._held.startswith(START):
            self._held = self._held.removeprefix(START).removeprefix("assistant")
        return True

    def _open(self, header: str) -> None:
        channels, recipient = _HEADER.findall(header), _RECIPIENT.search(header)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        self._fresh = True
        if name in self._names:
            self._kind = f"call {name}"
        else:
            self._kind = "thought" if channels[-1:] == ["analysis"] else "content"

    def _text(self, pieces: list[ParsedDelta]) -> bool:
        """Append a message's text to `pieces`. Returns False if more text is needed."""
        end = _END.search(self._held)
        if end is None:
            size = max(overlap(self._held, mark) for mark in _ENDS)
            cut = len(self._held) - size
            self._say(self._held[:cut], pieces)
            self._held = self._held[cut:]
            return False
        self._say(self._held[: end.start()], pieces)
        self._close(pieces)
        self._kind = None
        # What begins a message stays; what ended one goes.
        self._held = self._held[end.start() if end[0] == START else end.end() :]
        return True

    def _say(self, text: str, pieces: list[ParsedDelta]) -> None:
        kind = str(self._kind)
        if kind.startswith("call ") and self._fresh:
            pieces.append(ParsedDelta(calls=(CallPiece(self._calls, kind.removeprefix("call ")),)))
            self._calls += 1
            self._argued = self._fresh = False
        if not text:
            return
        if kind.startswith("call "):
            self._argued = True
            pieces.append(ParsedDelta(calls=(CallPiece(self._calls - 1, None, text),)))
            return
        thought = kind == "thought" and self._apart
        before = self._thoughts if thought else self._answered
        gap = "\n" if self._fresh and before else ""
        self._fresh = False
        if thought:
            self._thoughts.append(gap + text)
            pieces.append(ParsedDelta(reasoning=gap + text))
        else:
            self._answered = True
            pieces.append(ParsedDelta(content=gap + text))

    def _close(self, pieces: list[ParsedDelta]) -> None:
        """End a message; a call without arguments gets an empty object."""
        if not self._argued:
            self._argued = True
            pieces.append(ParsedDelta(calls=(CallPiece(self._calls - 1, None, "{}"),)))


def _is_header(text: str) -> bool:
    """Return whether a text is the beginning of a header."""
    begun = text.lstrip().removeprefix(START).lstrip().removeprefix("assistant").lstrip()
    if not begun or "assistant".startswith(begun):
        return True
    return any(begun.startswith(mark) or mark.startswith(begun) for mark in _BEGINS)


def _joined(pieces: list[ParsedDelta]) -> ParsedDelta:
    reasoning = "".join(one.reasoning for one in pieces)
    content = "".join(one.content for one in pieces)
    return ParsedDelta(reasoning, content, merged(call for one in pieces for call in one.calls))
