"""The operations between a draft head's levels in a captured round, as Triton kernels for CUDA. The
references are in tests/references/rounds.py. Asynchronous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.executors.torch.accept import NodeNoise
from forerun.executors.torch.decoder.elementwise import Rotary
from forerun.executors.torch.triton.round_types import (
    Accepted,
    Extended,
    Frontier,
    Levels,
    Prepared,
    RoundInputs,
    TreeStarts,
)
from forerun.executors.torch.triton.triton_choice import gumbel_at
from forerun.executors.torch.triton.triton_layers import warps_for
from forerun.interface.draft_model import CANDIDATES
from forerun.speculative.tree import full_size

CHUNK = 2048
"""Draft tokens that one program of `_candidates` reads."""


VIEWS = (
    *("draft_slot", "kv_len", "seeds", "positions", "temperatures", "grown", "position"),
    *("seeds_out", "positions_out", "temperatures_out", "tokens", "others"),
)
"""Parts of larger tensors, whose alignment must not specialise kernels."""


@triton.jit(
    do_not_specialize=["passed_size", "nodes", "first", "nobody", "rows", "width", "levels"],
    do_not_specialize_on_alignment=VIEWS,
)
def _follow(
    read, hidden, last, count, draft_slot, kv_len, seeds, positions, temperatures,
    read_out, hidden_out, outputs, kv_out, seeds_out, positions_out, temperatures_out, position,
    read_size, passed_size, nodes, first, nobody, rows, width, levels,
    BLOCK: tl.constexpr, ASKERS: tl.constexpr,
):  # fmt: skip
    """Copy some elements of one row; the first program also copies its inputs."""
    row, block = tl.program_id(0), tl.program_id(1)
    root = row * nodes
    at = block * BLOCK + tl.arange(0, BLOCK)
    end = (root + tl.load(last + row)).to(tl.int64)
    slot = tl.load(draft_slot + row)
    slot = tl.where(slot >= 0, first + slot, nobody).to(tl.int64)
    out, there = row.to(tl.int64), at < read_size
    found = tl.load(read + end * read_size + at, mask=there)
    tl.store(read_out + out * read_size + at, found, mask=there)
    there = at < passed_size
    passed = tl.load(hidden + end * passed_size + at, mask=there)
    tl.store(hidden_out + out * passed_size + at, passed, mask=there)
    tl.store(outputs + slot * passed_size + at, passed, mask=there)
    if block == 0:
        kept = tl.load(count + row)
        cached = tl.load(kv_len + row) + kept
        tl.store(kv_out + row, cached)
        each = tl.arange(0, ASKERS)
        asks, level = each < levels * width, each // width
        to = level * rows * width + row * width + each % width
        nothing = tl.zeros_like(each)
        begins = tl.load(positions + root) + kept
        tl.store(seeds_out + to, tl.load(seeds + root) + nothing, mask=asks)
        tl.store(positions_out + to, begins + level, mask=asks)
        tl.store(
            temperatures_out + to, tl.load(temperatures + root) + nothing.to(tl.float32), mask=asks
        )
        runs = asks & (level > 0)
        tl.store(position + to - rows * width, cached + level - 1, mask=runs)


def follow(
    extended: Extended, accepted: Accepted, prepared: Prepared, inputs: RoundInputs, size: Levels
) -> TreeStarts:
    """Gather the roots of R trees: the ends of accepted paths out of [M,H] and [M,W], and write
    `extended.outputs` by slot: see kernels.Follow. Asynchronous.
    """
    rows, levels, width = len(accepted.count), size.levels, size.width
    sizes = extended.read.shape[1], extended.hidden.shape[1]
    read, hidden = (extended.read.new_empty(rows, each) for each in sizes)
    kv_len = torch.empty_like(accepted.count)
    noise = prepared.noise
    seeds, positions, temperatures = (
        each.new_empty(levels, rows * width)
        for each in (noise.seeds, noise.positions, noise.temperatures)
    )
    position = kv_len.new_empty(levels - 1, rows * width)
    _follow[rows, triton.cdiv(max(*sizes, 1), 1024)](
        *(extended.read, extended.hidden, accepted.last, accepted.count),
        *(inputs["draft_slot"], inputs["kv_len"]),
        *(noise.seeds, noise.positions, noise.temperatures),
        *(read, hidden, extended.outputs, kv_len, seeds, positions, temperatures, position),
        *(*sizes, len(prepared.position) // rows, extended.first),
        *(len(extended.outputs) - 1, rows, width, levels),
        BLOCK=1024,
        ASKERS=triton.next_power_of_2(levels * width),
        num_warps=4,
    )
    of_levels = [NodeNoise(*each) for each in zip(seeds, positions, temperatures, strict=True)]
    of_levels[0] = NodeNoise(seeds[0, ::width], positions[0, ::width], temperatures[0, ::width])
    return TreeStarts(read, hidden, kv_len, tuple(of_levels), position)


@triton.jit(do_not_specialize=["factor"], do_not_specialize_on_alignment=VIEWS)
def _rotation(position, frequencies, cos, sin, factor, HALF: tl.constexpr):
    node, at = tl.program_id(0), tl.arange(0, triton.next_power_of_2(HALF))
    there = at < HALF
    where = tl.load(position + node).to(tl.float32)
    frequency = tl.load(frequencies + at, mask=there, other=0.0)
    angle = where * frequency
    out = node.to(tl.int64) * HALF + at
    tl.store(cos + out, tl.where(frequency == 0, 1.0, tl.cos(angle) * factor), mask=there)
    tl.store(sin + out, tl.sin(angle) * factor, mask=there)


def rotation(positions: Tensor, frequencies: Tensor, factor: float) -> Rotary:
    """Compute elementwise.rotation: float32[M,E/2] each, of positions int32[M]. Asynchronous."""
    shape = len(positions), len(frequencies)
    cos, sin = frequencies.new_empty(shape), frequencies.new_empty(shape)
    _rotation[(len(positions),)](
        positions, frequencies, cos, sin, factor, HALF=len(frequencies), num_warps=1
    )
    return cos, sin


@triton.jit
def _key(values, tokens):
    """Return int64 keys that order as the float32 values do, equal ones by the lower token
    first.
    """
    bits = values.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return (ordered << 32) | (0x7FFFFFFF - tokens).to(tl.int64)


@triton.jit
def _value(keys):
    ordered = (keys >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["vocab", "chunks", "every"], do_not_specialize_on_alignment=VIEWS)
def _candidates(
    logits, temperatures, keys, most, sums, vocab, chunks, every,
    CHUNK: tl.constexpr, COUNT: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Write the best candidates of one chunk of one node's draft tokens, descending, and the sum of
    its exponentials.
    """
    node, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    there = token < vocab
    place = node.to(tl.int64) * vocab + token
    values = tl.load(logits + place, mask=there, other=float("-inf")).to(tl.float32)
    top = tl.max(values, 0)
    level = tl.where(top == float("-inf"), 0.0, top)
    at = node * chunks + chunk
    tl.store(most + at, top)
    tl.store(sums + at, tl.sum(tl.exp(values - level), 0))
    key = _key(values, token)
    best = at.to(tl.int64) * COUNT + tl.arange(0, COUNT)
    if CHAIN and tl.load(temperatures + node * every) <= 0:
        # A single one, which is not reordered later.
        nothing = tl.full([COUNT], -9223372036854775807, tl.int64)
        tl.store(keys + best, tl.where(tl.arange(0, COUNT) == 0, tl.max(key, 0), nothing))
    else:
        tl.store(keys + best, tl.topk(key, COUNT))


@triton.jit
def _noised(value, token, there, seeds, positions, temperatures, place):
    """Return log-probabilities of candidates; at T > 0 those of the scores with the position's
    noise, normalised over the candidates.
    """
    temperature = tl.load(temperatures + place)
    if temperature > 0:
        noise = gumbel_at(tl.load(seeds + place), tl.load(positions + place), token)
        value = tl.div_rn(value, tl.zeros_like(value) + temperature) + noise
        value = tl.where(there, value, float("-inf"))
        greatest = tl.max(value, 0)
        value = value - (greatest + tl.log(tl.sum(tl.exp(value - greatest), 0)))
    return tl.where(value != value, float("-inf"), value)  # noqa: PLR0124 - NaN


@triton.jit(
    do_not_specialize=[
        *("chunks", "vocab", "every", "rows", "nodes", "places", "begin", "above"),
    ],
    do_not_specialize_on_alignment=VIEWS,
)
def _grow(
    keys, most, sums, ids, seeds, positions, temperatures, grown, chosen,
    chunks, vocab, every, rows, nodes, places, begin, above,
    COUNT: tl.constexpr, CANDIDATES: tl.constexpr, ALL: tl.constexpr, CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Write the best children of one node, from the candidates of its chunks."""
    node = tl.program_id(0)
    row, asker = node // nodes, node % nodes
    chunk = tl.arange(0, CHUNKS)
    top = tl.load(most + node * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    total = tl.load(sums + node * chunks + chunk, mask=chunk < chunks, other=0.0)
    level = tl.max(top, 0)
    # NaN and +inf in any chunk are in its sum.
    level = tl.where(level == float("-inf"), 0.0, level)
    share = tl.where(top == float("-inf"), 0.0, total * tl.exp(top - level))
    normaliser = level + tl.log(tl.sum(share + total * 0, 0))
    whole = tl.arange(0, ALL)
    nothing = tl.full([ALL], -9223372036854775807, tl.int64)
    place = node.to(tl.int64) * chunks * COUNT + whole
    found = tl.where(
        whole < chunks * COUNT, tl.load(keys + place, mask=whole < chunks * COUNT, other=0), nothing
    )
    best = tl.topk(found, COUNT)
    child = tl.arange(0, COUNT)
    draft = (0x7FFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32)
    there = (child < CANDIDATES) & (draft >= 0) & (draft < vocab)
    token = tl.load(ids + draft, mask=there, other=0)
    value = tl.where(there, _value(best) - normaliser, float("-inf"))
    value = _noised(value, token, there, seeds, positions, temperatures, node * every)
    size = rows.to(tl.int64) * places
    into = grown + row.to(tl.int64) * places
    base, parent = 0.0, -1
    if above >= 0:
        parent = above
        if CHOSEN:
            parent = above + tl.load(chosen + node).to(tl.int32)
        base = tl.load(into + 2 * size + parent).to(tl.float32, bitcast=True)
    for rank in range(WIDTH):
        greatest = tl.max(value, 0)
        which = tl.min(tl.where((value == greatest) & there, child, COUNT), 0)
        to = into + begin + asker * WIDTH + rank
        tl.store(to, tl.sum(tl.where(child == which, token, 0), 0))
        tl.store(to + size, parent)
        worth = base + tl.minimum(greatest, 0.0)
        tl.store(to + 2 * size, worth.to(tl.int32, bitcast=True))
        value = tl.where(child == which, float("-inf"), value)


def grow(
    logits: Tensor,
    ids: Tensor,
    noise: NodeNoise,
    size: Levels,
    level: int,
    grown: Tensor,
    chosen: Tensor | None,
) -> None:
    """Append a level of children to `grown` int32[3,R,K]: see kernels.Grow. Asynchronous."""
    count, vocab = logits.shape
    width, rows, places = size.width, grown.shape[1], grown.shape[2]
    candidates = min(max(CANDIDATES, width), vocab)
    kept, chunks = triton.next_power_of_2(candidates), triton.cdiv(vocab, CHUNK)
    keys = noise.seeds.new_empty(count, chunks, kept)
    most, sums = (noise.temperatures.new_empty(count, chunks) for _ in range(2))
    every = noise.seeds.stride(0)
    _candidates[count, chunks](
        *(logits, noise.temperatures, keys, most, sums, vocab, chunks, every),
        CHUNK=CHUNK,
        COUNT=kept,
        CHAIN=width == 1,
        num_warps=4,
    )
    _grow[(count,)](
        *(keys, most, sums, ids, noise.seeds, noise.positions, noise.temperatures, grown),
        *(keys if chosen is None else chosen, chunks, vocab, every, rows, count // rows, places),
        *(full_size(width, level), full_size(width, level - 1) if level else -1),
        COUNT=kept,
        CANDIDATES=candidates,
        ALL=triton.next_power_of_2(chunks * kept),
        CHUNKS=triton.next_power_of_2(chunks),
        WIDTH=width,
        CHOSEN=chosen is not None,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["count", "nodes", "every"], do_not_specialize_on_alignment=VIEWS)
def _children(
    scores, ids, others, seeds, positions, temperatures, ids_out, values_out,
    count, nodes, every, COUNT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the best children of one node, of its row's candidates."""
    node = tl.program_id(0)
    row = node // nodes
    child = tl.arange(0, COUNT)
    there = child < count
    value = tl.load(scores + node * count + child, mask=there, other=float("-inf"))
    token = tl.load(ids + row * count + child, mask=there, other=0)
    rest = tl.load(others + row)
    most = tl.maximum(tl.max(value, 0), rest)
    value = value - (most + tl.log(tl.sum(tl.exp(value - most), 0) + tl.exp(rest - most)))
    value = _noised(value, token, there, seeds, positions, temperatures, row * every)
    for rank in range(WIDTH):
        greatest = tl.max(value, 0)
        which = tl.min(tl.where((value == greatest) & there, child, COUNT), 0)
        tl.store(ids_out + node * WIDTH + rank, tl.sum(tl.where(child == which, token, 0), 0))
        tl.store(values_out + node * WIDTH + rank, tl.minimum(greatest, 0.0))
        value = tl.where(child == which, float("-inf"), value)


def children(
    scores: Tensor, ids: Tensor, others: Tensor, noise: NodeNoise, width: int
) -> tuple[Tensor, Tensor]:
    """Choose the children of nodes whose candidates depend on the tokens above them: see
    kernels.Children. Asynchronous.
    """
    nodes, count = scores.shape
    found, values = ids.new_empty(nodes, width), scores.new_empty(nodes, width)
    _children[(nodes,)](
        *(scores, ids, others, noise.seeds, noise.positions, noise.temperatures),
        *(found, values, count, nodes // len(ids), noise.seeds.stride(0)),
        COUNT=triton.next_power_of_2(count),
        WIDTH=width,
        num_warps=1,
    )
    return found, values


@triton.jit(
    do_not_specialize=["level", "count", "rows", "places", "begin", "full", "passed", "roots"],
    do_not_specialize_on_alignment=VIEWS,
)
def _descend(
    grown, hidden, above, chosen, tokens, hidden_out, above_out, tree_intervals,
    hidden_stride, level, count, rows, places, begin, full, passed, roots,
    WIDTH: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one row's frontier, and some elements of its nodes' hidden states."""
    row, block = tl.program_id(0), tl.program_id(1)
    WIDE: tl.constexpr = triton.next_power_of_2(WIDTH)
    each, place = tl.arange(0, FULL), tl.arange(0, WIDE)
    inside, real = each < full, place < WIDTH
    newest = row * places + begin + each
    bits = tl.load(grown + 2 * rows * places + newest, mask=inside, other=0)
    values, free = bits.to(tl.float32, bitcast=True), inside
    for _ in range(WIDTH):
        greatest = tl.max(tl.where(free, values, float("-inf")), 0)
        best = tl.min(tl.where(free & (values == greatest), each, FULL), 0)
        free = free & (each != best)
    taken = inside & (free == 0)
    # [place, node of the newest level]
    into = taken[None, :] & ((tl.cumsum(taken.to(tl.int32), 0) - 1)[None, :] == place[:, None])
    mine = tl.sum(tl.where(into, each[None, :], 0), 1)
    parent = tl.where(level > 1, mine // WIDTH, 0)
    asked = tl.where(level > 1, WIDTH, 1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    there = real[:, None] & (at < passed)[None, :]
    source = (row * asked + parent).to(tl.int64)[:, None] * hidden_stride + at[None, :]
    target = (row * WIDTH + place).to(tl.int64)[:, None] * passed + at[None, :]
    tl.store(hidden_out + target, tl.load(hidden + source, mask=there, other=0.0), mask=there)
    if block == 0:
        tl.store(chosen + row * WIDTH + place, mine, mask=real)
        token = tl.load(grown + row * places + begin + mine, mask=real, other=0)
        tl.store(tokens + row * WIDTH + place, token, mask=real)
        nodes = roots + count * WIDTH
        if roots > 0:
            tl.store(tree_intervals + row * nodes, 0)
            tl.store(tree_intervals + (rows + row) * nodes, WIDTH)
        for deep in range(count):
            known = (row * count + deep) * WIDTH
            who = tl.load(above + known + parent, mask=real & (deep < level - 2), other=-1)
            who = tl.where(deep == level - 2, parent, who)
            who = tl.where(deep == level - 1, place, who)
            tl.store(above_out + known + place, who, mask=real)
            # [place, node]
            before = real[None, :] & (who[None, :] < place[:, None])
            until = real[None, :] & (who[None, :] <= place[:, None])
            to = tree_intervals + row * nodes + roots + deep * WIDTH + place
            tl.store(to, tl.sum(before.to(tl.int32), 1), mask=real)
            tl.store(to + rows * nodes, tl.sum(until.to(tl.int32), 1), mask=real)


def descend(
    grown: Tensor, size: Levels, level: int, hidden: Tensor, above: Tensor | None, roots: bool
) -> Frontier:
    """Return the `width` best nodes of R trees' newest level: see kernels.Descend. Launches
    only.
    """
    (_, rows, places), width, count = grown.shape, size.width, size.levels - 1
    passed = hidden.shape[1]
    begin, wide = full_size(width, level - 1), triton.next_power_of_2(width)
    found = Frontier(
        chosen=grown.new_empty(rows, width),
        tokens=grown.new_empty(rows * width),
        hidden=hidden.new_empty(rows * width, passed),
        above=grown.new_empty(rows, count, width),
        tree_intervals=grown.new_empty(2, rows * (roots + count * width)),
    )
    block = max(1024 // wide, 64)
    _descend[rows, triton.cdiv(max(passed, 1), block)](
        *(grown, hidden, found.above if above is None else above),
        *(found.chosen, found.tokens, found.hidden, found.above, found.tree_intervals),
        *(hidden.stride(0), level, count, rows, places, begin, full_size(width, level) - begin),
        *(passed, int(roots)),
        WIDTH=width,
        FULL=triton.next_power_of_2(width * width),
        BLOCK=block,
        num_warps=4,
    )
    return found


@triton.jit(do_not_specialize=["eps"], do_not_specialize_on_alignment=VIEWS)
def _inputs(
    tokens, embedding, hidden, of_embedding, of_hidden, out, hidden_stride, width, eps,
    WIDE: tl.constexpr, HIDDEN_FIRST: tl.constexpr,
):  # fmt: skip
    """Write the normalised embedding of one node's token, or its normalised hidden state."""
    node, second = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDE)
    there = at < width
    of_state = (second == 1) != HIDDEN_FIRST
    if of_state:
        value = tl.load(hidden + node * hidden_stride + at, mask=there, other=0.0)
        by = tl.load(of_hidden + at, mask=there, other=0.0)
    else:
        token = tl.load(tokens + node).to(tl.int64)
        value = tl.load(embedding + token * width + at, mask=there, other=0.0)
        by = tl.load(of_embedding + at, mask=there, other=0.0)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps) * by
    tl.store(out + (2 * node + second) * width + at, wide.to(out.dtype.element_ty), mask=there)


def draft_inputs(
    tokens: Tensor,
    embedding: Tensor,
    hidden: Tensor,
    norms: tuple[Tensor, Tensor],
    eps: float,
    hidden_first: bool = False,
) -> Tensor:
    """Return [M,2H], the concatenation of embedding rows of tokens int[M] and hidden states [M,H],
    each normalised with its weight [H]: elementwise.draft_inputs. Asynchronous.
    """
    count, width = hidden.shape
    wide = triton.next_power_of_2(width)
    out = hidden.new_empty(count, 2 * width)
    _inputs[count, 2](
        *(tokens.int(), embedding, hidden, *norms, out, hidden.stride(0), width, eps),
        WIDE=wide,
        HIDDEN_FIRST=hidden_first,
        num_warps=warps_for(wide),
    )
    return out
