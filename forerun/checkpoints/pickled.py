"""Reads archives saved by torch: one pickle, and the data of its tensors in separate files.

The pickle is run by an interpreter of our own, which can only build values (pickle_program.py). The
archive is not trusted: every storage must be in the file, uncompressed, apart from all others, of
the length given by the pickle, and with its checksum. The format before torch 1.6, a sequence of
pickles without an archive, is rejected.
"""

import json
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from forerun.checkpoints.mapped import mapped
from forerun.checkpoints.pickle_program import ITEM_BYTES, Storage, View, run
from forerun.errors import ModelError
from forerun.networks.keys import shown

_MOST_IDS, _MOST_PROGRAM, _MOST_TENSORS = 1 << 24, 1 << 26, 65536
_LOCAL_HEADER, _SIGNATURE = 30, b"PK\x03\x04"
_CHUNK = 1 << 24
_OLD = 0x80
"""The first byte of a pickle; an archive begins with PK."""
_MOST_COPIES = 4
"""Most bytes of an archive's tensors, in multiples of its own size: tensors that share a storage,
as a tied head and its embedding do, are written one by one.
"""


@dataclass(frozen=True, slots=True)
class Archive:
    """A checked archive.

    value  of its pickle
    data   the file's bytes
    parts  name -> (begin, end) in `data`
    """

    value: Any
    data: NDArray[np.uint8]
    parts: dict[str, tuple[int, int]]

    def numbers(self, storage: Storage) -> NDArray[np.uint8]:
        """Return the storage's bytes, a view. Raises ModelError if it is missing or has another
        length.
        """
        start, end = self.parts.get(f"data/{storage.key}", (0, -1))
        expected = storage.count * ITEM_BYTES[storage.kind]
        if end - start != expected:
            held = f"{end - start} bytes" if end >= start else "not there"
            raise ModelError(
                f"storage {shown(storage.key)} must take {expected} bytes, it is {held}"
            )
        return self.data[start:end]


def read_pickled_ids(path: Path) -> list[int]:
    """Read a published list of token ids (freq_N.pt). Raises ModelError if the file has anything
    but a list of integers.
    """
    ids = _opened(path, "plain list of token ids").value
    if not isinstance(ids, list) or not all(type(id) is int for id in ids):
        raise ModelError(f"{path} is not a plain list of token ids: it holds something else")
    if len(ids) > _MOST_IDS:
        raise ModelError(
            f"{path} is not a plain list of token ids: it is longer than any vocabulary"
        )
    return ids


def write_safetensors(path: Path, target: IO[bytes]) -> int:
    """Copy all tensors of an archive to `target` as safetensors, bits unchanged. Returns the
    bytes written; at most one chunk of them is in memory at a time. Raises ModelError naming what
    the archive has besides tensors, and its faults.
    """
    archive = _opened(path, "table of tensors")
    try:
        views = _views(archive)
        for storage in {view.storage.key: view.storage for view in views.values()}.values():
            archive.numbers(storage)
        head = _header(views, _MOST_COPIES * len(archive.data))
        target.write(head)
        for view in views.values():
            for part in _items(archive, view):
                target.write(part.data)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return len(head) + sum(_size(view) for view in views.values())


def _opened(path: Path, what: str) -> Archive:
    """Open and check the archive, except for the storages' lengths. Raises ModelError if torch did
    not save it, or it is damaged.
    """
    data = mapped(path)
    with _damage_named(path):
        if len(data) and data[0] == _OLD:
            raise ModelError(
                "it has the format of torch before 1.6, a series of pickles; save it again with a "
                "newer torch, which writes an archive"
            )
        with zipfile.ZipFile(path) as archive:
            items = archive.infolist()
            inside = [item for item in items if item.filename.endswith("/data.pkl")]
            if len(inside) != 1 or inside[0].file_size > _MOST_PROGRAM:
                raise ModelError("it was not saved by torch")
            root = inside[0].filename.removesuffix("data.pkl")
            with archive.open(inside[0]) as stored:
                program = stored.read(_MOST_PROGRAM + 1)
            order = f"{root}byteorder"
            if order in archive.namelist() and archive.read(order) != b"little":
                raise ModelError("its numbers are not little-endian")
        parts = _parts(items, root, data)
    try:
        return Archive(run(program), data, parts)
    except ModelError as error:
        raise ModelError(f"{path} is not a {what}: {error}") from error


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Convert every exception of zipfile for damaged or unsupported archives to one ModelError."""
    damage = (
        OSError,
        ValueError,
        RuntimeError,
        EOFError,
        OverflowError,
        KeyError,
        zlib.error,
        zipfile.BadZipFile,
    )
    try:
        yield
    except (*damage, ModelError) as error:
        raise ModelError(f"{path} cannot be read as a torch archive: {error}") from error


def _parts(
    items: list[zipfile.ZipInfo], root: str, data: NDArray[np.uint8]
) -> dict[str, tuple[int, int]]:
    """Return the (begin, end) of each storage, by its name below the archive's folder. Raises
    ModelError if two overlap.
    """
    places: dict[str, tuple[int, int]] = {}
    for item in items:
        name = item.filename.removeprefix(root)
        if not name.startswith("data/"):
            continue
        at = item.header_offset
        header = data[at : at + _LOCAL_HEADER].tobytes()
        if header[:4] != _SIGNATURE or item.compress_type != zipfile.ZIP_STORED:
            raise ModelError(f"{shown(name)} is compressed")
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = at + _LOCAL_HEADER + lengths
        end = start + item.file_size
        if name in places or end > len(data) or item.flag_bits & 1:
            raise ModelError(f"{shown(name)} appears twice, is encrypted or cut off")
        if zlib.crc32(data[start:end].data) != item.CRC:
            raise ModelError(f"{shown(name)} has another checksum: the file is damaged")
        places[name] = (start, end)
    ordered = sorted(places.values())
    if any(after[0] < before[1] for before, after in pairwise(ordered)):
        raise ModelError("two of its storages overlap")
    return places


def _views(archive: Archive) -> dict[str, View]:
    """Return the tensors by name, those with the widest numbers first, so that all are aligned."""
    table = archive.value
    if not isinstance(table, dict) or not table or len(table) > _MOST_TENSORS:
        raise ModelError("it holds no table of tensors by name")
    for name, value in table.items():
        if not isinstance(value, View):
            what = type(value).__name__
            raise ModelError(f"{shown(name)} is a {what}, not a tensor; only tensors are read")
        if name == "__metadata__" or 0 in value.shape:
            raise ModelError(f"{shown(name)} is a tensor without numbers, or not a tensor")
    return dict(sorted(table.items(), key=lambda item: -ITEM_BYTES[item[1].storage.kind]))


def _size(view: View) -> int:
    """Return the bytes of the tensor's elements."""
    return math.prod(view.shape) * ITEM_BYTES[view.storage.kind]


def _header(views: dict[str, View], max_bytes: int) -> bytes:
    """Return the length and table of a safetensors file. Raises ModelError if the tensors take more
    than `max_bytes` bytes.
    """
    table, end = {}, 0
    for name, view in views.items():
        start, end = end, end + _size(view)
        offsets, shape = [start, end], list(view.shape)
        table[name] = {"dtype": view.storage.kind, "shape": shape, "data_offsets": offsets}
    if end > max_bytes:
        raise ModelError(f"its tensors take {end} bytes, many times the size of the file")
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _items(archive: Archive, view: View) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of the tensor's elements in order, in parts along its first dimension."""
    width = ITEM_BYTES[view.storage.kind]
    numbers = archive.numbers(view.storage).view(f"<u{width}")
    strides = tuple(step * width for step in view.strides)
    array = np.lib.stride_tricks.as_strided(
        numbers[view.offset :], view.shape, strides, writeable=False
    )
    array = np.atleast_1d(array)
    rows = max(1, _CHUNK * len(array) // _size(view))
    for start in range(0, len(array), rows):
        part = np.ascontiguousarray(array[start : start + rows])
        yield part.reshape(-1).view(np.uint8)
