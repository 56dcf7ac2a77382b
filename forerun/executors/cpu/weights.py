"""A checkpoint's tensors into the compiled core, packed as csrc/quant.h describes.

Floats, Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4 and 4-bit integers in groups of 128 keep the
file's own numbers exactly, in as many bytes; smaller groups in twice as many. Other quants, and
floats where that is asked for, become 8 bits in groups of 32: symmetric, scale = largest / 127 as a
half, rounded to nearest; or floats 4 bits, 16 steps from a group's smallest number to its largest.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forerun.errors import ModelError
from forerun.executors.cpu import native
from forerun.executors.cpu.few_bits import TILE, check_fp4, rows_of_bytes, rows_of_tiles
from forerun.models.arch import Architecture
from forerun.models.checkpoint import Checkpoint, InFourBits
from forerun.models.layer_spec import NORM_NAMES, Dense, Experts, LayerSpec
from forerun.models.mapped import release
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
}
"""ggml's name -> `Source` of csrc/quant.h, numbers in a block, bytes of a block."""
_INT4 = "4-bit integers"
"""With a scale and a zero point for 128 inputs, or a multiple of that (GPTQ, AWQ)."""
_SMALL_INT4 = "4-bit integers in groups below 128"
"""As bytes these are the same numbers."""
_FLOATS = ("F32", "F16", "BF16")
BYTES = 2
"""`Format` of 8 bits in groups of 32."""
_WIDE = 6
"""`Format` of float32."""
QUANTIZED = {"q8_0": BYTES, "q4_1": 1}
"""What floats can be made -> `Format` of csrc/quant.h; embedding and head 8 bits at least."""
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
_FEED, _ROUTER, _SHARED_GATE, _EXPERTS = 4, 7, 8, 9
"""Numbers of a layer's matrices in csrc/model.cpp, `Model::matrix`; attention's are the first."""
_ALIGN = 64
_HEAD = (-1, 1)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor goes: layer (-1 = the model's own) and number within it."""

    name: str
    layer: int
    which: int


def matrices(arch: Architecture) -> list[Place]:
    """Where all matrices go, in the order in which a step reads them; names without `.weight`."""
    places = [Place("model.embed_tokens", -1, 0)]
    for layer, spec in enumerate(arch.layer_specs):
        prefix = f"model.layers.{layer}."
        places += _placed(f"{prefix}self_attn.", _ATTENTION, layer, 0)
        match spec.feed_forward:
            case Dense():
                places += _placed(f"{prefix}mlp.", _FEED_FORWARD, layer, _FEED)
            case Experts() as experts:
                places += _expert_matrices(f"{prefix}mlp.", experts, layer)
    return places if arch.tied_head else [*places, Place("lm_head", *_HEAD)]


def _expert_matrices(prefix: str, experts: Experts, layer: int) -> list[Place]:
    places = [Place(f"{prefix}gate", layer, _ROUTER)]
    if experts.shared_gate:
        places.append(Place(f"{prefix}shared_expert_gate", layer, _SHARED_GATE))
    for expert in range(experts.count):
        first = _EXPERTS + len(_FEED_FORWARD) * expert
        places += _placed(f"{prefix}experts.{expert}.", _FEED_FORWARD, layer, first)
    if experts.shared:
        places += _placed(f"{prefix}shared_expert.", _FEED_FORWARD, layer, _FEED)
    return places


def _placed(prefix: str, names: tuple[str, ...], layer: int, first: int) -> list[Place]:
    return [Place(prefix + name, layer, first + i) for i, name in enumerate(names)]


def vectors(arch: Architecture) -> list[Place]:
    """Where each norm's weight and a router's correction go: canonical name, layer (-1 = the
    model's own) and which of the layer's vectors it is.
    """
    places = []
    for layer, spec in enumerate(arch.layer_specs):
        prefix, norms = f"model.layers.{layer}.", NORM_NAMES[spec.norms]
        normed = spec.qk_norm or spec.wide_qk_norm
        experts, correction = spec.feed_forward, "mlp.gate.e_score_correction_bias"
        named = (
            f"{norms.before_attention}.weight" if norms.before_attention else None,
            f"{norms.before_feed_forward}.weight" if norms.before_feed_forward else None,
            "self_attn.q_norm.weight" if normed else None,
            "self_attn.k_norm.weight" if normed else None,
            f"{norms.after_attention}.weight" if norms.after_attention else None,
            f"{norms.after_feed_forward}.weight" if norms.after_feed_forward else None,
            correction if isinstance(experts, Experts) and experts.router.correction else None,
            "self_attn.sinks" if spec.attention.sinks else None,
        )
        places += [Place(prefix + name, layer, i) for i, name in enumerate(named) if name]
    return [*places, Place("model.norm.weight", -1, 0)]


def _layer_kind(spec: LayerSpec) -> native.LayerKind:
    """The layer for the core, which `limits.refusal` finds nothing in."""
    kind = native.LayerKind(
        window=spec.attention.window or 0,
        clamped=spec.activation == "clamped_silu",
        rotated=spec.rope.rotated != 0,
        wide_norms=spec.wide_qk_norm,
        score_scale=spec.attention.scale,
        residual=spec.residual,
    )
    match spec.feed_forward:
        case Dense(width):
            kind.ffn = width
        case Experts() as experts:
            router = experts.router
            kind.ffn, kind.experts, kind.top_k = experts.width, experts.count, experts.top_k
            kind.shared, kind.sigmoid = experts.shared, router.scores == "sigmoid"
            kind.normalised, kind.router_scale = router.normalised, router.scale
            kind.groups, kind.kept = router.groups, router.kept
    return kind


def _kind(checkpoint: Checkpoint, name: str) -> str:
    """How a matrix is stored, as ggml calls it; "few bits" where nobody has a name for that."""
    packed = checkpoint.packed(f"{name}.weight")
    if packed is not None:
        return packed.kind
    group = 0
    if isinstance(checkpoint, InFourBits):
        group = checkpoint.four_bit_group(f"{name}.weight")
    return "few bits" if not group or group % 32 else _SMALL_INT4 if group % TILE else _INT4


def _stored_kinds(checkpoint: Checkpoint) -> set[str]:
    """How the layers' matrices are stored, routers not counted: they are floats."""
    places = [place for place in matrices(checkpoint.architecture) if place.layer >= 0]
    return {_kind(checkpoint, place.name) for place in places if not _routes(place)}


def widens(checkpoint: Checkpoint) -> bool:
    """Whether some matrices take more bytes in the core than in their file."""
    return bool(_stored_kinds(checkpoint) - _KINDS.keys())


def _routes(place: Place) -> bool:
    return place.layer >= 0 and place.which in (_ROUTER, _SHARED_GATE)


def _computes_in_floats(checkpoint: Checkpoint, dtype: str) -> bool:
    """Whether all layers' matrices stay floats, as activations and the cache then do."""
    return dtype not in QUANTIZED and _stored_kinds(checkpoint) <= set(_FLOATS)


def cache_item(checkpoint: Checkpoint, dtype: str) -> int:
    """Bytes of a number of keys and values: 4 where the model computes in floats, else 2."""
    return 4 if _computes_in_floats(checkpoint, dtype) else 2


def cache_bytes_per_token(arch: Architecture, item: int) -> int:
    """Bytes of one position's keys and values in all layers, `item` bytes a number."""
    return arch.layers * 2 * arch.kv_heads * arch.head_size * item


def sentence(checkpoint: Checkpoint, dtype: str) -> str:
    """How weights and activations are stored and computed, in words for people."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    kinds = _stored_kinds(checkpoint)
    floats = sorted(names[kind] for kind in kinds & names.keys())
    file = ", ".join([*floats, *sorted(kinds - names.keys())])
    if _computes_in_floats(checkpoint, dtype):
        return f"weights {file} as in the file, activations float32"
    made = [f"{', '.join(floats)} made {dtype}"] if floats and dtype in QUANTIZED else []
    made += ["embedding and output head made q8_0"] if made and dtype != "q8_0" else []
    kept = sorted(kinds & _KINDS.keys() - (names.keys() if made else set()))
    made += [f"{', '.join(kept)} as in the file"] if kept else []
    other = sorted(kinds - _KINDS.keys() - {_SMALL_INT4})
    made += [f"{', '.join(other)} made q8_0"] if other else []
    made += [f"{_SMALL_INT4} as the same numbers in 8 bits"] if _SMALL_INT4 in kinds else []
    return f"weights {', '.join(made)}, activations 8 bits in groups of 32"


class Packer:
    """Moves one checkpoint into one native model.

    head_rows  int32[Vd] the rows that its output head has; None = all
    some       matrices and vectors to load instead of a whole model's
    dtype      what floats become: "file", which is what they are, or a name of QUANTIZED

    Raises ModelError naming the tensor whose stored bytes do not fit its shape.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        checkpoint: Checkpoint,
        head_rows: Ints | None = None,
        some: tuple[list[Place], list[Place]] | None = None,
        dtype: str = "file",
    ) -> None:
        self._library = library
        self._checkpoint = checkpoint
        self._names = frozenset(checkpoint.names())
        self._head_rows, self._some, self._dtype = head_rows, some, dtype

    def planned_bytes(self) -> int:
        """Bytes that all packed tensors will take in the core, alignment included."""
        total = sum(self._bytes_of(place) for place in self._matrices())
        for place in self._vectors():
            total += 4 * self._checkpoint.shape(place.name)[0] + _ALIGN
        return total

    def _bytes_of(self, place: Place) -> int:
        """Of a matrix and its bias, alignment included."""
        rows, columns = self._checkpoint.shape(f"{place.name}.weight")
        if self._head_rows is not None and not self._whole(place):
            rows = len(self._head_rows)
        becomes = self._becomes(place, _kind(self._checkpoint, place.name))
        packed = int(self._library.forerun_packed_bytes(becomes, rows, columns))
        return packed + 4 * rows * (f"{place.name}.bias" in self._names) + 2 * _ALIGN

    def load(self, model: int, progress: Callable[[int, int], None] = lambda *_: None) -> None:
        """Set a native model's layers and pack every tensor into it. Raises ModelError.

        progress  is called after each matrix with bytes of those that are packed, and of all
        """
        arch = self._checkpoint.architecture
        if self._some is None:
            self._set_layers(model, arch)
        done, total = 0, sum(self._bytes_of(place) for place in self._matrices())
        for place in self._matrices():
            self._load_matrix(model, place)
            done += self._bytes_of(place)
            progress(done, total)
        if arch.tied_head and self._head_rows is None and self._some is None:
            self._library.forerun_tie_head(model)
        for place in self._vectors():
            values = self._floats(place.name)
            set_vector(self._library, model, (place.name, place.layer, place.which), values)

    def _set_layers(self, model: int, arch: Architecture) -> None:
        for layer, spec in enumerate(arch.layer_specs):
            set_layer(self._library, model, layer, spec)
        self._library.forerun_set_scales(model, arch.embedding_scale, arch.logit_scale)

    def _matrices(self) -> list[Place]:
        """All, and a tied head where it has not all rows of the embedding."""
        if self._some is not None:
            return self._some[0]
        arch = self._checkpoint.architecture
        some = arch.tied_head and self._head_rows is not None
        return matrices(arch) + ([Place("model.embed_tokens", *_HEAD)] if some else [])

    def _vectors(self) -> list[Place]:
        return self._some[1] if self._some else vectors(self._checkpoint.architecture)

    def _whole(self, place: Place) -> bool:
        return self._head_rows is None or (place.layer, place.which) != _HEAD

    def _becomes(self, place: Place, kind: str) -> int:
        """The `Format` of what is stored as `kind`. Routers stay what they are: where scores are
        near each other, fewer bits would choose other experts.
        """
        if kind not in _KINDS:
            return _WIDE if _routes(place) else BYTES
        if kind in _FLOATS and not _routes(place) and self._dtype in QUANTIZED:
            return QUANTIZED[self._dtype] if place.layer >= 0 else BYTES
        return int(self._library.forerun_own_format(_KINDS[kind][0]))

    def _load_matrix(self, model: int, place: Place) -> None:
        name = f"{place.name}.weight"
        channels, inputs = self._checkpoint.shape(name)
        packed = self._checkpoint.packed(name)
        kind, rows = self._rows(place)
        if not self._whole(place):
            rows = np.ascontiguousarray(rows[self._head_rows])
            channels = len(rows)
        has_bias = f"{place.name}.bias" in self._names
        bias = self._floats(f"{place.name}.bias") if has_bias else None
        where = (place.name, place.layer, place.which)
        becomes = self._becomes(place, _kind(self._checkpoint, place.name))
        set_matrix(
            self._library, model, where, Stored(kind, rows, (channels, inputs), becomes), bias
        )
        if packed is not None:
            release(packed.rows)

    def _rows(self, place: Place) -> tuple[str, AnyArray]:
        """A matrix's rows as a name of _KINDS says that they are stored."""
        name, kind = f"{place.name}.weight", _kind(self._checkpoint, place.name)
        packed = self._checkpoint.packed(name)
        if packed is not None and kind in _KINDS:
            rows = np.ascontiguousarray(packed.rows)
            if kind == "MXFP4":
                check_fp4(rows, name)
            return kind, rows
        if kind == _INT4 or (kind == _SMALL_INT4 and not _routes(place)):
            assert isinstance(self._checkpoint, InFourBits)
            matrix = self._checkpoint.four_bits(name)
            return (
                (kind, rows_of_tiles(matrix)) if kind == _INT4 else ("Q8_0", rows_of_bytes(matrix))
            )
        return "F32", np.ascontiguousarray(self._checkpoint.tensor(name), "<f4")

    def _floats(self, name: str) -> Floats:
        return np.ascontiguousarray(self._checkpoint.tensor(name), "<f4")


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix on its way into the core.

    kind     ggml's name of how its rows are stored
    shape    channels and inputs; None: those of `rows`
    becomes  a `Format` of csrc/quant.h
    """

    kind: str
    rows: AnyArray
    shape: tuple[int, int] | None = None
    becomes: int = BYTES


def set_layer(library: ctypes.CDLL, model: int, layer: int, spec: LayerSpec) -> None:
    """Make a native model's layer what `spec` says, before its tensors. Raises ModelError."""
    code = library.forerun_set_layer(model, layer, ctypes.byref(_layer_kind(spec)))
    _raise_for(library, code, f"model.layers.{layer}")


def set_matrix(
    library: ctypes.CDLL,
    model: int,
    place: tuple[str, int, int],
    stored: Stored,
    bias: Floats | None = None,
) -> None:
    """Pack one matrix into a native model.

    place  (name without `.weight`, layer, number within it)
    bias   float32[channels]; None = none

    Raises ModelError naming the tensor where its bytes do not make its shape, or the core refuses.
    """
    (name, layer, which), rows = place, stored.rows
    channels, inputs = stored.shape or rows.shape
    source, block, block_bytes = _KINDS[stored.kind]
    if inputs % block or rows.nbytes != channels * (inputs // block) * block_bytes:
        raise ModelError(
            f"{name}.weight: {rows.nbytes} bytes of {stored.kind} do not make a "
            f"[{channels}, {inputs}] matrix"
        )
    held = np.ascontiguousarray(rows)
    code = library.forerun_set_matrix(
        model,
        layer,
        which,
        source,
        stored.becomes,
        held.ctypes.data,
        channels,
        inputs,
        None if bias is None else bias.ctypes.data,
    )
    _raise_for(library, code, f"{name}.weight")


def set_vector(
    library: ctypes.CDLL, model: int, place: tuple[str, int, int], values: Floats
) -> None:
    """Copy one vector float32[n] into a native model. Raises ModelError naming the tensor."""
    name, layer, which = place
    held = np.ascontiguousarray(values, "<f4")
    code = library.forerun_set_vector(model, layer, which, held.ctypes.data, len(held))
    _raise_for(library, code, name)


def _raise_for(library: ctypes.CDLL, code: int, name: str) -> None:
    if code:
        raise ModelError(f"{name}: {library.forerun_error().decode()}")
