"""Reads and writes of FutureState, the state that a captured round leaves for the next, one Triton
kernel each, for CUDA. The references are in tests/references/future.py. Asynchronous.
"""

import triton
import triton.language as tl
from torch import Tensor

from forerun.executors.torch.sizes import Record, Size
from forerun.executors.torch.triton.round_types import Accepted, FutureState, RoundInputs
from forerun.speculative.accept import NOTHING

BLOCK = 16
"""Nodes of a full tree with which all others are compared at once; with 64, trees of width 8 spill
registers.
"""

VIEWS = (
    *("where", "counts", "tokens", "parents", "depth", "tree_intervals", "carried", "slots"),
    *("most", "deep", "last", "where_out", "counts_out", "tokens_out", "parents_out"),
    *("depth_out", "intervals_out", "places", "draft_slot", "count", "grown", "tokens_told"),
    *("parents_told", "counts_told"),
)
"""Parts of larger tensors, whose alignment must not specialise kernels."""


@triton.jit
def _valued(values, begin, node, full, bound, WIDTH: tl.constexpr):
    """Return the values of nodes of a full tree that begins at `begin`: -inf for nodes that may not
    be drafted.
    """
    level = 1 + tl.where(node < WIDTH, 0, (node - WIDTH) // (WIDTH * WIDTH) + 1)
    found = tl.load(values + begin + node, mask=node < full, other=float("-inf"))
    # NaN counts as no value.
    return tl.where((found > float("-inf")) & (level <= bound), found, float("-inf"))


@triton.jit
def _chain(
    tokens, values, begin, at, each, inside, nodes, total, full, most, bound, token,
    counts_out, tokens_out, parents_out, depth_out, intervals_out, parents, row,
    FULL: tl.constexpr,
):  # fmt: skip
    """Write the first nodes of a chain, which are its best."""
    node = tl.arange(0, FULL)
    found = tl.load(values + begin + node, mask=node < full, other=float("-inf"))
    drafts = tl.minimum(tl.minimum(most, bound), tl.sum((found > float("-inf")).to(tl.int32), 0))
    drafts = tl.minimum(tl.maximum(drafts, 0), nodes - 1)
    grown = tl.load(tokens + begin + each - 1, mask=(each > 0) & (each <= full), other=0)
    tl.store(counts_out + row, drafts + 1)
    tl.store(tokens_out + at, tl.where(each == 0, token, grown), mask=inside)
    tl.store(parents_out + at, tl.load(parents + at, mask=inside, other=0), mask=inside)
    # Padding has the last node's position, which has a page.
    tl.store(depth_out + at, tl.minimum(each, drafts), mask=inside)
    tl.store(intervals_out + at, each, mask=inside)
    tl.store(intervals_out + total + at, tl.maximum(drafts + 1, each + 1), mask=inside)


@triton.jit
def _tree(
    tokens, parents, values, begin, at, each, inside, nodes, total, full, most, bound, token,
    counts_out, tokens_out, parents_out, depth_out, intervals_out, places, row, deepest,
    NODES: tl.constexpr, FULL: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    NOTHING: tl.constexpr,
):  # fmt: skip
    """Write the root and the best nodes of a full tree, in its order."""
    node = tl.arange(0, FULL)
    value = _valued(values, begin, node, full, bound, WIDTH)
    rank = tl.zeros([FULL], tl.int32)
    for first in range(0, full, BLOCK):
        other = first + tl.arange(0, BLOCK)
        worth = _valued(values, begin, other, full, bound, WIDTH)
        same = (worth[None, :] == value[:, None]) & (other[None, :] < node[:, None])
        rank += tl.sum(((worth[None, :] > value[:, None]) | same).to(tl.int32), 1)
    kept = (value > float("-inf")) & (rank < tl.minimum(most, nodes - 1))
    place = tl.cumsum(kept.to(tl.int32), 0)
    count = 1 + tl.sum(kept.to(tl.int32), 0)
    mine = places + row * full
    tl.store(mine + node, place, mask=node < full)
    tl.debug_barrier()
    parent = tl.load(parents + begin + node, mask=node < full, other=0)
    above = tl.load(mine + tl.maximum(parent, 0), mask=node < full, other=0)
    to = row * nodes + place
    level = 1 + tl.where(node < WIDTH, 0, (node - WIDTH) // (WIDTH * WIDTH) + 1)
    grown = tl.load(tokens + begin + node, mask=kept, other=0)
    tl.store(tokens_out + to, grown, mask=kept)
    tl.store(parents_out + to, tl.where(parent < 0, 0, above), mask=kept)
    tl.store(depth_out + to, level, mask=kept)
    rest = inside & ((each == 0) | (each >= count))
    tl.store(tokens_out + at, tl.where(each == 0, token, 0), mask=rest)
    tl.store(parents_out + at, tl.zeros_like(each) + NOTHING, mask=rest)
    tl.store(depth_out + at, tl.zeros_like(each), mask=rest)
    tl.store(counts_out + row, count)
    tl.debug_barrier()
    # up[i,j]: node j is node i or an ancestor of it.
    up = each[:, None] == each[None, :]
    current = each
    for _ in range(deepest):
        there = inside & (current >= 0)
        current = tl.load(
            parents_out + row * nodes + tl.maximum(current, 0), mask=there, other=NOTHING
        )
        up = up | (current[:, None] == each[None, :])
    up = up.to(tl.int32)
    own = tl.load(parents_out + at, mask=inside, other=NOTHING)
    within = tl.sum(up * (each < count).to(tl.int32)[:, None], 0)
    earlier = (own[:, None] == own[None, :]) & (each[None, :] < each[:, None])
    before = 1 + tl.sum(earlier.to(tl.int32) * within[None, :], 1)
    before = tl.where(each > 0, before, 0)
    enter = tl.sum(up * before[None, :], 1)
    alone, real = 2 * nodes + each, each < count
    tl.store(intervals_out + at, tl.where(real, enter, alone), mask=inside)
    tl.store(intervals_out + total + at, tl.where(real, enter + within, alone + 1), mask=inside)


@triton.jit(
    do_not_specialize=["rows", "nodes", "total", "full", "deepest"],
    do_not_specialize_on_alignment=VIEWS,
)
def _resume(
    where, counts, tokens, parents, depth, tree_intervals, carried, slots, most, deep, last,
    state, grown_tokens, grown_parents, grown_values,
    where_out, counts_out, tokens_out, parents_out, depth_out, intervals_out, places,
    rows, nodes, total, full, deepest,
    NODES: tl.constexpr, FULL: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    NOTHING: tl.constexpr,
):  # fmt: skip
    """Write one row's inputs: as given, or from its slot."""
    row, each = tl.program_id(0), tl.arange(0, NODES)
    inside, at = each < nodes, row * nodes + each
    slot = tl.load(slots + row).to(tl.int64)
    goes = tl.load(carried + row) > 0
    cached = tl.where(goes, tl.load(state + slot * 3), tl.load(where + row))
    position = tl.where(goes, tl.load(state + slot * 3 + 1), tl.load(where + rows + row))
    token = tl.load(state + slot * 3 + 2)
    tl.store(where_out + row, cached)
    tl.store(where_out + rows + row, position)
    given = tl.load(tokens + at, mask=inside, other=0)
    if NODES == 1:
        tl.store(tokens_out + at, tl.where(goes, token, given), mask=inside)
    else:
        begin = slot * full
        if goes:
            bound = tl.minimum(tl.load(deep + row), tl.load(last + row) - cached)
            if WIDTH <= 1:
                _chain(
                    grown_tokens, grown_values, begin, at, each, inside, nodes, total, full,
                    tl.load(most + row), bound, token,
                    counts_out, tokens_out, parents_out, depth_out, intervals_out, parents, row,
                    FULL,
                )  # fmt: skip
            else:
                _tree(
                    grown_tokens, grown_parents, grown_values, begin, at, each, inside, nodes,
                    total, full, tl.load(most + row), bound, token,
                    counts_out, tokens_out, parents_out, depth_out, intervals_out, places, row,
                    deepest, NODES, FULL, WIDTH, BLOCK, NOTHING,
                )  # fmt: skip
        else:
            tl.store(counts_out + row, tl.load(counts + row))
            tl.store(tokens_out + at, given, mask=inside)
            tl.store(parents_out + at, tl.load(parents + at, mask=inside, other=0), mask=inside)
            tl.store(depth_out + at, tl.load(depth + at, mask=inside, other=0), mask=inside)
            enter = tl.load(tree_intervals + at, mask=inside, other=0)
            leave = tl.load(tree_intervals + total + at, mask=inside, other=0)
            tl.store(intervals_out + at, enter, mask=inside)
            tl.store(intervals_out + total + at, leave, mask=inside)


def resume(future: FutureState, size: Size, given: RoundInputs) -> RoundInputs:
    """Return the inputs of a round, those of carried rows from the contents of their slots: see
    kernels.Resume. Asynchronous.
    """
    rows, nodes, total = size.rows, size.nodes, size.total
    full = future.value.shape[1]
    out = given["where"].new_empty(3 * rows + 5 * total)
    parts = out.split([2 * rows, rows, total, total, total, 2 * total])
    places = given["where"].new_empty(rows * full if future.width > 1 and nodes > 1 else 1)
    names = "where", "count", "tokens", "parents", "depth", "tree_intervals"
    _resume[(rows,)](
        *(given[name] for name in names),
        *(given[name] for name in ("carried", "slot", "most", "deep", "last")),
        *(future.state, future.tokens, future.parents, future.value, *parts, places),
        *(rows, nodes, total, full, min(nodes - 1, future.levels)),
        NODES=triton.next_power_of_2(nodes),
        FULL=triton.next_power_of_2(max(full, 1)),
        WIDTH=future.width,
        BLOCK=BLOCK,
        NOTHING=NOTHING,
        num_warps=1 if future.width <= 1 or nodes == 1 else 8 if full > 256 else 4,
    )
    taken = zip(names, parts, strict=True)
    found = {name: part.view(given[name].shape) for name, part in taken}
    if nodes == 1:
        found = {name: found[name] for name in ("where", "tokens")}
    where = found["where"]
    return {**given, **found, "kv_len": where[0], "position": where[1]}


@triton.jit(
    do_not_specialize=["rows", "nodes", "full", "draft_tokens"],
    do_not_specialize_on_alignment=VIEWS,
)
def _leave(
    where, counts, tokens, parents, slots, draft_slot, choices, count, last, grown,
    tokens_told, parents_told, counts_told, state, grown_tokens, grown_parents, grown_values,
    rows, nodes, full, draft_tokens,
    NODES: tl.constexpr, FULL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the result of one row, by slot, and in the record."""
    row, each = tl.program_id(0), tl.arange(0, NODES)
    inside, at = each < nodes, row * nodes + each
    slot = tl.load(slots + row).to(tl.int64)
    tl.store(tokens_told + at, tl.load(tokens + at, mask=inside, other=0), mask=inside)
    end = row * nodes
    if NODES > 1:
        tl.store(parents_told + at, tl.load(parents + at, mask=inside, other=0), mask=inside)
        tl.store(counts_told + row, tl.load(counts + row))
        end += tl.load(last + row)
    kept = tl.load(count + row)
    tl.store(state + slot * 3, tl.load(where + row) + kept)
    tl.store(state + slot * 3 + 1, tl.load(where + rows + row) + kept)
    tl.store(state + slot * 3 + 2, tl.maximum(tl.load(choices + end), 0))
    if WIDTH > 0:
        node = tl.arange(0, FULL)
        there, to = node < draft_tokens, slot * full + node
        part = rows * draft_tokens
        begin = grown + row * draft_tokens + node
        bits = tl.load(begin + 2 * part, mask=there, other=0)
        follows = tl.load(draft_slot + row) >= 0
        value = tl.where(there & follows, bits.to(tl.float32, bitcast=True), float("-inf"))
        tl.store(grown_values + to, value, mask=node < full)
        tl.store(grown_tokens + to, tl.load(begin, mask=there, other=0), mask=there)
        if WIDTH > 1:
            tl.store(grown_parents + to, tl.load(begin + part, mask=there, other=0), mask=there)


def leave(
    future: FutureState, size: Size, inputs: RoundInputs, accepted: Accepted, record: Record
) -> None:
    """Write the rows' results to `future`, by slot, and the nodes that ran to the record: see
    kernels.Leave. Asynchronous.
    """
    whole: Tensor = record.grown if size.levels else record.tokens
    full = future.value.shape[1]
    _leave[(size.rows,)](
        *(inputs[name] for name in ("where", "count", "tokens", "parents", "slot", "draft_slot")),
        *(accepted.choices, accepted.count, accepted.last, whole),
        *(record.tokens, record.parents, record.count),
        *(future.state, future.tokens, future.parents, future.value),
        *(size.rows, size.nodes, full, size.draft_tokens if size.levels else 0),
        NODES=triton.next_power_of_2(size.nodes),
        FULL=triton.next_power_of_2(max(full, 1)),
        WIDTH=future.width,
        num_warps=1 if future.width <= 1 else 4,
    )
