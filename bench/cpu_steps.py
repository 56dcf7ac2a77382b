"""t(k): what a step of k rows costs on the CPU executor, matrix products alone and whole.

    python bench/cpu_steps.py [model.gguf] [--context 200] [--peers] [--json out.json]

The whole step is one sequence of `context` cached tokens and a chain of k nodes whose logits are
all wanted: embedding, norms, products, attention, head. Rounds go over all k in turn, so
that a slow moment of the machine hits them alike; minimum and median are over the rounds.
Milliseconds.

`--peers` takes turns with llama.cpp (the same step) and ONNX Runtime's MatMulNBits (the same
products), each in its own environment (bench/peers/environments.py makes it on first use), and
measures how fast two threads read memory: no step is faster than its weights arrive.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from forerun.executors.cpu import CpuExecutor, native
from forerun.hub.catalog import open_model
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Plan, SlotInit
from forerun.models.arch import Architecture
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft, TreeBatch, batch
from forerun.types import Floats

PEER_FOLDER = Path(__file__).parent / "peers"
PEERS = {"llama.cpp step": "llamacpp", "onnxruntime products": "onnx"}
BLOCKS = 3
PAGE = 16
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


def chain(tokens: np.ndarray, kv_len: int, draft_tokens: int) -> tuple[Plan, TreeBatch]:
    """One row: the first of `tokens` known, the rest known too or, for draft tokens > 0,
    drafted.
    """
    known = tokens[: len(tokens) - draft_tokens].astype(np.int32)
    drafted = tokens[len(known) :].astype(np.int32)
    draft = Draft(drafted, np.arange(-1, len(drafted) - 1, dtype=np.int32))
    pages = -(-(kv_len + len(tokens)) // PAGE)
    plan = Plan(
        slots=np.zeros(1, np.int32),
        kv_len=np.array([kv_len], np.int32),
        known=(known,),
        samples=np.ones(1, np.bool_),
        max_nodes=np.array([draft_tokens], np.int32),
        max_depth=np.array([draft_tokens], np.int32),
        page_table=np.arange(pages, dtype=np.int32)[None],
        constrained=np.zeros(1, np.bool_),
    )
    return plan, batch([known], [draft])


def fill(executor: CpuExecutor, tokens: np.ndarray) -> None:
    """Open slot 0 and put `tokens` into pages."""
    executor.open(SlotInit(0, tokens.astype(np.int32), len(tokens), Sampling(temperature=0.0)))
    plan, trees = chain(tokens, 0, 0)
    executor.finish(executor.begin(plan, trees))


Times = dict[int, list[float]]


def measure(work: dict[int, Callable[[], object]], rounds: int) -> Times:
    """Milliseconds per key, over interleaved rounds."""
    open_slots: Times = {key: [] for key in work}
    for _ in range(rounds):
        for key, call in work.items():
            start = time.perf_counter()
            call()
            open_slots[key].append((time.perf_counter() - start) * 1e3)
    return open_slots


def multiply(executor: CpuExecutor, rows: int, scratch: Floats) -> None:
    """The matrix products of a step of `rows` rows alone, on meaningless numbers; `scratch`
    float32[rows or more,V].
    """
    library = native.load()
    if library.forerun_products(executor.native_model(), rows, scratch.ctypes.data):
        raise RuntimeError(library.forerun_error().decode())


def add(open_slots: dict[str, Times], name: str, more: Times) -> None:
    """Keep another block of measurements."""
    for key, times in more.items():
        open_slots.setdefault(name, {}).setdefault(key, []).extend(times)


def summary(times: Times) -> dict[str, dict[int, float]]:
    """Minimum and median per key."""
    return {
        "min": {key: round(min(found), 3) for key, found in times.items()},
        "median": {key: round(statistics.median(found), 3) for key, found in times.items()},
    }


def shapes_of(arch: Architecture) -> dict[str, int]:
    """What bench/peers/steps_onnx.py builds."""
    qkv = (arch.heads + 2 * arch.kv_heads) * arch.head_size
    return {
        "layers": arch.layers,
        "hidden": arch.hidden,
        "qkv": qkv,
        "ffn": arch.ffn,
        "vocab": arch.vocab,
    }


def peers(
    options: argparse.Namespace, threads: int, rounds: int, shapes: dict[str, int]
) -> Iterator[tuple[str, Times]]:
    """One block of each peer; of those that cannot be installed, a word."""
    common = {"threads": threads, "rounds": rounds, "rows": ROWS}
    facts = {
        "llamacpp": common | {"path": str(options.path), "context": options.context},
        "onnx": common | {"shapes": shapes},
    }
    for name, place in PEERS.items():
        made = subprocess.run(
            [sys.executable, str(PEER_FOLDER / "environments.py"), place],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if made.returncode:
            sys.stderr.write(f"{name} left out: it cannot be installed\n")
            continue
        python = made.stdout.strip().splitlines()[-1]
        command = [python, str(PEER_FOLDER / f"steps_{place}.py"), json.dumps(facts[place])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        yield name, {int(key): times for key, times in found.items()}


def floor_ms(facts: dict[str, Any]) -> float:
    """Milliseconds in which this machine's threads read the weights once, at their best."""
    threads, size = facts["threads"], 1 << 26
    blocks = [np.ones(size, np.float32) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(8):
            start = time.perf_counter()
            list(pool.map(np.max, blocks))
            best = max(best, 4 * size * threads / (time.perf_counter() - start))
    return float(1e3 * facts["weight_bytes"] / best)


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
    parser.add_argument("--peers", action="store_true")
    options = parser.parse_args()
    model = open_model(options.model)
    options.path, checkpoint = model.path, model.checkpoint
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
    whole = {k: lambda step=step: executor.begin(*step) for k, step in steps.items()}
    scratch = np.empty((max(ROWS), vocab), np.float32)
    products = {k: lambda k=k: multiply(executor, k, scratch) for k in ROWS}
    report: dict[str, Any] = {
        "command": sys.argv,
        "machine": machine(),
        "executor": executor.describe(),
        "load_seconds": round(loaded, 3),
        "context": options.context,
        "floor_ms": round(floor_ms(executor.describe()), 3),
    }
    open_slots: dict[str, Times] = {}
    rounds = -(-options.rounds // BLOCKS)
    for _ in range(BLOCKS):
        add(open_slots, "products", measure(products, rounds))
        add(open_slots, "step", measure(whole, rounds))
        if options.peers:
            shapes = shapes_of(checkpoint.architecture)
            for name, times in peers(options, executor.describe()["threads"], rounds, shapes):
                add(open_slots, name, times)
    report["ms"] = {name: summary(times) for name, times in open_slots.items()}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report)


def print_table(report: dict[str, Any]) -> None:
    """Milliseconds and ratios, one column per k."""
    out = sys.stdout.write
    out(f"{report['machine']} loaded in {report['load_seconds']} s\n")
    out(f"reading the weights once takes {report['floor_ms']} ms\n")
    out("rows".ljust(28) + "".join(f"{k:>8}" for k in ROWS) + "\n")
    for name, found in report["ms"].items():
        for statistic, values in found.items():
            out(f"{name}, {statistic}".ljust(28) + "".join(f"{values[k]:8.2f}" for k in ROWS))
            out("\n")
        first = found["median"][1]
        ratios = (found["median"][k] / first for k in ROWS)
        out("  over t(1)".ljust(28) + "".join(f"{ratio:8.2f}" for ratio in ratios) + "\n")


if __name__ == "__main__":
    main()
