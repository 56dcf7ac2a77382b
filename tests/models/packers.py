"""Matrices in the formats of quantised checkpoints, written one number at a time from the formats'
definitions, and what they stand for. The reference of forerun/checkpoints/quantised/matrices.py.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def words(numbers, bits):
    """int32 words of 32 / bits numbers each, the lowest bits first; the last is filled with 0."""
    each = 32 // bits
    packed = []
    for start in range(0, len(numbers), each):
        word = 0
        for place, number in enumerate(numbers[start : start + each]):
            word |= int(number) << (bits * place)
        packed.append(word - (1 << 32) if word >> 31 else word)
    return packed


def integers(weight, bits, group, signed=False):
    """q [N,K], scale and zero [N,groups] of a matrix, and what it stands for."""
    rows, columns = weight.shape
    group = group or columns
    q = np.zeros((rows, columns), np.int64)
    count = -(-columns // group)
    scale, zero = np.zeros((rows, count), np.float32), np.zeros((rows, count), np.int64)
    meant = np.zeros((rows, columns), np.float32)
    for row in range(rows):
        for part in range(count):
            where = slice(part * group, (part + 1) * group)
            values = weight[row, where]
            if signed:
                s = max(abs(values).max() / ((1 << bits - 1) - 1), 1e-6)
                z, low, high = 0, -(1 << bits - 1), (1 << bits - 1) - 1
            else:
                s = max((values.max() - values.min()) / ((1 << bits) - 1), 1e-6)
                low, high = 0, (1 << bits) - 1
                z = int(np.clip(round(-values.min() / s), 1, high))
            s = np.float32(np.float16(s))
            q[row, where] = np.clip(np.rint(values / s) + z, low, high)
            scale[row, part], zero[row, part] = s, z
            meant[row, where] = (q[row, where] - z).astype(np.float32) * s
    return q, scale, zero, meant


def gptq(weight, bits=4, group=16, version="gptq", order=None):
    """GPTQ's tensors; `order` int[K]: columns are quantised in this order, and say their groups."""
    rows, columns = weight.shape
    group = group or columns
    turned = weight if order is None else weight[:, order]
    q, scale, zero, meant = integers(turned, bits, group)
    groups = np.arange(columns) // group
    if order is not None:
        back = np.argsort(order)
        q, meant, groups = q[:, back], meant[:, back], groups[back]
    stored = zero - 1 if version == "gptq" else zero
    return {
        "qweight": np.array([words(q[row], bits) for row in range(rows)], np.int32).T.copy(),
        "qzeros": np.array([words(each, bits) for each in stored.T], np.int32),
        "scales": scale.T.astype(np.float16),
        "g_idx": groups.astype(np.int32),
    }, meant


def awq(weight, group=16):
    """AWQ's tensors ("gemm"): of eight neighbouring columns, number i is column ORDER[i]."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    q, scale, zero, meant = integers(weight, 4, group)

    def shuffled(numbers):
        mixed = []
        for start in range(0, len(numbers), 8):
            mixed += [numbers[start + column] for column in order]
        return words(mixed, 4)

    return {
        "qweight": np.array([shuffled(column) for column in q.T], np.int32),
        "qzeros": np.array([shuffled(each) for each in zero.T], np.int32),
        "scales": scale.T.astype(np.float16),
    }, meant


def quark(weight, group=16, signed=False):
    """Quark's int4 and uint4: AWQ's under other names, of which int4 are 8 less."""
    tensors, meant = awq(weight, group)
    names = {"qweight": "weight", "qzeros": "weight_zero_point", "scales": "weight_scale"}
    change = np.int32(-0x77777778 if signed else 0)  # The highest bit of each four.
    return {
        names[name]: array if name == "scales" else array ^ change
        for name, array in tensors.items()
    }, meant


def packed(weight, bits=4, group=16, symmetric=True, order=None):
    """compressed-tensors' pack-quantized."""
    rows, columns = weight.shape
    middle = 1 << (bits - 1)
    turned = weight if order is None else weight[:, order]
    q, scale, zero, meant = integers(turned, bits, group, signed=symmetric)
    groups = np.arange(columns) // (group or columns)
    if order is not None:
        back = np.argsort(order)
        q, meant, groups = q[:, back], meant[:, back], groups[back]
    tensors = {
        "weight_packed": np.array(
            [words(q[row] + (middle if symmetric else 0), bits) for row in range(rows)], np.int32
        ),
        "weight_scale": scale.astype(np.float16),
        "weight_shape": np.array([rows, columns], np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = np.array(
            [words(column, bits) for column in zero.T], np.int32
        ).T.copy()
    if order is not None:
        tensors["weight_g_idx"] = groups.astype(np.int32)
    return tensors, meant


def int8(weight):
    """compressed-tensors' int-quantized, a scale per channel."""
    q, scale, _, meant = integers(weight, 8, 0, signed=True)
    return {"weight": q.astype(np.int8), "weight_scale": scale}, meant


def float8(weight, rows, columns, name="weight_scale_inv"):
    """float8 E4M3 in blocks; rows or columns 0 = all of them. Rounded by torch."""
    high, wide = weight.shape
    tall, broad = rows or high, columns or wide
    scale = np.zeros((-(-high // tall), -(-wide // broad)), np.float32)
    q = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    meant = np.zeros_like(weight)
    for i in range(len(scale)):
        for j in range(scale.shape[1]):
            at = slice(i * tall, (i + 1) * tall), slice(j * broad, (j + 1) * broad)
            block = weight[at]
            scale[i, j] = abs(block).max() / 448
            numbers = torch.from_numpy(np.ascontiguousarray(block / scale[i, j]))
            q[at] = numbers.to(torch.float8_e4m3fn)
            meant[at] = q[at].float().numpy() * scale[i, j]
    if not rows and not columns:
        scale = scale.reshape(())
    return {"weight": q, name: scale}, meant


def stream(numbers, bits):
    """uint32 words of numbers one after another, the lowest bits first, across words too."""
    whole = sum(int(number) << (bits * place) for place, number in enumerate(numbers))
    return [whole >> at & 0xFFFFFFFF for at in range(0, bits * len(numbers), 32)]


def mlx(weight, bits=4, group=32, scale=np.float16):
    """MLX's affine tensors: as many steps as fit between a group's smallest and largest number."""
    rows = len(weight)
    low = weight.reshape(rows, -1, group).min(-1).astype(scale)
    s = ((weight.reshape(rows, -1, group).max(-1) - low) / ((1 << bits) - 1)).astype(scale)
    wide, offset = (np.repeat(part.astype(np.float32), group, 1) for part in (s, low))
    q = np.clip(np.rint((weight - offset) / wide), 0, (1 << bits) - 1)
    packed = np.array([stream(row, bits) for row in q], np.uint32)
    meant = q.astype(np.float32) * wide + offset
    return {"weight": packed, "scales": s, "biases": low}, meant


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""OCP Microscaling Formats 1.0, table 7; the fourth bit is the sign."""


def small_floats(weight, mode):
    """mxfp4, mxfp8 or nvfp4: a row's numbers as a stream of bytes, what they are, the bytes of the
    scales, and the scales.
    """
    rows = len(weight)
    group = 16 if mode == "nvfp4" else 32
    largest = abs(weight.reshape(rows, -1, group)).max(-1)
    if mode == "nvfp4":
        s = torch.from_numpy(largest / 6).to(torch.float8_e4m3fn)
        stored, wide = s.view(torch.uint8).numpy(), s.float().numpy()
    else:
        most = 6 if mode == "mxfp4" else 448
        stored = (np.ceil(np.log2(largest / most)) + 127).astype(np.uint8)
        wide = np.exp2(stored.astype(np.float32) - 127)
    scaled = weight / np.repeat(wide, group, 1)
    if mode == "mxfp8":
        floats = torch.from_numpy(scaled).to(torch.float8_e4m3fn)
        q, means = floats.view(torch.uint8).numpy(), floats.float().numpy()
    else:
        q = abs(abs(scaled)[..., None] - E2M1).argmin(-1)
        means = np.where(weight < 0, -E2M1[q], E2M1[q])
        q = q + 8 * (weight < 0)
    words = np.array([stream(row, 8 if mode == "mxfp8" else 4) for row in q], np.uint32)
    return words.view(np.uint8), means, stored, wide


def mlx_floats(weight, mode):
    """MLX's mxfp4, mxfp8 and nvfp4."""
    packed, means, stored, wide = small_floats(weight, mode)
    meant = means * np.repeat(wide, weight.shape[1] // wide.shape[1], 1)
    return {"weight": packed.view(np.uint32), "scales": stored}, meant


def packed_floats(weight, mode, by="compressed-tensors"):
    """The same of compressed-tensors, or of ModelOpt; nvfp4 has a scale for all, too."""
    factor = np.float32(abs(weight).max() / (6 * 448) if mode == "nvfp4" else 1)
    packed, means, stored, wide = small_floats(weight / factor, mode)
    scales = torch.from_numpy(stored)
    tensors = {"weight" if by == "modelopt" or mode == "mxfp8" else "weight_packed": packed}
    if mode == "mxfp8":
        tensors["weight"] = torch.from_numpy(packed).view(torch.float8_e4m3fn)
    if mode == "nvfp4":
        scales = scales.view(torch.float8_e4m3fn)
        if by == "modelopt":
            tensors |= {"weight_scale_2": factor, "input_scale": np.float32(0.5)}
            wide = wide * factor
        else:
            tensors |= {
                "weight_global_scale": 1 / factor[None],
                "input_global_scale": np.ones(1, "f4"),
            }
            wide = wide / (1 / factor)
    tensors["weight_scale"] = scales
    return tensors, means * np.repeat(wide, weight.shape[1] // wide.shape[1], 1)


_DIGITS = (
    *(-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0),
    *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1),
)
NF4 = np.array(_DIGITS, np.float32)
"""QLoRA's table (arXiv 2305.14314, appendix E), in four digits."""


def bitsandbytes(weight, nested=True, kind="nf4"):
    """bitsandbytes' 4 bits: scales of blocks of 32, which may be places in a table themselves."""
    flat = weight.reshape(-1, 32)
    absmax = abs(flat).max(-1)
    state = {"quant_type": kind, "blocksize": 32, "dtype": "bfloat16", "shape": [*weight.shape]}
    tensors = {"weight.quant_map": NF4}
    if nested:
        offset, table = absmax.mean(), np.linspace(-1, 1, 256, dtype=np.float32)
        parts = [absmax[at : at + 256] - offset for at in range(0, len(absmax), 256)]
        high = np.array([abs(part).max() for part in parts], np.float32)
        codes = [abs(p[:, None] / h - table).argmin(-1) for p, h in zip(parts, high, strict=True)]
        tensors["weight.absmax"] = np.concatenate(codes).astype(np.uint8)
        tensors |= {"weight.nested_absmax": high, "weight.nested_quant_map": table}
        state |= {
            "nested_blocksize": 256,
            "nested_dtype": "float32",
            "nested_offset": float(offset),
        }
        absmax = np.concatenate([table[c] * h for c, h in zip(codes, high, strict=True)]) + offset
    else:
        tensors["weight.absmax"] = absmax
    q = abs((flat / absmax[:, None])[..., None] - NF4).argmin(-1).astype(np.uint8)
    tensors["weight"] = (q.ravel()[::2] << 4 | q.ravel()[1::2])[:, None]
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = text
    return tensors, (NF4[q] * absmax[:, None]).reshape(weight.shape)


def eight_bits_by_rows(weight):
    """bitsandbytes' LLM.int8."""
    largest = abs(weight).max(-1)
    q = np.rint(weight * (127 / largest)[:, None])
    tensors = {"weight": q.astype(np.int8), "SCB": largest, "weight_format": np.uint8(0)}
    return tensors, q.astype(np.float32) * (largest * np.float32(1 / 127))[:, None]


def quantise(folder: Path, settings: dict, pack, shards: int = 1) -> dict[str, np.ndarray]:
    """Rewrite a folder's linear layers as `pack` stores them: what they stand for, by name."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    meant, stored = {}, {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part != "weight" or not module.endswith(LINEAR):
            stored[name] = tensor
            continue
        parts, meant[name] = pack(tensor.float().numpy())
        for key, value in parts.items():
            whole = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
            stored[f"{module}.{key}"] = whole.contiguous()
    path = folder / "model.safetensors"
    save_file(stored, path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return meant
