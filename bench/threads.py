"""How evenly the core's steps are split over more threads than this machine has cores.

    python bench/threads.py model.gguf --threads 1 2 4 8 16 --nodes 1 8 64 --json out.json

The core is compiled with a pool whose threads take turns (pool_in_turns.cpp), so one thread at a
time has the machine to itself, and what each does between two barriers is timed; the least of all
repetitions counts. A step of n threads then takes, by this, the sum over its phases of the slowest
thread's time. Left out is what only a machine with so many cores has: the waits at barriers, cache
lines that travel between cores, and memory that all read at once. So what is printed is the most
that the split allows.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.records import ended, keep
from forerun.executors.cpu import CpuExecutor, native
from forerun.hub.catalog import Model, open_model
from forerun.machine import stamp
from forerun.measure.step_bench import StepBench, limits_for

HERE = Path(__file__).resolve().parent
WHO_IS_FREE = "int u; (u = next_unit_.fetch_add(1)) < (int)units_.size();"
IN_TURNS = "int u = thread; u < (int)units_.size(); u += pool.threads()"
"""How attend.cpp's threads find work, and how they do here, where the first would do all of it."""


def compile_core(folder: Path) -> None:
    """Compile csrc with the pool in turns into `folder` and have the package load that. Raises
    CalledProcessError where it does not compile, ValueError where attention's loop is another.
    """
    sources = folder / "csrc"
    shutil.copytree(HERE.parent / "csrc", sources)
    shutil.copy(HERE / "pool_in_turns.cpp", sources / "pool.cpp")
    attention = sources / "attend.cpp"
    text = attention.read_text(encoding="utf-8")
    if text.count(WHO_IS_FREE) != 1:
        raise ValueError(f"csrc/attend.cpp has no line {WHO_IS_FREE!r}: change it here, too")
    attention.write_text(text.replace(WHO_IS_FREE, IN_TURNS), encoding="utf-8")
    native.LIBRARY = folder / "_core.so"
    subprocess.run([sys.executable, sources / "build.py", native.LIBRARY], check=True)


def phases_of(model: Model, threads: int, nodes: int, context: int, repeat: int) -> np.ndarray:
    """float64[phases,threads]: the least seconds of each thread in each phase of a forward pass of
    one row with so many nodes.
    """
    library = native.load()
    limits = limits_for(model.checkpoint.architecture, 1, nodes, context)
    executor = CpuExecutor(model.checkpoint, limits, threads)
    bench = StepBench(executor, context)
    work = bench.forward(1, nodes)
    library.forerun_turns_forget()
    for repetition in range(repeat + 2):
        bench.rewind()
        library.forerun_turns_measure(repetition > 1)
        work()
        library.forerun_turns_measure(0)
    found = np.zeros((library.forerun_turns(None), threads))
    library.forerun_turns(found.ctypes.data_as(ctypes.c_void_p))
    bench.rewind()
    executor.shutdown()
    return found


def facts_of(phases: np.ndarray) -> dict[str, float]:
    """Of float64[phases,threads] seconds: how long the phases take by their slowest threads, how
    long all threads work together, how long phases take in which one thread alone works (more than
    nine tenths of a phase's work, where there are several), milliseconds; how many phases.
    """
    slowest, work = phases.max(axis=1), phases.sum(axis=1)
    alone = slowest > 0.9 * work if phases.shape[1] > 1 else np.zeros(len(phases), np.bool_)
    return {
        "ms": 1e3 * slowest.sum(),
        "work_ms": 1e3 * work.sum(),
        "alone_ms": 1e3 * slowest[alone].sum(),
        "phases": len(phases),
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if min(*asked.threads, *asked.nodes, asked.context, asked.repeat) < 1:
        parser.error("threads, nodes, context and repetitions are at least 1")
    model = open_model(asked.model)
    table: dict[str, Any] = {}
    sys.stdout.write(f"{stamp()}\n{'nodes':>5}{'threads':>8}{'ms':>9}{'times':>7}{'alone':>7}")
    sys.stdout.write(f"{'phases':>7}\n")
    with tempfile.TemporaryDirectory() as folder:
        compile_core(Path(folder))
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
        for nodes in asked.nodes:
            first = None
            for threads in asked.threads:
                phases = phases_of(model, threads, nodes, asked.context, asked.repeat)
                facts = facts_of(phases)
                first = first or facts["ms"]
                table[f"{nodes} nodes, {threads} threads"] = facts
                sys.stdout.write(f"{nodes:>5}{threads:>8}{facts['ms']:>9.3f}")
                sys.stdout.write(f"{first / facts['ms']:>7.2f}{facts['alone_ms']:>7.3f}")
                sys.stdout.write(f"{facts['phases']:>7}\n")
                sys.stdout.flush()
    if asked.json:
        keep(asked.json, {"model": asked.model, "context": asked.context, "least": table})


if __name__ == "__main__":
    ended(main)
