"""The key/value cache: pages, and the scratch of the current step.

A target has one such cache, its draft head another with one layer and the same pages.

There is one tensor [L, 2, G, slots, E] (2: keys, values) for the L layers of each shape; for latent
attention [L, 1, 1, slots, E], whose values are the first elements of the keys. Along `slots`:

    0 .. P*page_size          pages: offset o of page p is slot p*page_size + o
    .. + scored_nodes         scratch: of draft tokens, and of whole rounds (captured/)
    last                      null: zeros, read where there is no key, so that no other
                              sequence's data is read

In float8 (E4M3) every element takes one byte, and each head of each slot has a scale of its own,
its greatest absolute value over float8's: float32 [L, 2, G, slots]. It needs no calibration, and
attention multiplies scores and weights by it instead of keys and values.

A draft token's keys and values stay in scratch until they are committed; those of a rejected one
are overwritten by the next step. Those of known tokens are written to pages at once. These slots
are unrelated to the slots of sequences in a plan.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.torch.decoder.elementwise import AnyHeads
from forerun.executors.torch.decoder.float8 import FLOAT8, float8_rows
from forerun.interface.executor import ExecutorLimits
from forerun.networks.cache_layer import CacheLayer
from forerun.types import AnyArray, Ints

Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KvShape:
    """The keys and values that layers cache per position.

    caches    of each layer with keys and values of its own (Architecture.caches)
    places    index in `caches` that each layer reads; None: every layer has its own
    windowed  which of `caches` have window pages; (): none
    """

    caches: tuple[CacheLayer, ...]
    places: tuple[int, ...] | None = None
    windowed: tuple[bool, ...] = ()

    def bytes(self, limits: ExecutorLimits, dtype: torch.dtype) -> int:
        """Return the bytes of a PagedCache of this shape with pages in `dtype`: the slots of
        `limits.pages` or of `limits.window_pages`, of scratch, and the null slot; in float8 with a
        scale for each head.
        """
        scale = SCALE_BYTES if dtype == FLOAT8 else 0
        own = [
            layer.planes * layer.kv_heads * (layer.head_size * dtype.itemsize + scale)
            for layer in self.caches
        ]
        near = sum(count for count, windowed in zip(own, self.windowed, strict=False) if windowed)
        paged = limits.pages * (sum(own) - near) + limits.window_pages * near
        return paged * limits.page_size + (limits.scored_nodes + 1) * sum(own)


SCALE_BYTES = 4
"""Bytes of a head's scale in float8."""


def indices(values: AnyArray, device: torch.device) -> Tensor:
    """Return a copy of integers as int64 on the device, for indexing."""
    return torch.from_numpy(np.array(values, np.int64)).to(device)


def int32s(values: ArrayLike, device: torch.device) -> Tensor:
    """Return a copy of integers as int32 on the device, for kernels."""
    return torch.from_numpy(np.array(values, np.int32, order="C")).to(device)


@dataclass(frozen=True, slots=True)
class Narrow:
    """Keys or values of one layer in float8: numbers [G,slots,E] and scale float32[G,slots]."""

    numbers: Tensor
    scale: Tensor

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def shape(self) -> torch.Size:
        """[G,slots,E], as of a cache tensor in another dtype."""
        return self.numbers.shape


CacheTensor = Tensor | Narrow
"""Keys or values of one layer: [G,slots,E], or that in float8."""


def bytes_of(parts: Iterable[Tensor]) -> bytes:
    """Return the concatenated bytes of tensors, on the host."""
    flat = [part.contiguous().view(torch.uint8).flatten() for part in parts]
    return bytes(torch.cat(flat).cpu().numpy().tobytes())


def put_bytes(parts: Iterable[Tensor], content: bytes | memoryview) -> None:
    """Fill tensors from the bytes that `bytes_of` returned."""
    left = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
    for part in parts:
        own, left = left.tensor_split([part.numel() * part.element_size()])
        # The offset of a part may not be a multiple of its element size.
        part.copy_(own.clone().view(part.dtype).view(part.shape))


def read(cached: CacheTensor, slots: Tensor) -> Tensor:
    """Return [G, *slots.shape, E], the contents of `slots` int64; of float8 as float32."""
    flat = slots.flatten()
    if isinstance(cached, Narrow):
        scale = cached.scale.index_select(1, flat)[..., None]
        found = cached.numbers.index_select(1, flat).float() * scale
    else:
        found = cached.index_select(1, flat)
    numbers: Tensor = found.unflatten(1, slots.shape)
    return numbers


def put(cached: CacheTensor, place: Tensor, rows: Tensor) -> None:
    """Write rows [M,G,E] into the slots `place`, int64[M]; into a narrow cache as float8, with a
    scale for each row and head.
    """
    rows = rows.transpose(0, 1)
    if isinstance(cached, Narrow):
        numbers, scale = float8_rows(rows)
        cached.numbers[:, place], cached.scale[:, place] = numbers, scale[..., 0]
    else:
        cached[:, place] = rows


def enter(heads: AnyHeads, layer: tuple[CacheTensor, CacheTensor], slots: Tensor) -> Tensor:
    """Return the queries [M,A,E] of `heads`, normalised and rotated; write their keys and values to
    the slots int[M] of `layer`; further rows are padding. The reference for
    forerun.executors.torch.triton.triton_layers.enter.
    """
    (queries, keys, values), count = heads.turned(), len(slots)
    write(layer, slots.long(), keys[:count], values[:count])
    return queries


def write(
    layer: tuple[CacheTensor, CacheTensor], place: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Write keys [M,G,E] and values [M,G,E] to the slots `place`, int64[M], of `layer`; if values
    are smaller than keys, they are the keys' first elements and only the keys are written.
    """
    if not keys.shape[1]:  # The layer reads another one's.
        return
    rank = values.shape[-1]
    if rank < keys.shape[-1]:
        put(layer[0], place, _finite_latent(keys, rank))
        return
    for cached, rows in zip(layer, _finite_values(keys, values), strict=True):
        put(cached, place, rows)


def _finite_latent(keys: Tensor, rank: int) -> Tensor:
    """Make values finite as `_finite_values` does, if they are the keys' first `rank` elements: a
    non-finite element is moved to the remaining ones.
    """
    rest = keys[..., rank:] + (keys * 0).sum(-1, keepdim=True)
    return torch.cat([keys[..., :rank].nan_to_num(0, 0, 0), rest], -1)


def _finite_values(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Move non-finite elements from values to keys. There the attention mask hides a NaN from the
    nodes that must not attend to it, while zero times NaN in the values would spoil their sums.
    """
    return keys + (keys * 0 + values * 0).sum(-1, keepdim=True), values.nan_to_num(0, 0, 0)


Move = Callable[["PagedCache", Tensor, Tensor, Tensor | None], None]
"""PagedCache.move, or a function that does the same."""


@dataclass(frozen=True, slots=True)
class CachePart:
    """Keys and values of the L layers of one shape.

    numbers  [L,planes,G,slots,E]; planes: 2, keys and values, or 1 where values are the keys' first
    scales   float32[L,planes,G,slots], the factors of float8 numbers; None: another dtype
    """

    numbers: Tensor
    scales: Tensor | None

    def layer(self, number: int, value_size: int | None) -> tuple[CacheTensor, CacheTensor]:
        """Return keys and values of layer `number` of the part, as views; value_size as of
        CacheLayer.
        """
        planes = self.numbers[number]
        keys, values = planes[0], planes[1] if value_size is None else planes[0, ..., :value_size]
        if self.scales is None:
            return keys, values
        scales = self.scales[number]
        return Narrow(keys, scales[0]), Narrow(values, scales[-1])


class PagedCache:
    """Keys and values of all sequences and of the step in progress.

    layers  keys and values of each layer; a layer without any of its own has another one's
    parts   those of all layers, by shape
    groups  the most key/value heads of a layer
    near    the cache of the layers with window pages (window_cache.py), which are in `layers` too,
            but in none of `parts`; None: there are none
    kind_of index in `kinds` of each of `layers`
    """

    near: "PagedCache | None" = None

    def __init__(
        self, shape: KvShape, limits: ExecutorLimits, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.page_size, self._pages = limits.page_size, limits.pages
        caches, self.device = shape.caches, device
        self.scratch_begin = limits.pages * limits.page_size
        self.groups = max((layer.kv_heads for layer in caches), default=1)
        self.null = self.scratch_begin + limits.scored_nodes

        def part(layer: CacheLayer) -> CachePart:
            sizes = caches.count(layer), layer.planes, layer.kv_heads, self.null + 1
            numbers = torch.zeros((*sizes, layer.head_size), device=device, dtype=dtype)
            scales = torch.zeros(sizes, device=device) if dtype == FLOAT8 else None
            return CachePart(numbers, scales)

        parts = {layer: part(layer) for layer in dict.fromkeys(caches)}
        self.parts = tuple(parts.values())
        own = [
            parts[layer].layer(caches[:number].count(layer), layer.value_size)
            for number, layer in enumerate(caches)
        ]
        self.layers = own if shape.places is None else [own[place] for place in shape.places]
        self.kind_of = (0,) * len(self.layers)

    @property
    def kinds(self) -> "tuple[PagedCache, ...]":
        """The cache itself, and that of the layers with window pages, if there are any."""
        return (self,) if self.near is None else (self, self.near)

    def own(self, slots: Slots) -> Slots:
        """Return int64[n], the slots of this cache for `slots` int64[n] of the first of `kinds`."""
        return slots

    def written(self, slots: Slots) -> Slots:
        """Return `own` for slots that will be written."""
        return slots

    def table(self, table: Ints) -> Ints:
        """Return int32[B,W], the pages of this cache for a page table int32[B,W] of the engine."""
        return table

    def slots_of(self, table: Ints, row: AnyArray | int, positions: AnyArray) -> Slots:
        """Return int64[n], the slots of positions [n] in rows [n], or all in one row, of a page
        table int32[B,W]. Raises EngineError if a position has no page.
        """
        number = positions // self.page_size
        inside = number < table.shape[1]
        page = table[row, np.where(inside, number, 0)].astype(np.int64)
        if not inside.all() or np.any((page < 0) | (page >= self._pages)):
            raise EngineError("a plan's position has no page: the page table is too short")
        found: Slots = page * self.page_size + positions % self.page_size
        return found

    def scratch(self, nodes: AnyArray) -> Slots:
        """Return int64[n], the scratch slots for keys and values of the step's nodes int[n]."""
        return self.scratch_begin + nodes.astype(np.int64)

    def move(self, source: Tensor, target: Tensor, kept: Tensor | None = None) -> None:
        """Copy slots `source` [n] to slots `target` [n], all different, in all layers; only those
        that are `kept` bool[n], if given.
        """
        source = source.long()
        target = target.long() if kept is None else torch.where(kept, target, source).long()
        for part in self.parts:
            numbers, scales = part.numbers, part.scales
            if scales is not None:
                scales.index_copy_(3, target, scales.index_select(3, source))
                numbers = numbers.view(torch.uint8)
            numbers.index_copy_(3, target, numbers.index_select(3, source))
