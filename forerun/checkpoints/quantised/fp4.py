"""Experts in MXFP4, as gpt-oss's folders store them (OCP Microscaling Formats 1.0, section 5).

NAME_blocks uint8[experts,N,K/32,16] has two numbers e of E2M1 per byte, the first in the low bits,
NAME_scales uint8[experts,N,K/32] the exponent of 32 numbers: w = 2^(scale - 127) e. Together they
are the tensor that a folder of floats calls NAME, [experts,K,N].
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forerun.checkpoints.mapped import Packed, TensorEntry, TensorFile
from forerun.errors import ModelError

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32

_Part = tuple[TensorFile, str]


@dataclass(frozen=True, slots=True)
class Fp4File(TensorFile):
    """A file's tensors of experts in MXFP4.

    parts  by the names in `tensors`: blocks and scales
    """

    parts: Mapping[str, tuple[_Part, _Part]] = field(default_factory=dict)

    def expert(self, name: str, expert: int) -> Packed:
        """Return one expert's matrix [N,K] as ggml's MXFP4 rows: for 32 numbers the scale, then 16
        bytes with number i and number i + 16. Raises ModelError for a scale that is NaN.
        """
        blocks, scales = (_tensor(*part)[expert] for part in self.parts[name])
        if scales.max(initial=0) == 255:
            raise ModelError(f"{name}{_SCALES} has a scale of 255, which means NaN")
        numbers = np.empty((*blocks.shape[:2], _GROUP), np.uint8)
        numbers[..., ::2], numbers[..., 1::2] = blocks & 15, blocks >> 4
        rows = np.empty((*blocks.shape[:2], 17), np.uint8)
        rows[..., 0] = scales
        rows[..., 1:] = numbers[..., :16] | numbers[..., 16:] << 4
        return Packed("MXFP4", rows.reshape(len(rows), -1), blocks.shape[1] * _GROUP)


def with_experts(files: Mapping[str, TensorFile]) -> dict[str, TensorFile]:
    """Map each stored name to the file that has it, each pair NAME_blocks and NAME_scales as NAME.

    Raises ModelError naming the tensor that is missing, of another type or of another shape.
    """
    plain: dict[str, TensorFile] = {}
    pairs: dict[str, dict[str, _Part]] = {}
    for name, file in files.items():
        kind = next((end for end in (_BLOCKS, _SCALES) if name.endswith(end)), None)
        if kind is None:
            plain[name] = file
        else:
            pairs.setdefault(name.removesuffix(kind), {})[kind] = (file, name)
    if not pairs:
        raise ModelError(
            "config.json says that experts are stored in MXFP4, and none is: remove "
            "quantization_config if that is so"
        )
    for name, parts in pairs.items():
        for kind in (_BLOCKS, _SCALES):
            if kind not in parts:
                raise ModelError(f"{name}{kind} is missing")
        blocks, scales = parts[_BLOCKS], parts[_SCALES]
        shape = _shape(blocks, scales)
        stored = TensorEntry("quantised", shape, 0, 0)
        file = blocks[0]
        plain[name] = Fp4File(file.path, {name: stored}, file.data[:0], {name: (blocks, scales)})
    return plain


def _shape(blocks: _Part, scales: _Part) -> tuple[int, int, int]:
    """Return (experts, K, N)."""
    for file, name in (blocks, scales):
        if file.tensors[name].kind != "U8":
            raise ModelError(f"{name} is stored as {file.tensors[name].kind}, not U8")
    blocks_shape, exponents = (file.tensors[name].shape for file, name in (blocks, scales))
    if len(blocks_shape) != 4 or blocks_shape[3] != _GROUP // 2:
        raise ModelError(
            f"{blocks[1]} is {list(blocks_shape)}; it must be [experts, rows, groups, 16]"
        )
    if exponents != blocks_shape[:3]:
        raise ModelError(f"{scales[1]} is {list(exponents)}, not {list(blocks_shape[:3])}")
    return blocks_shape[0], blocks_shape[2] * _GROUP, blocks_shape[1]


def _tensor(file: TensorFile, name: str) -> NDArray[np.uint8]:
    there = file.tensors[name]
    return file.data[there.start : there.start + there.size].reshape(there.shape)
