"""The target's choices in one pass over the logits, as a Triton kernel, for CUDA.

The arithmetic of forerun.spec.noise and forerun.spec.accept; noise never touches memory. The slow
twin is `forerun.executors.torch.accept.choose`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.executors.torch.accept import NodeNoise
from forerun.spec.accept import NOTHING

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
    heat = tl.load(temperatures + node)
    if heat > 0:
        seed, position = tl.load(seeds + node), tl.load(positions + node)
        block = (chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)).to(tl.uint32)
        zero = tl.zeros_like(block)
        first, second, third, fourth = tl.philox(
            seed, block, zero + position.to(tl.uint32), zero, zero
        )
        words = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
        uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        noise = (-tl.log(-tl.log(uniform))).to(tl.float32)
        scores = tl.div_rn(scores, tl.zeros_like(scores) + heat) + noise
    bad = (scores != scores) | (scores == float("inf"))  # noqa: PLR0124 - NaN
    top = tl.max(tl.where(bad, float("inf"), scores), 0)
    found = tl.min(tl.where(scores == top, token, vocab), 0)
    tl.store(best + node * chunks + chunk, top)
    tl.store(tokens + node * chunks + chunk, found)


def choose(logits: Tensor, noise: NodeNoise) -> Tensor:
    """int32[M] the target's choices from logits float32[M,V], contiguous; NOTHING as in
    forerun.spec.accept.choose. Launches only.
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
