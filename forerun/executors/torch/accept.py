"""Chooses the target's tokens on the device that has the logits, by forerun.speculative.noise and
forerun.speculative.accept. Only for nodes without sampling parameters other than temperature; the
host decides all others. The noise equals the host's bit for bit if the device's float64 logarithm
does; a token differs only if two scores are within a rounding error of float32.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.executors.device_choice import DeviceNodes
from forerun.speculative.noise import ROUNDS

CHUNK = 64
"""Nodes whose noise is computed at once, which takes about 50 bytes per node and token of the
vocabulary.
"""

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

    @staticmethod
    def of(nodes: DeviceNodes, device: torch.device) -> "NodeNoise":
        """Return the parameters of nodes given on the host, copied to the device."""
        arrays = nodes.seeds.view(np.int64), nodes.positions, nodes.temperatures
        return NodeNoise(*(torch.from_numpy(array).to(device) for array in arrays))


def philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Return four words of Philox-4x32-10 for four counter words and two key words, each an int64
    tensor of 32-bit values. Products of two words overflow int64 and wrap; their low and high
    halves are still correct.
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


def gumbel(seeds: Tensor, positions: Tensor, vocab: int, first: int = 0) -> Tensor:
    """Return float32[n,V], forerun.speculative.noise.gumbel of n seeds (64 bits in an int64[n]) and
    output positions int64[n], for V tokens from `first` on.
    """
    low, high = (seeds & _LOW).unsqueeze(-1), ((seeds >> 32) & _LOW).unsqueeze(-1)
    block, before = divmod(first, 4)  # Four tokens share a block of the generator.
    blocks = torch.arange(block, block - (-(before + vocab) // 4), device=seeds.device)
    nothing = torch.zeros((), dtype=torch.int64, device=seeds.device)
    counter = [blocks.expand(len(seeds), -1), positions.unsqueeze(-1), nothing, nothing]
    words = torch.stack(philox(counter, [low, high]), -1).flatten(1)[:, before : before + vocab]
    return of_words(words)


def of_words(words: Tensor) -> Tensor:
    """Return the Gumbel variables float32[...] of 32-bit words int64[...]."""
    uniform = (words.double() + 0.5) * 2.0**-32
    return -uniform.log_().neg_().log_().float()


def best(logits: Tensor, noise: NodeNoise, first: int) -> tuple[Tensor, Tensor]:
    """Return the greatest score float32[M] of M nodes, and the lowest token int32[M], counted from
    `first`, with that score, from logits [M,V] of V tokens: kernels.Best in plain torch. Does not
    synchronise with the device.
    """
    scores, tokens = [], []
    for begin in range(0, len(logits), CHUNK):
        part = slice(begin, begin + CHUNK)
        temperature, mine = noise.temperatures[part, None], logits[part].float()
        made = gumbel(noise.seeds[part], noise.positions[part].long(), mine.shape[1], first)
        heated = mine / torch.where(temperature > 0, temperature, 1.0) + made
        found = torch.where(temperature > 0, heated, mine).max(-1)
        scores.append(found.values)
        tokens.append((first + found.indices).int())
    return torch.cat(scores), torch.cat(tokens)


def greatest(logits: Tensor, noise: NodeNoise, first: int) -> tuple[Tensor, Tensor]:
    """Return the result of `best` if no node has a temperature: without noise."""
    found = logits.float().max(-1)
    return found.values, (first + found.indices).int()
