"""Which matrices of a checkpoint stay in few bits, where products of layers read them so."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.grouped import Grouped, GroupedKind, GroupedRows
from forerun.errors import ModelError
from forerun.types import AnyArray


@runtime_checkable
class InGroups(Protocol):
    """A checkpoint some of whose matrices are quantised with scales by group."""

    def grouped(self, name: str) -> Grouped | None:
        """Return the matrix in groups, or None where it is stored in another way. Raises KeyError
        for an unknown name.
        """
        ...


_KEPT = re.compile(
    r"model\.layers\.\d+\.(self_attn|mlp|mlp\.shared_expert)\."
    r"((q|k|v|o|gate|up|down|q_a|q_b)_proj|kv_a_proj_with_mqa)\.weight"
)
"""Matrices that are a product each of all rows. Experts' are not, kv_b_proj is turned and cut."""


def grouped_of(checkpoint: Checkpoint, name: str) -> Grouped | None:
    """Return a matrix in few bits by group, whichever format stores it so; None if none does."""
    grouped = checkpoint.grouped(name) if isinstance(checkpoint, InGroups) else None
    return grouped if grouped is not None else _of_packed(checkpoint, name)


def kept_matrix(checkpoint: Checkpoint, name: str) -> Grouped | None:
    """Return the matrix of that name that a product may keep in the file's few bits; None if it is
    to be widened, for its name, its storage or its size.
    """
    if _KEPT.fullmatch(name) is None:
        return None
    grouped = grouped_of(checkpoint, name)
    return grouped if grouped is not None and grouped.block else None


def keeps(checkpoint: Checkpoint) -> bool:
    """Return whether a product may keep any matrix of the checkpoint in few bits."""
    return any(kept_matrix(checkpoint, name) is not None for name in checkpoint.names())


def kept_matrices(checkpoint: Checkpoint) -> dict[str, Grouped]:
    """Collect by name all matrices that `kept_matrix` returns. Reads headers and orders of
    columns.
    """
    pairs = ((name, kept_matrix(checkpoint, name)) for name in checkpoint.names())
    return {name: matrix for name, matrix in pairs if matrix is not None}


SCRATCH = 1 << 27
"""Bytes of a kept weight that are widened at a time for many rows (triton_few_bits.py in
executors/torch). Not measured."""

PARTS = 1 << 25
"""Bytes that programs which share tiles of few rows find, at most, there."""


def saved_bytes(kept: Iterable[Grouped], item: int) -> int:
    """Return how many bytes fewer these matrices take than with `item` bytes a number."""
    return sum(item * math.prod(matrix.shape) - matrix.bytes for matrix in kept)


def kept_sentence(kept: Mapping[str, Grouped]) -> str:
    """Describe, for users, which matrices stay as stored in the file."""
    if not kept:
        return "all weights are widened: no matrix has a quantised format that kernels can use"
    counts = Counter(matrix.title() for matrix in kept.values())
    parts = [f"{title} ({count} matrices)" for title, count in counts.most_common()]
    return f"weights {', '.join(parts)} as in the file, all others widened"


_BLOCKS: dict[str, tuple[GroupedKind, int]] = {"Q4_0": ("int4", 18), "Q8_0": ("int8", 34)}
_BLOCK = 32


def _of_packed(checkpoint: Checkpoint, name: str) -> Grouped | None:
    """Return a matrix in one of ggml's formats of a scale and integers (ggml-quants.h), else None.
    Rows that the file has in another order are copied on each read.
    """
    packed = checkpoint.packed(name)
    if packed is None or packed.kind not in _BLOCKS:
        return None
    kind, size = _BLOCKS[packed.kind]

    def read(rows: slice) -> GroupedRows:
        packed = checkpoint.packed(name)
        assert packed is not None
        blocks = np.ascontiguousarray(packed.rows[rows]).reshape(-1, packed.columns // _BLOCK, size)
        scales = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0].astype(np.float32)
        numbers: AnyArray = blocks[..., 2:]
        if kind == "int4":
            numbers = np.concatenate([numbers & 15, numbers >> 4], -1)
        else:
            numbers = np.ascontiguousarray(numbers).view(np.int8)
        return GroupedRows(numbers.reshape(len(blocks), -1), scales, None)

    if packed.columns % _BLOCK:
        raise ModelError(f"{name}: {packed.columns} columns are not whole blocks of {packed.kind}")
    shape = len(packed.rows), packed.columns
    return Grouped(kind, shape, _BLOCK, False, "F16", None, read)
