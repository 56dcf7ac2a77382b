"""Maps safetensors files.

Their headers are read by the format's own library, which checks that the tensors cover the data
exactly once, without holes; limits on their size are checked here, because files are untrusted.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from forerun.checkpoints.mapped import TensorEntry, TensorFile, UnsupportedError, mapped
from forerun.errors import ModelError
from forerun.networks.keys import shown

_MOST_HEADER = 64 << 20
"""Most bytes of a header; those of published models take up to 15 MB."""
_MOST_TENSORS = 65536
_DIMENSIONS = 8
FLOATS: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
"""Number types, and bytes of one number."""
MAPS: Mapping[str, int] = {**FLOATS, "I64": 8, "I32": 4, "U16": 2, "BOOL": 1}
"""Also the types of drafts' vocabulary maps and n-gram tables."""
QUANTISED: Mapping[str, int] = {**MAPS, "U32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1}
"""Also the types of quantised matrices."""


def read_shard(path: Path, kinds: Mapping[str, int] = FLOATS) -> TensorFile:
    """Map one .safetensors file. Raises ModelError if it is damaged, or has unsupported content.

    kinds  the dtypes that its tensors may have
    """
    data = mapped(path)
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    try:
        if len(data) >= begin > 8 + _MOST_HEADER:
            raise UnsupportedError(
                f"a header of {begin - 8} bytes; {_MOST_HEADER} at most are read"
            )
        tensors = _tensors(path, begin, kinds)
    except UnsupportedError as error:
        raise ModelError(f"{path}: {error}") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: damaged safetensors file: {str(error)[:200]}") from error
    # Empty tensors are left out: a reader that needs a tensor then reports it as missing.
    return TensorFile(path, {name: one for name, one in tensors.items() if one.size}, data)


def _tensors(path: Path, begin: int, kinds: Mapping[str, int]) -> dict[str, TensorEntry]:
    """Return the tensors by name. Their data begins at byte `begin`."""
    tensors: dict[str, TensorEntry] = {}
    with safe_open(path, "np") as file:
        names = file.offset_keys()
        if len(names) > _MOST_TENSORS:
            raise UnsupportedError(f"{len(names)} tensors; {_MOST_TENSORS} at most are read")
        for name in names:
            tensor = file.get_slice(name)
            kind, shape = tensor.get_dtype(), tuple(tensor.get_shape())
            if kind not in kinds:
                able = ", ".join(kinds)
                message = f"tensor {shown(name)} is stored as {shown(kind)}; {able} can be read"
                raise UnsupportedError(message)
            if len(shape) > _DIMENSIONS:
                message = f"tensor {shown(name)} has {len(shape)} dimensions; {_DIMENSIONS} at most"
                raise UnsupportedError(f"{message} are read")
            tensors[name] = TensorEntry(kind, shape, begin, math.prod(shape) * kinds[kind])
            begin += tensors[name].size
    return tensors
