"""The target's choices, made on the device that has the logits: forerun.speculative.noise and
forerun.speculative.accept.

Only for nodes with temperature as only parameter; the host decides everything else. The noise
equals the host's to the bit as far as the device's float64 logarithm does; a token
differs only if two scores lie within a rounding error of float32.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.executors.device_choice import DeviceNodes
from forerun.speculative.accept import NOTHING
from forerun.speculative.noise import ROUNDS
from forerun.types import AnyArray

CHUNK = 64
"""Nodes whose noise is computed at once: some 50 bytes per node and token of the vocabulary."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class NodeNoise:
    """Sampling parameters of M nodes on the device: seeds (64 bits in an int64[M]), output
    positions int32[M] and temperatures float32[M]; 0 = greedy.
    """

    seeds: Tensor
    positions: Tensor
    temperatures: Tensor


def philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Return four words of Philox-4x32-10 for four words and two key words, int64 that hold 32-bit
    words.

    Products of two words overflow int64, which wraps: their low and high halves stay right.
    """
    words = counter
    for index in range(ROUNDS):
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        keys = [(k + index * step) & _LOW for k, step in zip(key, _KEY_STEPS, strict=True)]
        words = [
            (second >> 32) & _LOW ^ words[1] ^ keys[0],
            second & _LOW,
            (first >> 32) & _LOW ^ words[3] ^ keys[1],
            first & _LOW,
        ]
    return words


def gumbel(
    seeds: AnyArray, positions: AnyArray, vocab: int, device: torch.device, first: int = 0
) -> Tensor:
    """Return float32[n,V], forerun.speculative.noise.gumbel of n seeds (uint64) and output
    positions, for V tokens from `first` on.
    """
    there = torch.from_numpy(seeds.view(np.int64)).to(device)
    before = first % 4  # Four tokens share a block of the generator.
    at = torch.from_numpy(positions.astype(np.int64)).to(device)
    return _gumbel(there, at, before + vocab, first // 4)[:, before:]


def _gumbel(seeds: Tensor, positions: Tensor, vocab: int, first: int = 0) -> Tensor:
    """Return float32[n,V] noise of int64[n] seeds and positions, from the block `first` on."""
    low, high = (seeds & _LOW).unsqueeze(-1), ((seeds >> 32) & _LOW).unsqueeze(-1)
    block = torch.arange(first, first + -(-vocab // 4), device=seeds.device)
    nothing = torch.zeros((), dtype=torch.int64, device=seeds.device)
    counter = [block.expand(len(seeds), -1), positions.unsqueeze(-1), nothing, nothing]
    words = torch.stack(philox(counter, [low, high]), -1).flatten(1)[:, :vocab]
    return _of_words(words)


def _of_words(words: Tensor) -> Tensor:
    uniform = (words.double() + 0.5) * 2.0**-32
    return -uniform.log_().neg_().log_().float()


def choices(logits: Tensor, nodes: DeviceNodes) -> Tensor:
    """Return int32[n] on the device: the target's choices from logits float32[n,V] of n nodes;
    NOTHING as in forerun.speculative.accept.choose.
    """
    scores, tokens = best(logits, nodes)
    return torch.where(scores.isfinite(), tokens, NOTHING).int()


def best(logits: Tensor, nodes: DeviceNodes, first: int = 0) -> tuple[Tensor, Tensor]:
    """Return the greatest score float32[n] of n nodes, and the place int64[n] of the lowest token
    that has it, from logits float32[n,V] of V tokens from `first` on. NaN where there is any.
    """
    device = logits.device
    temperature = torch.from_numpy(nodes.temperatures).to(device)
    scores = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    hot = np.flatnonzero(nodes.temperatures > 0)
    for begin in range(0, len(hot), CHUNK):
        part = hot[begin : begin + CHUNK]
        # Nodes of one depth share their noise.
        pairs = np.stack([nodes.seeds[part], nodes.positions[part].astype(np.uint64)], 1)
        unique, which = np.unique(pairs, axis=0, return_inverse=True)
        noise = gumbel(unique[:, 0], unique[:, 1], logits.shape[1], device, first)
        rows = torch.from_numpy(part).to(device)
        scores[rows] += noise[torch.from_numpy(which.reshape(-1)).to(device)]
    return scores.max(-1).values, scores.argmax(-1)
