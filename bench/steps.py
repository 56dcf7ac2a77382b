"""What a step of R rows with k nodes each costs on one executor or on several, in turns.

    python bench/steps.py [model] [--executors cpu] [--rows 1] [--nodes 1 2 4 8 ...] [--context 200]
        [--kinds plain cut shaped] [--clock cpu] [--cores 1] [--kernels all] [--peers]
        [--json out.json]

A row has `context` cached tokens and a chain of random draft tokens, nearly all rejected:
embedding, norms, products, attention, head, and the choices. Logits are computed of all nodes, but
on the compiled core in rows of kind plain: there of the root and of draft tokens that a path
reaches (decision 0055), so a step takes longer where many of them are accepted. Rounds go over all
sizes in turn, and over the executors in an order drawn anew, so that a slow moment of the machine
hits all alike. Rows of kind plain have a temperature, cut ones top_k and top_p too, shaped ones
penalties, a cut-off and log-probabilities. Milliseconds: minimum and median over the rounds, and,
of several executors, the quartiles of the rounds' ratios to the first. `--clock cpu` counts the
process's own time, for a machine that others use.

Of the compiled core, "cpu products" are the matrix products alone, "cpu forward" is the step but
for choosing (and the logits that paths reach then), and "cpu reading" is what the weights take to
be read once and not used: no step is faster than its least time. `--kernels` takes turns with
executors of the core that use other instruction sets ("all": each that this machine has but plain
C++), a block of rounds each, since each holds weights of its own and those of all together fit no
cache. `--peers` (of one row) takes turns with llama.cpp and ik_llama.cpp (one llama_decode) and
ONNX Runtime's MatMulNBits (the same products), each in its own environment
(bench/peers/environments.py makes it on first use).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench.records import ended, keep, quartiles
from bench.step_bench import StepBench, limits_for
from forerun.draft_shape import DraftShape
from forerun.executors.cpu import CpuExecutor, native
from forerun.hub.catalog import Model, open_model
from forerun.interface.executor import Executor, ExecutorLimits
from forerun.machine import stamp
from forerun.speculative.sampling import Sampling

PEER_FOLDER = Path(__file__).parent / "peers"
PEERS = {
    "llama.cpp step": ("llamacpp", "llamacpp"),
    "ik_llama.cpp step": ("ikllama", "llamacpp"),
    "onnxruntime products": ("onnx", "onnx"),
}
"""Name -> its environment, and which steps_*.py runs in that."""
BLOCKS = 3
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
KINDS = {
    "plain": Sampling(temperature=0.8),
    "cut": Sampling(temperature=0.8, top_k=64, top_p=0.95),
    "shaped": Sampling(temperature=0.8, top_k=50, repetition_penalty=1.1, logprobs=5),
}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Size = tuple[int, int]
"""Rows, nodes of each."""
Times = dict[str, dict[Size, list[float]]]
"""By name and size, in milliseconds."""


def built(name: str, model: Model, limits: ExecutorLimits, args: argparse.Namespace) -> Executor:
    """The executor called `name`, warmed up; torch and JAX compute in float32. "cpu X" is the core
    with kernels X.
    """
    core, _, kernels = name.partition(" ")
    if core == "cpu":
        return CpuExecutor(model.checkpoint, limits, args.cores, kernels)
    if name == "torch":
        import torch  # noqa: PLC0415 - the core is measured without it

        from forerun.executors.torch import TorchExecutor  # noqa: PLC0415

        torch.set_num_threads(args.cores or torch.get_num_threads())
        return TorchExecutor(model.checkpoint, limits)
    from forerun.executors.jax import JaxExecutor, JaxOptions  # noqa: PLC0415

    options = JaxOptions(draft_nodes=max(args.nodes) - 1, cache_dir=args.cache)
    executor = JaxExecutor(model.checkpoint, limits, options)
    executor.warm_up(DraftShape(options.draft_nodes), compiled)
    return executor


def compiled(what: str, done: int, of: int) -> None:
    """Say how far compiling is."""
    sys.stderr.write(f"compiled {what}, {done} of {of}\n")


def works_of(name: str, bench: StepBench, sizes: list[Size]) -> dict[str, Callable[..., Any]]:
    """What is measured of an executor: names, and what gives the work of a size."""
    works: dict[str, Callable[..., Any]] = {f"{name} step": bench.step}
    if isinstance(core := bench.executor, CpuExecutor):
        most = max(rows * nodes for rows, nodes in sizes)
        scratch = np.empty((most, core.limits.vocab), np.float32)
        works[f"{name} forward"] = bench.forward
        works[f"{name} reading"] = lambda *_: (
            lambda: native.load().forerun_read_weights(core.native_model())
        )
        works[f"{name} products"] = lambda rows, nodes: (
            lambda: multiply(core, rows * nodes, scratch)
        )
    return works


def multiply(executor: CpuExecutor, rows: int, scratch: np.ndarray) -> None:
    """The matrix products of a step of `rows` nodes alone, on meaningless numbers; `scratch`
    float32[rows or more,V].
    """
    library = native.load()
    if library.forerun_products(executor.native_model(), rows, scratch.ctypes.data):
        raise RuntimeError(library.forerun_error().decode())


def measure(
    benches: dict[str, StepBench], sizes: list[Size], rounds: int, draw: np.random.Generator
) -> Times:
    """So many rounds, every work of every size once in each, right behind two of its kind that do
    not count, as steps follow each other in service: behind 64 rows one row finds its weights out
    of the caches.
    """
    works = [
        (bench, label, work)
        for name, bench in benches.items()
        for label, work in works_of(name, bench, sizes).items()
    ]
    taken: Times = {label: {size: [] for size in sizes} for _, label, _ in works}
    for _ in range(rounds):
        for size in sizes:
            for index in draw.permutation(len(works)).tolist():
                bench, label, work = works[index]
                (took,) = bench.times(work(*size), 1, warm_up=2)
                taken[label][size].append(took)
    return taken


def peers(
    model: Model, args: argparse.Namespace, threads: int, rounds: int
) -> Iterator[tuple[str, dict[Size, list[float]]]]:
    """One block of each peer; of those that cannot be installed, a word."""
    arch = model.checkpoint.architecture
    common = {"threads": threads, "rounds": rounds, "rows": args.nodes}
    shapes = {
        "layers": arch.layers,
        "hidden": arch.hidden,
        "qkv": (arch.heads + 2 * arch.kv_heads) * arch.head_size,
        "ffn": arch.ffn,
        "vocab": arch.vocab,
    }
    file = common | {"path": str(model.path), "context": args.context}
    facts = {"llamacpp": file, "onnx": common | {"shapes": shapes}}
    for name, (place, script) in PEERS.items():
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
        command = [python, str(PEER_FOLDER / f"steps_{script}.py"), json.dumps(facts[script])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        report = json.loads(done.stdout.splitlines()[-1])
        yield name, {(1, int(key)): times for key, times in report.items()}


def summary(times: Times, executors: list[str]) -> dict[str, Any]:
    """By name and size: minimum, median, and, of a step, the quartiles of ratios to the first
    executor's.
    """
    first = times[f"{executors[0]} step"]
    table: dict[str, Any] = {}
    for label, sizes in times.items():
        table[label] = {}
        for size, taken in sizes.items():
            line: dict[str, Any] = {"min": min(taken), "median": statistics.median(taken)}
            if label in [f"{name} step" for name in executors[1:]]:
                ratios = [a / b for a, b in zip(taken, first[size], strict=True)]
                line["ratio"] = quartiles(ratios)
            table[label]["x".join(map(str, size))] = line
    return table


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--executors", nargs="+", choices=("cpu", "torch", "jax"), default=["cpu"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES))
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["plain"])
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--cores", type=int, help="the process is bound to so many")
    parser.add_argument("--kernels", nargs="+", help="of the core, in turns; all: of this machine")
    parser.add_argument("--cache", help="folder of JAX's compiled programs")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    if args.kernels:
        each = native.KERNELS[:-1] if args.kernels == ["all"] else args.kernels
        cores = [f"cpu {kernels}" for kernels in each if native.kernels(kernels)]
        if not cores:
            parser.error(f"this machine runs none of {each}")
        args.executors = cores + [name for name in args.executors if name != "cpu"]
    model = open_model(args.model)
    arch = model.checkpoint.architecture
    most = max(args.rows), max(args.nodes)
    limits = limits_for(arch, *most, args.context)
    benches = {
        name: StepBench(built(name, model, limits, args), args.context, clock=CLOCKS[args.clock])
        for name in args.executors
    }
    facts: dict[str, Any] = {name: each.executor.describe() for name, each in benches.items()}
    report: dict[str, Any] = {"executors": facts, "model": args.model, "context": args.context}
    report |= {"clock": args.clock, "ms": {}}
    sizes, rounds = list(product(args.rows, args.nodes)), -(-args.rounds // BLOCKS)
    draw = np.random.default_rng(0)
    for kind in args.kinds:
        report.setdefault("prompt_ms", {})[kind] = {
            name: bench.fill(KINDS[kind]) for name, bench in benches.items()
        }
        times: Times = {}
        for _ in range(BLOCKS):
            together = (
                [{name: bench} for name, bench in benches.items()] if args.kernels else [benches]
            )
            blocks = [
                taken for some in together for taken in measure(some, sizes, rounds, draw).items()
            ]
            if args.peers:
                blocks += peers(model, args, facts[args.executors[0]]["threads"], rounds)
            for label, step_times in blocks:
                for size, taken in step_times.items():
                    times.setdefault(label, {}).setdefault(size, []).extend(taken)
        report["ms"][kind] = summary(times, args.executors)
    if "jax" in benches:
        report["executors"]["jax"] = benches["jax"].executor.describe()
    print_table(report)
    if args.json:
        keep(args.json, report)


def print_table(report: dict[str, Any]) -> None:
    """Medians, one column per size."""
    out = sys.stdout.write
    out(f"{stamp()}\n")
    for kind, table in report["ms"].items():
        sizes = list(next(iter(table.values())))
        out(f"{kind} rows x nodes".ljust(28) + "".join(f"{size:>9}" for size in sizes) + "\n")
        for label, lines in table.items():
            medians = [lines[size]["median"] for size in sizes]
            out(label.ljust(28) + "".join(f"{ms:9.2f}" for ms in medians) + "\n")
            ratios = [lines[size].get("ratio") for size in sizes]
            if ratios[0]:
                line = "".join(f"{middle:9.2f}" for _, middle, _ in ratios)
                out("  over the first".ljust(28) + line + "\n")
            else:
                over = "".join(f"{ms / medians[0]:9.2f}" for ms in medians)
                out("  over the smallest".ljust(28) + over + "\n")


if __name__ == "__main__":
    ended(main)
