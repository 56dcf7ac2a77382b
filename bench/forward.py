"""Forward passes of models on the compiled core, in turns: for scripts beside this one."""

import time
from collections.abc import Iterable, Iterator
from statistics import median

import numpy as np

from forerun.executors.cpu import CpuExecutor
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Plan
from forerun.interface.slot_init import SlotInit
from forerun.models.checkpoint import Checkpoint
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft, batch

CONTEXT, PAGES = 128, 64
"""Tokens in the cache before every step, and pages of 16 tokens."""
MOST = 256
"""Rows of a step."""


def opened(checkpoint: Checkpoint, threads: int) -> CpuExecutor:
    """The model with a sequence of CONTEXT random tokens in its cache."""
    vocab = checkpoint.architecture.vocab
    limits = ExecutorLimits(
        page_size=16, pages=PAGES, slots=1, max_nodes=MOST, context=16 * PAGES, vocab=vocab
    )
    executor = CpuExecutor(checkpoint, limits, threads)
    tokens = np.random.default_rng(0).integers(0, vocab, CONTEXT).astype(np.int32)
    executor.open(SlotInit(0, tokens, CONTEXT, Sampling(temperature=0.0)))
    step(executor, tokens, 0)
    return executor


def step(executor: CpuExecutor, tokens: np.ndarray, kv_len: int) -> float:
    """Seconds of one forward pass over these tokens, int32[rows], behind so many."""
    one = np.ones(1, np.int32)
    plan = Plan(
        slots=0 * one,
        kv_len=kv_len * one,
        known=(tokens,),
        samples=np.ones(1, np.bool_),
        max_nodes=0 * one,
        max_depth=0 * one,
        page_table=np.arange(PAGES, dtype=np.int32)[None],
        constrained=np.zeros(1, np.bool_),
    )
    trees = batch([tokens], [Draft()])
    begin = time.perf_counter()
    executor.begin(plan, trees)
    return time.perf_counter() - begin


def in_turns(models: dict[str, CpuExecutor], counts: Iterable[int], turns: int) -> Iterator[str]:
    """Of each count of rows a line: by model the least and the median milliseconds of so many
    turns, and both over the first model's. Another model begins each turn; the first does not
    count.
    """
    random, names = np.random.default_rng(1), list(models)
    vocab = models[names[0]].limits.vocab
    for count in counts:
        taken: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(turns + 1):
            tokens = random.integers(0, vocab, count).astype(np.int32)
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                taken[name].append(1e3 * step(models[name], tokens, CONTEXT))
        found = {name: (min(times[1:]), median(times[1:])) for name, times in taken.items()}
        least, middle = found[names[0]]
        cells = [
            f"{name} {low:.2f} {half:.2f} (x {low / least:.2f} {half / middle:.2f})"
            for name, (low, half) in found.items()
        ]
        yield f"{count:4d} rows: {', '.join(cells)}\n"


def weights(models: dict[str, CpuExecutor]) -> str:
    """MiB of weights, by model."""
    facts: dict[str, dict[str, object]] = {name: each.describe() for name, each in models.items()}
    sizes = [f"{name} {int(str(each['weight_bytes'])) >> 20}" for name, each in facts.items()]
    return f"MiB of weights: {', '.join(sizes)}\n"
