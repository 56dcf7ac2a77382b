"""Steps of the JAX executor beside the torch executor's, in turns, in one process, in float32.

    python bench/jax_steps.py [model] [--context 256] [--rounds 12] [--cores 1] [--json out.json]

Every kind of step is R rows of N nodes, a chain of draft tokens: rows that the temperature alone
shapes, and rows with a penalty, a cut-off and log-probabilities. Both executors do the same step,
one after the other, in an order that is drawn anew; milliseconds of wall time and of the process's
CPU time, medians over the rounds, and quartiles of the rounds' ratios jax / torch. Also: seconds of
compiling, programs, dispatches per decoding step. The process is pinned to so many cores, which
both executors then use. `--cache` names a folder of compiled programs; else everything is compiled.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.executors.jax import JaxExecutor, JaxOptions
from forerun.executors.torch import TorchExecutor
from forerun.hub.catalog import open_model
from forerun.interface.executor import DraftShape, Executor, ExecutorLimits
from forerun.interface.plan import Plan, SlotInit
from forerun.machine import stamp
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft, batch

PAGE, SLOTS, NODES = 16, 4, 4
SHAPES = [(1, 1), (1, NODES), (SLOTS, 1), (SLOTS, NODES)]
"""Rows, nodes of each."""
KINDS = {
    "plain": {"temperature": 0.8},
    "shaped": {"temperature": 0.8, "top_k": 50, "repetition_penalty": 1.1, "logprobs": 5},
}


class Side:
    """An executor and the sequences that it holds, one per slot, each with pages of its own."""

    def __init__(self, executor: Executor, prompts: np.ndarray) -> None:
        self.executor, self._prompts = executor, prompts
        self._tokens: list[list[int]] = []
        self._kv_len: list[int] = []

    def open(self, kind: str) -> float:
        """Begin anew with the prompts; milliseconds of the last one's step."""
        if self._tokens:
            for slot in range(SLOTS):
                self.executor.close(slot)
        self._tokens, self._kv_len = self._prompts.tolist(), [0] * SLOTS
        took = 0.0
        for slot, prompt in enumerate(self._prompts):
            sampling = Sampling(seed=slot, **KINDS[kind])
            self.executor.open(SlotInit(slot, prompt, len(prompt), sampling))
            began = time.perf_counter()
            self._step([slot], 1)
            took = 1e3 * (time.perf_counter() - began)
        return took

    def timed(self, shape: tuple[int, int]) -> tuple[float, float]:
        """Milliseconds of one step: wall, CPU."""
        rows, nodes = shape
        began = time.perf_counter(), time.process_time()
        self._step(list(range(rows)), nodes)
        return 1e3 * (time.perf_counter() - began[0]), 1e3 * (time.process_time() - began[1])

    def _step(self, slots: list[int], nodes: int) -> None:
        known = [np.array(self._tokens[s][self._kv_len[s] :], np.int32) for s in slots]
        chain = np.arange(7, 6 + nodes, dtype=np.int32)
        draft = Draft(chain, np.arange(len(chain), dtype=np.int32) - 1)
        limits = self.executor.limits
        pages = limits.pages // SLOTS
        plan = Plan(
            slots=np.array(slots, np.int32),
            kv_len=np.array([self._kv_len[s] for s in slots], np.int32),
            known=tuple(known),
            samples=np.ones(len(slots), np.bool_),
            max_nodes=np.full(len(slots), nodes - 1, np.int32),
            max_depth=np.full(len(slots), nodes - 1, np.int32),
            page_table=np.add.outer(np.array(slots) * pages, np.arange(pages)).astype(np.int32),
            constrained=np.zeros(len(slots), np.bool_),
        )
        trees = batch(known, [draft] * len(slots))
        outcome = self.executor.finish(self.executor.begin(plan, trees))
        for row, slot in enumerate(slots):
            self._kv_len[slot] += len(known[row]) + int(outcome.n_tokens[row]) - 1
            self._tokens[slot] += outcome.tokens[row, : outcome.n_tokens[row]].tolist()


def measure(sides: dict[str, Side], rounds: int) -> dict[str, Any]:
    """By kind and shape, in turns."""
    random, table = np.random.default_rng(0), {}
    for kind in KINDS:
        prompts = {name: [side.open(kind)] for name, side in sides.items()}
        times: dict[Any, dict[str, list[tuple[float, float]]]] = {
            shape: {name: [] for name in sides} for shape in SHAPES
        }
        for turn in range(rounds + 1):
            for shape, found in times.items():
                for name in random.permutation(list(sides)).tolist():
                    took = sides[name].timed(shape)
                    if turn:  # The first warms caches.
                        found[name].append(took)
        table[kind] = {"prompt": {name: min(found) for name, found in prompts.items()}}
        for (rows, nodes), found in times.items():
            table[kind][f"{rows}x{nodes}"] = _compared(found)
    return table


def _compared(found: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    line: dict[str, Any] = {}
    for place, what in enumerate(("wall", "cpu")):
        mine, other = ([pair[place] for pair in found[name]] for name in ("jax", "torch"))
        ratios = [a / b for a, b in zip(mine, other, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        line[what] = {
            "jax": round(statistics.median(mine), 2),
            "torch": round(statistics.median(other), 2),
            "ratio": [round(value, 2) for value in (low, middle, high)],
        }
    return line


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--json")
    parser.add_argument("--cache")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    torch.set_num_threads(options.cores)
    checkpoint = open_model(options.model).checkpoint
    arch = checkpoint.architecture
    room = -(-(options.context + NODES * len(SHAPES) * (options.rounds + 2)) // PAGE)
    limits = ExecutorLimits(
        page_size=PAGE, pages=room * SLOTS, slots=SLOTS, max_nodes=max(256, options.context),
        context=min(room * PAGE, arch.context), vocab=arch.vocab,
    )  # fmt: skip
    random = np.random.default_rng(1)
    prompts = random.integers(10, arch.vocab, (SLOTS, options.context)).astype(np.int32)
    on_xla = JaxExecutor(checkpoint, limits, JaxOptions(draft_nodes=3, cache_dir=options.cache))
    began = time.process_time()
    on_xla.warm_up(DraftShape(3), lambda *told: sys.stderr.write(f"compiled {told}\n"))
    compiling = time.process_time() - began
    sides = {
        "jax": Side(on_xla, prompts),
        "torch": Side(TorchExecutor(checkpoint, limits), prompts),
    }
    sides["jax"].open("plain")
    before = on_xla.describe()
    for _ in range(8):
        sides["jax"].timed((SLOTS, NODES))
    after = on_xla.describe()
    found = {
        "model": options.model, "context": options.context, "rounds": options.rounds,
        "cores": options.cores, "machine": stamp(), "steps": measure(sides, options.rounds),
        "dispatches_per_step": (after["dispatches"] - before["dispatches"]) / 8,
        "programs": after["compiled"], "compile_seconds": after["compile_seconds"],
        "compile_cpu_seconds": round(compiling, 1),
        "compiled_late": on_xla.describe()["compiled_late"],
    }  # fmt: skip
    text = json.dumps(found, indent=1, default=str)
    sys.stdout.write(text + "\n")
    if options.json:
        Path(options.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
