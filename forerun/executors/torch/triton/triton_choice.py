"""The choice of a token at each node, as a Triton kernel for CUDA: one pass over the logits. The
arithmetic is that of forerun.speculative.noise and forerun.speculative.accept; the noise is never
stored. The reference is `choose` in tests/references/rounds.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.executors.torch.accept import NodeNoise
from forerun.speculative.accept import NOTHING

CHUNK = 4096
"""Tokens of the vocabulary that one program reads."""


@triton.jit
def _gumbel(words):
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def gumbel_at(seed, position, tokens):
    """Return, in a kernel, the noise float32[n] of tokens int32[n] at one output position, as
    forerun.speculative.noise.gumbel_of.
    """
    block = (tokens // 4).to(tl.uint32)
    zero = tl.zeros_like(block)
    first, second, third, fourth = tl.philox(seed, block, zero + position.to(tl.uint32), zero, zero)
    place = tokens % 4
    word = tl.where(place == 0, first, second)
    return _gumbel(tl.where(place == 2, third, tl.where(place == 3, fourth, word)))


@triton.jit(do_not_specialize=["vocab", "chunks", "block", "before"])
def _choose(
    logits, seeds, positions, temperatures, best, tokens, vocab, chunks, block, before,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Write `best` and `tokens` [M,chunks]: greatest score and the lowest token with it; inf if a
    logit is NaN or +inf. The logits are of `vocab` tokens, whose first is at index `before` of the
    noise's `block`.
    """
    node, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK) - before
    there = (token >= 0) & (token < vocab)
    place = node.to(tl.int64) * vocab + token
    scores = tl.load(logits + place, mask=there, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + node)
    if temperature > 0:
        seed, position = tl.load(seeds + node), tl.load(positions + node)
        blocks = (block + chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)).to(tl.uint32)
        zero = tl.zeros_like(blocks)
        first, second, third, fourth = tl.philox(
            seed, blocks, zero + position.to(tl.uint32), zero, zero
        )
        words = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
        scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature) + _gumbel(words)
    bad = (scores != scores) | (scores == float("inf"))  # noqa: PLR0124 - NaN
    top = tl.max(tl.where(bad, float("inf"), scores), 0)
    found = tl.min(tl.where((scores == top) & there, token, vocab), 0)
    tl.store(best + node * chunks + chunk, top)
    tl.store(tokens + node * chunks + chunk, 4 * block + before + found)


def scored(logits: Tensor, noise: NodeNoise, first: int = 0) -> tuple[Tensor, Tensor]:
    """Return for each node and chunk of the vocabulary the greatest score with noise float32[M,C],
    and the lowest token id with it int32[M,C]. Asynchronous.

    logits  [M,V], contiguous, of the V ids from `first` on; a score is +inf if a logit is NaN or
            +inf
    """
    count, vocab = logits.shape
    block, before = divmod(first, 4)  # Four tokens share a block of the noise's generator.
    chunks = triton.cdiv(vocab + before, CHUNK)
    best = logits.new_empty((count, chunks), dtype=torch.float32)
    tokens = logits.new_empty((count, chunks), dtype=torch.int32)
    _choose[count, chunks](
        logits,
        noise.seeds,
        noise.positions,
        noise.temperatures,
        best,
        tokens,
        *(vocab, chunks, block, before),
        CHUNK=CHUNK,
        num_warps=8,
    )
    return best, tokens


def choose(logits: Tensor, noise: NodeNoise) -> Tensor:
    """Return int32[M], the target's choices from logits [M,V], contiguous; NOTHING as in
    forerun.speculative.accept.choose. Asynchronous.
    """
    best, tokens = scored(logits, noise)
    top, where = best.max(1)
    token = tokens.gather(1, where[:, None])[:, 0]
    return torch.where(top.isfinite(), token, NOTHING)


def best(logits: Tensor, noise: NodeNoise, first: int) -> tuple[Tensor, Tensor]:
    """Return the greatest score float32[M] of each row of logits [M,V], and the lowest token
    int32[M], counted from `first`, that has it: see kernels.Best. Asynchronous.
    """
    scores, tokens = scored(logits, noise, first)
    top = scores.amax(1)
    # Chunks of padding alone have no token; of equal scores the first chunk's is lowest.
    return top, tokens.where(scores == top[:, None], _NO_TOKEN).amin(1)


_NO_TOKEN = 2**31 - 1
