"""t(k): what a step of k rows costs on the CPU executor, matrix products alone and whole.

    python bench/cpu_steps.py [model.gguf] [--context 200] [--json out.json]

The whole step is one sequence of `context` cached tokens and a chain of k nodes whose logits are
all wanted: embedding, norms, products, attention, head. Rounds go over all k in turn, so that a
slow moment of the machine hits them alike; minimum and median are over the rounds. Milliseconds.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from forerun.catalog import open_model
from forerun.engine.executor import ExecutorLimits
from forerun.engine.plan import Opening, Plan
from forerun.executors.cpu import CpuExecutor
from forerun.spec.sampling import Sampling
from forerun.spec.tree import Draft, TreeBatch, batch

PAGE = 16
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


def chain(tokens: np.ndarray, kv_len: int, guesses: int) -> tuple[Plan, TreeBatch]:
    """One row: the first of `tokens` known, the rest known too or, for guesses > 0, guessed."""
    known = tokens[: len(tokens) - guesses].astype(np.int32)
    guessed = tokens[len(known) :].astype(np.int32)
    draft = Draft(guessed, np.arange(-1, len(guessed) - 1, dtype=np.int32))
    pages = -(-(kv_len + len(tokens)) // PAGE)
    plan = Plan(
        slots=np.zeros(1, np.int32),
        kv_len=np.array([kv_len], np.int32),
        known=(known,),
        samples=np.ones(1, np.bool_),
        max_nodes=np.array([guesses], np.int32),
        max_depth=np.array([guesses], np.int32),
        page_table=np.arange(pages, dtype=np.int32)[None],
        constrained=np.zeros(1, np.bool_),
    )
    return plan, batch([known], [draft])


def fill(executor: CpuExecutor, tokens: np.ndarray) -> None:
    """Open slot 0 and put `tokens` into pages."""
    executor.open(Opening(0, tokens.astype(np.int32), len(tokens), Sampling(temperature=0.0)))
    plan, trees = chain(tokens, 0, 0)
    scores = executor.verify(plan, trees)
    executor.commit(plan, trees, scores, executor.accept(plan, trees, scores, None))


def measure(work: dict[int, Callable[[], object]], rounds: int) -> dict[str, dict[int, float]]:
    """Milliseconds, minimum and median per key, over interleaved rounds."""
    taken: dict[int, list[float]] = {key: [] for key in work}
    for _ in range(rounds):
        for key, call in work.items():
            start = time.perf_counter()
            call()
            taken[key].append((time.perf_counter() - start) * 1e3)
    return {
        "min": {key: round(min(times), 3) for key, times in taken.items()},
        "median": {key: round(statistics.median(times), 3) for key, times in taken.items()},
    }


def machine() -> dict[str, Any]:
    """Enough to know which machine, and how busy, the numbers come from."""
    info = Path("/proc/cpuinfo")
    names = info.read_text().split("model name") if info.exists() else []
    return {
        "cpu": names[1].split(":", 1)[1].split("\n")[0].strip() if len(names) > 1 else "unknown",
        "platform": platform.platform(),
        "load": os.getloadavg(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    checkpoint = open_model(options.model).checkpoint
    vocab = checkpoint.architecture.vocab
    pages = -(-(options.context + max(ROWS)) // PAGE)
    size = options.context + max(ROWS)
    limits = ExecutorLimits(PAGE, pages, 1, size, min(size, checkpoint.architecture.context), vocab)
    start = time.perf_counter()
    executor = CpuExecutor(checkpoint, limits, options.threads)
    loaded = time.perf_counter() - start
    tokens = np.random.default_rng(0).integers(0, vocab, size)
    fill(executor, tokens[: options.context])
    steps = {k: chain(tokens[:k], options.context, k - 1) for k in ROWS}
    whole = {k: lambda step=step: executor.verify(*step) for k, step in steps.items()}
    products = {k: lambda k=k: executor.products(k) for k in ROWS}
    report = {
        "machine": machine(),
        "executor": executor.describe(),
        "load_seconds": round(loaded, 3),
        "context": options.context,
        "products_ms": measure(products, options.rounds),
        "step_ms": measure(whole, options.rounds),
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report)


def print_table(report: dict[str, Any]) -> None:
    """Milliseconds and ratios, one column per k."""
    out = sys.stdout.write
    out(f"{report['machine']} loaded in {report['load_seconds']} s\n")
    out("rows".ljust(18) + "".join(f"{k:>8}" for k in ROWS) + "\n")
    for kind in ("products_ms", "step_ms"):
        for statistic, values in report[kind].items():
            out(f"{kind} {statistic}".ljust(18) + "".join(f"{values[k]:8.2f}" for k in ROWS) + "\n")
        first = report[kind]["median"][1]
        ratios = (report[kind]["median"][k] / first for k in ROWS)
        out("  over t(1)".ljust(18) + "".join(f"{ratio:8.2f}" for ratio in ratios) + "\n")


if __name__ == "__main__":
    main()
