"""GGUF files in several parts (llama-gguf-split), opened by the first, which has the metadata.

Parts are named `NAME-00001-of-00003.gguf` and so on; each has tensors of its own, and its number
and their count in `split.no` and `split.count`.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forerun.checkpoints.gguf.header import GgufFile, Value, read_header
from forerun.errors import ModelError

PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST_PARTS = 1024


@dataclass(frozen=True, slots=True)
class PartedGguf(GgufFile):
    """The first part, with the tensors of all parts.

    owners  tensor name -> the part that has it
    """

    owners: dict[str, GgufFile]

    def rows(self, name: str) -> NDArray[np.uint8]:
        """Return uint8[rows, bytes of a row] of a tensor, a read-only view; a vector is one row."""
        return self.owners[name].rows(name)


def part_names(name: str) -> list[str]:
    """Return the names of all parts of the GGUF file to which the part `name` belongs; only `name`
    if it is a whole file.
    """
    match = PART.fullmatch(name)
    if match is None or not 0 < int(match["count"]) <= _MOST_PARTS:
        return [name]
    count = match["count"]
    return [f"{match['stem']}-{n:05}-of-{count}.gguf" for n in range(1, int(count) + 1)]


def parts_of(path: Path) -> list[Path]:
    """Return the files that make up the GGUF file at `path`, the first one first."""
    return [path.parent / name for name in part_names(path.name)]


def read_gguf(path: Path) -> GgufFile:
    """Map a GGUF file, or all parts of the one whose first part is at `path`, and check the
    headers. Raises ModelError for any fault.
    """
    first = read_header(path)
    count = _number(first, "split.count", 1)
    if count <= 1:
        return first
    paths = parts_of(path)
    if _number(first, "split.no", 0) != 0:
        raise ModelError(f"{path} is not the first of {count} parts; name {paths[0].name}")
    if len(paths) != count:
        raise ModelError(
            f"{path} says that it is the first of {count} parts; name them as llama-gguf-split "
            f"does, NAME-00001-of-{count:05}.gguf"
        )
    owners = dict.fromkeys(first.tensors, first)
    for number, other in enumerate(paths[1:], 1):
        part = _part(other, number, count)
        twins = owners.keys() & part.tensors.keys()
        if twins:
            raise ModelError(f"{other} repeats the tensor {min(twins)!r} of another part")
        owners |= dict.fromkeys(part.tensors, part)
    announced = _number(first, "split.tensors.count", len(owners))
    if announced != len(owners):
        raise ModelError(f"{path}: its parts have {len(owners)} tensors, not {announced}")
    tensors = {name: owner.tensors[name] for name, owner in owners.items()}
    return PartedGguf(path, tensors, first.data, first.metadata, first.end, owners)


def _part(path: Path, number: int, count: int) -> GgufFile:
    if not path.is_file():
        raise ModelError(f"{path} is missing: it is part {number + 1} of {count}")
    part = read_header(path)
    no, of = _number(part, "split.no", -1), _number(part, "split.count", -1)
    if (no, of) != (number, count):
        raise ModelError(
            f"{path} says that it is part {no + 1} of {of}, not {number + 1} of {count}"
        )
    return part


def _number(file: GgufFile, key: str, absent: int) -> int:
    value: Value = file.metadata.get(key, absent)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{file.path}: {key} is not a whole number")
    return value
