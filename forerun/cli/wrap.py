"""Text wrapped at words for a terminal."""

import shutil
import sys
import textwrap
from typing import TextIO


def wrapped(text: str, indent: int = 0, stream: TextIO | None = None) -> str:
    """Return `text` as it is to be printed on `stream` (default: standard error).

    On a terminal each line is wrapped at spaces to the terminal's width, continuation lines
    indented by `indent` spaces; longer words are not broken. Otherwise the text is unchanged,
    because programs that read a log expect whole lines.
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
