"""Penalties and biases, and the cuts of min_p, top_k and top_p, as two Triton kernels for CUDA.

The cuts need no sort: a program processes one node, and searches the 32-bit keys that order as the
logits over temperature for the least key to keep, by counts and masses above four pivots at a time;
once only a few tokens are between two pivots, among these alone. The references are `shaped` and
`cut` in forerun.executors.torch.shaping. Asynchronous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.executors.device_choice import LEAST_TOP_P
from forerun.executors.torch.shaping import COUNT, SEEN, STOP, Shaping, without
from forerun.executors.torch.shaping import shaped as shaped_plainly

FEW = 4096
"""Tokens that a program keeps in registers: with 128,256 normally distributed logits of deviation
0.2 to 4 this few are left after one to five passes over the vocabulary; with more equal logits,
after 20.
"""

ROWS, LANES, WARPS = 4, 2048, 16
"""Shape of the part of the vocabulary that a program reads at once. Every thread has whole columns,
so that a pass sums without synchronising its threads; more would spill (124 registers of 128).
"""

EDITED = 2048
"""Tokens of the vocabulary that one program of `_edit` processes."""

LEAST = tl.constexpr(LEAST_TOP_P)

RULES = ("temperatures", "min_p", "top_k", "low", "high")
FACTS = (
    *("logits", "slots", "repetition", "frequency", "presence", "min_tokens"),
    *("tokens", "positions"),
)
"""Parts of larger tensors, whose alignment must not specialise kernels."""


@triton.jit
def _key(value):
    """Return int64 keys, within 32 bits, that order as float32 does; for 0.0 but not for -0.0."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    ordered = tl.where(key == -1, -2, key).to(tl.int32)  # No key is -0.0: use the next one below.
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _part(begin, ROWS: tl.constexpr, LANES: tl.constexpr):
    return begin + tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def _weight(value, top):
    return tl.exp(value - top).to(tl.float64)


@triton.jit
def _heated(logits, heated, vocab, temperature, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Write one node's logits over temperature to `heated`; returns the greatest."""
    most = tl.full([LANES], float("-inf"), tl.float32)
    for begin in range(0, vocab, ROWS * LANES):
        at = _part(begin, ROWS, LANES)
        value = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
        value = tl.div_rn(value, tl.zeros_like(value) + temperature)
        value = tl.where(value == 0, 0.0, value)  # Makes both zeros equal.
        tl.store(heated + at, value, mask=at < vocab)
        most = tl.maximum(most, tl.max(value, 0))
    tl.debug_barrier()
    return tl.max(most, 0)


@triton.jit
def _above(
    heated, vocab, top, p0, p1, p2, p3,
    MASS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return the numbers of tokens above four keys, and their masses."""
    v0, v1, v2, v3 = _value(p0), _value(p1), _value(p2), _value(p3)
    c0 = tl.zeros([LANES], tl.int32)
    m0 = tl.zeros([LANES], tl.float64)
    c1, c2, c3, m1, m2, m3 = c0, c0, c0, m0, m0, m0
    for begin in range(0, vocab, ROWS * LANES):
        at = _part(begin, ROWS, LANES)
        value = tl.load(heated + at, mask=at < vocab, other=float("-inf"))
        a0, a1, a2, a3 = value > v0, value > v1, value > v2, value > v3
        c0 += tl.sum(a0.to(tl.int32), 0)
        c1 += tl.sum(a1.to(tl.int32), 0)
        c2 += tl.sum(a2.to(tl.int32), 0)
        c3 += tl.sum(a3.to(tl.int32), 0)
        if MASS:
            weight = _weight(value, top)
            m0 += tl.sum(tl.where(a0, weight, 0.0), 0)
            m1 += tl.sum(tl.where(a1, weight, 0.0), 0)
            m2 += tl.sum(tl.where(a2, weight, 0.0), 0)
            m3 += tl.sum(tl.where(a3, weight, 0.0), 0)
    counts = tl.sum(c0, 0), tl.sum(c1, 0), tl.sum(c2, 0), tl.sum(c3, 0)
    masses = tl.sum(m0, 0), tl.sum(m1, 0), tl.sum(m2, 0), tl.sum(m3, 0)
    return counts, masses


@triton.jit
def _pivot(place: tl.constexpr, step, first, low, high, top):
    """Return the key of one of four pivots in (low, high), ascending: below the greatest at first,
    then evenly spaced by value if that is narrower, else evenly by key, which terminates.
    """
    from_, to = _value(low), _value(high)
    key = low + (high - low) * (place + 1) // 5
    if (step < 6) & (to - from_ <= 64.0):
        key = _key(from_ + (to - from_) * (place + 1) * 0.2)
    if step == 0:
        key = first if place == 0 else _key(top - 32.0 / 2**place)
    return tl.minimum(tl.maximum(key, low), high - 1)


@triton.jit
def _gather(heated, few, vocab, low, high, BLOCK: tl.constexpr):
    """Write the heated logits whose keys are in (low, high] to `few`; returns their number."""
    least, most, found = _value(low), _value(high), 0
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(heated + at, mask=at < vocab, other=float("-inf"))
        mine = (value > least) & (value <= most)
        place = found + tl.cumsum(mine.to(tl.int32), 0)
        tl.store(few + place - 1, value, mask=mine)
        found += tl.sum(mine.to(tl.int32), 0)
    tl.debug_barrier()
    return found


@triton.jit
def _search(
    heated, few, vocab, top, first, low, asked, more,
    MASS: tl.constexpr, FEW: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return the least key above `low` with less than a limit above it, where the limit is `asked`
    tokens, or mass `asked` of what lies above `first`, and `more`. Also the count and mass above
    it, tokens that have it (the vocabulary if not counted), and the limit.
    """
    high = tl.maximum(_key(top), first) + 1
    limit, step, low_count, high_count = asked, 0, vocab, 0
    high_mass = more * 0.0
    while (step == 0) | ((step < 32) & (high - low > 1) & (low_count - high_count > FEW)):
        p0 = _pivot(0, step, first, low, high, top)
        p1 = tl.maximum(_pivot(1, step, first, low, high, top), p0)
        p2 = tl.maximum(_pivot(2, step, first, low, high, top), p1)
        p3 = tl.maximum(_pivot(3, step, first, low, high, top), p2)
        counts, masses = _above(heated, vocab, top, p0, p1, p2, p3, MASS, ROWS, LANES)
        if MASS:
            limit = tl.where(step == 0, asked * (masses[0] + more), limit)
        keys, below = (p0, p1, p2, p3), low
        for n in tl.static_range(4):
            reached = (masses[n] if MASS else counts[n]) >= limit
            low = tl.where(reached, keys[n], low)
            low_count = tl.where(reached | (keys[n] == below), counts[n], low_count)
        for n in tl.static_range(3, -1, -1):
            less = ((masses[n] if MASS else counts[n]) < limit) & (keys[n] > below)
            high = tl.where(less, keys[n], high)
            high_count = tl.where(less, counts[n], high_count)
            high_mass = tl.where(less, masses[n], high_mass)
        step += 1
    if high - low > 1:
        count = _gather(heated, few, vocab, low, high, ROWS * LANES)
        each = tl.arange(0, FEW)
        value = tl.load(few + each, mask=each < count, other=float("-inf"))
        key, weight = _key(value), tl.where(each < count, _weight(value, top), 0.0)
        above_count, above_mass = high_count, high_mass
        while high - low > 1:
            middle = low + ((high - low) >> 1)
            above = (each < count) & (key > middle)
            next_count = above_count + tl.sum(above.to(tl.int32), 0)
            next_mass = above_mass
            if MASS:
                next_mass += tl.sum(tl.where(above, weight, 0.0), 0)
            less = (next_mass if MASS else next_count) < limit
            low_count = tl.where(less, low_count, next_count)
            low = tl.where(less, low, middle)
            high_count = tl.where(less, next_count, high_count)
            high_mass = tl.where(less, next_mass, high_mass)
            high = tl.where(less, middle, high)
    return high, high_count, high_mass, low_count - high_count, limit


@triton.jit
def _write(logits, heated, vocab, least, fit, ties, BLOCK: tl.constexpr):
    """Write the logits of tokens above `least` in heated order, and of the first `fit` tokens equal
    to it; -inf elsewhere.
    """
    seen = 0
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(heated + at, mask=at < vocab, other=float("-inf"))
        kept = (value >= least) | (value != value)  # noqa: PLR0124 - NaN stays.
        if fit < ties:
            tie = value == least
            rank = seen + tl.cumsum(tie.to(tl.int32), 0)
            kept = kept & ((value != least) | (rank <= fit))
            seen += tl.sum(tie.to(tl.int32), 0)
        logit = tl.load(logits + at, mask=at < vocab)
        tl.store(heated + at, tl.where(kept, logit, float("-inf")), mask=at < vocab)


@triton.jit(do_not_specialize=["nodes"], do_not_specialize_on_alignment=FACTS)
def _edit(
    logits, slots, history, bias, repetition, frequency, presence, min_tokens, tokens, above,
    positions, allowed, out, nodes, vocab,
    COUNT: tl.constexpr, SEEN: tl.constexpr, STOP: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Edit a part of one node's logits."""
    node, block = tl.program_id(0), tl.program_id(1)
    row = node // nodes
    token = block * BLOCK + tl.arange(0, BLOCK)
    there = token < vocab
    place = node.to(tl.int64) * vocab + token
    mine = tl.load(slots + row).to(tl.int64) * vocab + token
    logit = tl.load(logits + place, mask=there, other=0.0)
    entry = tl.load(history + mine, mask=there, other=0)
    count = entry // COUNT
    for other in range(nodes):
        if tl.load(above + node.to(tl.int64) * nodes + other):
            count += (token == tl.load(tokens + row * nodes + other)).to(tl.int32)
    seen = ((entry & SEEN) > 0) | (count > 0)
    factor = tl.load(repetition + row)
    repeated = tl.where(logit > 0, tl.div_rn(logit, tl.zeros_like(logit) + factor), logit * factor)
    edited = tl.where(seen, repeated, logit)
    edited -= tl.load(frequency + row) * count.to(tl.float32)
    edited -= tl.load(presence + row) * (count > 0).to(tl.float32)
    edited += tl.load(bias + mine, mask=there, other=0.0)
    if MASKED:
        left = tl.load(allowed + place, mask=there, other=0) != 0
    else:
        early = tl.load(positions + node) < tl.load(min_tokens + row)
        left = ((entry & STOP) == 0) | (early == 0)
    edited = tl.where(left, edited, float("-inf"))
    bad = (logit != logit) | (logit == float("inf"))  # noqa: PLR0124 - NaN
    tl.store(out + place, tl.where(bad, float("nan"), edited), mask=there)


@triton.jit(do_not_specialize=["nodes"], do_not_specialize_on_alignment=RULES)
def _cut(
    logits, temperatures, min_p, top_k, low, high, few, out, nodes, vocab,
    FEW: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Cut one node's logits."""
    node = tl.program_id(0)
    row = node // nodes
    logits += node.to(tl.int64) * vocab
    out += node.to(tl.int64) * vocab
    few += node * FEW
    temperature = tl.load(temperatures + row)
    hot = temperature > 0
    top = _heated(logits, out, vocab, tl.where(hot, temperature, 1.0), ROWS, LANES)
    # A token of probability 0 is not counted.
    nothing = _key(tl.full([], float("-inf"), tl.float32))
    first = tl.maximum(_key(top + tl.load(min_p + row)), nothing + 1) - 1
    most = tl.load(top_k + row)
    bits = (tl.load(high + row).to(tl.int64) << 32) | (tl.load(low + row).to(tl.int64) & 0xFFFFFFFF)
    top_p = tl.maximum(bits.to(tl.float64, bitcast=True), LEAST)
    least, below, fit, ties = first + 1, first, vocab, 0
    mass = top_p * 0.0
    if hot & (most < vocab):
        least, above, _, ties, _ = _search(
            out, few, vocab, top, first, first, most, mass, False, FEW, ROWS, LANES
        )
        fit = tl.minimum(most - above, ties)
        first, below = least, least - 1
        mass = fit * _weight(_value(least), top)
    if hot & (top_p < 1.0):
        found, _, above_mass, same, limit = _search(
            out, few, vocab, top, first, below, top_p, mass, True, FEW, ROWS, LANES
        )
        weight = _weight(_value(found), top)
        room = tl.ceil((limit - above_mass) / tl.where(weight > 0, weight, 1.0))
        room = tl.where(weight > 0, tl.minimum(room, vocab), vocab).to(tl.int32)
        again = found == least
        fit = tl.where(again, tl.minimum(fit, room), room)
        ties = tl.where(again & (ties > 0), ties, same)
        least = found
    lowest = tl.where(hot, _value(least), float("-inf"))
    tl.debug_barrier()
    _write(logits, out, vocab, lowest, fit, tl.where(hot, ties, 0), ROWS * LANES)


def cut(logits: Tensor, shaping: Shaping) -> Tensor:
    """Return logits float32[R,N,V], contiguous, with -inf for tokens removed by top_k, top_p or
    min_p: shaping.cut. Asynchronous.
    """
    rows, nodes, vocab = logits.shape
    out, rules = torch.empty_like(logits), shaping.rules
    few = logits.new_empty(rows * nodes, FEW)
    _cut[(rows * nodes,)](
        *(logits, shaping.temperatures, rules["min_p"].view(torch.float32)),
        *(rules["top_k"], rules["top_p_low"], rules["top_p_high"], few, out, nodes, vocab),
        FEW=FEW,
        ROWS=ROWS,
        LANES=LANES,
        num_warps=WARPS,
    )
    return out


def shaped(logits: Tensor, shaping: Shaping | None, allowed: Tensor | None) -> Tensor:
    """Return logits float32[R,N,V] after penalties, biases, cuts and masks: see shaping.Shape.
    Asynchronous.
    """
    if shaping is None:
        return shaped_plainly(logits, None, allowed)
    if allowed is not None:
        history = shaping.history.index_select(0, shaping.slots)[:, None]
        early = shaping.positions[..., None] < shaping.rules["min_tokens"][:, None, None]
        allowed = without((history & STOP > 0) & early, allowed)
    return cut(_edited(logits, shaping, allowed), shaping)


def _edited(logits: Tensor, shaping: Shaping, allowed: Tensor | None) -> Tensor:
    """Return logits with penalties and biases, and -inf for tokens that are not allowed, or, if
    `allowed` is None, for early stop tokens. NaN if a logit is not finite, except -inf.
    """
    rows, nodes, vocab = logits.shape
    out, rules = torch.empty_like(logits), shaping.rules
    names = "repetition", "frequency", "presence"
    _edit[rows * nodes, triton.cdiv(vocab, EDITED)](
        *(logits, shaping.slots, shaping.history, shaping.bias),
        *(rules[name].view(torch.float32) for name in names),
        *(rules["min_tokens"], shaping.tokens, shaping.above, shaping.positions),
        *(logits if allowed is None else allowed, out, nodes, vocab),
        COUNT=COUNT,
        SEEN=SEEN,
        STOP=STOP,
        MASKED=allowed is not None,
        BLOCK=EDITED,
        num_warps=8,
        # A product is rounded before it is subtracted, as on the host.
        enable_fp_fusion=False,
    )
    return out
