r"""`\/` in JSON strings, which llguidance does not have (docs/inside/llguidance-strings.md).

It means `/`, so what may follow it is what may follow `/`: where a token ends with a backslash that
begins an escape, a copy of the matcher stays before that backslash, and takes what begins with a
slash. Where all is JSON, a token with `\/` within is taken as the tokens of the same text with `/`,
where it does not fit as it is; beside other text, where that would take `<\/` for `</`, it is not.
"""

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

_ESCAPE = re.compile(rb"\\(.?)", re.DOTALL)


def shown(token: bytes) -> bytes:
    r"""Return a token of JSON with `/` for `\/`, as llguidance takes it; the token itself if it has
    none.

    Where an escape began before the token, its pairs of backslash and letter may be others; then
    the text that is shown is not taken, never one that is no JSON.
    """
    if b"\\/" not in token:
        return token
    return _ESCAPE.sub(lambda found: b"/" if found[1] == b"/" else found[0], token)


class Slashes:
    r"""Which tokens of a vocabulary begin with a slash, end with a backslash or have `\/` within.

    tokens          bytes of each id
    longest_tokens  returns the ids of a text in the longest tokens, as far as there are any
    special         ids of control tokens, which stand for no text
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
        """Yield as what llguidance may take a token, the likeliest first: ids, and those of the
        text before its final backslash. The latter are None if it does not end so, or no tokens
        have that text.
        """
        end = self._ends.get(token)
        yield [token], None if end is None else self._longest(end)
        text = self._shown.get(token)
        if text is not None and (ids := self._longest(text)):
            yield ids, self._longest(text[:-1]) if text.endswith(b"\\") else None

    def _longest(self, text: bytes) -> list[int] | None:
        """Return the ids of a text in the longest tokens; None if no tokens have it."""
        ids = self._longest_tokens(text)
        return ids if sum(len(self._tokens[id]) for id in ids) == len(text) else None

    def with_shown(self, mask: bytes, fits: Callable[[list[int]], bool]) -> bytes:
        r"""Return a mask and the tokens with `\/` that may follow, too, as they are shown.

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
        """Return those of the tokens in a mask that begin with a slash, as a mask of that
        length.
        """
        bits = np.frombuffer(mask, np.uint8)
        found = np.zeros_like(bits)
        size = min(len(bits), len(self._begins))
        found[:size] = bits[:size] & self._begins[:size]
        return found.tobytes()
