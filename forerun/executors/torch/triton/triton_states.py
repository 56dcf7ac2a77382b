"""Recurrent states of a step's nodes, as Triton kernels for CUDA. The references are in
tests/references/states.py. Asynchronous.

A program keeps some columns of one head's state in registers while it processes a row's nodes, one
after the other. After a chain the state is available; where a tree branches it is recomputed from
the one at which the tree began, along the node's ancestors: there are few, and no state but the
accepted one is ever stored. So a path is scored and made permanent with the same numbers in the
same order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.executors.torch.attention.state_nodes import (
    KnownNodes,
    PathNodes,
    StateNodes,
    StateTables,
)
from forerun.executors.torch.decoder.delta import DeltaNumbers
from forerun.networks.layer_spec import GatedDelta

COLUMNS = 32
"""Columns of a state per program: with 128 rows 4,096 elements, 32 per thread of four warps."""

BLOCK = 256
"""Channels of a program without matrices."""

VIEWS = (
    *("slots", "counts", "parents", "enter", "leave", "depth", "kv_len", "copies", "kept"),
    *("mixed", "gates"),
)
"""Parts of larger tensors, whose alignment must not specialise kernels."""


@triton.jit(do_not_specialize=["nodes"], do_not_specialize_on_alignment=VIEWS)
def _ancestors(parents, past, nodes, W: tl.constexpr, NODES: tl.constexpr):
    """Write the windows of one row's nodes, from their own place backwards."""
    begin, each = tl.program_id(0) * nodes, tl.arange(0, NODES)
    inside, place = each < nodes, each
    for back in tl.static_range(W):
        at = tl.where(place >= 0, begin + place, place)
        tl.store(past + (begin + each) * W + W - 1 - back, at, mask=inside)
        above = tl.load(parents + begin + tl.maximum(place, 0), mask=inside, other=-1)
        # The window's last place is the one before a root.
        above = tl.where(above >= 0, above, 1 - W)
        place = tl.where(place >= 0, above, place + 1)


def ancestors(nodes: StateNodes, width: int) -> Tensor:
    """Return every node's window: see state_nodes.Ancestors. Asynchronous."""
    rows, total = len(nodes.count), len(nodes.parents)
    past = nodes.parents.new_empty(total, width)
    each = total // rows
    _ancestors[(rows,)](
        nodes.parents, past, each, W=width, NODES=triton.next_power_of_2(each), num_warps=1
    )
    return past


@triton.jit
def _convolved(
    total, mixed, windows, kernel, past, node, channel, there, channels, W: tl.constexpr
):
    """Add the sums of a node's window in some channels to `total`, the oldest token first."""
    for place in tl.static_range(W):
        at = tl.load(past + node * W + place).to(tl.int64)
        own = tl.load(mixed + at * channels + channel, mask=there & (at >= 0), other=0.0)
        before = windows + (-1 - at) * channels + channel
        old = tl.load(before, mask=there & (at < 0), other=0.0)
        factor = tl.load(kernel + channel * W + place, mask=there, other=0.0)
        total += (own.to(tl.float32) + old) * factor
    return total


@triton.jit
def _passed(
    mixed, windows, kernel, past, node, channel, there, channels,
    W: tl.constexpr, PASSED: tl.constexpr,
):  # fmt: skip
    """Return some channels of a node after convolution and SiLU."""
    if PASSED:
        found = tl.load(mixed + node.to(tl.int64) * channels + channel, mask=there, other=0.0)
        found = found.to(tl.float32)
    else:
        nothing = tl.zeros_like(channel).to(tl.float32)
        total = _convolved(nothing, mixed, windows, kernel, past, node, channel, there, channels, W)
        found = total / (1 + tl.exp(-total))
    return found


@triton.jit
def _of_unit_length(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _advanced(
    state, mixed, gates, kernel, rate, step, windows, past, node, head, heads, key, value,
    within, inside, channels,
    W: tl.constexpr, PASSED: tl.constexpr,
):  # fmt: skip
    """Return the state after one node. key, value: channels of its key and of its values."""
    k = _passed(mixed, windows, kernel, past, node, key, within, channels, W, PASSED)
    v = _passed(mixed, windows, kernel, past, node, value, inside, channels, W, PASSED)
    k = _of_unit_length(k)
    gate = gates + node.to(tl.int64) * 2 * heads + head
    a = tl.load(gate + heads).to(tl.float32) + tl.load(step + head)
    soft = tl.maximum(a, 0.0) + tl.log(1 + tl.exp(-tl.abs(a)))
    beta = 1 / (1 + tl.exp(-tl.load(gate).to(tl.float32)))
    state = state * tl.exp(tl.load(rate + head) * soft)
    change = (v - tl.sum(state * k[:, None], 0)) * beta
    return state + k[:, None] * change[None, :]


@triton.jit
def _key_head(head, heads, key_heads, TILED: tl.constexpr):
    return head % key_heads if TILED else head // (heads // key_heads)


@triton.jit(do_not_specialize_on_alignment=VIEWS)
def _score(
    mixed, gates, kernel, rate, step, windows, states, slots, past, start, counts, parents, enter,
    leave, leading, targets, out, channels, heads, key_heads,
    DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr,
    TILED: tl.constexpr, PASSED: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """Run one row's nodes with some columns of one head's state."""
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, triton.next_power_of_2(DK))
    e = part * COLUMNS + tl.arange(0, COLUMNS)
    within, inside = d < DK, e < DV
    there = within[:, None] & inside[None, :]
    count, begin = tl.load(counts + row), tl.load(start + row)
    slot = tl.where(count > 0, tl.load(slots + row), 0).to(tl.int64)
    size: tl.constexpr = DK * DV
    at = d[:, None] * DV + e[None, :]
    own = states + (slot * heads + head) * size + at
    window = windows + slot * (W - 1) * channels
    query = _key_head(head, heads, key_heads, TILED) * DK + d
    key, value = key_heads * DK + query, 2 * key_heads * DK + head * DV + e
    first = 0
    if KNOWN:
        first = tl.load(leading + row)
    state = tl.load(own, mask=there, other=0.0)
    for place in range(count):
        node = begin + place
        if tl.load(parents + node) != place - 1:
            state = tl.load(own, mask=there, other=0.0)
            entered = tl.load(enter + node)
            for above in range(first, place):
                other = begin + above
                if (tl.load(enter + other) <= entered) & (entered < tl.load(leave + other)):
                    state = _advanced(
                        state, mixed, gates, kernel, rate, step, window, past, other, head, heads,
                        key, value, within, inside, channels, W, PASSED,
                    )  # fmt: skip
        state = _advanced(
            state, mixed, gates, kernel, rate, step, window, past, node, head, heads,
            key, value, within, inside, channels, W, PASSED,
        )  # fmt: skip
        q = _passed(mixed, window, kernel, past, node, query, within, channels, W, PASSED)
        q = _of_unit_length(q) * (DK**-0.5)
        found = tl.sum(state * q[:, None], 0)
        tl.store(out + (node.to(tl.int64) * heads + head) * DV + e, found, mask=inside)
        if KNOWN:
            target = tl.load(targets + node).to(tl.int64)
            if target >= 0:
                tl.store(states + (target * heads + head) * size + at, state, mask=there)
            if place == first - 1:
                tl.store(own, state, mask=there)
                tl.debug_barrier()  # Draft tokens' branches begin there.
    for place in range(count, tl.load(start + row + 1) - begin):
        nothing = tl.zeros([COLUMNS], tl.float32)
        node = (begin + place).to(tl.int64)
        tl.store(out + (node * heads + head) * DV + e, nothing, mask=inside)


def score(
    about: GatedDelta,
    numbers: DeltaNumbers,
    states: StateTables,
    nodes: StateNodes,
    past: Tensor | None,
    known: KnownNodes | None = None,
) -> Tensor:
    """Run nodes through a layer: see state_nodes.Score. Asynchronous."""
    matrices, heads = states.matrices, about.value_heads
    assert matrices is not None
    rows, total = len(nodes.count), len(nodes.parents)
    out = numbers.mixed.new_empty(total, heads, about.value_size, dtype=torch.float32)
    _score[rows, heads, triton.cdiv(about.value_size, COLUMNS)](
        *(numbers.mixed, numbers.gates, numbers.kernel, numbers.rate, numbers.step),
        *(states.windows, matrices, nodes.slots, nodes.start if past is None else past),
        *(nodes.start, nodes.count, nodes.parents, *nodes.tree_intervals),
        *((nodes.start, nodes.start) if known is None else (known.leading, known.targets)),
        *(out, about.channels, heads, about.key_heads),
        **_constants(about),
        PASSED=past is None,
        KNOWN=known is not None,
        num_warps=4,
    )
    return out


def _constants(about: GatedDelta) -> dict[str, int | bool]:
    return {
        "DK": about.key_size,
        "DV": about.value_size,
        "W": about.window,
        "COLUMNS": COLUMNS,
        "TILED": about.tiled,
    }


@triton.jit(do_not_specialize=["nodes"], do_not_specialize_on_alignment=VIEWS)
def _convolve(
    mixed, kernel, bias, windows, slots, counts, past, out, channels, nodes,
    W: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the sums of one node's window in some channels."""
    node, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, there = node // nodes, channel < channels
    real = node % nodes < tl.load(counts + row)
    slot = tl.where(real, tl.load(slots + row), 0).to(tl.int64)
    window = windows + slot * (W - 1) * channels
    total = tl.zeros_like(channel).to(tl.float32)
    if BIASED:
        total += tl.load(bias + channel, mask=there & real, other=0.0)
    total = _convolved(total, mixed, window, kernel, past, node, channel, there & real, channels, W)
    tl.store(out + node.to(tl.int64) * channels + channel, total, mask=there)


def convolve(
    mixed: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    states: StateTables,
    nodes: StateNodes,
    past: Tensor,
) -> Tensor:
    """Compute the sums of nodes' windows in a layer: see state_nodes.Convolve. Asynchronous."""
    total, channels = mixed.shape
    out = torch.empty_like(mixed, dtype=torch.float32)
    _convolve[total, triton.cdiv(channels, BLOCK)](
        *(mixed, kernel, kernel if bias is None else bias, states.windows),
        *(nodes.slots, nodes.count, past, out, channels, total // len(nodes.count)),
        W=kernel.shape[1],
        BIASED=bias is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["nodes", "most", "table"], do_not_specialize_on_alignment=VIEWS)
def _advance(
    mixed, gates, kernel, rate, step, windows, states, slots, past, counts, kept, depth, kv_len,
    copies, channels, heads, key_heads, nodes, most, table,
    DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr,
    TILED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Advance some columns of one head along one row's path, in one layer."""
    row, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    parts: tl.constexpr = (DV + COLUMNS - 1) // COLUMNS
    head, part = head // parts, head % parts
    begin = row * nodes
    if tl.load(kept + begin) != 0:
        d = tl.arange(0, triton.next_power_of_2(DK))
        e = part * COLUMNS + tl.arange(0, COLUMNS)
        within, inside = d < DK, e < DV
        there = within[:, None] & inside[None, :]
        mixed += layer * most * channels
        gates += layer * most * 2 * heads
        kernel += layer * channels * W
        size: tl.constexpr = DK * DV
        at = d[:, None] * DV + e[None, :]
        slot = layer * table + tl.load(slots + row)
        window = windows + slot * (W - 1) * channels
        own = states + (slot * heads + head) * size + at
        key = (key_heads + _key_head(head, heads, key_heads, TILED)) * DK + d
        value = 2 * key_heads * DK + head * DV + e
        copy, before = tl.load(copies + row).to(tl.int64), tl.load(kv_len + row) + 1
        state = tl.load(own, mask=there, other=0.0)
        for place in range(tl.load(counts + row)):
            node = begin + place
            if tl.load(kept + node) != 0:
                state = _advanced(
                    state, mixed, gates, kernel, rate + layer * heads, step + layer * heads, window,
                    past, node, head, heads, key, value, within, inside, channels, W, False,
                )  # fmt: skip
                if (copy >= 0) & ((before + tl.load(depth + node)) % PAGE == 0):
                    there_too = states + ((layer * table + copy) * heads + head) * size + at
                    tl.store(there_too, state, mask=there)
        tl.store(own, state, mask=there)


def advance(
    about: GatedDelta,
    numbers: DeltaNumbers,
    states: StateTables,
    nodes: StateNodes,
    past: Tensor,
    path: PathNodes,
) -> None:
    """Make paths permanent in all layers: see state_nodes.Advance. Asynchronous."""
    matrices, heads = states.matrices, about.value_heads
    assert matrices is not None
    rows, (layers, most, channels) = len(nodes.count), numbers.mixed.shape
    _advance[rows, heads * triton.cdiv(about.value_size, COLUMNS), layers](
        *(numbers.mixed, numbers.gates, numbers.kernel, numbers.rate, numbers.step),
        *(states.windows, matrices, nodes.slots, past, nodes.count, path.on_path.view(torch.int8)),
        *(path.depth, path.kv_len, path.copies, channels, heads, about.key_heads),
        *(len(nodes.parents) // rows, most, matrices.shape[1]),
        **_constants(about),
        PAGE=path.page_size,
        num_warps=4,
    )


@triton.jit
def _window(mixed, windows, past, node, place, channel, there, channels, W: tl.constexpr):
    """Return the rows [W-1, channels] of the window after a node: the node's own window without the
    oldest.
    """
    at = tl.load(past + node * W + 1 + place, mask=place < W - 1, other=0).to(tl.int64)[:, None]
    own = tl.load(mixed + at * channels + channel, mask=there & (at >= 0), other=0.0)
    old = tl.load(windows + (-1 - at) * channels + channel, mask=there & (at < 0), other=0.0)
    return own.to(tl.float32) + old


@triton.jit(do_not_specialize=["nodes", "most", "table"], do_not_specialize_on_alignment=VIEWS)
def _shift(
    mixed, windows, slots, past, counts, kept, depth, kv_len, copies, channels, nodes, most, table,
    W: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Move some channels of one row's windows to the end of its path, in one layer."""
    row, part, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin = row * nodes
    if tl.load(kept + begin) != 0:
        end, full = begin, begin - 1
        before = tl.load(kv_len + row) + 1
        for place in range(tl.load(counts + row)):
            keeps = tl.load(kept + begin + place) != 0
            ends = keeps & ((before + tl.load(depth + begin + place)) % PAGE == 0)
            end = tl.where(keeps, begin + place, end)
            full = tl.where(ends, begin + place, full)
        channel = (part * BLOCK + tl.arange(0, BLOCK))[None, :]
        place = tl.arange(0, WIDE)
        there = (place < W - 1)[:, None] & (channel < channels)
        mixed += layer * most * channels
        windows += layer * table * (W - 1) * channels
        own = windows + tl.load(slots + row).to(tl.int64) * (W - 1) * channels
        at = place[:, None] * channels + channel
        found = _window(mixed, own, past, end, place, channel, there, channels, W)
        copy = tl.load(copies + row).to(tl.int64)
        if (full >= begin) & (copy >= 0):
            there_too = _window(mixed, own, past, full, place, channel, there, channels, W)
            tl.store(windows + copy * (W - 1) * channels + at, there_too, mask=there)
        tl.debug_barrier()  # Another thread may read what this one overwrites.
        tl.store(own + at, found, mask=there)


def shift(
    mixed: Tensor, states: StateTables, nodes: StateNodes, past: Tensor, path: PathNodes
) -> None:
    """Move windows to the ends of paths in all layers: see state_nodes.Shift. Asynchronous."""
    rows, (layers, most, channels) = len(nodes.count), mixed.shape
    width = past.shape[1]
    _shift[rows, triton.cdiv(channels, BLOCK), layers](
        *(mixed, states.windows, nodes.slots, past, nodes.count, path.on_path.view(torch.int8)),
        *(path.depth, path.kv_len, path.copies, channels, len(nodes.parents) // rows, most),
        states.windows.shape[1],
        W=width,
        WIDE=triton.next_power_of_2(width - 1),
        BLOCK=BLOCK,
        PAGE=path.page_size,
        num_warps=4,
    )
