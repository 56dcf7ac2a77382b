"""Packs a checkpoint's tensors into the compiled core, in the formats of csrc/quant.h.

The formats of _KINDS keep the file's own numbers exactly, in as many bytes; so do those of
_CONVERTED, in more bytes, and those of few_bits.py. Other quantised formats become 8 bits in groups
of 32: symmetric, scale = largest / 127 as a float16, rounded to nearest. If `dtype` requests it,
floats become the same, or 4 bits (16 steps from a group's smallest number to its largest), or Q4_K
by ggml's rule (csrc/make_q4_k.cpp).
"""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil, prod

import numpy as np

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.grouped import Grouped
from forerun.checkpoints.mapped import release
from forerun.checkpoints.quantised_matrices import InGroups
from forerun.drafts.block_folder import BlockFile
from forerun.drafts.eagle_folder import DraftFile
from forerun.errors import ModelError
from forerun.executors.cpu import native
from forerun.executors.cpu.few_bits import (
    FEW_BITS,
    ROUNDED,
    SMALL,
    check_fp4,
    kind_of,
    source_rows,
)
from forerun.executors.cpu.latent import ABSORBED, absorbed, in_kind
from forerun.executors.cpu.levels import LEVELS, TERNARY, rows_of_levels, rows_of_q4_0
from forerun.executors.cpu.places import Place, layer_kind, matrices, routes, vectors
from forerun.networks.arch import Architecture
from forerun.networks.cache_layer import CacheLayer
from forerun.types import AnyArray, Floats, Ints

_KINDS = {
    "Q4_0": (0, 32, 18),
    "Q4_1": (1, 32, 20),
    "Q8_0": (2, 32, 34),
    "F32": (3, 1, 4),
    "F16": (4, 1, 2),
    "BF16": (5, 1, 2),
    "Q4_K": (6, 256, 144),
    "Q5_K": (7, 256, 176),
    "Q6_K": (8, 256, 210),
    "4-bit integers": (9, 128, 68),
    "MXFP4": (10, 32, 17),
    "Q5_0": (11, 32, 22),
    "Q5_1": (12, 32, 24),
    "IQ4_NL": (13, 32, 18),
    "IQ4_XS": (14, 256, 136),
    "Q3_K": (15, 256, 110),
    "Q2_K": (16, 256, 84),
}
"""ggml's name -> `Source` of csrc/quant.h, elements in a block, bytes of a block."""
_CONVERTED = {kind: (17 if len(levels) > 8 else 18, 256, 166) for kind, levels in LEVELS.items()}
_CONVERTED |= dict.fromkeys(TERNARY, _KINDS["Q4_0"])
"""The same of types whose blocks are converted to those of another source first (levels.py)."""
_KINDS |= _CONVERTED
_KINDS |= {kind: _KINDS[source] for kind, source in FEW_BITS.items()}
_FLOATS = ("F32", "F16", "BF16")
BYTES = 2
"""`Format` of 8 bits in groups of 32."""
WIDE = 6
"""`Format` of float32."""
QUANTIZED = {"q8_0": BYTES, "q4_1": 1, "q4_k": 3}
"""dtype for floats -> `Format` of csrc/quant.h; embedding and head have 8 bits at least."""
_WHOLE_BLOCKS = {"q4_k": 256}
"""Inputs per block, by dtype: matrices whose rows are not whole blocks become 8 bits."""
_ALIGN = 64
_HEAD = (-1, 1)


def _kind(checkpoint: Checkpoint, name: str) -> str:
    """Return the storage format of a matrix, by ggml's name or as `kind_of`."""
    packed = checkpoint.packed(f"{name}.weight")
    return kind_of(_grouped(checkpoint, f"{name}.weight")) if packed is None else packed.kind


def _grouped(checkpoint: Checkpoint, name: str) -> Grouped | None:
    return checkpoint.grouped(name) if isinstance(checkpoint, InGroups) else None


def _stored_kinds(checkpoint: Checkpoint) -> set[str]:
    """Return the storage formats of the layers' matrices, except routers, which are always
    floats.
    """
    places = [place for place in matrices(checkpoint.architecture) if place.layer >= 0]
    return {_kind(checkpoint, place.name) for place in places if not routes(place)}


def _fits(dtype: str, inputs: int) -> bool:
    return inputs % _WHOLE_BLOCKS.get(dtype, 1) == 0


def _some_become_bytes(checkpoint: Checkpoint, dtype: str) -> bool:
    """Return whether some of the layers' float matrices have rows with partial `dtype` blocks."""
    places = [place for place in matrices(checkpoint.architecture) if place.layer >= 0]
    return any(
        not _fits(dtype, checkpoint.shape(f"{place.name}.weight")[1])
        for place in places
        if not routes(place) and _kind(checkpoint, place.name) in _FLOATS
    )


def packed_bytes(checkpoint: Checkpoint, dtype: str) -> int:
    """Return the bytes that all tensors will take in the core, if floats become `dtype`."""
    return Packer(checkpoint, dtype=dtype).planned_bytes()


def bits_made(dtype: str) -> int | None:
    """Return the most bits per weight, scales included and rounded up, if floats are converted to
    `dtype`; None if they stay floats.
    """
    if dtype not in QUANTIZED:
        return None
    return 5 if dtype == "q4_1" else 9


def _computes_in_floats(checkpoint: Checkpoint, dtype: str) -> bool:
    """Return whether all layers' matrices stay floats, so that activations and the cache do,
    too.
    """
    return dtype not in QUANTIZED and _stored_kinds(checkpoint) <= set(_FLOATS)


CACHE_DTYPES = {1: "q8_0", 2: "float16", 4: "float32"}
"""Formats of keys and values (`Item` of csrc/kernels.h) by the bytes of one number."""


def cache_item(checkpoint: Checkpoint, dtype: str, kv_dtype: str = "same") -> int:
    """Return the bytes of one number of keys and values, a key of CACHE_DTYPES: 1 for `kv_dtype`
    q8_0; for "same" 4 if the model computes in floats, else 2.
    """
    if kv_dtype == CACHE_DTYPES[1]:
        return 1
    return 4 if _computes_in_floats(checkpoint, dtype) else 2


def cache_bytes_per_token(caches: Iterable[CacheLayer], item: int) -> int:
    """Return the bytes of one position's keys and values in these layers, at `item` bytes per
    number. q8_0 adds a scale of 2 bytes for every 32 numbers of a head.
    """
    return sum(
        cached.numbers * item
        + (2 * cached.planes * cached.kv_heads * ceil(cached.head_size / 32) if item == 1 else 0)
        for cached in caches
    )


def sentence(checkpoint: Checkpoint, dtype: str) -> str:
    """Return a sentence for users on how weights and activations are stored and computed."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    kinds = _stored_kinds(checkpoint)
    floats = sorted(names[kind] for kind in kinds & names.keys())
    file = ", ".join([*floats, *sorted(kinds - names.keys())])
    if _computes_in_floats(checkpoint, dtype):
        return f"weights {file} as in the file, activations float32"
    parts = [f"{', '.join(floats)} made {dtype}"] if floats and dtype in QUANTIZED else []
    if parts and _some_become_bytes(checkpoint, dtype):
        parts += [f"q8_0 where inputs are no multiple of {_WHOLE_BLOCKS[dtype]}"]
    parts += ["embedding and output head made q8_0"] if parts and dtype != "q8_0" else []
    small = {kind for kind in kinds if kind.startswith(SMALL)}
    rounded = {kind for kind in kinds if kind.endswith(ROUNDED)} - small
    unchanged = sorted(kinds & _KINDS.keys() - small - (names.keys() if parts else set()))
    parts += [f"{', '.join(unchanged)} as in the file"] if unchanged else []
    parts += sorted(rounded)
    other = sorted(kinds - _KINDS.keys() - small - rounded)
    parts += [f"{', '.join(other)} made q8_0"] if other else []
    parts += [
        f"{kind}, in 8 bits" if kind.endswith(ROUNDED) else f"{kind} as the same numbers in 8 bits"
        for kind in sorted(small)
    ]
    return f"weights {', '.join(parts)}, activations 8 bits in groups of 32"


class Packer:
    """Copies one checkpoint into one native model.

    head_rows  int32[Vd] the rows that its output head has; None = all
    tensors    matrices and vectors to load instead of a whole model's
    dtype      what floats are converted to: "file" = unchanged, or a name of QUANTIZED

    Raises ModelError naming the tensor whose stored bytes do not fit its shape.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        head_rows: Ints | None = None,
        tensors: tuple[list[Place], list[Place]] | None = None,
        dtype: str = "file",
    ) -> None:
        self._checkpoint = checkpoint
        self._names = frozenset(checkpoint.names())
        self._head_rows, self._tensors, self._dtype = head_rows, tensors, dtype

    def planned_bytes(self) -> int:
        """Return the bytes that all packed tensors will take in the core, alignment included."""
        total = sum(self._bytes_of(place) for place in self._matrices())
        for place in self._vectors():
            total += 4 * prod(self._checkpoint.shape(place.name)) + _ALIGN
        return total

    def _bytes_of(self, place: Place) -> int:
        """Return the bytes of a matrix and its bias, alignment included."""
        rows, columns = self._checkpoint.shape(f"{place.name}.weight")
        if place.name.endswith(ABSORBED):
            return self._bytes_of_heads(place)
        if self._head_rows is not None and not self._has_all_rows(place):
            rows = len(self._head_rows)
        format = self._format_of(place, _kind(self._checkpoint, place.name))
        packed = int(native.load().forerun_packed_bytes(format, rows, columns))
        return packed + 4 * rows * (f"{place.name}.bias" in self._names) + 2 * _ALIGN

    def _bytes_of_heads(self, place: Place) -> int:
        format = self._format_of(place, self._kind_of_heads(place))
        arch = self._checkpoint.architecture
        latent = arch.latent
        assert latent is not None
        shapes = (latent.rank, latent.nope), (latent.value, latent.rank)
        packed = (native.load().forerun_packed_bytes(format, *shape) + _ALIGN for shape in shapes)
        return arch.heads * int(sum(packed))

    def _kind_of_heads(self, place: Place) -> str:
        """Return the format of each head's part: floats, or "few bits" to be widened and
        transposed.
        """
        kind = _kind(self._checkpoint, place.name)
        return kind if kind in _FLOATS else "few bits"

    def load(self, model: int, progress: Callable[[int, int], None] = lambda *_: None) -> None:
        """Set a native model's layers and pack every tensor into it. Raises ModelError if the core
        refuses one.

        progress  called after each matrix with (bytes packed so far, bytes in total)
        """
        arch = self._checkpoint.architecture
        if self._tensors is None:
            self._set_layers(model, arch)
        done, total = 0, sum(self._bytes_of(place) for place in self._matrices())
        for place in self._matrices():
            heads = place.name.endswith(ABSORBED)
            (self._load_heads if heads else self._load_matrix)(model, place)
            done += self._bytes_of(place)
            progress(done, total)
        if arch.tied_head and self._head_rows is None and self._tensors is None:
            native.load().forerun_tie_head(model)
        for place in self._vectors():
            set_vector(model, place, self._vector(place.name, arch))

    def _set_layers(self, model: int, arch: Architecture) -> None:
        for layer in range(arch.layers):
            set_layer(model, layer, layer_kind(arch, layer))
        cap = arch.final_softcap or 0.0
        native.load().forerun_set_scales(model, arch.embedding_scale, arch.logit_scale, cap)

    def _matrices(self) -> list[Place]:
        """Return the places of all matrices, and of a tied head if it has not all rows of the
        embedding.
        """
        if self._tensors is not None:
            return self._tensors[0]
        arch = self._checkpoint.architecture
        has_own_head = arch.tied_head and self._head_rows is not None
        return matrices(arch) + ([Place("model.embed_tokens", *_HEAD)] if has_own_head else [])

    def _vectors(self) -> list[Place]:
        return self._tensors[1] if self._tensors else vectors(self._checkpoint.architecture)

    def _has_all_rows(self, place: Place) -> bool:
        return self._head_rows is None or (place.layer, place.which) != _HEAD

    def _format_of(self, place: Place, kind: str) -> int:
        """Return the `Format` for a matrix stored as `kind`. Routers keep their precision: fewer
        bits would select other experts at nearly equal scores.
        """
        kind = kind.removesuffix(ROUNDED)
        if kind not in _KINDS or (kind in FEW_BITS and routes(place)):
            return WIDE if routes(place) else BYTES
        if kind in _FLOATS and not routes(place) and self._dtype in QUANTIZED:
            inputs = self._checkpoint.shape(f"{place.name}.weight")[1]
            converts = place.layer >= 0 and _fits(self._dtype, inputs)
            return QUANTIZED[self._dtype] if converts else BYTES
        return int(native.load().forerun_own_format(_KINDS[kind][0]))

    def _load_matrix(self, model: int, place: Place) -> None:
        name = f"{place.name}.weight"
        channels, inputs = self._checkpoint.shape(name)
        packed = self._checkpoint.packed(name)
        kind, rows = self._rows(place)
        if not self._has_all_rows(place):
            rows = np.ascontiguousarray(rows[self._head_rows])
            channels = len(rows)
        has_bias = f"{place.name}.bias" in self._names
        bias = self._floats(f"{place.name}.bias") if has_bias else None
        becomes = self._format_of(place, _kind(self._checkpoint, place.name))
        stored = Stored(kind, rows, (channels, inputs), becomes)
        set_matrix(model, place, stored, bias)
        if packed is not None:
            release(packed.rows)

    def _load_heads(self, model: int, place: Place) -> None:
        latent, kind = self._checkpoint.architecture.latent, self._kind_of_heads(place)
        assert latent is not None
        becomes = self._format_of(place, kind)
        kind = kind if kind in _FLOATS else "F32"
        every = absorbed(self._floats(f"{place.name}.weight"), latent)
        for number, matrix in enumerate(every):
            own = replace(place, which=place.which + number)
            stored = Stored(kind, in_kind(matrix, kind), matrix.shape, becomes)
            set_matrix(model, own, stored)

    def _rows(self, place: Place) -> tuple[str, AnyArray]:
        """Return (a name of _KINDS, a matrix's rows in that source's blocks)."""
        name, kind = f"{place.name}.weight", _kind(self._checkpoint, place.name)
        packed = self._checkpoint.packed(name)
        if packed is not None and kind in _KINDS:
            rows = np.ascontiguousarray(packed.rows)
            if kind == "MXFP4":
                check_fp4(rows, name)
            if kind in LEVELS:
                rows = rows_of_levels(kind, rows)
            if kind in TERNARY:
                rows = rows_of_q4_0(kind, rows)
            return kind, rows
        matrix = _grouped(self._checkpoint, name)
        if kind.removesuffix(ROUNDED) in FEW_BITS and not routes(place) and matrix is not None:
            source, rows = source_rows(kind, matrix)
            if source == "MXFP4":
                check_fp4(rows, name)
            return source, rows
        return "F32", np.ascontiguousarray(self._checkpoint.tensor(name), "<f4")

    def _vector(self, name: str, arch: Architecture) -> Floats:
        """Return a vector as the core reads it: a norm's weight with its offset (a delta net's own
        norm has none), A_log as a decay rate, and a convolution's weights with the tap as the outer
        index.
        """
        values = self._floats(name)
        if name.endswith(("linear_attn.conv1d.weight", "conv.conv.weight")):
            return values.squeeze(1).T.ravel()
        if name.endswith("linear_attn.A_log"):
            return -np.exp(values)
        if name.endswith("moe.gate.scale"):
            return values * np.float32(arch.hidden**-0.5)
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            return values + np.float32(arch.norm_offset)
        return values

    def _floats(self, name: str) -> Floats:
        return np.ascontiguousarray(self._checkpoint.tensor(name), "<f4")


@dataclass(frozen=True, slots=True)
class DraftTensors:
    """The tensors of an EAGLE head or a block drafter, and their places in the core.

    shapes    of the tensors in its file, by name
    matrices, vectors  in its file
    head      int32[Vd] the target's rows that are its output head; None: it has its own, or shares
              the target's
    format    of its matrices, a `Format` of csrc/quant.h
    """

    draft: DraftFile | BlockFile
    shapes: dict[str, tuple[int, ...]]
    matrices: list[Place]
    vectors: list[Place]
    head: Ints | None
    format: int

    def planned_bytes(self) -> int:
        """Return the bytes that the tensors will take in the core, alignment included."""
        library, hidden = native.load(), self.draft.head.hidden
        matrices = [self.shapes[f"{place.name}.weight"] for place in self.matrices]
        matrices += [] if self.head is None else [(len(self.head), hidden)]
        packed = (library.forerun_packed_bytes(self.format, *shape) for shape in matrices)
        vectors = (4 * prod(self.shapes[place.name]) + _ALIGN for place in self.vectors)
        biases = 4 * sum(rows for rows, _ in matrices)
        return int(sum(packed)) + 4 * _ALIGN * len(matrices) + sum(vectors) + biases

    def load(self, model: int, target: Checkpoint) -> None:
        """Copy the tensors into a native model; `target` has the head's rows. Raises ModelError if
        the core refuses one.
        """
        draft = self.draft
        for place in self.matrices:
            stored = Stored("F32", draft.tensor(f"{place.name}.weight"), becomes=self.format)
            bias = f"{place.name}.bias"
            values = draft.tensor(bias) if bias in self.shapes else None
            set_matrix(model, place, stored, values)
        for place in self.vectors:
            set_vector(model, place, draft.tensor(place.name).ravel())
        if self.head is not None:
            rows = target.tensor(target.architecture.head_tensor)[self.head]
            stored = Stored("F32", np.ascontiguousarray(rows), becomes=self.format)
            set_matrix(model, Place("lm_head", *_HEAD), stored)


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix to be copied into the core.

    kind     ggml's name of the rows' format
    shape    channels and inputs; None: those of `rows`
    becomes  a `Format` of csrc/quant.h
    """

    kind: str
    rows: AnyArray
    shape: tuple[int, int] | None = None
    becomes: int = BYTES


def set_layer(model: int, layer: int, kind: native.LayerKind) -> None:
    """Describe a native model's layer to the core, before its tensors. Raises ModelError if the
    core refuses it.
    """
    code = native.load().forerun_set_layer(model, layer, ctypes.byref(kind))
    _raise_for(code, f"model.layers.{layer}")


def set_matrix(
    model: int,
    place: Place,
    stored: Stored,
    bias: Floats | None = None,
) -> None:
    """Pack one matrix into a native model. bias: float32[channels]; None = none.

    Raises ModelError naming the tensor if its bytes do not fit its shape, or the core rejects it.
    """
    name, rows = place.name, stored.rows
    channels, inputs = stored.shape or rows.shape
    source, block, block_bytes = _KINDS[stored.kind]
    if inputs % block or rows.nbytes != channels * (inputs // block) * block_bytes:
        raise ModelError(
            f"{name}.weight: {rows.nbytes} bytes of {stored.kind} do not make a "
            f"[{channels}, {inputs}] matrix"
        )
    contiguous = np.ascontiguousarray(rows)
    code = native.load().forerun_set_matrix(
        model,
        place.layer,
        place.which,
        source,
        stored.becomes,
        contiguous.ctypes.data,
        channels,
        inputs,
        None if bias is None else bias.ctypes.data,
    )
    _raise_for(code, f"{name}.weight")


def set_vector(model: int, place: Place, values: Floats) -> None:
    """Copy one vector float32[n] into a native model. Raises ModelError naming the tensor."""
    own = np.ascontiguousarray(values, "<f4")
    where = place.layer, place.which
    code = native.load().forerun_set_vector(model, *where, own.ctypes.data, len(own))
    _raise_for(code, place.name)


def _raise_for(code: int, name: str) -> None:
    if code:
        raise ModelError(f"{name}: {native.load().forerun_error().decode()}")
