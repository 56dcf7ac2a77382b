"""Parses Gemma 4's calls: `call:f{key:<|"|>text<|"|>,n:42,o:{...},a:[...]}`. Keys have no quotes,
strings are between marks without escapes; JSON's strings are accepted too. FunctionGemma's have
other marks.
"""

import json
import re
from collections.abc import Sequence

from forerun.text.reasoning import overlap
from forerun.text.tagged_calls import DeclaredTypes
from forerun.text.tool_bodies import NOTHING, Body, Openings, Tools, loads_or

QUOTES = ('<|"|>', "<escape>")
"""Marks before and behind strings: Gemma 4's, FunctionGemma's."""
CALL = "call:"
_NAME = re.compile(r"\s*+call:([\w.:-]{1,256})\s*+\{")
_BEGUN = re.compile(r"call:[\w.:-]*+\s*+")
_LONGEST_HEAD = 300
_CLOSES = {"{": "}", "[": "]"}


class GemmaCalls(Body):
    """Parses calls and returns their arguments as JSON.

    tools   their argument names are recognised whatever characters they contain
    closer  ends a call; a model may leave it out
    quote   is before and behind a string
    """

    def __init__(self, tools: Tools, closer: str, quote: str) -> None:
        super().__init__(closer)
        self._quote = quote
        self._declared = DeclaredTypes(tools)
        self._arguments: _Arguments | None = None
        self._ended = False

    def _read(self, text: str) -> tuple[str, bool]:
        """Parse the name when it is complete, then the arguments as they come. Ends after the
        closer, or where no call can follow.
        """
        if self._arguments is None and not self._ended:
            name = _NAME.match(text)
            if name is None:
                head = text.lstrip()
                begun = len(head) < _LONGEST_HEAD and _BEGUN.fullmatch(head)
                return text, CALL.startswith(head) or begun is not None
            self._begin(name[1])
            self._arguments = _Arguments(self._declared.names(name[1]), self._quote)
            text = "{" + text[name.end() :]
        if self._arguments is not None:
            written, text = self._arguments.push(text)
            if written:
                self._argue(written)
            if not self._arguments.ended:
                return text, True
            self._arguments, self._ended = None, True
        behind = text.lstrip()
        if self._closer.startswith(behind) and behind != self._closer:
            return text, True
        self._ended = False
        return behind.removeprefix(self._closer), False


class _Arguments:
    """Parses one object as it comes.

    names  keys that it may have, besides those without a colon or brace
    quote  is before and behind a string
    ended  whether its last brace was read
    """

    def __init__(self, names: Sequence[str], quote: str) -> None:
        self._quote = quote
        self._keys = Openings(f"{name}:" for name in names)
        self.ended = False
        self._open: list[str] = []
        self._quoted = False
        self._key = False
        self._read = 0  # Of a word that is not whole.

    def push(self, text: str) -> tuple[str, str]:
        """Return the JSON that is certain, and the text that is left over."""
        written: list[str] = []
        while text and not self.ended:
            taken = self._string(text) if self._quoted else self._next(text)
            if taken is None:
                break
            piece, text = taken
            written.append(piece)
        return "".join(written), text

    def _string(self, text: str) -> tuple[str, str] | None:
        """Parse a piece of a string, or its end if the mark has arrived."""
        at = text.find(self._quote)
        if at < 0:
            at = len(text) - overlap(text, self._quote)
            return (_escaped(text[:at]), text[at:]) if at else None
        self._quoted = False
        return _escaped(text[:at]) + '"', text[at + len(self._quote) :]

    def _next(self, text: str) -> tuple[str, str] | None:
        """Parse one sign, key or value without quotes; None: it is not complete."""
        if self._key and len(self._open) == 1:
            if self._keys.begun(text):
                return None
            if key := next(self._keys.at(text), ""):
                self._key = False
                return json.dumps(key[:-1], ensure_ascii=False), text[len(key) - 1 :]
        first = text[0]
        if first.isspace() or first in "{}[],:":
            return self._sign(first), text[1:]
        if text.startswith(self._quote):
            self._quoted, self._key = True, False
            return '"', text[len(self._quote) :]
        return None if self._quote.startswith(text) else self._word(text)

    def _sign(self, sign: str) -> str:
        """Return the JSON of a sign between keys and values; "" for white space."""
        if sign in "}]":
            return self._close()
        if sign in "{[":
            self._open.append(sign)
        if sign in "{[,":
            self._key = self._open[-1] == "{"
        return {",": ", ", ":": ": "}.get(sign, sign.strip())

    def _close(self) -> str:
        """Return the JSON that ends the innermost object or list, whichever sign the model
        wrote.
        """
        opened = self._open.pop()
        self.ended = not self._open
        self._key = False
        return _CLOSES[opened]

    def _word(self, text: str) -> tuple[str, str] | None:
        """Parse a key up to its colon, or a number or word up to its end."""
        if text[0] == '"':
            return self._json_string(text)
        end = (_KEY_END if self._key else _VALUE_END).search(text, self._read)
        if end is None:
            self._read = len(text)
            return None
        self._read = 0
        word, rest = text[: end.start()].strip(), text[end.start() :]
        if self._key:
            self._key = False
            return json.dumps(word, ensure_ascii=False), rest
        is_json = loads_or(word, NOTHING) is not NOTHING
        return word if is_json else json.dumps(word, ensure_ascii=False), rest

    def _json_string(self, text: str) -> tuple[str, str] | None:
        """Parse a string in JSON, which is returned unchanged if it is valid."""
        at = max(self._read, 1)
        while at < len(text) and text[at] != '"':
            at += 2 if text[at] == "\\" else 1
        if at >= len(text):
            self._read = at if at == len(text) else len(text) - 1
            return None
        self._read, self._key = 0, False
        word, rest = text[: at + 1], text[at + 1 :]
        is_json = isinstance(loads_or(word, NOTHING), str)
        return word if is_json else json.dumps(word[1:-1], ensure_ascii=False), rest


_KEY_END = re.compile(r"[:}]")
_VALUE_END = re.compile(r"[,}\]]")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
