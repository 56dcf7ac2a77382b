"""What the torch executor costs on a device, against what its memory would allow.

    python bench/gpu.py [model] [--device cuda] [--out bench/results/gpu.json] [--quick]

plain    one token for each of B sequences: whole steps (draft nothing, verify, accept, commit)
         against the floor, the weights' bytes over the copy bandwidth measured first
t(k)     a chain of k nodes of one sequence over one node
served   the engine end to end, speculation off and on: tokens per second of wall time
author   dense generation, as `forerun train` uses it

Every section is measured by itself: where one fails, its error stands in the table and the rest
goes on. Prints a table last and writes JSON with the machine's stamp.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.bench.workload import read_prompts
from forerun.catalog import Model, open_model
from forerun.completion import complete, make_request
from forerun.engine.executor import ExecutorLimits
from forerun.engine.plan import Opening, Plan
from forerun.executors.torch import TorchExecutor
from forerun.llm import LLM
from forerun.machine import stamp
from forerun.spec.sampling import Sampling
from forerun.spec.tree import Draft, TreeBatch, batch
from forerun.train.answers import Ask
from forerun.train.generate import DenseAuthor
from forerun.train.target import DenseTarget

PAGE = 16


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    context: int
    batches: tuple[int, ...]
    nodes: tuple[int, ...]
    rounds: int
    prompts: int
    tokens: int
    width: int
    copy: int
    """Bytes of the copy that measures bandwidth."""


FULL = Size(512, (1, 4, 16, 64, 256), (1, 2, 4, 8, 16, 32), 30, 16, 128, 1024, 4 << 30)
QUICK = Size(40, (1, 2), (1, 4), 2, 2, 8, 4, 1 << 24)


def say(text: str) -> None:
    """One line on stdout, now."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def wait(device: torch.device) -> None:
    """Until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median over rounds, after one warm-up round."""
    taken = []
    for _ in range(rounds + 1):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken[1:])


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second, read and written together, of a large copy."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / milliseconds(lambda: target.copy_(source), device, 5) * 1e3


class Steps:
    """An executor with `rows` sequences of `context` cached tokens."""

    def __init__(self, model: Model, device: torch.device, rows: int, size: Size) -> None:
        arch = model.architecture
        self._context, most = size.context, max(size.nodes)
        self._pages = -(-(size.context + most) // PAGE)
        limits = ExecutorLimits(
            page_size=PAGE,
            pages=self._pages * rows,
            slots=rows,
            max_nodes=max(rows, most, size.context),
            context=min(arch.context, self._pages * PAGE),
            vocab=arch.vocab,
        )
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        self.executor = TorchExecutor(model.checkpoint, limits, str(device), dtype)
        random = np.random.default_rng(0)
        self._tokens = random.integers(0, arch.vocab, size.context + most).astype(np.int32)
        cached = self._tokens[: size.context]
        for row in range(rows):
            tokens = self._tokens[: size.context + 1]
            self.executor.open(Opening(row, tokens, len(cached), Sampling(temperature=0.0)))
            plan, trees = self._plan([row], 0, cached, 0)
            scores = self.executor.verify(plan, trees)
            accepted = self.executor.accept(plan, trees, scores, None)
            self.executor.commit(plan, trees, scores, accepted)

    def step(self, rows: int, nodes: int) -> Callable[[], object]:
        """`rows` sequences with chains of `nodes` nodes: verify and accept, which can be
        repeated, because they change nothing.
        """
        known = self._tokens[self._context : self._context + 1]
        plan, trees = self._plan(list(range(rows)), self._context, known, nodes - 1)

        def work() -> None:
            scores = self.executor.verify(plan, trees)
            self.executor.accept(plan, trees, scores, None)

        return work

    def _plan(
        self, rows: list[int], kv_len: int, known: np.ndarray, guesses: int
    ) -> tuple[Plan, TreeBatch]:
        parents = np.arange(-1, guesses - 1, dtype=np.int32)
        draft = Draft(self._tokens[:guesses].copy(), parents)
        first = np.array(rows, np.int32)[:, None] * self._pages
        plan = Plan(
            slots=np.array(rows, np.int32),
            kv_len=np.full(len(rows), kv_len, np.int32),
            known=(known,) * len(rows),
            samples=np.full(len(rows), bool(kv_len)),
            max_nodes=np.full(len(rows), guesses, np.int32),
            max_depth=np.full(len(rows), guesses, np.int32),
            page_table=first + np.arange(self._pages, dtype=np.int32),
            constrained=np.zeros(len(rows), np.bool_),
        )
        return plan, batch([known] * len(rows), [draft] * len(rows))


def measure_plain(model: Model, device: torch.device, size: Size) -> dict[str, Any]:
    """Milliseconds of a plain step by batch; the floor is one reading of the weights."""
    bandwidth = copy_bandwidth(device, size.copy)
    found = {}
    for rows in size.batches:
        steps = Steps(model, device, rows, size)
        found[rows] = milliseconds(steps.step(rows, 1), device, size.rounds)
        weights = steps.executor.describe()["weight_bytes"]
        steps.executor.shutdown()
    floor = weights / bandwidth * 1e3
    return {"bandwidth_bytes_per_s": bandwidth, "floor_ms": floor, "step_ms": found}


def measure_nodes(model: Model, device: torch.device, size: Size) -> dict[str, Any]:
    """Milliseconds of a step of one sequence by nodes."""
    steps = Steps(model, device, 1, size)
    found = {k: milliseconds(steps.step(1, k), device, size.rounds) for k in size.nodes}
    steps.executor.shutdown()
    return {"step_ms": found}


def measure_served(model: Model, device: torch.device, size: Size) -> dict[str, Any]:
    """Tokens per second of wall time through the engine, greedy: one stream, then all."""
    found: dict[str, Any] = {}
    prompts = read_prompts()[: size.prompts]
    for speculation in ("off", "ngram"):
        with LLM(
            str(model.path),
            executor="torch",
            device=str(device),
            speculation=speculation,
            max_sequences=max(size.prompts, 2),
            context=1024,
        ) as llm:
            for at_once in (1, size.prompts):
                requests = [
                    make_request(
                        llm.loaded.chat.encode(list(prompt.messages)),
                        llm.loaded.tokenizer.eos_ids,
                        max_tokens=size.tokens,
                    )
                    for prompt in prompts[: 4 if at_once == 1 else None]
                ]
                start = time.perf_counter()
                done = complete(llm.loaded.engine, requests, at_once)
                tokens = sum(len(choice.tokens) for (choice,) in done)
                rate = tokens / (time.perf_counter() - start)
                found[f"{speculation}, {at_once} at once, tokens/s"] = rate
    return found


def measure_author(model: Model, device: torch.device, size: Size) -> dict[str, Any]:
    """Dense generation: tokens per second with all rows busy, programs captured before."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = DenseTarget(model.checkpoint, str(device), dtype)
    author = DenseAuthor(target, (), size.width, 1024, 4 * size.tokens)
    prompt = np.arange(100, 140, dtype=np.int32)

    def run() -> None:
        for key in range(author.width):
            author.ask(key, Ask(prompt, 0.8 * (key % 2), key, size.tokens))
        left = author.width
        while left:
            left -= len(author.finished())

    taken = milliseconds(run, device, 1)
    return {"width": author.width, "tokens/s": author.width * size.tokens / taken * 1e3}


SECTIONS = {
    "plain": measure_plain,
    "t(k)": measure_nodes,
    "served": measure_served,
    "author": measure_author,
}


def device_facts(device: torch.device) -> dict[str, Any]:
    """The machine, and the device where it is another one."""
    facts = stamp() | {"torch": torch.__version__, "device": str(device)}
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        facts |= {"gpu": about.name, "gpu_bytes": about.total_memory, "cuda": torch.version.cuda}
    return facts


def rows_of(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The table: (what, value)."""
    lines: list[tuple[str, str]] = []
    for section in SECTIONS:
        found = report[section]
        if "error" in found:
            lines.append((section, f"FAILED: {found['error']}"))
            continue
        steps = found.get("step_ms", {})
        floor = found.get("floor_ms", next(iter(steps.values()), 0))
        word = "floor" if "floor_ms" in found else "t(1)"
        for name, value in found.items():
            if name != "step_ms":
                lines.append((f"{section}: {name}", f"{value:,.3f}"))
        lines += [
            (f"{section}: {count}", f"{value:9.3f} ms  {value / floor:7.2f} x {word}")
            for count, value in steps.items()
        ]
    return lines


def main() -> int:
    """Measure, write JSON, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    options = parser.parse_args()
    device, size = torch.device(options.device), QUICK if options.quick else FULL
    model = open_model(options.model)
    report: dict[str, Any] = {"machine": device_facts(device), "model": model.name}
    for name, measure in SECTIONS.items():
        start = time.perf_counter()
        try:
            report[name] = measure(model, device, size)
        except Exception as error:  # noqa: BLE001 - the next section may still be worth it
            traceback.print_exc()
            report[name] = {"error": f"{type(error).__name__}: {error}"}
        say(f"{name} took {time.perf_counter() - start:.1f} s")
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    say(json.dumps(report["machine"]))
    for what, value in rows_of(report):
        say(f"{what:44} {value}")
    return int(any("error" in report[name] for name in SECTIONS))


if __name__ == "__main__":
    sys.exit(main())
