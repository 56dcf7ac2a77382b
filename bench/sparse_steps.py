"""What a step of experts takes beside its dense twin: `python bench/sparse_steps.py`.

Two models of random numbers in 8 bits on the compiled core, alike but for the feed-forward: 32
experts of which a token visits 4, and one that is as wide as these 4. Steps of one row and more
behind 128 tokens, in turns; the least, the median and the ratio of both, milliseconds.
"""

import argparse
import sys
from dataclasses import replace

from bench.forward import in_turns, opened, weights
from bench.records import ended
from forerun.executors.cpu import CpuExecutor
from forerun.models.arch import Architecture, plain_layers
from forerun.models.layer_spec import Dense, Experts, LayerSpec, Router
from forerun.models.rope import Rope
from forerun.models.shapes import RandomCheckpoint

COUNT, TOP_K = 32, 4


def built(spec: LayerSpec, layers: int, hidden: int, threads: int) -> CpuExecutor:
    """The model, opened."""
    specs = (spec,) * layers
    arch = Architecture("llama", hidden, hidden // 64, hidden // 256, 64, 8192, 4096, 1e-5, specs)
    return opened(RandomCheckpoint(arch), threads)


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--width", type=int, default=768, help="of one expert")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=40)
    asked = parser.parse_args()
    (plain,) = plain_layers(1, 64, TOP_K * asked.width, Rope(1e4))
    sparse = Experts(COUNT, TOP_K, asked.width, Router(normalised=True))
    models = {
        name: built(replace(plain, feed_forward=feed), asked.layers, asked.hidden, asked.threads)
        for name, feed in (("dense", Dense(TOP_K * asked.width)), ("experts", sparse))
    }
    sys.stdout.write(weights(models))
    sys.stdout.writelines(in_turns(models, (1, 2, 4, 8, 16, 64, 256), asked.turns))


if __name__ == "__main__":
    ended(main)
