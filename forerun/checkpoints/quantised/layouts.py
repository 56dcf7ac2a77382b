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
modelopt  weight uint8[N,K/2] of E2M1; weight_scale E4M3 [N,K/16] times weight_scale_2
gptq    qweight int32[K/n,N] along K; qzeros int32[K/group,N/n] along N; scales s [K/group,N];
        g_idx int32[K] the group of every column
awq     as gptq, but qweight int32[K,N/8] along N, and the eight numbers of a word are columns
        0, 2, 4, 6, 1, 3, 5, 7 of eight, in qzeros too; no g_idx
mlx     weight uint32[N,K*bits/32], a stream; scales s [N,K/group]; biases b, as s (MLX's affine
        mode), or q are floats and s bytes: exponents (mxfp4, mxfp8) or E4M3 (nvfp4)
blocks  NAME_blocks uint8[N,K/32,16], a stream of E2M1; NAME_scales uint8[N,K/32] exponents
        (gpt-oss)
"""

from collections.abc import Mapping

from forerun.checkpoints.mapped import TensorFile
from forerun.checkpoints.quantised.method import Layout, Method
from forerun.errors import ModelError

PARTS: dict[Layout, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "float8": (("weight",), ("weight_scale_inv", "weight_scale")),
    "int8": (("weight", "weight_scale"), ("weight_zero_point",)),
    "packed": (
        ("weight_packed", "weight_scale"),
        ("weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale"),
    ),
    "modelopt": (("weight", "weight_scale", "weight_scale_2"), ()),
    "gptq": (("qweight", "qzeros", "scales"), ("g_idx",)),
    "awq": (("qweight", "qzeros", "scales"), ()),
    "mlx": (("weight", "scales"), ("biases",)),
    "blocks": (("blocks", "scales"), ()),
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
            return method, _checked(name, method, parts)
        except ModelError as error:
            faults.append(error)
    raise faults[0]


def _checked(
    name: str, method: Method, parts: Mapping[str, tuple[TensorFile, str]]
) -> tuple[int, ...]:
    required, optional = PARTS[method.layout]
    rest = sorted(parts.keys() - set(required) - set(optional))
    if rest:
        raise ModelError(f"{name} has {', '.join(rest)}, which {method.title} has not")
    if {"weight_scale_inv", "weight_scale"} <= parts.keys():
        raise ModelError(f"{name} has weight_scale_inv and weight_scale; {method.title} has one")
    shapes = {part: file.tensors[stored].shape for part, (file, stored) in parts.items()}
    kinds = {part: file.tensors[stored].kind for part, (file, stored) in parts.items()}
    whole = _shape(name, method, shapes, parts)
    for part, (allowed, types) in _expected(method, whole, shapes).items():
        if part not in shapes:
            other = ", and so is weight_scale_inv" if part == "weight_scale" else ""
            raise ModelError(f"{name}.{part} is missing{other}; {method.title} needs it")
        if kinds[part] not in types:
            raise ModelError(
                f"{parts[part][1]} is stored as {kinds[part]}, not {' or '.join(types)}"
            )
        if shapes[part] not in allowed:
            expected_text = " or ".join(str(list(each)) for each in allowed)
            raise ModelError(
                f"{parts[part][1]} is {list(shapes[part])}, not {expected_text}: "
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
    words = _words(method)
    match method.layout:
        case "gptq":
            return known[1], known[0] * words
        case "awq":
            return known[1] * words, known[0]
        case "packed":
            return known[0], _declared_columns(name, shapes, parts, known[1] * words, known[0])
        case "mlx" | "modelopt":
            return (*known[:-1], known[-1] * words if words else known[-1] * 32 // method.bits)
    return known


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


_Expected = dict[str, tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]]
_FLOATS = ("F32", "F16", "BF16")


def _expected(
    method: Method, whole: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
) -> _Expected:
    """Return the shapes and types that each tensor may have."""
    rows, columns = whole[-2:]
    words = _words(method)
    groups = count(columns, method.group)
    scale_types = ("U8", f"F8_{method.scale}") if method.scale else _FLOATS
    if method.layout in ("mlx", "blocks"):
        shared = ((*whole[:-1], groups),)
        if method.layout == "blocks":
            return {"blocks": ((shapes["blocks"],), ("U8",)), "scales": (shared, scale_types)}
        packed = (*whole[:-1], columns * method.bits // 32)
        expected: _Expected = {"weight": ((packed,), ("U32",)), "scales": (shared, scale_types)}
        return expected | ({} if method.scale else {"biases": (shared, scale_types)})
    if method.layout in ("gptq", "awq"):
        expected = {
            "qzeros": (((groups, rows // words),), ("I32",)),
            "scales": (((groups, rows),), _FLOATS),
            PARTS[method.layout][0][0]: ((shapes["qweight"],), ("I32",)),
        }
        if "g_idx" in shapes:
            expected["g_idx"] = (((columns,),), ("I32",))
        return expected
    blocks = (count(rows, method.rows), groups)
    scales: list[tuple[int, ...]] = [blocks]
    if blocks == (1, 1):
        scales += [(1,), ()]
    elif blocks[1] == 1:
        scales.append((blocks[0],))
    scale = "weight_scale_inv" if "weight_scale_inv" in shapes else "weight_scale"
    expected = {scale: (tuple(scales), scale_types)}
    if method.scale == "E4M3":
        unit = "weight_scale_2" if method.layout == "modelopt" else "weight_global_scale"
        expected[unit] = (((1,), ()), ("F32",))
    if method.layout == "modelopt":
        expected["weight"] = (((rows, columns // words),), ("U8",))
        return expected
    if method.layout == "packed":
        stored = "U8" if method.numbers == "fp4" else "I32"
        expected["weight_packed"] = (((rows, -(-columns // words)),), (stored,))
        if method.zeros:
            expected["weight_zero_point"] = (((-(-rows // words), groups),), ("I32",))
        if "weight_g_idx" in shapes:
            expected["weight_g_idx"] = (((columns,),), ("I32",))
        return expected
    if method.layout == "int8":
        expected["weight"] = ((whole,), ("I8",))
        if method.zeros:
            expected["weight_zero_point"] = (tuple(scales), ("I8",))
    else:
        expected["weight"] = ((whole,), ("F8_E4M3",))
    return expected


def count(length: int, part: int) -> int:
    """Return the number of blocks of `part` in `length`, of which the last may be smaller; 0 = one
    block.
    """
    return -(-length // part) if part else 1
