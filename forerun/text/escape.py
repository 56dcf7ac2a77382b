"""Separates users' texts from the control strings that a chat template writes.

A chat is rendered to one string before it is encoded, so a user who types `<|im_end|>` could end
the turn. Before rendering, a marker (a private-use character that no input contains) is inserted
into every control string in user text, so that it no longer is one. After rendering, the text is
cut at the remaining control strings, which only the template can have written, and the markers are
removed. A marker inside a word survives trimming, splitting and JSON.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

from forerun.errors import RequestError
from forerun.text.tokenizer import matcher

_MAX_DEPTH = 64
_PRIVATE = re.compile("[\ue000-\uf8ff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class ControlStrings:
    """Control strings of at least two characters each. Created once per template: Gemma has 6,249,
    whose pattern takes 20 ms to compile (one core of an EPYC).

    whole    pattern that matches any of them
    longest  characters of the longest
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._forward = sorted(set(strings))
        self._backward = sorted(string[::-1] for string in self._forward)
        self.whole = matcher(self._forward)
        self.longest = max(map(len, self._forward), default=0)

    def begin_with(self, text: str) -> bool:
        """Return whether one of them begins with `text` and is longer."""
        return _begin_with(self._forward, text)

    def end_with(self, text: str) -> bool:
        """Return whether one of them ends with `text` and is longer."""
        return _begin_with(self._backward, text[::-1])


def _begin_with(strings: list[str], text: str) -> bool:
    """Return whether one of these strings, in ascending order, begins with `text` and is longer."""
    place = bisect_right(strings, text)
    return place < len(strings) and strings[place].startswith(text)


class Escape:
    """Breaks control strings in user text by a marker, including parts that adjacent text could
    complete.
    """

    def __init__(self, controls: ControlStrings, marker: str) -> None:
        self._controls, self._marker = controls, marker

    def text(self, text: str) -> str:
        """Return user text with markers in its control strings, and at an end that adjacent text
        could complete to one. A word of letters at an end, such as `user`, is not changed.
        """
        broken = self.key(text)
        controls = self._controls
        sizes = range(1, min(controls.longest, len(text)) + 1)
        if any(_is_sign(text[-size:]) and controls.begin_with(text[-size:]) for size in sizes):
            broken += self._marker
        if any(_is_sign(text[:size]) and controls.end_with(text[:size]) for size in sizes):
            broken = self._marker + broken
        return broken

    def key(self, text: str) -> str:
        """Return a name that templates may look up, with markers in complete control strings
        only.
        """
        marker = self._marker
        return self._controls.whole.sub(lambda match: match[0][0] + marker + match[0][1:], text)

    def name(self, text: str) -> str:
        """Return a role that no template has, with a marker after it, so that adjacent text
        cannot make it part of a control string.
        """
        return self.text(text) + self._marker

    def value(self, value: Any) -> Any:
        """Return a copy of plain JSON data with `text` applied to every string and `key` to every
        key.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.key(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        return value


def _is_sign(text: str) -> bool:
    """Return whether a text has other characters than letters and digits; templates compare
    words.
    """
    return not text.isalnum()


def free_marker(data: Iterable[Any]) -> str:
    """Return a private-use character that no string of the data contains. Raises RequestError if
    all are used.
    """
    used: set[str] = set()
    for text in _strings(data):
        used.update(_PRIVATE.findall(text))
    free = next((chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used), None)
    if free is None:
        raise RequestError("the messages use every private-use character of Unicode", "messages")
    return free


def _strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        yield from data
        yield from _strings(data.values())
    elif isinstance(data, Iterable):
        for item in data:
            yield from _strings(item)


def check_json(value: Any, path: str, depth: int = 0) -> None:
    """Raise RequestError, naming the path, if `value` is not plain JSON data: other types, keys
    that are no strings, lone surrogates, or more than 64 levels.

    depth  levels above `value`
    """
    if depth > _MAX_DEPTH:
        raise RequestError(f"{path} is nested deeper than {_MAX_DEPTH} levels", path)
    if isinstance(value, str):
        bad = _SURROGATE.search(value)
        if bad:
            raise RequestError(
                f"{path} has a lone surrogate (U+{ord(bad[0]):04X}) at character {bad.start()}",
                path,
            )
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RequestError(f"{path} has a key that is not a string: {key!r}", path)
            check_json(key, f"{path}: a key", depth)
            check_json(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_json(item, f"{path}[{index}]", depth + 1)
    elif value is not None and not isinstance(value, bool | int | float):
        raise RequestError(f"{path} is not JSON data: {type(value).__name__}", path)
