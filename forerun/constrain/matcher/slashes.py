r"""Support for `\/` in JSON strings, which llguidance lacks (docs/inside/llguidance-strings.md).

`\/` means `/`, so what may follow it is what may follow `/`. Where a token ends with a backslash
that begins an escape, a copy of the matcher stays before that backslash, and takes what begins with
a slash. If the whole text is JSON, a token with `\/` inside that does not fit is tried as the
tokens of the same text with `/`. Beside other text it is not, since that would accept `<\/` for
`</`.
"""

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

_ESCAPE = re.compile(rb"\\(.?)", re.DOTALL)


def shown(token: bytes) -> bytes:
    r"""Return a token of JSON with `/` for `\/`, the form that llguidance accepts; the token itself
    if it has none. If an escape began before the token, its pairs of backslash and letter may be
    divided otherwise; then the result may not fit, but it never makes invalid JSON fit.
    """
    if b"\\/" not in token:
        return token
    return _ESCAPE.sub(lambda found: b"/" if found[1] == b"/" else found[0], token)


class Slashes:
    r"""Tokens of a vocabulary that begin with a slash, end with a backslash or have `\/` inside.

    tokens          bytes of each id
    longest_tokens  bytes -> ids of the longest tokens, until none matches
    special         ids of control tokens, which have no text
    of_json         all text is JSON
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        longest_tokens: Callable[[bytes], list[int]],
        special: Sequence[int],
        of_json: bool,
    ) -> None:
        self._tokens, self._longest_tokens = tokens, longest_tokens
        silent = set(special)
        begins = np.zeros(-(-len(tokens) // 32) * 32, np.uint8)
        self._ends: dict[int, bytes] = {}
        self._shown: dict[int, bytes] = {}
        for id, token in enumerate(tokens):
            if not token or id in silent:
                continue
            begins[id] = token[:1] == b"/"
            if token.endswith(b"\\"):
                self._ends[id] = token[:-1]
            if of_json and (text := shown(token)) != token:
                self._shown[id] = text
        self._begins = np.packbits(begins, bitorder="little")
        within = {id: found for id, text in self._shown.items() if (found := self._longest(text))}
        single = [(id, found[0]) for id, found in within.items() if len(found) == 1]
        self._single = np.array(single, np.int64).reshape(-1, 2).T
        self._several = {id: found for id, found in within.items() if len(found) > 1}

    def begins(self, token: int) -> bool:
        """Return whether a token begins with a slash."""
        return bool(self._begins[token // 8] >> token % 8 & 1)

    def readings(self, token: int) -> Iterator[tuple[list[int], list[int] | None]]:
        """Yield the forms in which llguidance may accept a token, the likeliest first: (its ids,
        the ids of the text before its final backslash). The latter are None if it does not end so,
        or no tokens have that text.
        """
        end = self._ends.get(token)
        yield [token], None if end is None else self._longest(end)
        text = self._shown.get(token)
        if text is not None and (ids := self._longest(text)):
            yield ids, self._longest(text[:-1]) if text.endswith(b"\\") else None

    def _longest(self, text: bytes) -> list[int] | None:
        """Return the ids of a text in the longest tokens; None if no tokens spell it."""
        ids = self._longest_tokens(text)
        return ids if sum(len(self._tokens[id]) for id in ids) == len(text) else None

    def with_shown(self, mask: bytes, fits: Callable[[list[int]], bool]) -> bytes:
        r"""Return the mask, with the tokens added that contain `\/` and may follow in their form
        with `/`.

        fits  whether several ids may follow, one after the other
        """
        if not self._shown:
            return mask
        bits = np.frombuffer(mask, np.uint8).copy()
        ids, as_shown = self._single
        may = ids[bits[as_shown // 8] >> as_shown % 8 & 1 > 0]
        several = [id for id, found in self._several.items() if fits(found)]
        for id in (*may.tolist(), *several):
            bits[id // 8] |= 1 << id % 8
        return bits.tobytes()

    def of(self, mask: bytes) -> bytes:
        """Return the mask reduced to tokens that begin with a slash; same length."""
        bits = np.frombuffer(mask, np.uint8)
        found = np.zeros_like(bits)
        size = min(len(bits), len(self._begins))
        found[:size] = bits[:size] & self._begins[:size]
        return found.tobytes()
