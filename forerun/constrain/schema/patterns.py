"""Translates regular expressions with JavaScript's meaning for Rust's regex engine, which reads
some of them otherwise.
"""

import re
from collections.abc import Iterator, Sequence
from math import inf

from forerun.errors import RequestError

MAX_NESTING = 100
"""Deepest nesting of brackets."""

MAX_FORCED = 10_000
"""Most characters of the shortest text that a pattern matches."""


MAX_STEPS = 1_000_000
"""Most steps of a backtracking engine, which take some milliseconds."""

ASCII_MEMBERS = {
    r"\d": "0-9",
    r"\w": "0-9A-Za-z_",
    r"\D": r"\x00-\/:-\U0010FFFF",
    r"\W": r"\x00-\/:-@\[-\^`\{-\U0010FFFF",
}
"""Escapes of sets -> their members in a class: as in JavaScript, digits and letters of ASCII
only.
"""

ASCII_CLASSES = {name: f"[{inside}]" for name, inside in ASCII_MEMBERS.items()} | {
    name.upper(): f"[^{ASCII_MEMBERS[name]}]" for name in (r"\d", r"\w")
}
"""Escapes of sets -> their meaning outside of a class."""

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")

_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]", re.DOTALL)
_REPETITION = re.compile(r"\{\d*+(?:,\d*+)?\}")
_SEVERAL = re.compile(r"\\[dDwWsSpP]|\[:")
"""Begins a member of a class that matches several characters: a dash next to it is a
character.
"""
_ATOM = r"\\[pPux]\{[^{}]*\}|\\.|\[:\w+:\]|."


def portable(pattern: str, field: str) -> str:
    """Translate a pattern for Rust's regex engine, with JavaScript's meaning: `[`, `&&`, `--` and
    `~~` are ordinary characters in a class; digits and letters are ASCII's. Raises RequestError,
    naming `field` and pointing at the character, if a bracket has no partner, groups nest deeper
    than MAX_NESTING, or every matching text is longer than MAX_FORCED: such a text would be forced
    anew on every step.
    """
    out: list[str] = []
    lengths = _Lengths()
    stray: int | None = None
    for index, unit in _units(pattern, field):
        if unit == ")" and not lengths.opened:
            raise regex_error(pattern, index, "')' closes nothing", field)
        lengths.add(unit, index)
        if len(lengths.opened) > MAX_NESTING:
            raise regex_error(
                pattern, index, f"more than {MAX_NESTING} groups inside another", field
            )
        if lengths.shortest > MAX_FORCED:
            raise regex_error(
                pattern, index, f"every text has more than {MAX_FORCED} characters", field
            )
        if unit in ("}", "]") and stray is None and lengths.opened:
            stray = index
        out.append(portable_class(unit) if unit[0] == "[" else ASCII_CLASSES.get(unit, unit))
    if lengths.opened and stray is not None and stray > lengths.opened[-1]:
        raise regex_error(pattern, stray, f"{pattern[stray]!r} where ')' was expected", field)
    if lengths.opened:
        raise regex_error(pattern, lengths.opened[-1], "'(' is never closed", field)
    return "".join(out)


def assertion(pattern: str, field: str) -> RequestError | None:
    """Return an error for the first part of a portable pattern that matches a position instead of a
    character: a word boundary, or the beginning or end of the text inside it. None if there is
    none.
    """
    for index, unit in _units(pattern, field):
        inside = unit in ("^", "$") and 0 < index < len(pattern) - 1
        if unit in (r"\b", r"\B", r"\<", r"\>") or inside:
            fault = f"'{unit}' stands for a place between characters, which is not supported"
            return regex_error(pattern, index, fault, field)
    return None


def _units(pattern: str, field: str) -> Iterator[tuple[int, str]]:
    """Yield the units of a pattern with their indices. Raises RequestError as `unit_end`."""
    index = 0
    while index < len(pattern):
        end = unit_end(pattern, index, field)
        yield index, pattern[index:end]
        index = end


def unit_end(pattern: str, start: int, field: str) -> int:
    """Return the index after the escape, class, repetition or single character that begins at
    `start`. Raises RequestError, naming `field`, for a class without end or an incomplete escape.
    """
    if pattern[start] == "\\":
        if start + 1 == len(pattern):
            raise regex_error(pattern, start, "'\\' escapes nothing", field)
        return start + 2
    if pattern[start] == "[":
        match = _CLASS.match(pattern, start)
        if match is None:
            raise regex_error(pattern, start, "'[' is never closed", field)
        return match.end()
    match = _REPETITION.match(pattern, start)
    return match.end() if match else start + 1


def portable_class(text: str) -> str:
    """Translate a character class `text` ("[...]") so that no character is a set operation for
    Rust's engine.
    """
    head = "[^" if text.startswith("[^") else "["
    atoms = re.findall(_ATOM, text[len(head) : -1], re.DOTALL)
    out, index = head, 0
    while index < len(atoms):
        out += _escaped(atoms[index])
        if atoms[index + 1 : index + 2] == ["-"] and index + 2 < len(atoms):
            several = any(_SEVERAL.match(atoms[place]) for place in (index, index + 2))
            out += ("\\-" if several else "-") + _escaped(atoms[index + 2])
            index += 2
        index += 1
    return out + "]"


def literal(text: str) -> str:
    """Return a pattern that matches only `text`."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def matching(pattern: str, names: Sequence[str], max_steps: int = MAX_STEPS) -> list[bool] | None:
    """Return for each name whether a pattern matches anywhere in it. None if that may take more
    than about `max_steps` steps of Python's engine, which no other thread can interrupt, or if the
    pattern is invalid in Python.
    """
    try:
        tries = _Tries()
        for _, unit in _units(pattern, "pattern"):
            tries.add(unit)
        if sum(len(name) + 1 for name in names) * len(pattern) > max_steps:
            return None
        if sum((len(name) + 1) * tries.for_length(len(name)) for name in names) > max_steps:
            return None
        return [re.search(pattern, name) is not None for name in names]
    except (re.error, RequestError, OverflowError):
        return None


class _Tries:
    """Counts how often a backtracking engine may try: each repetition multiplies the number of
    choices.
    """

    def __init__(self) -> None:
        self._unbounded = self._doubled = 0
        self._endless = False
        self._opened: list[int] = []
        self._choices = 0
        self._inner = 0

    def for_length(self, length: int) -> float:
        """Return the most tries at one position of a text of `length` characters."""
        if self._endless or self._unbounded > 8 or self._doubled > 30:
            return inf
        return (length + 1.0) ** self._unbounded * 2.0**self._doubled

    def add(self, unit: str) -> None:
        """Read the next unit of the pattern."""
        repeats = unit in ("*", "+", "?") or (unit[0] == "{" and len(unit) > 1)
        if unit == "(":
            self._opened.append(self._choices)
        elif repeats:
            self._endless |= self._inner > 0  # Choices within a group that is repeated.
            self._doubled += unit == "?"
            self._unbounded += unit != "?"
        before = self._opened.pop() if unit == ")" and self._opened else self._choices
        self._inner = self._choices - before
        self._choices += repeats or unit == "|"


class _Lengths:
    """Computes the length of the shortest text that matches a pattern, while it is read.

    opened   indices where the open groups begin

    There is a frame per group: length of the branch so far, of the shortest branch before it, and
    of the last item (which a repetition multiplies).
    """

    def __init__(self) -> None:
        self.opened: list[int] = []
        self._frames: list[list[float]] = [[0, inf, 0]]

    @property
    def shortest(self) -> float:
        """Length of the shortest text of the branch being read, without outer groups."""
        return self._frames[-1][0]

    def add(self, unit: str, place: int) -> None:
        """Read the next unit of the pattern."""
        branch, best, last = frame = self._frames[-1]
        if unit == "(":
            self.opened.append(place)
            self._frames.append([0, inf, 0])
        elif unit == ")":
            self.opened.pop()
            self._frames.pop()
            self._frames[-1][2] = min(branch, best)
            self._frames[-1][0] += min(branch, best)
        elif unit == "|":
            frame[:] = [0, min(branch, best), 0]
        elif unit in ("*", "?") or (unit[0] == "{" and len(unit) > 1):
            times = 0 if unit in ("*", "?") else _times(unit)
            frame[0] += last * (times - 1)
            frame[2] = last * times
        elif unit != "+":
            frame[0], frame[2] = branch + 1, 1


def _times(bounds: str) -> int:
    """Return the smaller of a repetition's `bounds`, limited to MAX_FORCED + 1: it may have many
    digits.
    """
    digits = re.split("[,}]", bounds[1:])[0].lstrip("0")
    return min(int(digits[:9] or 0), MAX_FORCED + 1)


def regex_error(text: str, index: int, message: str, field: str) -> RequestError:
    """Return an error with an excerpt of the pattern around `index` and a caret below it."""
    left = max(0, index - 30)
    shown = text[left : index + 10].replace("\n", " ")
    return RequestError(
        f"{field} is not a valid regular expression: {message} at character {index}\n"
        f"    {shown}\n    {' ' * (index - left)}^",
        field,
    )


def _escaped(atom: str) -> str:
    """Return a regex for exactly this character; a longer atom is a regex already and is returned
    unchanged.
    """
    return literal(atom) if len(atom) == 1 else ASCII_MEMBERS.get(atom, atom)
