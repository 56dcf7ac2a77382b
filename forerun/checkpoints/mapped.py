"""Files of tensors, mapped into memory: the place of each tensor, and its elements as floats."""

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from forerun.checkpoints.ggml import floats_of
from forerun.checkpoints.grouped import Grouped
from forerun.errors import ModelError, reason_of
from forerun.types import Floats

_ROWS_AT_ONCE = 2048


class UnsupportedError(ModelError):
    """A file that may be sound, but has content that is not supported."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place of a tensor in its file.

    kind   ggml's name of the storage type; also for safetensors' F32, F16 and BF16
    shape  outermost first, as in NumPy
    start  byte in the file
    size   in bytes
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix as its file stores it, rows in canonical order.

    kind     ggml's name of the storage: "F32", "F16", "BF16", "Q8_0", "Q4_1", ...
    rows     uint8[rows, bytes of a row], read-only; a view of the file where possible
    columns  elements in a row
    """

    kind: str
    rows: NDArray[np.uint8]
    columns: int

    def floats(self) -> Floats:
        """Return float32[rows,columns]; a read-only view of the file if that is how it is
        stored.
        """
        if self.kind == "F32" and self.rows.flags.c_contiguous:
            return np.require(self.rows.view("<f4"), requirements="A")
        flat = np.empty((len(self.rows), self.columns), np.float32)
        for start in range(0, len(self.rows), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            flat[part] = floats_of(self.kind, np.ascontiguousarray(self.rows[part]))
        return flat


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A mapped file whose table of tensors has been checked against its size."""

    path: Path
    tensors: dict[str, TensorEntry]
    data: NDArray[np.uint8]

    def rows(self, name: str) -> NDArray[np.uint8]:
        """Return uint8[rows, bytes of a row] of a tensor, a read-only view; a vector is one row."""
        stored = self.tensors[name]
        flat = self.data[stored.start : stored.start + stored.size]
        count = math.prod(stored.shape[:-1])
        return flat.reshape(count, stored.size // count)

    def packed(self, name: str) -> Packed | None:
        """Return a matrix as stored; None for a vector. Raises KeyError for a name that is not in
        the file.
        """
        stored = self.tensors[name]
        if len(stored.shape) != 2:
            return None
        return Packed(stored.kind, self.rows(name), stored.shape[-1])

    def grouped(self, name: str) -> Grouped | None:
        """Return None: this format has no quantised matrices whose columns share scales."""
        return None

    def part(self, name: str, rows: slice, columns: slice) -> Floats:
        """Return float32[n,k], some rows and columns of a matrix, or of those of all experts below
        one another. Raises KeyError for a name that is not in the file.
        """
        stored = self.tensors[name]
        return Packed(stored.kind, self.rows(name)[rows], stored.shape[-1]).floats()[:, columns]

    def floats(self, name: str) -> Floats:
        """Return the tensor of that name in the file as float32, of its stored shape; a read-only
        view if that is how it is stored. Raises KeyError for an unknown name.
        """
        stored = self.tensors[name]
        packed = Packed(stored.kind, self.rows(name), stored.shape[-1])
        return packed.floats().reshape(stored.shape)


def mapped(path: Path) -> NDArray[np.uint8]:
    """Map the file's bytes uint8[n], read-only; pages are loaded when accessed. Raises ModelError
    if it cannot be read.
    """
    try:
        if path.stat().st_size == 0:
            raise ModelError(f"{path} is empty: fetch it again")
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {reason_of(error)}"
        if isinstance(error, FileNotFoundError) and path.is_symlink():
            problem = "is a link to a file that is gone: fetch it again"
        raise ModelError(f"{path} {problem}") from error
    check_fetched(path, mapping[: len(_POINTER)])
    _mappings.add(mapping)
    return np.frombuffer(mapping, np.uint8)


_POINTER = b"version https://git-lfs"


def check_fetched(path: Path, head: bytes) -> None:
    """Raise ModelError if a file beginning with `head` is a pointer: Git without LFS leaves
    a few lines of text in place of every large file.
    """
    if head.startswith(_POINTER):
        raise ModelError(
            f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder"
        )


_mappings = WeakSet[mmap.mmap]()


def release_files() -> None:
    """Release the memory of all mapped files to the system, as `release` does, after a model is
    loaded.
    """
    for mapping in [*_mappings] if hasattr(mmap, "MADV_DONTNEED") else ():
        mapping.madvise(mmap.MADV_DONTNEED)


def release(rows: NDArray[np.uint8]) -> None:
    """Release the memory of rows of a mapped file to the system; they are loaded again when
    accessed. Does nothing for other rows, and on systems without such a call.
    """
    owner: object = rows
    while isinstance(owner, np.ndarray):
        owner = owner.base
    owner = owner.obj if isinstance(owner, memoryview) else owner
    if not isinstance(owner, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = rows.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    page = start // mmap.PAGESIZE * mmap.PAGESIZE
    owner.madvise(mmap.MADV_DONTNEED, page, start + rows.nbytes - page)


def check_disjoint(tensors: dict[str, TensorEntry]) -> None:
    """Raise ModelError if two tensors share bytes."""
    end, before = 0, ""
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].start):
        if stored.start < end:
            raise ModelError(f"tensors {before!r} and {name!r} overlap")
        end, before = stored.start + stored.size, name
