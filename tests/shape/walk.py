"""Counts what one token's walk opens: the package's files in which something runs between the
plan of a step and the delta that reports its token. A kernel of a GPU, and what its reference
(tests/references) calls instead of it, is none of them.

    with Walk() as walk:
        engine.step_once()
    walk.files, walk.statements, walk.listing()
"""

import ast
import sys
from collections import Counter
from types import FrameType
from typing import Any

from tests.shape.tree import PACKAGE, ROOT, parsed

REFERENCES = f"{ROOT / 'tests' / 'references'}/"


class Walk:
    """While it is entered, every call into the package on this thread is counted by file."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._references = 0  # How many of their frames are running.

    def __enter__(self) -> "Walk":
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, arg: Any) -> None:
        name = frame.f_code.co_filename
        if name.startswith(REFERENCES):
            self._references += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and name.startswith(f"{PACKAGE}/") and not self._references:
            self.calls[name.removeprefix(f"{PACKAGE}/")] += 1

    @property
    def files(self) -> int:
        """How many files were opened."""
        return len(self.calls)

    @property
    def statements(self) -> int:
        """Statements of these files, all of them: a reader of a file sees it whole."""
        return sum(statements(name) for name in self.calls)

    def listing(self) -> str:
        """List the files with their statements, one a line, and the sums."""
        rows = [f"{statements(name):5d}  {name}" for name in sorted(self.calls)]
        return "\n".join([*rows, f"{self.statements:5d}  in {self.files} files"])


def statements(name: str) -> int:
    """Count the statements of a file of the package, imports included, docstrings and comments left
    out: prose and line breaks are free.
    """
    nodes = [node for node in ast.walk(parsed(PACKAGE / name)) if isinstance(node, ast.stmt)]
    return sum(not _is_text(node) for node in nodes)


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
