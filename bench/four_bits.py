"""Steps of one model in several storages of few bits: `python bench/four_bits.py`.

The shape of Llama 3.2 1B, its matrices random bytes in each storage (embedding and head in 8 bits),
on the compiled core: steps of one row and more behind 128 tokens, and the products alone, in turns;
least and median milliseconds and their ratios to the first storage.
"""

import argparse
import sys
from dataclasses import replace
from functools import lru_cache

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from bench.forward import in_turns, opened, weights
from bench.records import ended
from forerun.executors.cpu import native
from forerun.models.arch import Architecture
from forerun.models.mapped import FourBits, Packed
from forerun.models.shapes import RandomCheckpoint, shape_named

INTEGERS = "integers"
SCALES_AT = {"Q4_K": (0, 2), "Q8_0": (0,), "Q4_0": (0,), "Q6_K": (208,)}
"""Where in a block the halves lie that must be modest."""


class FewBits(RandomCheckpoint):
    """Random bytes in the storage of this name in all matrices of layers."""

    def __init__(self, arch: Architecture, kind: str) -> None:
        super().__init__(arch)
        self.kind = kind

    def packed(self, name: str) -> Packed | None:
        """As Checkpoint; embedding and head in 8 bits."""
        shape = self.shape(name)
        if len(shape) != 2:
            return None
        inner = name.startswith("model.layers")
        kind = self.kind if inner else "Q8_0"
        return None if kind == INTEGERS else Packed(kind, rows(kind, shape), shape[1])

    def four_bit_group(self, name: str) -> int:
        """As InFourBits."""
        return 128

    def four_bits(self, name: str) -> FourBits:
        """As InFourBits."""
        random, (count, inputs) = np.random.default_rng(0), self.shape(name)
        numbers, zeros = (
            random.integers(0, 16, (count, width), dtype=np.uint8)
            for width in (inputs, inputs // 128)
        )
        return FourBits(numbers, np.full(zeros.shape, 0.002, np.float16), zeros)


@lru_cache(maxsize=16)
def rows(kind: str, shape: tuple[int, int]) -> np.ndarray:
    """uint8[rows, bytes of a row]"""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = shape[0], shape[1] // block
    found = np.random.default_rng(0).integers(0, 256, (*blocks, size), dtype=np.uint8)
    for at in SCALES_AT.get(kind, ()):
        found[..., at : at + 2] = np.array([0.001], np.float16).view(np.uint8)
    if kind == "MXFP4":
        found[..., 0] = 120
    return found.reshape(shape[0], -1)


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--kinds", nargs="+", default=["Q4_K", INTEGERS, "MXFP4", "Q8_0"])
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15)
    asked = parser.parse_args()
    whole = shape_named(asked.shape)
    arch = replace(whole, vocab=32000, layer_specs=whole.layer_specs[: asked.layers])
    models = {kind: opened(FewBits(arch, kind), asked.threads) for kind in asked.kinds}
    sys.stdout.write(f"{native.kernels()}; {weights(models)}")
    sys.stdout.writelines(in_turns(models, (1, 4, 8, 16, 64), asked.turns))


if __name__ == "__main__":
    ended(main)
