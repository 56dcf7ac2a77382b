"""Launch configurations of the attention kernels (triton_attention.py) by device."""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch

from forerun.executors.torch.sizes import KEYS
from forerun.networks.cache_layer import CacheLayer

WIDE = 256
"""Head size above which a tile has half as many queries, of few heads."""


def lines_for(queries: int) -> int:
    """Return the rows of a program's tile for `queries` queries: a power of two that tensor cores
    support.
    """
    return max(16, 1 << (queries - 1).bit_length())


class Shape(NamedTuple):
    """A launch configuration: keys per iteration, pipeline stages, and warps."""

    keys: int
    stages: int
    warps: int = 4


def shape_for(lines: int, itemsize: int, size: int, major: int) -> Shape:
    """Return the configuration without register spills and with eight warps per multiprocessor, on
    compute capabilities 8.0, 9.0 and 10.0 (bench/compile_kernels.py). itemsize: bytes of a query's
    element; size: head size; major: major version of the compute capability. With 10, the tensor
    cores accumulate in a memory of their own, whose contents pass through registers in every
    iteration.
    """
    full, tensor_memory = lines == 64, major == 10
    if size > 256:
        return Shape(16, 2, 8)  # Latent attention; compiled, but not measured.
    if size > 128:
        keys = KEYS // 4 if itemsize == 4 or full else KEYS // 2
        return Shape(keys, 3 if full and not tensor_memory else 2)
    if itemsize == 4:
        return Shape(KEYS // 4 if full else KEYS // 2, 2, 8 if full and tensor_memory else 4)
    if full and tensor_memory:
        return Shape(KEYS // 2, 2, 8 if size > 64 else 4)
    return Shape(KEYS, 2 if full else 3)


@cache
def major_of(device: torch.device) -> int:
    """Return the major version of the compute capability; 9 if kernels are interpreted, not
    compiled.
    """
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def program_heads(gqa_group: int, size: int) -> int:
    """Return how many of the query heads, of size `size`, that share a key/value head one program
    processes: all, but at most 16 wide heads (latent attention, where all heads share one).
    """
    most = gqa_group if size <= WIDE else min(gqa_group, 16)
    return next(heads for heads in range(most, 0, -1) if gqa_group % heads == 0)


def tile_heads(gqa_group: int, size: int) -> int:
    """Return the number of query heads, of size `size`, per key/value head that sizes.tile_nodes
    assumes: those of one program, or twice as many if heads are WIDE.
    """
    return program_heads(gqa_group, size) * (2 if size > WIDE else 1)


def widest_tile(heads: int, caches: Iterable[CacheLayer]) -> int:
    """Return the greatest `tile_heads` of a model's layers, with `heads` query heads: all layers
    use the same tiles.
    """
    return max(tile_heads(heads // cached.kv_heads, cached.head_size) for cached in caches)
