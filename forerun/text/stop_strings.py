"""Detects stop strings in a text that comes character by character."""

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that is complete first (Aho and Corasick, CACM 18(6), 1975), in O(1)
    per character. Of several that end at one character the longest counts.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._found: list[str | None] = [None]
        self._depth = [0]
        self._state = 0
        for string in filter(None, strings):
            self._insert(string)
        self._link()

    @property
    def pending(self) -> int:
        """Number of characters at the text's end that may begin a stop string."""
        return self._depth[self._state]

    def feed(self, character: str) -> str | None:
        """Return the stop string that `character` completes, or None."""
        state = self._state
        while state and character not in self._next[state]:
            state = self._fallback[state]
        self._state = self._next[state].get(character, 0)
        return self._found[self._state]

    def _insert(self, string: str) -> None:
        state = 0
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._found.append(None)
                self._depth.append(self._depth[state] + 1)
            state = self._next[state][character]
        self._found[state] = string

    def _link(self) -> None:
        """Link each state to its longest proper suffix that is also a state."""
        queue = list(self._next[0].values())
        for state in queue:
            for character, child in self._next[state].items():
                queue.append(child)
                back = self._fallback[state]
                while back and character not in self._next[back]:
                    back = self._fallback[back]
                self._fallback[child] = self._next[back].get(character, 0)
                self._found[child] = self._found[child] or self._found[self._fallback[child]]
