"""Selects the matrices of a checkpoint that stay quantised, because the products of layers can read
their format.
"""

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
    """A checkpoint with quantised matrices that have scales by group."""

    def grouped(self, name: str) -> Grouped | None:
        """Return the matrix in groups, or None if it has another format. Raises KeyError for an
        unknown name.
        """
        ...


_STACKED = re.compile(
    r"model\.layers\.\d+\.(self_attn|mlp|mlp\.shared_expert)\."
    r"((q|k|v|o|gate|up|down|q_a|q_b)_proj|kv_a_proj_with_mqa)\.weight"
)
"""Names of matrices that are used as one product of all their rows. Experts' are not, and kv_b_proj
is transposed and cut.
"""


def grouped_of(checkpoint: Checkpoint, name: str) -> Grouped | None:
    """Return a matrix in few bits by group, from any file format; None for any other matrix."""
    grouped = checkpoint.grouped(name) if isinstance(checkpoint, InGroups) else None
    return grouped if grouped is not None else _of_packed(checkpoint, name)


def quantised_matrix(checkpoint: Checkpoint, name: str) -> Grouped | None:
    """Return the matrix of that name if products can read its format; None if they cannot, because
    of its name, its format or its size.
    """
    if _STACKED.fullmatch(name) is None:
        return None
    grouped = grouped_of(checkpoint, name)
    return grouped if grouped is not None and grouped.block else None


def has_quantised_matrices(checkpoint: Checkpoint) -> bool:
    """Return whether any matrix of the checkpoint can stay quantised."""
    return any(quantised_matrix(checkpoint, name) is not None for name in checkpoint.names())


def quantised_matrices(checkpoint: Checkpoint) -> dict[str, Grouped]:
    """Return all matrices that `quantised_matrix` returns, by name. Reads headers and orders of
    columns.
    """
    pairs = ((name, quantised_matrix(checkpoint, name)) for name in checkpoint.names())
    return {name: matrix for name, matrix in pairs if matrix is not None}


SCRATCH = 1 << 27
"""Bytes of a quantised weight that are dequantised at a time for many rows (triton_few_bits.py in
executors/torch). Not measured.
"""

PARTS = 1 << 25
"""Most bytes of scratch for programs that share tiles of few rows, there."""


def saved_bytes(matrices: Iterable[Grouped], item: int) -> int:
    """Return how many bytes fewer these matrices take than with `item` bytes per number."""
    return sum(item * math.prod(matrix.shape) - matrix.bytes for matrix in matrices)


def quantised_sentence(matrices: Mapping[str, Grouped]) -> str:
    """Return a sentence, for users, on which matrices stay as stored in the file."""
    if not matrices:
        return "all weights are widened: no matrix has a quantised format that kernels can use"
    counts = Counter(matrix.title() for matrix in matrices.values())
    parts = [f"{title} ({count} matrices)" for title, count in counts.most_common()]
    return f"weights {', '.join(parts)} as in the file, all others widened"


_BLOCKS: dict[str, tuple[GroupedKind, int]] = {"Q4_0": ("int4", 18), "Q8_0": ("int8", 34)}
_BLOCK = 32


def _of_packed(checkpoint: Checkpoint, name: str) -> Grouped | None:
    """Return a matrix in one of ggml's formats with a scale and integers (ggml-quants.h), else
    None. Rows that the file has in another order are copied on each read.
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
