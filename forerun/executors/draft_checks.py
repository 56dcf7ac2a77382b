"""Checks the inputs of draft models against their bounds, since a device would not report which
number is wrong.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from forerun.errors import EngineError
from forerun.interface.draft_model import DraftBlock, DraftExtension, DraftLevel
from forerun.interface.executor import ExecutorLimits
from forerun.interface.features import Features
from forerun.types import AnyArray, Ints

F = TypeVar("F", bound=Features)

Bounds = dict[str, tuple[AnyArray, int, int]]
"""By name: the values, the lower bound, and the upper bound plus one."""


def check_extension(extension: DraftExtension, limits: ExecutorLimits) -> None:
    """Raise EngineError if a slot, token, position or count of an extension is out of range."""
    count = np.array([len(extension.tokens)])
    _check({
        **_of_rows(extension, limits),
        "tokens": (extension.tokens, 0, limits.vocab),
        "next_tokens": (extension.next_tokens, 0, limits.vocab),
        "scored": (extension.scored, 0, int(count[0])),
        "the number of tokens": (count, 1, limits.max_nodes + 1),
    })  # fmt: skip


def check_pages(extension: DraftExtension, limits: ExecutorLimits) -> None:
    """Raise EngineError if a position of an extension has no page."""
    size, lengths = limits.page_size, np.diff(extension.start)
    for pages, begin, length in zip(extension.pages, extension.kv_len, lengths, strict=True):
        needed = -(-int(begin + length) // size)
        if needed > len(pages) or np.any(pages[:needed] < 0):
            raise EngineError("a draft step was refused: a position has no page")


def check_level(level: DraftLevel, limits: ExecutorLimits) -> None:
    """Raise EngineError if a slot, token, parent or count of a level is out of range."""
    count = len(level.tokens)
    _check({
        **_of_rows(level, limits),
        "tokens": (level.tokens, 0, limits.vocab),
        "parents": (level.parents, -1, level.first),
        "first": (np.array([level.first]), 0, limits.max_nodes - count + 1),
        "the number of tokens": (np.array([count]), 0, limits.max_nodes + 1),
    })  # fmt: skip


def own_features(features: Features | None, rows: int, reader: str, kind: type[F]) -> F:
    """Return the features of an extension of `rows` tokens for the draft model `reader`, which
    reads features of class `kind`. Raises EngineError if they are missing, have another number of
    rows, or come from another executor.
    """
    if features is None:
        raise EngineError(f"{reader} was extended without the target's features")
    if len(features) != rows:
        raise EngineError("an extension whose features are not one row per token")
    if not isinstance(features, kind):
        raise EngineError(f"features of {type(features).__name__} come from another executor")
    return features


def check_block(block: DraftBlock, size: int, limits: ExecutorLimits) -> None:
    """Raise EngineError if a slot, root or position of a block is out of range, or its depth
    exceeds `size` draft tokens.
    """
    depth = np.array([block.depth])
    _check({
        **_of_rows(block, limits),
        "roots": (block.roots, 0, limits.vocab),
        "depth": (depth, 1, size + 1),
    })  # fmt: skip


def check_borrows(kv_len: Ints) -> None:
    """Raise EngineError if a row of an assistant's pass has no cached token. kv_len: int32[R]."""
    if not (kv_len > 0).all():
        raise EngineError("a draft step was refused: an assistant needs a token in the cache")


def _of_rows(work: DraftExtension | DraftLevel | DraftBlock, limits: ExecutorLimits) -> Bounds:
    known = work.pages.shape[1] * limits.page_size + 1
    return {"slots": (work.slots, 0, limits.slots), "kv_len": (work.kv_len, 0, known)}


def _check(bounds: Bounds) -> None:
    for name, (values, low, high) in bounds.items():
        if np.any((values < low) | (values >= high)):
            raise EngineError(f"a draft step was refused: {name} is outside {low}..{high - 1}")


@dataclass(frozen=True, slots=True)
class Roots:
    """The rows of an extension for a model that runs only their roots.

    last    int[R] index of each row's last token, whose features its root reads
    start   int32[R+1] row r has node r
    kv_len  int32[R] positions before the root
    scored  int32[s] rows to return candidates for
    """

    last: AnyArray
    start: Ints
    kv_len: Ints
    scored: Ints


def roots_of(extension: DraftExtension) -> Roots:
    """Return the roots of an extension. Raises EngineError if it requests candidates after other
    tokens.
    """
    last = extension.start[1:] - 1
    scored = np.searchsorted(last, extension.scored).astype(np.int32)
    if (scored >= len(last)).any() or (last[scored] != extension.scored).any():
        raise EngineError(
            "a draft step was refused: candidates behind a token that is no row's last"
        )
    counts = np.diff(extension.start).astype(np.int32)
    start = np.arange(len(last) + 1, dtype=np.int32)
    return Roots(last, start, extension.kv_len + counts, scored)
