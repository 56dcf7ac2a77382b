"""Tree attention over pages as a Triton kernel, for CUDA.

Split-prefix decoding (flash-decoding; online softmax after Milakov and Gimelshein, arXiv
1805.02867) with a tree at its end. A program processes one tile of a row's nodes, one key/value
head and one part of the prefix; the queries of all heads that share that key/value head are its
lines, so keys are read once for all of them and for all nodes of the tile.

    prefix   |  part 0  |  part 1  |  part 2  | part 3 + the row's own nodes, masked |
                  '----------'----------'-----------------'-- merged: triton_merge.py

Keys and values are read in place (kv.py): the prefix through the page table, the step's own from
scratch. Inputs are float32, bfloat16 or float16; sums, maxima and exponentials float32. Keys and
values may be float8 with a scale for each head of a slot: scores and weights are multiplied by it,
so that a scale costs one product per key and not one per element.

The sliding window and the first position that may be attended to are run-time arguments: a tile's
loop begins at the first key that one of its nodes attends to. Kernels without window or softcap are
compiled without the code for them.

The number of parts depends on the length of each row (split_of in sizes.py), so that no program
reads much longer than the others; a row with one part needs no merging.

The reference is `attend_dense` in tests/references/kernels.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.executors.torch.attention.attention_shapes import (
    lines_for,
    major_of,
    program_heads,
    shape_for,
)
from forerun.executors.torch.attention.geometry import Geometry, positions_of
from forerun.executors.torch.attention.kv import CacheTensor, Narrow
from forerun.executors.torch.sizes import MOST_PARTS, PROGRAMS
from forerun.executors.torch.triton.triton_merge import AttentionParts, merged
from forerun.networks.layer_spec import AttentionSpec

VIEWS = (
    "key_scales",
    "value_scales",
    "sinks",
    "tiles",
    "start",
    "kv_len",
    "table",
    "tree_intervals",
    "slots",
    "position",
    "split",
)
"""Parts of larger tensors, whose alignment must not specialise the kernel."""

NO_WINDOW = 2**30
"""A window larger than any context."""

_LOG2E = 1.4426950408889634


@triton.jit
def _see(
    most, total, mixed, q, rest, keys, values, key_scales, value_scales, slot, seen, there, scale,
    cap, E: tl.constexpr, V: tl.constexpr, NARROW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Attend to the keys at `slot` [KEYS], restricted for each line to `seen` [LINES,KEYS]. Scores
    are dot products times `scale`, in units of log2; if CAPPED, `cap` times their tanh. If values
    are the first V of a key's E elements, they are loaded once, and `rest` are the queries' other
    elements.
    """
    WIDE: tl.constexpr = triton.next_power_of_2(V) if V > 16 else 16
    e = tl.arange(0, WIDE)
    place, real = slot[:, None] * E + e[None, :], there[:, None] & (e[None, :] < V)
    k = tl.load(keys + place, mask=real, other=0.0).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    if V < E:
        FURTHER: tl.constexpr = triton.next_power_of_2(E - V) if E - V > 16 else 16
        f = tl.arange(0, FURTHER)
        beyond, more = slot[:, None] * E + V + f[None, :], there[:, None] & (f[None, :] < E - V)
        further = tl.load(keys + beyond, mask=more, other=0.0).to(q.dtype)
        scores += tl.dot(rest, tl.trans(further), input_precision="tf32x3")
    scores = scores * scale
    if NARROW:
        scores = scores * tl.load(key_scales + slot, mask=there, other=0.0)[None, :]
    if CAPPED:
        # tanh(x), without overflow at either end.
        scores = cap * (1 - 2 / (tl.exp(2 * scores) + 1))
    scores = tl.where(seen, scores, float("-inf"))
    now = tl.maximum(most, tl.max(scores, 1))
    # Without any key so far there is no maximum to subtract.
    level = tl.where(now == float("-inf"), 0.0, now)
    weights = tl.exp2(scores - level[:, None])
    fade = tl.exp2(most - level)
    total = total * fade + tl.sum(weights, 1)
    v = k
    if V == E:
        v = tl.load(values + place, mask=real, other=0.0).to(q.dtype)
    if NARROW:
        weights = weights * tl.load(value_scales + slot, mask=there, other=0.0)[None, :]
    mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
    return now, total, mixed


@triton.jit
def _prefix(
    most, total, mixed, q, rest, keys, values, key_scales, value_scales, pages, low, high, oldest,
    scale, cap, E: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    NARROW: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Attend to cached positions from `low` to `high`, of a row with these `pages`; each line
    attends to positions from `oldest` [LINES] on.
    """
    key = tl.arange(0, KEYS)
    for at in range(low, high, KEYS):
        there = at + key < high
        page = tl.load(pages + (at + key) // PAGE, mask=there, other=0)
        slot, seen = page * PAGE + (at + key) % PAGE, there[None, :]
        if WINDOWED:
            seen = seen & ((at + key)[None, :] >= oldest[:, None])
        most, total, mixed = _see(
            most, total, mixed, q, rest, keys, values, key_scales, value_scales, slot, seen, there,
            scale, cap, E, V, NARROW, CAPPED,
        )  # fmt: skip
    return most, total, mixed


@triton.jit
def _own(
    most, total, mixed, q, rest, keys, values, key_scales, value_scales,
    tree_intervals, slots, position, begin, last, count, step, oldest,
    scale, cap, E: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, NARROW: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Attend to the step's own nodes from `begin` to `last`; each line attends to those whose
    interval contains its `step` [LINES].
    """
    key = tl.arange(0, KEYS)
    for at in range(begin, last, KEYS):
        there = at + key < last
        enter = tl.load(tree_intervals + at + key, mask=there, other=0)[None, :]
        leave = tl.load(tree_intervals + count + at + key, mask=there, other=0)[None, :]
        slot = tl.load(slots + at + key, mask=there, other=0)
        seen = there[None, :] & (enter <= step[:, None]) & (step[:, None] < leave)
        if WINDOWED:
            where = tl.load(position + at + key, mask=there, other=-1)
            seen = seen & (where[None, :] >= oldest[:, None])
        most, total, mixed = _see(
            most, total, mixed, q, rest, keys, values, key_scales, value_scales, slot, seen, there,
            scale, cap, E, V, NARROW, CAPPED,
        )  # fmt: skip
    return most, total, mixed


@triton.jit
def _give(
    found, sums, out, mixed, most, total, mine, whole, place, e, where, further,
    part, parts, most_parts, E: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Write a program's result, see `_attend`. where [LINES]: query and head; further: number of
    all such.
    """
    if parts == 1:
        tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=whole)
        if most_parts > 1:
            tl.store(sums + most_parts * further + where, tl.zeros_like(total) - 1, mask=mine)
    else:
        if part == 0:
            for other in range(parts, most_parts):
                nothing = tl.full([LINES], float("-inf"), tl.float32)
                tl.store(sums + other * further + where, nothing, mask=mine)
        to = part * further + where
        tl.store(found + to.to(tl.int64)[:, None] * E + e[None, :], mixed, mask=whole)
        tl.store(sums + to, most, mask=mine)
        tl.store(sums + most_parts * further + to, total, mask=mine)


@triton.jit(
    do_not_specialize=[
        *("table_stride", "asked", "count", "nodes", "reach", "window", "since", "most_parts"),
    ],
    do_not_specialize_on_alignment=VIEWS,
)
def _attend(
    queries, keys, values, key_scales, value_scales, sinks, out, found, sums,
    tiles, start, kv_len, table, tree_intervals, slots, position, split,
    group_stride, table_stride, asked, count, nodes, reach, window, since, most_parts, scale, cap,
    GQA_GROUP: tl.constexpr, SHARING: tl.constexpr, E: tl.constexpr, V: tl.constexpr,
    PAGE: tl.constexpr, LINES: tl.constexpr, KEYS: tl.constexpr, NARROW: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Fill `found`, `sums` and `out` as in AttentionParts (triton_merge.py), for P = most_parts.
    asked: Q, count: M, nodes of a tile. The rest as in Geometry.

    SHARING programs of GQA_GROUP heads each read one key/value head; values have V elements, which
    are the first of the keys' if V < E. SINKS: each head's sums begin with its own score, once.

    Parts and nodes are arguments, not constants, so that a model needs few binaries.
    """
    entry, group = split + 3 * tl.program_id(0), tl.program_id(1)
    tile, part, parts = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    works = tile >= 0
    tile = tl.maximum(tile, 0)
    heads = GQA_GROUP * tl.num_programs(1)
    row, first = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    behind = first - tl.load(tiles + 3 * tile + 2)  # Nodes before the tile without a query.
    begin, end = tl.load(start + row), tl.load(start + row + 1)
    line = tl.arange(0, LINES)
    node, head = first + line // GQA_GROUP, group * GQA_GROUP + line % GQA_GROUP
    mine = (line < nodes * GQA_GROUP) & (node < end) & works
    WIDE: tl.constexpr = triton.next_power_of_2(V) if V > 16 else 16
    e = tl.arange(0, WIDE)
    query = node - behind
    which = (query * heads + head)[:, None]
    place, whole = which * V + e[None, :], mine[:, None] & (e[None, :] < V)
    q = tl.load(queries + which * E + e[None, :], mask=whole, other=0.0)
    rest = q
    if V < E:
        FURTHER: tl.constexpr = triton.next_power_of_2(E - V) if E - V > 16 else 16
        f = tl.arange(0, FURTHER)
        beyond = mine[:, None] & (f[None, :] < E - V)
        rest = tl.load(queries + which * E + V + f[None, :], mask=beyond, other=0.0)
    away = (group // SHARING).to(tl.int64) * group_stride
    keys, values = keys + away, values + away
    # A scale for E elements; without scales these are not read.
    ks, vs = key_scales + away // E, value_scales + away // E
    most = tl.full([LINES], float("-inf"), tl.float32)
    total, mixed = tl.zeros([LINES], tl.float32), tl.zeros([LINES, WIDE], tl.float32)
    if SINKS:
        first_part = mine & (part == 0)
        most = tl.load(sinks + head, mask=first_part, other=float("-inf")) * 1.4426950408889634
        total = tl.where(first_part, 1.0, 0.0)

    cached = tl.where(works, tl.load(kv_len + row), 0)
    length = tl.cdiv(tl.cdiv(cached, KEYS), parts) * KEYS
    high = tl.minimum((part + 1) * length, cached)
    low = part * length
    # The first position that each line attends to, at most its node's own.
    oldest = tl.zeros([LINES], tl.int32)
    if WINDOWED:
        own = tl.load(position + node, mask=mine, other=2147483647)
        oldest = tl.maximum(own - window + 1, tl.minimum(own, since))
        low = tl.maximum(low, tl.min(oldest, 0) // KEYS * KEYS)
    most, total, mixed = _prefix(
        most, total, mixed, q, rest, keys, values, ks, vs, table + row * table_stride, low, high,
        oldest, scale, cap, E, V, PAGE, KEYS, NARROW, WINDOWED, CAPPED,
    )  # fmt: skip
    # A parent precedes its children, so in trees no node attends beyond its tile.
    last = tl.where(works & (part == parts - 1), tl.minimum(first + reach, end), begin)
    step = tl.load(tree_intervals + node, mask=mine, other=-1)
    most, total, mixed = _own(
        most, total, mixed, q, rest, keys, values, ks, vs, tree_intervals, slots, position, begin,
        last, count, step, oldest, scale, cap, E, V, KEYS, NARROW, WINDOWED, CAPPED,
    )  # fmt: skip
    _give(
        found, sums, out, mixed, most, total, mine, whole, place, e, query * heads + head,
        asked * heads, part, parts, most_parts, V, LINES,
    )  # fmt: skip


def parts_for(programs: int) -> int:
    """Return the number of parts of every prefix, if one part gives `programs` programs."""
    parts = 1
    while parts < MOST_PARTS and parts * programs < PROGRAMS:
        parts *= 2
    return parts


_uniform: dict[tuple[int, int, torch.device], Tensor] = {}


def uniform(tiles: int, parts: int, device: torch.device) -> Tensor:
    """Return int32[tiles*parts,3] as Geometry.split, with the same number of parts for every tile.
    Cached.
    """
    key = tiles, parts, device
    if key not in _uniform:
        entry = torch.arange(tiles * parts, dtype=torch.int32, device=device)
        columns = entry // parts, entry % parts, torch.full_like(entry, parts)
        _uniform[key] = torch.stack(columns, 1).contiguous()
    return _uniform[key]


def attend(
    queries: Tensor,
    keys: CacheTensor,
    values: CacheTensor,
    geometry: Geometry,
    spec: AttentionSpec | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention output [Q,A,E] of queries [Q,A,E] over one layer's keys and values;
    [Q,A,V] if values are the first V elements of the keys.

    The step's own keys and values must be in the slots `geometry.slots`. Does not synchronise with
    the device.

    spec   how scores are computed; None: scaled by 1/sqrt(E), no window
    sinks  float32[A]: a score of each head that has no value
    """
    split, most = _split(geometry, len(keys))
    found = AttentionParts.of(queries, most, values.shape[-1])
    spec = spec or AttentionSpec(queries.shape[2] ** -0.5)
    _launch(queries.contiguous(), (keys, values), geometry, spec, split, found, sinks)
    return merged(found)


def _split(geometry: Geometry, groups: int) -> tuple[Tensor, int]:
    """Return Geometry.split for `groups` key/value heads, and the most parts of a tile."""
    tiles, split = len(geometry.tiles), geometry.split
    if split is None:
        parts = parts_for(tiles * groups)
        return uniform(tiles, parts, geometry.tiles.device), parts
    return split, min(MOST_PARTS, len(split) - tiles + 1)


def _launch(
    queries: Tensor,
    cached: tuple[CacheTensor, CacheTensor],
    geometry: Geometry,
    spec: AttentionSpec,
    split: Tensor,
    found: AttentionParts,
    sinks: Tensor | None,
) -> None:
    """Launch `_attend` for whole queries [Q,A,E] over keys and values."""
    keys, (count, heads, size) = cached[0], queries.shape
    windowed, cap = spec.window is not None or geometry.begin > 0, spec.softcap
    sharing = heads // len(keys)
    taken = program_heads(sharing, size)
    lines = lines_for(geometry.tile * taken)
    shape = shape_for(lines, queries.itemsize, size, major_of(queries.device))
    numbers, scales = zip(*(_parts_of(each) for each in cached), strict=True)
    nodes = len(geometry.slots)
    _attend[len(split), heads // taken](
        *(queries, *numbers, *scales, found.sums if sinks is None else sinks),
        *(found.out, found.parts, found.sums),
        *(geometry.tiles, geometry.start, geometry.kv_len, geometry.table),
        *(geometry.tree_intervals, geometry.slots),
        positions_of(geometry) if windowed else geometry.tree_intervals,
        *(split, numbers[0].stride(0), geometry.table.stride(0), count, nodes, geometry.tile),
        nodes if geometry.both_ways else geometry.tile,
        NO_WINDOW if spec.window is None else spec.window,
        *(geometry.begin, found.most),
        spec.scale * _LOG2E if cap is None else spec.scale / cap,
        (cap or 0.0) * _LOG2E,
        GQA_GROUP=taken,
        SHARING=sharing // taken,
        E=size,
        V=found.out.shape[2],
        PAGE=geometry.page_size,
        LINES=lines,
        KEYS=shape.keys,
        NARROW=isinstance(keys, Narrow),
        WINDOWED=windowed,
        CAPPED=cap is not None,
        SINKS=sinks is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


def _parts_of(cached: CacheTensor) -> tuple[Tensor, Tensor]:
    """Return the elements and their scales; without scales, the elements again."""
    return (cached.numbers, cached.scale) if isinstance(cached, Narrow) else (cached, cached)
