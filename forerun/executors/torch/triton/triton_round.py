"""The operations before and after the forward pass of a captured round, as Triton kernels for CUDA.
The references are in tests/references/rounds.py and `PagedCache.move`. Asynchronous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.executors.torch.accept import NodeNoise
from forerun.executors.torch.attention.kv import CachePart, PagedCache
from forerun.executors.torch.triton.round_types import Accepted, Prepared, RoundInputs, RoundShape
from forerun.executors.torch.triton.triton_choice import scored
from forerun.speculative.accept import NOTHING

FACTS = (
    *("kv_len", "outputs", "low", "high", "of_rows", "decided", "counts", "depth", "parents"),
    *("table", "tokens", "tree_intervals", "record"),
)
"""Views of larger tensors, whose alignment must not specialise kernels."""

NEAR_BLOCK = 32
"""Nodes of one program of `_near`: those of a warp."""


@triton.jit(
    do_not_specialize=["nodes", "width", "scratch", "total"],
    do_not_specialize_on_alignment=FACTS,
)
def _prepare(
    kv_len, outputs, low, high, of_rows, decided, counts, depth, parents, table,
    frequencies, factors,
    position, pages, slots, seeds, positions, temperatures, turned,
    nodes, width, scratch, total,
    PAGE: tl.constexpr, HALF: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Write the fields of `Prepared` for one node; `turned` [K,2,M,E/2] cos and sin of one kind."""
    node, kind = tl.program_id(0), tl.program_id(1)
    row, place = node // nodes, node % nodes
    deep = tl.load(depth + node)
    where = tl.load(kv_len + row) + deep
    at = tl.arange(0, triton.next_power_of_2(HALF))
    there = at < HALF
    frequency = tl.load(frequencies + kind * HALF + at, mask=there, other=0.0)
    angle = where.to(tl.float32) * frequency
    factor = tl.load(factors + kind)
    out = turned + (2 * kind * total + node).to(tl.int64) * HALF + at
    tl.store(out, tl.where(frequency == 0, 1.0, tl.cos(angle) * factor), mask=there)
    tl.store(out + total.to(tl.int64) * HALF, tl.sin(angle) * factor, mask=there)
    if kind == 0:
        each = tl.arange(0, NODES)
        real = each < tl.load(counts + row)
        above = tl.load(parents + row * nodes + each, mask=real & (each < nodes), other=0)
        breaks = tl.sum((real & (each < nodes) & (above != each - 1)).to(tl.int32), 0)
        page = tl.load(table + row * width + tl.minimum(where // PAGE, width - 1))
        slot = page * PAGE + where % PAGE
        chain = (breaks == 0) & (tl.load(decided + row) > 0) & (place < tl.load(counts + row))
        tl.store(position + node, where)
        tl.store(pages + node, slot)
        tl.store(slots + node, tl.where(chain, slot, scratch + node))
        lower = tl.load(low + row).to(tl.int64) & 0xFFFFFFFF
        tl.store(seeds + node, (tl.load(high + row).to(tl.int64) << 32) | lower)
        tl.store(positions + node, tl.load(outputs + row) + deep)
        tl.store(temperatures + node, tl.load(of_rows + row))


def prepare(inputs: RoundInputs, shape: RoundShape) -> Prepared:
    """Compute every node's position, slots, noise and rotary numbers: see kernels.Prepare. Launches
    only.
    """
    rows, total = len(inputs["count"]), len(inputs["depth"])
    kinds, half = shape.frequencies.shape
    position, pages, slots, positions = (torch.empty_like(inputs["depth"]) for _ in range(4))
    seeds = torch.empty_like(inputs["depth"], dtype=torch.int64)
    temperatures = torch.empty_like(inputs["depth"], dtype=torch.float32)
    turned = shape.frequencies.new_empty(kinds, 2, total, half)
    _prepare[total, kinds](
        *(inputs[name] for name in ("kv_len", "position", "low", "high")),
        inputs["temperature"].view(torch.float32),
        *(inputs[name] for name in ("decided", "count", "depth", "parents", "table")),
        *(shape.frequencies, shape.factors),
        *(position, pages, slots, seeds, positions, temperatures, turned),
        *(total // rows, inputs["table"].shape[1], shape.scratch, total),
        PAGE=shape.page_size,
        HALF=half,
        NODES=triton.next_power_of_2(total // rows),
        num_warps=1,
    )
    noise = NodeNoise(seeds, positions, temperatures)
    return Prepared(position, pages, slots, noise, tuple((each[0], each[1]) for each in turned))


@triton.jit(
    do_not_specialize=["total", "nodes", "width", "scratch", "behind"],
    do_not_specialize_on_alignment=("position", "slots", "table"),
)
def _near(
    position, slots, table, own, pages, total, nodes, width, scratch, behind,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `own` and `pages` of BLOCK nodes: their slots in a cache of window pages."""
    node = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = node < total
    where, slot = tl.load(position + node, mask=there, other=0), tl.load(slots + node, mask=there)
    entry = (node // nodes) * width + tl.minimum(where // PAGE, width - 1)
    place = tl.load(table + entry, mask=there, other=0) * PAGE + where % PAGE
    tl.store(pages + node, place, mask=there)
    tl.store(own + node, tl.where(slot < scratch, place, slot - behind), mask=there)


def near(
    position: Tensor, slots: Tensor, table: Tensor, shape: RoundShape, behind: int
) -> tuple[Tensor, Tensor]:
    """Return slots and pages int32[M] in a cache of window pages: see kernels.Near. Launches
    only.
    """
    own, pages, total = torch.empty_like(slots), torch.empty_like(slots), len(slots)
    _near[(triton.cdiv(total, NEAR_BLOCK),)](
        *(position, slots, table, own, pages),
        *(total, total // len(table), table.shape[1], shape.scratch, behind),
        PAGE=shape.page_size,
        BLOCK=NEAR_BLOCK,
        num_warps=1,
    )
    return own, pages


@triton.jit(do_not_specialize=["nodes", "total", "chunks"], do_not_specialize_on_alignment=FACTS)
def _walk(
    best, found, counts, decided, tokens, parents, depth, tree_intervals,
    choices, kept, count, last, record,
    nodes, total, chunks,
    NODES: tl.constexpr, CHUNKS: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    """Write one row's choices, from the results of the vocabulary's chunks, and its accepted
    path.
    """
    row, each = tl.program_id(0), tl.arange(0, NODES)
    inside = each < nodes
    at = row * nodes + each
    chunk = tl.arange(0, CHUNKS)
    there = inside[:, None] & (chunk < chunks)[None, :]
    place = at[:, None] * chunks + chunk[None, :]
    scores = tl.load(best + place, mask=there, other=float("-inf"))
    top = tl.max(scores, 1)
    token = tl.load(found + place, mask=there, other=2147483647)
    chosen = tl.min(tl.where(scores == top[:, None], token, 2147483647), 1)
    finite = (top == top) & (top != float("inf")) & (top != float("-inf"))  # noqa: PLR0124 - NaN
    chosen = tl.where(finite & inside, chosen, NOTHING)
    tl.store(choices + at, chosen, mask=inside)

    drafted = tl.load(tokens + at, mask=inside, other=0)
    parent = tl.load(parents + at, mask=inside, other=-1)
    # [node, another]
    same = (parent[:, None] == parent[None, :]) & (drafted[:, None] == drafted[None, :])
    doubled = tl.max((same & (each[:, None] > each[None, :])).to(tl.int32), 1) > 0
    above = tl.maximum(parent, 0)[:, None] == each[None, :]
    asked = tl.sum(tl.where(above, chosen[None, :], 0), 1)
    right = ((drafted == asked) & (doubled == 0)) | (each == 0)
    right = right & (chosen != NOTHING) & (each < tl.load(counts + row))
    right = right & (tl.load(decided + row) > 0)
    enter = tl.load(tree_intervals + at, mask=inside, other=-1)
    leave = tl.load(tree_intervals + total + at, mask=inside, other=-1)
    sees = (enter[None, :] <= enter[:, None]) & (enter[:, None] < leave[None, :])
    wrong = tl.max((sees & (right == 0)[None, :] & inside[None, :]).to(tl.int32), 1) > 0
    keeps = inside & (wrong == 0)
    tl.store(kept + at, keeps.to(tl.int8), mask=inside)
    tl.store(record + at, tl.where(keeps, chosen, NOTHING), mask=inside)
    tl.store(count + row, tl.sum(keeps.to(tl.int32), 0))
    deep = tl.where(keeps, tl.load(depth + at, mask=inside, other=0) + 1, 0)
    # On a path the deepest node is the last one.
    tl.store(last + row, tl.max(tl.where((deep == tl.max(deep, 0)) & (deep > 0), each, 0), 0))


def accept(logits: Tensor, noise: NodeNoise, inputs: RoundInputs, record: Tensor) -> Accepted:
    """Choose a token at every node from logits [M,V] and follow each row's accepted path; writes
    choices on paths to `record` int32[M], NOTHING elsewhere: see kernels.Accept. Asynchronous.
    """
    return _accepted(*scored(logits, noise), inputs, record)


def keep(choices: Tensor, inputs: RoundInputs, record: Tensor) -> Accepted:
    """Compute `accept` for choices int32[M] that are already made: see kernels.Keep.
    Asynchronous.
    """
    # As if the vocabulary were one chunk, with each node's choice as its best token.
    whole = choices[:, None]
    return _accepted(torch.zeros_like(whole, dtype=torch.float32), whole, inputs, record)


def _accepted(best: Tensor, found: Tensor, inputs: RoundInputs, record: Tensor) -> Accepted:
    rows, total = len(inputs["count"]), len(inputs["depth"])
    choices = torch.empty_like(inputs["tokens"])
    kept = choices.new_empty((rows, total // rows), dtype=torch.bool)
    count, last = torch.empty_like(inputs["count"]), torch.empty_like(inputs["count"])
    _walk[(rows,)](
        *(best, found),
        *(inputs[name] for name in ("count", "decided", "tokens", "parents", "depth")),
        inputs["tree_intervals"],
        *(choices, kept.view(torch.int8), count, last, record),
        *(total // rows, total, best.shape[1]),
        NODES=triton.next_power_of_2(total // rows),
        CHUNKS=triton.next_power_of_2(best.shape[1]),
        NOTHING=NOTHING,
        num_warps=4,
    )
    return Accepted(choices, kept, count, last)


@triton.jit(do_not_specialize=["groups", "slots"])
def _move(
    numbers, scales, source, target, kept, groups, slots,
    E: tl.constexpr, SCALED: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Copy one node's elements in all heads of one layer's keys or values."""
    node, plane = tl.program_id(0), tl.program_id(1).to(tl.int64) * groups
    there, here = tl.load(target + node).to(tl.int64), tl.load(source + node).to(tl.int64)
    moves = there != here
    if CHOSEN:
        moves = moves & (tl.load(kept + node) != 0)
    if moves:
        at = tl.arange(0, triton.next_power_of_2(E))
        for group in range(groups):
            begin = (plane + group) * slots
            held = tl.load(numbers + (begin + here) * E + at, mask=at < E)
            tl.store(numbers + (begin + there) * E + at, held, mask=at < E)
            if SCALED:
                tl.store(scales + begin + there, tl.load(scales + begin + here))


def move(cache: PagedCache, source: Tensor, target: Tensor, kept: Tensor | None = None) -> None:
    """Copy keys and values of all layers from slots int32[n] to slots int32[n], where kept bool[n];
    None: all. PagedCache.move; asynchronous.
    """
    for part in cache.parts:
        _move_part(part, source, target, kept)


def _move_part(part: CachePart, source: Tensor, target: Tensor, kept: Tensor | None) -> None:
    numbers, scales = part.numbers, part.scales
    layers, two, groups, slots, size = numbers.shape
    _move[len(source), layers * two](
        # float8 is copied as it is.
        numbers if scales is None else numbers.view(torch.uint8),
        *(source if scales is None else scales, source, target),
        source if kept is None else kept.view(torch.int8),
        *(groups, slots),
        E=size,
        SCALED=scales is not None,
        CHOSEN=kept is not None,
        num_warps=1,
    )
