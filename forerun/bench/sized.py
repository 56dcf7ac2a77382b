"""What the torch executor costs at a model's size, with random weights in its place.

plain      a step of one token for each of B sequences, against the floor: the weights read once,
           at the bandwidth of a large copy measured first
t(k)/t(1)  a step of B trees with k nodes each over a plain one
draft      a pass of one layer with a head for 32,000 tokens, which is what an EAGLE-3 head is
speed-up   SYNTHETIC: random weights accept nothing. The measured times are combined with an
           acceptance published for a real draft of the real model:
           (1 + a + a^2 + ... + a^k) / ((t(k+1) + k * draft) / t(1))
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from forerun.engine.executor import ExecutorLimits
from forerun.engine.plan import Opening, Plan
from forerun.errors import MemoryPlanError
from forerun.executors.torch import TorchExecutor
from forerun.models.checkpoint import Checkpoint
from forerun.models.shapes import RandomCheckpoint, shape_named
from forerun.spec.sampling import Sampling
from forerun.spec.tree import Draft, TreeBatch, batch
from forerun.types import Ints

PAGE = 16
DRAFT_VOCAB = 32_000


@dataclass(frozen=True, slots=True)
class Published:
    """Acceptance length `tau`, bonus token included, of a chain of `chain` guesses."""

    tau: float
    chain: int
    source: str

    def rate(self) -> float:
        """The one rate a with 1 + a + ... + a^chain = tau."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if length(middle, self.chain) < self.tau else (low, middle)
        return low


PUBLISHED = {
    "qwen3-8b MT-bench": Published(2.66, 7, "EAGLE-3, T=1, chain 7 (DSpark paper, table)"),
    "qwen3-4b GSM8K": Published(5.14, 7, "EAGLE-3, T=1, chain 7 (DSpark paper, table)"),
}


def length(rate: float, guesses: int) -> float:
    """Tokens a round emits on average where each guess is right at `rate`, given the last."""
    return float(sum(rate**depth for depth in range(guesses + 1)))


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is measured: at each batch, chains of each number of nodes, behind `context` tokens."""

    batches: tuple[int, ...]
    nodes: tuple[int, ...] = (1, 2, 4, 8)
    context: int = 512
    rounds: int = 20
    copy_bytes: int = 4 << 30


class Steps:
    """An executor with `rows` sequences of `context` cached tokens."""

    def __init__(
        self, checkpoint: Checkpoint, device: str, dtype: str, rows: int, sweep: Sweep
    ) -> None:
        arch = checkpoint.architecture
        self._context, most = sweep.context, max(sweep.nodes)
        self._pages = -(-(sweep.context + most) // PAGE)
        limits = ExecutorLimits(
            page_size=PAGE,
            pages=self._pages * rows,
            slots=rows,
            max_nodes=max(rows * most, sweep.context),
            context=min(arch.context, self._pages * PAGE),
            vocab=arch.vocab,
        )
        self.executor = TorchExecutor(checkpoint, limits, device, dtype)
        random = np.random.default_rng(0)
        self._tokens = random.integers(0, arch.vocab, sweep.context + most).astype(np.int32)
        cached = self._tokens[: sweep.context]
        for row in range(rows):
            tokens = self._tokens[: sweep.context + 1]
            self.executor.open(Opening(row, tokens, len(cached), Sampling(temperature=0.0)))
            self.run(*self._plan([row], 0, cached, 0), commit=True)

    def step(self, rows: int, nodes: int) -> Callable[[], None]:
        """`rows` sequences with chains of `nodes` nodes: verify and accept. It may be repeated:
        what it writes lies behind the cached tokens.
        """
        known = self._tokens[self._context : self._context + 1]
        plan, trees = self._plan(list(range(rows)), self._context, known, nodes - 1)
        return lambda: self.run(plan, trees)

    def run(self, plan: Plan, trees: TreeBatch, commit: bool = False) -> None:
        """One step."""
        scores = self.executor.verify(plan, trees)
        accepted = self.executor.accept(plan, trees, scores, None)
        if commit:
            self.executor.commit(plan, trees, scores, accepted)

    def _plan(
        self, rows: list[int], kv_len: int, known: Ints, guesses: int
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
            page_table=(first + np.arange(self._pages)).astype(np.int32),
            constrained=np.zeros(len(rows), np.bool_),
        )
        return plan, batch([known] * len(rows), [draft] * len(rows))


def wait(device: torch.device) -> None:
    """Until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median over rounds, after three that warm up (the second captures)."""
    taken = []
    for _ in range(rounds + 3):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken[3:])


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second, read and written together, of a large copy."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / milliseconds(lambda: target.copy_(source), device, 5) * 1e3


def measure(name: str, device: str, dtype: str, sweep: Sweep) -> dict[str, Any]:
    """All numbers of one shape, in milliseconds, by batch. A batch that does not fit into memory
    has an "error" instead. Raises ConfigError for an unknown shape.
    """
    arch, there = shape_named(name), torch.device(device)
    bandwidth = copy_bandwidth(there, sweep.copy_bytes)
    report: dict[str, Any] = {
        "shape": name,
        "dtype": dtype,
        "device": device,
        "weights": "random",
        "acceptance": "synthetic: published lengths applied to measured times",
        "parameters": arch.parameters,
        "context": sweep.context,
        "bandwidth_bytes_per_s": bandwidth,
        "batches": {},
    }
    head = replace(arch, layers=1, vocab=min(DRAFT_VOCAB, arch.vocab))
    # One executor for all batches: building it takes most of the time there is.
    try:
        steps = Steps(RandomCheckpoint(arch), device, dtype, max(sweep.batches), sweep)
    except MemoryPlanError as error:
        return report | {"error": str(error)}
    facts = steps.executor.describe()
    report["floor_ms"] = facts["weight_bytes"] / bandwidth * 1e3
    report["weight_bytes"] = facts["weight_bytes"]
    for rows in sweep.batches:
        found = {k: milliseconds(steps.step(rows, k), there, sweep.rounds) for k in sweep.nodes}
        report["batches"][rows] = {"step_ms": found}
    facts = steps.executor.describe()
    report["captured"] = facts["captured"]
    report["capture_seconds"] = facts["capture_seconds"]
    steps.executor.shutdown()
    del steps
    drafts = Steps(RandomCheckpoint(head), device, dtype, max(sweep.batches), sweep)
    for rows in sweep.batches:
        entry = report["batches"][rows]
        entry["draft_ms"] = milliseconds(drafts.step(rows, 1), there, sweep.rounds)
        entry["speed_up"] = speed_ups(entry["step_ms"], entry["draft_ms"])
    drafts.executor.shutdown()
    return report


def speed_ups(step_ms: dict[int, float], draft_ms: float) -> dict[str, dict[str, float]]:
    """By published acceptance: guesses that pay most, and how much; 0 guesses = 1."""
    found = {}
    for name, published in PUBLISHED.items():
        rate, plain = published.rate(), step_ms[1]
        gains = {0: 1.0} | {
            nodes - 1: length(rate, nodes - 1) * plain / (ms + (nodes - 1) * draft_ms)
            for nodes, ms in step_ms.items()
            if nodes > 1
        }
        best = max(gains, key=lambda guesses: gains[guesses])
        found[name] = {"guesses": float(best), "speed_up": gains[best]}
    return found


def lines(report: dict[str, Any]) -> list[str]:
    """The report as text, the table last."""
    if "error" in report:
        return [f"{report['shape']}: {report['error']}"]
    found = [
        f"{report['shape']}, {report['dtype']}, random weights of {report['weight_bytes']:,} bytes,"
        f" {report['context']} tokens cached; copy {report['bandwidth_bytes_per_s'] / 1e9:,.0f} "
        f"GB/s, floor {report['floor_ms']:.3f} ms; captured {len(report['captured'])} in "
        f"{report['capture_seconds']:.1f} s",
        "speed-ups are SYNTHETIC: published acceptance lengths over the times measured here",
        *(f"  {name}: tau {p.tau}, {p.source}" for name, p in PUBLISHED.items()),
    ]
    for rows, entry in report["batches"].items():
        steps = entry["step_ms"]
        ratios = " ".join(f"t({k})/t(1) {ms / steps[1]:.2f}" for k, ms in steps.items() if k > 1)
        gains = "; ".join(
            f"{name} x{gain['speed_up']:.2f} ({gain['guesses']:.0f} guesses)"
            for name, gain in entry["speed_up"].items()
        )
        found.append(
            f"batch {rows:4}: plain {steps[1]:9.3f} ms = {steps[1] / report['floor_ms']:6.2f} x "
            f"floor, {ratios}, draft {entry['draft_ms']:.3f} ms; {gains}"
        )
    return found
