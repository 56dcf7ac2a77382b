"""What a node says next, as Triton kernels, for CUDA: the target's choices in one pass over the
logits, and the best children among those that a draft head finds likely.

The arithmetic of forerun.speculative.noise and forerun.speculative.accept; noise never touches
memory. The slow twins are `choose` and `pick` in forerun.executors.torch.accept.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.executors.torch.accept import Likely, NodeNoise
from forerun.speculative.accept import NOTHING

CHUNK = 4096
"""Tokens of the vocabulary that one program looks at."""


@triton.jit(do_not_specialize=["vocab", "chunks"])
def _choose(
    logits, seeds, positions, temperatures, best, tokens, vocab, chunks, CHUNK: tl.constexpr
):
    """Fill `best` and `tokens` [M,chunks]: greatest score and its lowest token; inf = trouble."""
    node, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    there = token < vocab
    place = node.to(tl.int64) * vocab + token
    scores = tl.load(logits + place, mask=there, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + node)
    if temperature > 0:
        seed, position = tl.load(seeds + node), tl.load(positions + node)
        block = (chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)).to(tl.uint32)
        zero = tl.zeros_like(block)
        first, second, third, fourth = tl.philox(
            seed, block, zero + position.to(tl.uint32), zero, zero
        )
        words = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
        uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        noise = (-tl.log(-tl.log(uniform))).to(tl.float32)
        scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature) + noise
    bad = (scores != scores) | (scores == float("inf"))  # noqa: PLR0124 - NaN
    top = tl.max(tl.where(bad, float("inf"), scores), 0)
    found = tl.min(tl.where(scores == top, token, vocab), 0)
    tl.store(best + node * chunks + chunk, top)
    tl.store(tokens + node * chunks + chunk, found)


def choose(logits: Tensor, noise: NodeNoise) -> Tensor:
    """int32[M] the target's choices from logits float32[M,V], contiguous; NOTHING as in
    forerun.speculative.accept.choose. Launches only.
    """
    count, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    best = logits.new_empty((count, chunks), dtype=torch.float32)
    tokens = logits.new_empty((count, chunks), dtype=torch.int32)
    _choose[count, chunks](
        logits,
        noise.seeds,
        noise.positions,
        noise.temperatures,
        best,
        tokens,
        vocab,
        chunks,
        CHUNK=CHUNK,
        num_warps=8,
    )
    top, where = best.max(1)
    token = tokens.gather(1, where[:, None])[:, 0]
    return torch.where(top.isfinite(), token, NOTHING)


@triton.jit
def _pick(
    logits,
    which,
    normalisers,
    ids,
    seeds,
    positions,
    temperatures,
    tokens,
    values,
    count,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Fill `tokens` and `values` [n,WIDTH] from `count` likely children of a node."""
    node, child = tl.program_id(0), tl.arange(0, COUNT)
    there = child < count
    at = node * count + child
    draft = tl.load(which + at, mask=there, other=0)
    token = tl.load(ids + draft, mask=there, other=0)
    value = tl.load(logits + at, mask=there, other=float("-inf")) - tl.load(normalisers + node)
    temperature = tl.load(temperatures + node)
    if temperature > 0:
        seed, position = tl.load(seeds + node), tl.load(positions + node)
        block = (token // 4).to(tl.uint32)
        zero = tl.zeros_like(block)
        first, second, third, fourth = tl.philox(
            seed, block, zero + position.to(tl.uint32), zero, zero
        )
        place = token % 4
        word = tl.where(place == 0, first, second)
        word = tl.where(place == 2, third, tl.where(place == 3, fourth, word))
        uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        noise = (-tl.log(-tl.log(uniform))).to(tl.float32)
        value = tl.div_rn(value, tl.zeros_like(value) + temperature) + noise
        value = tl.where(there, value, float("-inf"))
        most = tl.max(value, 0)
        value = value - (most + tl.log(tl.sum(tl.exp(value - most), 0)))
    value = tl.where(value != value, float("-inf"), value)  # noqa: PLR0124 - NaN
    for rank in range(WIDTH):
        top = tl.max(value, 0)
        found = tl.min(tl.where((value == top) & there, child, COUNT), 0)
        tl.store(tokens + node * WIDTH + rank, tl.sum(tl.where(child == found, token, 0), 0))
        tl.store(values + node * WIDTH + rank, top)
        value = tl.where(child == found, float("-inf"), value)


def pick(likely: Likely, noise: NodeNoise, width: int) -> tuple[Tensor, Tensor]:
    """accept.pick. Launches only."""
    nodes, count = likely.logits.shape
    tokens = likely.ids.new_empty((nodes, width))
    values = likely.logits.new_empty((nodes, width))
    _pick[(nodes,)](
        likely.logits,
        likely.which,
        likely.normaliser,
        likely.ids,
        noise.seeds,
        noise.positions,
        noise.temperatures,
        tokens,
        values,
        count,
        COUNT=triton.next_power_of_2(count),
        WIDTH=width,
        num_warps=1 if count <= 64 else 4,
    )
    return tokens, values
