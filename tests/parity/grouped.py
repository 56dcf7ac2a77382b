"""Random matrices in few bits, and what they stand for."""

import numpy as np
import torch

from forerun.checkpoints.grouped import Grouped, GroupedRows


def grouped(kind, shape, group, zeros, ordered=False, scale="F16", seed=0):
    """A random matrix, and what it stands for in float64."""
    random = np.random.default_rng(seed)
    rows, columns = shape
    groups = -(-columns // group)
    low, high, dtype = {
        "int4": (0, 16, np.uint8),
        "int8": (-128, 128, np.int8),
        "float8": (0, 256, np.uint8),
    }[kind]
    numbers = random.integers(low, high, shape).astype(dtype)
    if kind == "float8":
        numbers[(numbers & 127) == 127] = 3
    scales = random.uniform(0.001, 0.01, (rows, groups)).astype(np.float16).astype(np.float32)
    some = random.integers(low, high, (rows, groups)).astype(dtype) if zeros else None
    order = random.permutation(columns).astype(np.int32) if ordered else None
    wide = numbers.astype(np.float64)
    if kind == "float8":
        wide = torch.from_numpy(numbers).view(torch.float8_e4m3fn).double().numpy()
    zero = some if zeros else np.full((rows, groups), 8 if kind == "int4" else 0)
    wide = (wide - np.repeat(zero.astype(np.float64), group, 1)[:, :columns]) * np.repeat(
        scales.astype(np.float64), group, 1
    )[:, :columns]
    if order is not None:
        wide[:, order] = wide.copy()

    def read(part):
        return GroupedRows(numbers[part], scales[part], None if some is None else some[part])

    return Grouped(kind, shape, group, zeros, scale, order, read), torch.from_numpy(wide)
