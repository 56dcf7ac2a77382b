"""The tensors of matrices stored in few bits, by layout.

w [N,K] is the matrix, y = w x; q are its numbers, s scales, z zero points, b offsets: w = s (q - z)
+ b. A stream has numbers one after another along K, the lowest bits first. Experts' matrices may be
one tensor, with an axis more in front of all parts.

float8  weight float8[N,K]; weight_scale_inv or weight_scale s, one for each block of rows and
        columns
int8    weight int8[N,K]; weight_scale s; weight_zero_point z int8, as s
packed  weight_packed int32[N,K/n], a stream, each more by 2^(bits-1); weight_scale s [N,K/group];
        weight_zero_point, packed likewise along N, int32[N/n,K/group]; weight_shape; weight_g_idx.
        Or weight_packed uint8[N,K/2] of E2M1, s exponents (mxfp4), or E4M3 to be divided by
        weight_global_scale (nvfp4)
fp4     weight uint8[N,K/2], a stream of E2M1; weight_scale exponents [N,K/32] (Quark), or E4M3
        [N,K/16] times weight_scale_2 (ModelOpt)
gptq    qweight int32[K/n,N] along K; qzeros int32[K/group,N/n] along N; scales s [K/group,N];
        g_idx int32[K] the group of every column
awq     as gptq, but qweight int32[K,N/8] along N, and the eight numbers of a word are columns
        0, 2, 4, 6, 1, 3, 5, 7 of eight, in qzeros too; no g_idx
quark   as awq, but weight, weight_zero_point and weight_scale; q and z may be in two's complement
mlx     weight uint32[N,K*bits/32], a stream; scales s [N,K/group]; biases b, as s (MLX's affine
        mode), or q are floats and s bytes: exponents (mxfp4, mxfp8) or E4M3 (nvfp4)
bnb4    weight uint8[N*K/2,1] of places in quant_map float32[16], the first in the high bits;
        absmax float32[N*K/group] s, or uint8 places in nested_quant_map, times nested_absmax of a
        larger group, plus an offset, which quant_state says (bitsandbytes)
bnb8    weight int8[N,K]; SCB float32[N], 127 s
blocks  NAME_blocks uint8[N,K/32,16], a stream of E2M1; NAME_scales uint8[N,K/32] exponents
        (gpt-oss)
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from forerun.checkpoints.mapped import TensorFile
from forerun.checkpoints.quantised.method import Layout, Method
from forerun.errors import ModelError

STATES = ("bitsandbytes__nf4", "bitsandbytes__fp4")
"""Tensors of bitsandbytes whose bytes are JSON."""
_MOST_STATE = 1 << 16
PARTS: dict[Layout, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "float8": (("weight",), ("weight_scale_inv", "weight_scale")),
    "int8": (("weight", "weight_scale"), ("weight_zero_point",)),
    "packed": (
        ("weight_packed", "weight_scale"),
        ("weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale"),
    ),
    "fp4": (("weight", "weight_scale"), ("weight_scale_2",)),
    "gptq": (("qweight", "qzeros", "scales"), ("g_idx",)),
    "awq": (("qweight", "qzeros", "scales"), ()),
    "quark": (("weight", "weight_zero_point", "weight_scale"), ()),
    "mlx": (("weight", "scales"), ("biases",)),
    "blocks": (("blocks", "scales"), ()),
    "bnb4": (("weight", "absmax", "quant_map"), ("nested_absmax", "nested_quant_map", *STATES)),
    "bnb8": (("weight", "SCB"), ("weight_format",)),
}
"""The tensors of a matrix in each layout: (required ones, of which the first identifies the layout;
optional ones).
"""
INTEGERS = {"I8": "<i1", "I32": "<i4", "I64": "<i8"}
"""Types of integers -> NumPy's names."""


def fitting(
    name: str, methods: tuple[Method, ...], parts: Mapping[str, tuple[TensorFile, str]]
) -> tuple[Method, tuple[int, ...]]:
    """Return the method that fits a module's tensors, and their matrix's shape (N, K) or (experts,
    N, K). Raises ModelError naming the tensor that is missing, left over, of another type or of
    another shape.

    parts  last part of a tensor's name -> (the file that has it, its name there)
    """
    named = [method for method in methods if name in method.modules]
    methods = tuple(named or (method for method in methods if not method.modules))
    possible = [method for method in methods if parts.keys() >= set(PARTS[method.layout][0])]
    if not possible:
        required = " or ".join(sorted({", ".join(PARTS[method.layout][0]) for method in methods}))
        raise ModelError(f"{name} has {', '.join(sorted(parts))}; it needs {required}")
    # Groups of modules differ at most in size, which the shape of the scales shows.
    faults = []
    for method in possible:
        try:
            made = _of_state(name, method, parts)
            return made, _checked(name, made, parts)
        except ModelError as error:
            faults.append(error)
    raise faults[0]


def _of_state(name: str, method: Method, parts: Mapping[str, tuple[TensorFile, str]]) -> Method:
    """Return the method with the group of bitsandbytes' 4 bits, which only its files say. Raises
    ModelError for integers in the order of a GPU's tiles.
    """
    if method.layout == "bnb4":
        return replace(method, group=QuantState.of(name, parts).group)
    if "weight_format" in parts:
        file, stored = parts["weight_format"]
        if file.data[file.tensors[stored].start]:
            raise ModelError(f"{stored} is not 0: save the model with a newer bitsandbytes")
    return method


def _checked(
    name: str, method: Method, parts: Mapping[str, tuple[TensorFile, str]]
) -> tuple[int, ...]:
    shapes = {part: file.tensors[stored].shape for part, (file, stored) in parts.items()}
    kinds = {part: file.tensors[stored].kind for part, (file, stored) in parts.items()}
    if {"weight_scale_inv", "weight_scale"} <= parts.keys():
        raise ModelError(f"{name} has weight_scale_inv and weight_scale; {method.title} has one")
    whole = _shape(name, method, shapes, parts)
    expected = _expected(method, whole, shapes)
    rest = sorted(parts.keys() - expected.keys() - {"weight_shape", *STATES})
    if rest:
        raise ModelError(f"{name} has {', '.join(rest)}, which {method.title} has not")
    for part, tensor in expected.items():
        if part not in shapes and tensor.needed:
            other = ", and so is weight_scale_inv" if part == "weight_scale" else ""
            raise ModelError(f"{name}.{part} is missing{other}; {method.title} needs it")
        if part not in shapes:
            continue
        stored = parts[part][1]
        if kinds[part] not in tensor.kinds:
            raise ModelError(
                f"{stored} is stored as {kinds[part]}, not {' or '.join(tensor.kinds)}"
            )
        if shapes[part] not in tensor.shapes:
            expected_text = " or ".join(str(list(each)) for each in tensor.shapes)
            raise ModelError(
                f"{stored} is {list(shapes[part])}, not {expected_text}: "
                f"{method.title}, a matrix of {' x '.join(map(str, whole))}"
            )
    return whole


def _shape(
    name: str,
    method: Method,
    shapes: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, tuple[TensorFile, str]],
) -> tuple[int, ...]:
    """Return (N, K), or (experts, N, K), from the tensor with the numbers."""
    first = PARTS[method.layout][0][0]
    known = shapes[first]
    if method.layout == "blocks":
        if len(known) != 4 or known[3] * 2 != method.group:
            raise ModelError(
                f"{parts[first][1]} is {list(known)}; it must be [experts, rows, groups, 16]"
            )
        return (*known[:2], known[2] * method.group)
    if len(known) != 2 and (method.layout != "mlx" or len(known) != 3):
        raise ModelError(f"{name} is stored as {list(known)}; it must have two dimensions")
    words, shape = _words(method), known
    match method.layout:
        case "gptq":
            shape = known[1], known[0] * words
        case "awq" | "quark":
            shape = known[1] * words, known[0]
        case "packed":
            shape = known[0], _declared_columns(name, shapes, parts, known[1] * words, known[0])
        case "mlx" | "fp4":
            shape = (*known[:-1], known[-1] * words if words else known[-1] * 32 // method.bits)
        case "bnb4":
            shape = QuantState.of(name, parts).shape
    return shape


def _words(method: Method) -> int:
    """Return how many numbers a word, or a byte of floats, has; 0 if some lie across words."""
    of_bytes = method.numbers == "fp4" and method.layout != "mlx"
    width = 8 if of_bytes else 32
    return 0 if width % method.bits else width // method.bits


def _declared_columns(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, tuple[TensorFile, str]],
    most: int,
    rows: int,
) -> int:
    """Return K from weight_shape, since the last word of a row may not be full."""
    if "weight_shape" not in parts:
        return most
    file, stored = parts["weight_shape"]
    there = file.tensors[stored]
    if there.shape != (2,) or there.kind not in ("I32", "I64"):
        raise ModelError(f"{name}.weight_shape is not two whole numbers")
    flat = file.data[there.start : there.start + there.size].view(INTEGERS[there.kind])
    declared_rows, declared = flat.tolist()
    if declared_rows != rows or not most - 32 < declared <= most:
        raise ModelError(
            f"{name}.weight_shape says {declared_rows} x {declared}, its tensors otherwise"
        )
    return int(declared)


class _Tensor(NamedTuple):
    """The shapes and types that a tensor may have, and whether it must be there."""

    kinds: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    needed: bool = True


_FLOATS = ("F32", "F16", "BF16")
_ONE: tuple[tuple[int, ...], ...] = ((1,), ())


def _expected(
    method: Method, whole: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, _Tensor]:
    """Return all tensors that a matrix may have, but weight_shape and STATES."""
    (rows, columns), words = whole[-2:], _words(method) or 1
    groups = count(columns, method.group)
    kinds = ("U8", f"F8_{method.scale}") if method.scale else _FLOATS
    each = ((*whole[:-1], groups),)
    blocks = count(rows, method.rows), groups
    by_block = (blocks, *(_ONE if blocks == (1, 1) else ((blocks[0],),) if groups == 1 else ()))
    made: dict[str, _Tensor] = {}
    match method.layout:
        case "gptq" | "awq" | "quark":
            numbers, zeros, scales = PARTS[method.layout][0]
            made[numbers] = _Tensor(("I32",), (shapes[numbers],))
            made[zeros] = _Tensor(("I32",), ((groups, rows // words),))
            made[scales] = _Tensor(kinds, ((groups, rows),))
            if method.layout == "gptq":
                made["g_idx"] = _Tensor(("I32",), ((columns,),), False)
        case "mlx":
            packed = (*whole[:-1], columns * method.bits // 32)
            made |= {"weight": _Tensor(("U32",), (packed,)), "scales": _Tensor(kinds, each)}
            if method.offsets:
                made["biases"] = _Tensor(kinds, each)
        case "blocks":
            made["blocks"] = _Tensor(("U8",), (shapes["blocks"],))
            made["scales"] = _Tensor(kinds, each)
        case "fp4":
            made["weight"] = _Tensor(("U8",), ((rows, columns // words),))
            made["weight_scale"] = _Tensor(kinds, by_block)
            if method.scale == "E4M3":
                made["weight_scale_2"] = _Tensor(("F32",), _ONE)
        case "packed":
            stored = ("U8" if method.numbers == "fp4" else "I32",)
            made["weight_packed"] = _Tensor(stored, ((rows, -(-columns // words)),))
            made["weight_scale"] = _Tensor(kinds, by_block)
            points = ((-(-rows // words), groups),)
            made["weight_zero_point"] = _Tensor(("I32",), points, method.zeros)
            made["weight_g_idx"] = _Tensor(("I32",), ((columns,),), False)
            if method.scale == "E4M3":
                made["weight_global_scale"] = _Tensor(("F32",), _ONE)
        case "bnb8":
            made |= {"weight": _Tensor(("I8",), (whole,)), "SCB": _Tensor(("F32",), ((rows,),))}
            made["weight_format"] = _Tensor(("U8",), _ONE, False)
        case "bnb4":
            made |= _expected_of_4_bits(rows * columns, method.group, "nested_absmax" in shapes)
        case _:
            made["weight"] = _Tensor(("I8" if method.layout == "int8" else "F8_E4M3",), (whole,))
            scale = "weight_scale_inv" if "weight_scale_inv" in shapes else "weight_scale"
            made[scale] = _Tensor(kinds, by_block)
            if method.layout == "int8":
                made["weight_zero_point"] = _Tensor(("I8",), by_block, method.zeros)
    return made


def _expected_of_4_bits(numbers: int, group: int, nested: bool) -> dict[str, _Tensor]:
    made = {
        "weight": _Tensor(("U8",), ((numbers // 2, 1), (1, numbers // 2))),
        "absmax": _Tensor(("U8" if nested else "F32",), ((numbers // group,),)),
        "quant_map": _Tensor(("F32",), ((16,),)),
    }
    if nested:
        groups = count(numbers // group, QuantState.nested)
        made["nested_absmax"] = _Tensor(("F32",), ((groups,),))
        made["nested_quant_map"] = _Tensor(("F32",), ((256,),))
    return made


@dataclass(frozen=True, slots=True)
class QuantState:
    """What bitsandbytes says of a matrix of 4 bits.

    group   numbers that share a scale
    shape   (N, K)
    offset  what is added to nested scales
    """

    group: int
    shape: tuple[int, int]
    offset: float
    nested: ClassVar[int] = 256

    @classmethod
    def of(cls, name: str, parts: Mapping[str, tuple[TensorFile, str]]) -> "QuantState":
        """Read a matrix's. Raises ModelError if it is missing or damaged, or a row has no whole
        groups.
        """
        part = next((part for part in STATES if part in parts), None)
        if part is None:
            raise ModelError(f"{name}.weight.quant_state.{STATES[0]} is missing")
        file, stored = parts[part]
        there = file.tensors[stored]
        try:
            if there.size > _MOST_STATE:
                raise ValueError("it is too long")
            state = json.loads(file.data[there.start : there.start + there.size].tobytes())
            rows, columns = (int(size) for size in state["shape"])
            made = cls(
                int(state["blocksize"]), (rows, columns), float(state.get("nested_offset", 0))
            )
            nested = state.get("nested_blocksize", cls.nested)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"{stored} is damaged: {type(error).__name__} {error}") from error
        if min(rows, columns, made.group) < 1 or columns % made.group or made.group % 2:
            raise ModelError(
                f"{stored}: blocks of {made.group} do not divide the {columns} columns of a matrix"
            )
        if nested != cls.nested or not math.isfinite(made.offset):
            raise ModelError(f"{stored}: nested blocks are {nested}, of {made.offset}; not 256")
        return made


def count(length: int, part: int) -> int:
    """Return the number of blocks of `part` in `length`, of which the last may be smaller; 0 = one
    block.
    """
    return -(-length // part) if part else 1
