"""Sentences that are broken between words, where a terminal would break them within one."""

import shutil
import sys
import textwrap
from typing import TextIO


def wrapped(text: str, indent: int = 0, stream: TextIO | None = None) -> str:
    """Return `text` as it is to be printed on `stream` (default: standard error).

    On a terminal each line of it is broken at spaces so that none is longer than the terminal is
    wide, those after the first behind `indent` blanks; a word that is longer stays whole. Anywhere
    else it is unchanged: what reads a log wants whole lines.
    """
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        return text
    how = textwrap.TextWrapper(
        width=shutil.get_terminal_size().columns,
        subsequent_indent=" " * indent,
        replace_whitespace=False,
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(how.fill(line) for line in text.split("\n"))
