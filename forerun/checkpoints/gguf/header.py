"""A strict, bounded reader of GGUF headers (the format: ggml's docs/gguf.md, versions 2 and 3).

A file is untrusted: every count, length, shape and offset is checked against the rest of the file
before memory of that size is allocated, so a damaged or hostile header costs neither time nor
memory. Tensor data is mapped, never read here.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from forerun.checkpoints.ggml import NAMES, STORAGE, UNREADABLE
from forerun.checkpoints.mapped import (
    TensorEntry,
    TensorFile,
    UnsupportedError,
    check_disjoint,
    mapped,
)
from forerun.errors import ModelError

DRAFT_IDS = "d2t"
"""The only tensor that may have integers: a draft's offsets to target ids."""

Value = bool | int | float | str | Sequence[str] | list[int] | list[float] | list[bool]
"""A metadata value."""

_SCALARS: dict[int, str] = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_LENGTH = struct.Struct("<Q")

# Several times what the largest published models need, and few enough to read in a second.
_MOST_KEYS = 4096
_MOST_TENSORS = 16384
_MOST_ITEMS = 3_000_000
"""Most items of all arrays together: a Gemma 4 has 1,301,338, for 262,144 tokens and 514,906
merges.
"""
_LONG = 4096
"""Arrays of more strings than this are read as StoredStrings."""
_MOST_TEXT = 64 << 20
_MOST_NAME = 256
_MOST_ALIGNMENT = 1 << 16
_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufFile(TensorFile):
    """A checked header over a mapped file. end: the byte after the header."""

    metadata: dict[str, Value]
    end: int


def declares(path: Path, architecture: str) -> bool:
    """Return whether a path is that of a GGUF file of an architecture; False if it cannot be
    read.
    """
    try:
        return is_gguf(path) and declared(path, "general.architecture") == architecture
    except ModelError:
        return False


def read_header(path: Path) -> GgufFile:
    """Map the file at `path` and check its header. Raises ModelError for any fault."""
    return parsed_header(path, mapped(path))


def parsed_header(path: Path, data: NDArray[np.uint8]) -> GgufFile:
    """Check the header of a mapped file `data` uint8[n]. Raises ModelError as `read_header`."""
    cursor = _Cursor(path, data)
    try:
        if cursor.take(4) != b"GGUF":
            raise UnsupportedError("it is not a GGUF file (it does not begin with 'GGUF')")
        _check_version(cursor.scalar(4))
        n_tensors = cursor.count("tensors", 8, _MOST_TENSORS)
        n_keys = cursor.count("metadata keys", 8, _MOST_KEYS)
        metadata = _read_metadata(cursor, n_keys)
        tensors = _read_tensors(cursor, n_tensors, _alignment(metadata))
        check_disjoint(tensors)
    except UnsupportedError as error:
        raise ModelError(f"{path}: {error}") from error
    except (struct.error, UnicodeDecodeError, ModelError) as error:
        raise ModelError(f"{path}: damaged GGUF header at byte {cursor.at}: {error}") from error
    return GgufFile(path, tensors, data, metadata, cursor.at)


def is_gguf(path: Path) -> bool:
    """Return whether a path is a file with the name or the first bytes of a GGUF file."""
    if path.suffix == ".gguf" or not path.is_file():
        return path.is_file()
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def declared(path: Path, key: str) -> Value | None:
    """Return one metadata value, without reading further; None if there is none of that name.
    Raises ModelError for a header that is damaged before it.
    """
    cursor = _Cursor(path, mapped(path))
    try:
        if cursor.take(4) != b"GGUF":
            raise ModelError("it is not a GGUF file")
        _check_version(cursor.scalar(4))
        cursor.count("tensors", 8, _MOST_TENSORS)
        for _ in range(cursor.count("metadata keys", 8, _MOST_KEYS)):
            name = cursor.string(_MOST_NAME)
            value = cursor.value(int(cursor.scalar(4)))
            if name == key:
                return value
    except (struct.error, UnicodeDecodeError, UnsupportedError, ModelError) as error:
        raise ModelError(f"{path}: {error}") from error
    return None


class StoredStrings(Sequence[str]):
    """The strings of a long array, decoded when they are read: as objects of their own, the tokens
    and merges of a vocabulary would fragment the memory allocated after them.

    begins  where each string begins in `view`, and 8 bytes after the end of the last: its length
            comes before each
    """

    def __init__(self, view: memoryview, begins: "array[int]") -> None:
        self._view, self._begins = view, begins

    def __len__(self) -> int:
        """Return the number of strings."""
        return len(self._begins) - 1

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        """Return a string, or a list of strings for a slice. Raises IndexError for an index out of
        range.
        """
        places = range(len(self))[place]
        if isinstance(places, range):
            return [self[one] for one in places]
        return str(self._view[self._begins[places] : self._begins[places + 1] - 8], "utf-8")


class _Cursor:
    """Reads forward through the header, never past its end or beyond the limits."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self.path = path
        self.at = 0
        self._view = data.data
        self._items_left = _MOST_ITEMS
        self._text_left = _MOST_TEXT

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self._view) - self.at

    def take(self, size: int) -> bytes:
        """Copy the next `size` bytes."""
        self._need(size)
        start = self.at
        self.at += size
        return bytes(self._view[start : self.at])

    def scalar(self, kind: int) -> int | float | bool:
        """Read one number of GGUF value type `kind`. A float32 becomes its shortest decimal (1e-05,
        not 9.999999747378752e-06), which is what its author wrote.
        """
        layout = _SCALARS[kind]
        (value,) = struct.unpack_from(layout, self._view, self.at)
        self.at += struct.calcsize(layout)
        if kind == _FLOAT32:
            return float(str(np.float32(value)))
        number: int | float | bool = value
        return number

    def count(self, what: str, least_bytes: int, limit: int) -> int:
        """Read a 64-bit count of items that take at least `least_bytes` each. Raises ModelError if
        it exceeds `limit` or the rest of the file.
        """
        number = int(self.scalar(10))
        if number > limit or number * least_bytes > self.left:
            raise ModelError(
                f"it announces {number} {what}; the file has room for "
                f"{min(self.left // least_bytes, limit)}"
            )
        return number

    def string(self, max_bytes: int = _MOST_TEXT) -> str:
        """Read a length-prefixed UTF-8 string."""
        size = int(self.scalar(10))
        if size > max_bytes or size > self._text_left:
            raise ModelError(f"a string of {size} bytes is longer than any a model needs")
        self._text_left -= size
        return self.take(size).decode("utf-8")

    def value(self, kind: int) -> Value:
        """Read one metadata value."""
        if kind in _SCALARS:
            return self.scalar(kind)
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        raise ModelError(f"unknown metadata type {kind}")

    def _array(self) -> Value:
        kind = int(self.scalar(4))
        if kind != _STRING and kind not in _SCALARS:
            what = "an array of arrays" if kind == _ARRAY else f"an array of unknown type {kind}"
            raise UnsupportedError(f"{what} is not supported")
        size = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind])
        length = self.count("items", size, self._items_left)
        self._items_left -= length
        if kind == _STRING:
            return self._strings(length)
        raw = self.take(length * size)
        numbers: list[int] | list[float] | list[bool] = np.frombuffer(raw, _SCALARS[kind]).tolist()
        return numbers

    def _strings(self, count: int) -> Sequence[str]:
        """Read `count` strings: `string` in a fast loop, because vocabularies are long."""
        begins, view, at, length = array("Q"), self._view, self.at, _LENGTH.unpack_from
        end = min(len(view), at + 8 * count + self._text_left)
        for _ in range(count):
            (size,) = length(view, at)
            at += 8
            if size > end - at:
                raise ModelError(f"a string of {size} bytes at byte {at} is too long")
            str(view[at : at + size], "utf-8")
            begins.append(at)
            at += size
        self._text_left -= at - self.at - 8 * count
        self.at = at
        begins.append(at + 8)
        texts = StoredStrings(view, begins)
        return texts if count > _LONG else [*texts]

    def _need(self, size: int) -> None:
        if size > self.left:
            raise ModelError(f"the file ends: {size} bytes needed, {self.left} left")


def _check_version(version: int | float | bool) -> None:
    if version in (2, 3):
        return
    if isinstance(version, int) and version >= 1 << 16:
        raise UnsupportedError("a big-endian GGUF; convert it to little-endian")
    raise UnsupportedError(f"GGUF version {version}; versions 2 and 3 can be read")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.string(_MOST_NAME)
        if key in metadata:
            raise ModelError(f"the metadata key {key!r} appears twice")
        metadata[key] = cursor.value(int(cursor.scalar(4)))
    return metadata


def _alignment(metadata: dict[str, Value]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or not 1 <= value <= _MOST_ALIGNMENT or value & (value - 1):
        raise ModelError(f"general.alignment is {value!r}, not a small power of two")
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorEntry]:
    """Read the tensor table, then check the offsets, which depend on where the data begins."""
    table = [_read_tensor(cursor) for _ in range(count)]
    begin = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for name, stored in table:
        if name in tensors:
            raise ModelError(f"the tensor {name!r} appears twice")
        if stored.start % alignment:
            raise ModelError(f"tensor {name!r} begins at {stored.start}, not aligned")
        end = begin + stored.start + stored.size
        if end > cursor.at + cursor.left:
            raise ModelError(
                f"tensor {name!r} ends at byte {end} of a file of {cursor.at + cursor.left}: it "
                "is cut off, fetch or copy it again"
            )
        tensors[name] = TensorEntry(stored.kind, stored.shape, begin + stored.start, stored.size)
    return tensors


def _read_tensor(cursor: _Cursor) -> tuple[str, TensorEntry]:
    name = cursor.string(_MOST_NAME)
    dimensions = int(cursor.scalar(4))
    if not 1 <= dimensions <= _DIMENSIONS:
        raise ModelError(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(int(cursor.scalar(10)) for _ in range(dimensions))[::-1]
    while len(shape) > 1 and shape[0] == 1:  # Lost when llama.cpp quantises.
        shape = shape[1:]
    kind, block, block_bytes = _storage(name, int(cursor.scalar(4)))
    elements = 1
    for length in shape:
        elements *= length
    if elements == 0 or shape[-1] % block:
        raise ModelError(f"tensor {name!r} of shape {list(shape)} cannot be {kind}")
    return name, TensorEntry(kind, shape, int(cursor.scalar(10)), elements // block * block_bytes)


def _storage(name: str, number: int) -> tuple[str, int, int]:
    """Return the ggml name, elements per block and bytes per block of storage type `number`."""
    kind = NAMES.get(number)
    if kind is None:
        raise UnsupportedError(f"tensor {name!r} has the unknown storage type {number}")
    if kind in UNREADABLE and not (name == DRAFT_IDS and kind in ("I32", "I64")):
        raise UnsupportedError(f"tensor {name!r} is stored as {kind}, which cannot be read")
    return kind, STORAGE[kind].block, STORAGE[kind].size
