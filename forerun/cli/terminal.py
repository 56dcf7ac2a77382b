"""The user's side of a chat: input by typing, pasting or a pipe, and output wrapped at words."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from forerun.cli.console import say

QUOTES = '"""'
"""Delimits a message of several lines."""


def messages(history: Path, interactive: bool) -> Iterator[str]:
    """Yield the user's messages until the input ends.

    In a terminal a paste is one message, Alt-Enter begins a new line, Ctrl-C clears a half-typed
    message, and the arrow keys recall earlier messages, also of earlier sessions, from the file
    `history`, which only its owner can read. Otherwise each line is a message. Lines between two
    QUOTES are one message in both cases.
    """
    read = _typed(history) if interactive else _piped
    while (line := read("> ")) is not None:
        if line.startswith(QUOTES):
            yield _until_quotes(line.removeprefix(QUOTES), read)
        else:
            yield line


def _until_quotes(first: str, read: Callable[[str], str | None]) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        line = read(". ")
        if line is None:
            return "\n".join(lines).strip("\n")
        lines.append(line)
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")


def _piped(_: str) -> str | None:
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _typed(history: Path) -> Callable[[str], str | None]:
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession(history=_history(history), key_bindings=keys())

    def read(prompt: str) -> str | None:
        try:
            line: str = session.prompt(prompt)
        except EOFError:
            return None
        return line

    return read


def keys() -> Any:
    """Return the key bindings: Ctrl-C clears a half-typed message and exits on an empty one;
    Alt-Enter inserts a new line.
    """
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    def clear(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=EOFError)

    def new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    bindings.add("c-c")(clear)
    bindings.add("escape", "enter")(new_line)
    return bindings


def _history(path: Path) -> Any:
    """Return the history stored in the file, or one in memory if the file cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError as error:
        say(f"earlier messages cannot be kept: {error}")
        return InMemoryHistory()
    return FileHistory(str(path))


class Wrapped:
    """Writes text that arrives in pieces, wrapped at words; code is not wrapped.

    width  characters per line; None = no wrapping
    """

    def __init__(self, output: IO[str] | None = None, width: int | None = None) -> None:
        self._output = output
        self._width = width
        self._line = self._word = ""
        self._code = False

    @classmethod
    def for_terminal(cls) -> "Wrapped":
        """Return an instance as wide as the terminal; without wrapping if stdout is not a
        terminal.
        """
        wide = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        return cls(width=wide)

    def write(self, text: str) -> None:
        """Write the next piece. A word that may be incomplete is held back until its end is
        known.
        """
        if self._width is None:
            self._put(text)
            return
        for letter in text:
            if letter.isspace():
                self._end_word()
                self._space(letter)
            else:
                self._word += letter

    def _end_word(self) -> None:
        assert self._width is not None
        if not self._word:
            return
        begins = not self._line.strip()
        if begins and self._word.startswith("```"):
            self._code = not self._code
        if not (self._code or begins) and len(self._line) + len(self._word) > self._width:
            self._put("\n")
            self._line = ""
        self._put(self._word)
        self._line, self._word = self._line + self._word, ""

    def _space(self, letter: str) -> None:
        self._put(letter)
        self._line = "" if letter == "\n" else self._line + letter

    def _put(self, text: str) -> None:
        output = self._output or sys.stdout
        output.write(text)
        output.flush()
