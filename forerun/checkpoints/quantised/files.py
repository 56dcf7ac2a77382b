"""Presents a folder's tensors with every quantised matrix as one tensor `NAME.weight`."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forerun.checkpoints.grouped import Grouped
from forerun.checkpoints.mapped import Packed, TensorEntry, TensorFile
from forerun.checkpoints.quantised.grouped import grouped
from forerun.checkpoints.quantised.layouts import PARTS
from forerun.checkpoints.quantised.matrices import StoredMatrix, stored_matrix
from forerun.checkpoints.quantised.method import Method
from forerun.errors import ModelError
from forerun.types import Floats

QUANTISED = "quantised"
"""`TensorEntry.kind` of such a matrix."""

_OF_ACTIVATIONS = re.compile(
    r".*\.(input_scale|input_global_scale|activation_scale|output_scale|(input|output)_zero_point|[kv]_scale|kv_scale)"
)
"""Scales of activations, keys and values, which are not quantised here."""
_OF_WEIGHTS = {*PARTS["bnb4"][0][1:], *PARTS["bnb4"][1]}
"""The ends of names of tensors that bitsandbytes calls MODULE.weight.PART."""
_BLOCKS = re.compile("_(blocks|scales)$")
"""The end of the names of gpt-oss's experts, which are no modules."""


@dataclass(frozen=True, slots=True)
class QuantisedFile(TensorFile):
    """A file's quantised matrices. `floats` dequantises one; `rows` is its bytes as float32.

    matrices  by the names in `tensors`
    """

    matrices: Mapping[str, StoredMatrix] = field(default_factory=dict)

    def floats(self, name: str) -> Floats:
        """Return the matrix float32[N,K], or those of all experts float32[experts,N,K]. Raises
        KeyError for an unknown name, ModelError as StoredMatrix.floats.
        """
        return self.matrices[name].floats()

    def part(self, name: str, rows: slice, columns: slice) -> Floats:
        """Return float32[n,k], some rows and columns, reading little else (StoredMatrix.part).
        Raises as `floats`, as do the methods below.
        """
        return self.matrices[name].part(rows, columns)

    def grouped(self, name: str) -> Grouped | None:
        """Return the quantised matrix with its scales by group; None if it has another format."""
        return grouped(self.matrices[name])

    def packed(self, name: str) -> Packed | None:
        """Return None: these formats are not ggml's."""
        return None

    def rows(self, name: str) -> NDArray[np.uint8]:
        """Return uint8[N,4K], the bytes of the matrix as float32. Raises as `floats`."""
        whole = self.floats(name)
        return whole.reshape(-1, whole.shape[-1]).view(np.uint8)


def with_matrices(
    files: Mapping[str, TensorFile], methods: tuple[Method, ...]
) -> dict[str, TensorFile]:
    """Return stored name -> the file that has it, with each quantised matrix under the name
    `MODULE.weight`.

    files  stored name -> file, of a folder whose matrices are stored by `methods`; with no
           methods they are returned unchanged

    A matrix of ordinary floats is unchanged, whichever modules the configuration excludes. Raises
    ModelError naming the tensor that is missing, left over or does not fit.
    """
    if not methods:
        return dict(files)
    known = {part for method in methods for group in PARTS[method.layout] for part in group}
    blocks = any(method.layout == "blocks" for method in methods)
    plain: dict[str, TensorFile] = {}
    modules: dict[str, dict[str, tuple[TensorFile, str]]] = {}
    for name, file in files.items():
        module, _, part = (_BLOCKS.sub(r".\1", name) if blocks else name).rpartition(".")
        if part in _OF_WEIGHTS:
            module = module.removesuffix(".quant_state").removesuffix(".weight")
        if _OF_ACTIVATIONS.fullmatch(name):
            continue
        if part not in known or _plain(files, module, part):
            plain[name] = file
        else:
            modules.setdefault(module, {})[part] = (file, name)
    if not modules:
        raise ModelError(
            "config.json says that weights are quantised "
            f"({methods[0].title}), and no tensor is: remove {methods[0].key} if that is so"
        )
    return plain | _collected(modules, methods)


def _plain(files: Mapping[str, TensorFile], module: str, part: str) -> bool:
    """Return whether `MODULE.weight` is a matrix of floats, not a quantised one."""
    name = f"{module}.weight"
    return part == "weight" and files[name].tensors[name].kind in ("F32", "F16", "BF16")


def _collected(
    modules: Mapping[str, Mapping[str, tuple[TensorFile, str]]], methods: tuple[Method, ...]
) -> dict[str, TensorFile]:
    by_file: dict[int, tuple[TensorFile, dict[str, StoredMatrix]]] = {}
    for module, parts in modules.items():
        matrix = stored_matrix(module, methods, parts)
        file, _ = next(iter(parts.values()))
        by_file.setdefault(id(file), (file, {}))[1][f"{module}.weight"] = matrix
    collected: dict[str, TensorFile] = {}
    for file, matrices in by_file.values():
        tensors = {
            name: TensorEntry(QUANTISED, matrix.whole, 0, 4 * math.prod(matrix.whole))
            for name, matrix in matrices.items()
        }
        one = QuantisedFile(file.path, tensors, file.data[:0], matrices)
        collected |= dict.fromkeys(tensors, one)
    return collected
