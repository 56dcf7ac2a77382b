"""What a step of experts takes beside its dense twin: `python bench/sparse_steps.py`.

Two models of random numbers in 8 bits on the compiled core, alike but for the feed-forward: 32
experts of which a token visits 4, and one that is as wide as these 4. Steps of one row and more
behind 128 tokens, in turns; the least, the median and the ratio of both, milliseconds.
"""

import argparse
import sys
import time
from dataclasses import replace
from statistics import median

import numpy as np

from forerun.executors.cpu import CpuExecutor
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Plan
from forerun.interface.slot_init import SlotInit
from forerun.models.arch import Architecture, plain_layers
from forerun.models.layer_spec import Dense, Experts, LayerSpec, Router
from forerun.models.rope import Rope
from forerun.models.shapes import RandomCheckpoint
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft, batch

VOCAB, CONTEXT, COUNT, TOP_K = 8192, 128, 32, 4


def built(spec: LayerSpec, layers: int, hidden: int, threads: int) -> CpuExecutor:
    """The model, with a sequence of CONTEXT tokens in its cache."""
    arch = Architecture(
        "llama", hidden, hidden // 64, hidden // 256, 64, VOCAB, 4096, 1e-5, (spec,) * layers
    )
    limits = ExecutorLimits(
        page_size=16, pages=64, slots=1, max_nodes=256, context=1024, vocab=VOCAB
    )
    executor = CpuExecutor(RandomCheckpoint(arch), limits, threads)
    tokens = np.random.default_rng(0).integers(0, VOCAB, CONTEXT).astype(np.int32)
    executor.open(SlotInit(0, tokens, CONTEXT, Sampling(temperature=0.0)))
    step(executor, tokens, 0)
    return executor


def step(executor: CpuExecutor, tokens: np.ndarray, kv_len: int) -> float:
    """Seconds of one forward pass over these tokens, behind so many."""
    one = np.ones(1, np.int32)
    plan = Plan(
        slots=0 * one,
        kv_len=kv_len * one,
        known=(tokens,),
        samples=np.ones(1, np.bool_),
        max_nodes=0 * one,
        max_depth=0 * one,
        page_table=np.arange(64, dtype=np.int32)[None],
        constrained=np.zeros(1, np.bool_),
    )
    trees = batch([tokens], [Draft()])
    begin = time.perf_counter()
    executor.begin(plan, trees)
    return time.perf_counter() - begin


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
    models = [
        built(replace(plain, feed_forward=feed), asked.layers, asked.hidden, asked.threads)
        for feed in (Dense(TOP_K * asked.width), sparse)
    ]
    random = np.random.default_rng(1)
    sizes = " ".join(str(m.describe()["weight_bytes"] >> 20) for m in models)
    sys.stdout.write(f"{models[0].name}; weights {sizes} MiB\n")
    for rows in (1, 2, 4, 8, 16, 64, 256):
        taken: list[list[float]] = [[], []]
        for turn in range(asked.turns + 1):
            tokens = random.integers(0, VOCAB, rows).astype(np.int32)
            for index in (turn % 2, 1 - turn % 2):
                taken[index].append(1e3 * step(models[index], tokens, CONTEXT))
        dense, experts = (sorted(times[1:]) for times in taken)
        sys.stdout.write(
            f"{rows:4d} rows: dense {dense[0]:7.2f} {median(dense):7.2f}, "
            f"experts {experts[0]:7.2f} {median(experts):7.2f}, "
            f"ratio {experts[0] / dense[0]:.2f} {median(experts) / median(dense):.2f}\n"
        )


if __name__ == "__main__":
    main()
