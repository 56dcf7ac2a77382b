"""A strict, bounded reader of safetensors headers (the format: safetensors' README).

Eight bytes of length, a JSON table, then the data, which must be covered exactly once by the
tensors, without holes. Untrusted like any file: see `gguf_header`.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.checkpoints.mapped import (
    TensorEntry,
    TensorFile,
    UnsupportedError,
    check_disjoint,
    mapped,
)
from forerun.errors import ModelError
from forerun.networks.keys import shown

_MOST_HEADER = 64 << 20
"""Bytes; those of published models take up to 15 MB."""
_MOST_TENSORS = 65536
_DIMENSIONS = 8
FLOATS: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
"""Types of numbers, and bytes of one."""
MAPS: Mapping[str, int] = {**FLOATS, "I64": 8, "I32": 4, "U16": 2, "BOOL": 1}
"""Drafts also store vocabulary maps and n-gram tables."""
QUANTISED: Mapping[str, int] = {**MAPS, "F8_E4M3": 1, "I8": 1, "U8": 1}
"""Storage types of quantised matrices."""


def read_shard(path: Path, kinds: Mapping[str, int] = FLOATS) -> TensorFile:
    """Map one .safetensors file and check its header. ModelError for anything out of order.

    kinds  which types of numbers its tensors may have
    """
    data = mapped(path)
    try:
        length = int.from_bytes(data[:8].tobytes(), "little")
        if len(data) < 8 or length > len(data) - 8:
            raise ModelError(f"a header of {length} bytes in a file of {len(data)}")
        if length > _MOST_HEADER:
            raise UnsupportedError(f"a header of {length} bytes; {_MOST_HEADER} at most are read")
        text = data[8 : 8 + length].tobytes().decode("utf-8")
        table = json.loads(text, object_pairs_hook=_no_twins)
        tensors = _tensors(table, 8 + length, kinds)
        check_disjoint(tensors)
        covered = sum(stored.size for stored in tensors.values())
        if 8 + length + covered != len(data):
            raise ModelError(
                f"its tensors take {covered} bytes; {len(data) - 8 - length} are there"
            )
    except UnsupportedError as error:
        raise ModelError(f"{path}: {error}") from error
    except (ModelError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: damaged safetensors file: {error}") from error
    # Empty tensors are left out: what needs one that is not empty calls it missing.
    return TensorFile(path, {name: one for name, one in tensors.items() if one.size}, data)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ModelError("a name appears twice in the header")
    return table


def _tensors(table: Any, begin: int, kinds: Mapping[str, int]) -> dict[str, TensorEntry]:
    if not isinstance(table, dict):
        raise ModelError("the header is not an object of tensors")
    if len(table) > _MOST_TENSORS:
        raise UnsupportedError(f"{len(table)} tensors; {_MOST_TENSORS} at most are read")
    table.pop("__metadata__", None)
    return {name: _tensor(name, entry, begin, kinds) for name, entry in table.items()}


def _tensor(name: str, entry: Any, begin: int, kinds: Mapping[str, int]) -> TensorEntry:
    """Check one entry of the table; `begin` is where the data begins."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"tensor {shown(name)} is not dtype, shape and data_offsets")
    kind = entry["dtype"]
    if not isinstance(kind, str) or kind not in kinds:
        raise UnsupportedError(
            f"tensor {shown(name)} is stored as {shown(kind)}; {', '.join(kinds)} can be read"
        )
    shape, offsets = _naturals(name, entry["shape"]), _naturals(name, entry["data_offsets"])
    if len(shape) > _DIMENSIONS or len(offsets) != 2:
        raise ModelError(f"tensor {shown(name)}: shape {shape}, offsets {offsets}")
    start, end = offsets
    if end - start != math.prod(shape) * kinds[kind]:
        raise ModelError(
            f"tensor {shown(name)} of shape {list(shape)} cannot take bytes {start} to {end}"
        )
    return TensorEntry(kind, shape, begin + start, end - start)


def _naturals(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        type(number) is int and 0 <= number < 1 << 48 for number in value[: _DIMENSIONS + 1]
    ):
        raise ModelError(f"tensor {shown(name)}: {shown(value)} are not sizes")
    return tuple(value[: _DIMENSIONS + 1])
