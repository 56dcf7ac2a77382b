"""Ends a text by its lines, for editors that fill in code."""

from dataclasses import dataclass


@dataclass(slots=True)
class LineLimits:
    """Ends one text by its lines; an implementation of `Cut`.

    indent   a line after the first that is indented by less ends the text, and is not part of it
    seconds  the text ends after this time, once it has a line break; 0 = never
    """

    indent: int
    seconds: float
    _blank: int | None = None
    """White space so far of a line that has no other character yet; None = it has one."""
    _lines: int = 0

    def __call__(self, piece: str, seconds: float) -> str | None:
        """Return the part of a piece to keep if the text ends within it; None = it continues."""
        for index, character in enumerate(piece):
            if character == "\n":
                self._blank, self._lines = 0, self._lines + 1
            elif self._blank is not None and character in " \t":
                self._blank += 1
            elif self._blank is not None:
                if self._blank < self.indent:
                    return piece[:index]
                self._blank = None
        if self.seconds and self._lines and seconds > self.seconds:
            return piece
        return None
