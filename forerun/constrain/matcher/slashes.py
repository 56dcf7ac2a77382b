r"""`\/` in JSON strings, which llguidance does not have (docs/inside/llguidance-strings.md).

It means `/`, so what may follow it is what may follow `/`: where a token ends with a backslash that
begins an escape, a copy of the matcher stays before that backslash, and takes what begins with a
slash. Where all is JSON, `\/` within a token is shown to llguidance as `/`; beside other text,
where that would take `<\/` for `</`, it is not.
"""

import re
from collections.abc import Sequence

import numpy as np

_ESCAPE = re.compile(rb"\\(.?)", re.DOTALL)


def shown(token: bytes) -> bytes:
    r"""Return a token of JSON in the form in which llguidance sees it: with `/` for `\/`.

    Where an escape began before the token, its pairs of backslash and letter may be others; then
    the text that is shown is not taken, never one that is no JSON.
    """
    if b"\\/" not in token:
        return token
    return _ESCAPE.sub(lambda found: b"/" if found[1] == b"/" else found[0], token)


class Slashes:
    """Which tokens of a vocabulary begin with a slash, and which end with a backslash.

    tokens   as shown, by id
    special  ids of control tokens, which stand for no text
    """

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int]) -> None:
        self._spelled: dict[bytes, int] = {}
        silent = set(special)
        begins = np.zeros(-(-len(tokens) // 32) * 32, np.uint8)
        self._ends: dict[int, bytes] = {}
        for id, token in enumerate(tokens):
            if not token or id in silent:
                continue
            self._spelled[token] = id
            begins[id] = token[:1] == b"/"
            if token.endswith(b"\\"):
                self._ends[id] = token[:-1]
        self._begins = np.packbits(begins, bitorder="little")

    def begins(self, token: int) -> bool:
        """Return whether a token begins with a slash."""
        return bool(self._begins[token // 8] >> token % 8 & 1)

    def before(self, token: int) -> list[int] | None:
        """Return the ids of the text of a token before its final backslash, in the longest tokens;
        None if it does not end so, or no tokens have that text.
        """
        text = self._ends.get(token)
        if text is None:
            return None
        ids: list[int] = []
        while text:
            sizes = range(len(text), 0, -1)
            size = next((size for size in sizes if text[:size] in self._spelled), 0)
            if not size:
                return None
            ids.append(self._spelled[text[:size]])
            text = text[size:]
        return ids

    def of(self, mask: bytes) -> bytes:
        """Return those of the tokens in a mask that begin with a slash, as a mask of that
        length.
        """
        bits = np.frombuffer(mask, np.uint8)
        found = np.zeros_like(bits)
        size = min(len(bits), len(self._begins))
        found[:size] = bits[:size] & self._begins[:size]
        return found.tobytes()
