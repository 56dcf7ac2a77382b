"""What the torch executor costs at a model's size, with random weights in its place.

plain      a step of one token for each of B sequences, against the floor: the weights read once,
           at the bandwidth of a large copy measured first
t(k)/t(1)  a step of B chains with k nodes each over a plain one
drafted    the same step when it also follows an EAGLE-3 head for 32,000 tokens, random too, and
           grows the next k - 1 draft tokens: within the captured round where there are rounds, else
           the step and the passes that the host asks for
draft      one such pass, which grows one draft token for each sequence
host       share of a plain step that passes outside of the captured round; without an engine
speed-up   SYNTHETIC: random weights accept nothing. The measured times are combined with an
           acceptance published for a real draft of the real model: tokens(k) over
           drafted(k + 1) / t(1)
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from forerun.build.shapes import RandomCheckpoint, random_draft, shape_named
from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.eagle_folder import DraftFile
from forerun.errors import MemoryPlanError
from forerun.executors.torch import TorchEagleModel, TorchExecutor
from forerun.interface.executor import Executor
from forerun.measure.step_bench import StepBench, limits_for, milliseconds

DRAFT_VOCAB = 32_000


@dataclass(frozen=True, slots=True)
class Published:
    """Acceptance length `tau`, bonus token included, of a chain of `chain` draft tokens.

    positions  how often each of them was accepted, where that is known: tau is their sum and one
    """

    tau: float
    chain: int
    source: str
    positions: tuple[float, ...] = ()

    def rate(self) -> float:
        """Return the conditional acceptance a in [0, 1] with 1 + a + ... + a^chain = tau, by
        bisection.
        """
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if length(middle, self.chain) < self.tau else (low, middle)
        return low

    def tokens(self, draft_tokens: int) -> float:
        """Return the tokens that a round emits on average with `draft_tokens` draft tokens, up to
        `chain`: by position if that is published, else from `rate`.
        """
        if self.positions:
            return 1.0 + sum(self.positions[:draft_tokens])
        return length(self.rate(), draft_tokens)


_VLLM = "EAGLE-3, T=0, chain 3, 80 prompts (vLLM, tests/v1/spec_decode/test_acceptance_length.py)"

PUBLISHED = {
    "llama-3.1-8b MT-bench": Published(2.60, 3, _VLLM, (0.730, 0.521, 0.355)),
    "qwen3-8b MT-bench": Published(2.66, 7, "EAGLE-3, T=1, chain 7 (DSpark paper, table)"),
    "qwen3-4b GSM8K": Published(5.14, 7, "EAGLE-3, T=1, chain 7 (DSpark paper, table)"),
}


def length(rate: float, draft_tokens: int) -> float:
    """Return the tokens that a round emits on average if each of `draft_tokens` is right with
    probability `rate`, given that the one before was: 1 + rate + ... + rate^draft_tokens.
    """
    return float(sum(rate**depth for depth in range(draft_tokens + 1)))


@dataclass(frozen=True, slots=True)
class StepSweep:
    """What is measured: at each batch, chains of each number of nodes, behind `context` tokens."""

    batches: tuple[int, ...]
    nodes: tuple[int, ...] = (1, 2, 4, 8)
    context: int = 512
    rounds: int = 20
    copy_bytes: int = 4 << 30


def torch_bench(
    checkpoint: Checkpoint,
    device: str,
    dtype: str,
    sweep: StepSweep,
    draft: DraftFile | None = None,
    **how: Any,
) -> StepBench:
    """Return a StepBench on the torch executor, with as many sequences as the sweep's largest
    batch; its rounds are captured if its device captures.

    draft  a draft head beside it; None = none
    how    kv_dtype and prompts, as TorchExecutor takes them

    Raises what TorchExecutor raises: ConfigError, MemoryPlanError.
    """
    arch = checkpoint.architecture
    rows, nodes = max(sweep.batches), max(sweep.nodes)
    limits = limits_for(arch, rows, nodes, sweep.context)
    executor = TorchExecutor(checkpoint, limits, device, dtype, **how).capture()
    head = None
    if draft is not None:
        head = TorchEagleModel(executor, checkpoint, draft)
        executor.draft_with(head)
    return StepBench(executor, sweep.context, head=head, wait=partial(wait, torch.device(device)))


def wait(device: torch.device) -> None:
    """Return when a CUDA device has finished everything launched; at once on other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Measure the bytes per second, read and written counted, of copying `size` bytes on the
    device; the median of 5.
    """
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = milliseconds(lambda: target.copy_(source), 5, partial(wait, device))
    return 2 * size / statistics.median(times) * 1e3


def measure(name: str, device: str, dtype: str, sweep: StepSweep) -> dict[str, Any]:
    """Measure one model shape with random weights: times in milliseconds by batch, as plain values.

    name   a shape of forerun.build.shapes
    sweep  batches, nodes, context and repeats

    Where the executor does not fit into memory, "error" stands instead of batches. Raises
    ConfigError for an unknown shape.
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
    draft = random_draft(arch, min(DRAFT_VOCAB, arch.vocab))
    # One executor for all batches: building it takes most of the time there is.
    try:
        steps = torch_bench(RandomCheckpoint(arch), device, dtype, sweep, draft)
    except MemoryPlanError as error:
        return report | {"error": str(error)}
    facts: dict[str, Any] = steps.executor.describe()
    report["floor_ms"] = facts["weight_bytes"] / bandwidth * 1e3
    report["weight_bytes"] = facts["weight_bytes"]
    for rows in sweep.batches:
        report["batches"][rows] = _batch(steps, rows, sweep)
    facts = steps.executor.describe()
    report["captured"] = facts.get("captured", [])
    report["capture_seconds"] = facts.get("capture_seconds", 0.0)
    steps.executor.shutdown()
    return report


def _batch(steps: StepBench, rows: int, sweep: StepSweep) -> dict[str, Any]:
    """Measure one batch and return its numbers."""
    step_ms = {k: steps.median(steps.step(rows, k), sweep.rounds) for k in sweep.nodes}
    draft_ms = steps.median(steps.draft_pass(rows), sweep.rounds)
    drafted_ms, within = {}, False
    for nodes in sweep.nodes:
        if nodes > 1:
            drafted_ms[nodes] = step_ms[nodes] + (nodes - 1) * draft_ms
            work = steps.drafted(rows, nodes, nodes - 1)
            if work is not None:
                drafted_ms[nodes], within = steps.median(work, sweep.rounds), True
    plain = steps.step(rows, 1)
    return {
        "step_ms": step_ms,
        "draft_ms": draft_ms,
        "drafted_ms": drafted_ms,
        "drafted_within_rounds": within,
        "host_share": host_share(
            steps.executor, lambda: sum(steps.times(plain, sweep.rounds, warm_up=0))
        ),
        "speed_up": speed_ups(step_ms[1], drafted_ms),
    }


def host_share(executor: Executor, work: Callable[[], float]) -> float | None:
    """Return the share, in [0, 1], of the milliseconds of `work` that passed outside of captured
    rounds; None if the executor captured none.
    """
    before: dict[str, Any] = executor.describe()
    taken = work()
    after: dict[str, Any] = executor.describe()
    if after.get("rounds") == before.get("rounds"):
        return None
    return 1.0 - 1e3 * float(after["round_seconds"] - before["round_seconds"]) / taken


def speed_ups(plain_ms: float, drafted_ms: dict[int, float]) -> dict[str, dict[str, float]]:
    """Return, for each published acceptance, the number of draft tokens that pays most and its
    speed over plain decoding (SYNTHETIC: measured times, published lengths). 0 draft tokens count
    as 1.

    plain_ms    a plain step
    drafted_ms  a drafting step, by nodes of a row, one more than its draft tokens
    """
    found = {}
    for name, published in PUBLISHED.items():
        gains = {0: 1.0} | {
            nodes - 1: published.tokens(nodes - 1) * plain_ms / ms
            for nodes, ms in drafted_ms.items()
            if nodes - 1 <= published.chain
        }
        best = max(gains, key=lambda draft_tokens: gains[draft_tokens])
        found[name] = {"draft_tokens": float(best), "speed_up": gains[best]}
    return found


def lines(report: dict[str, Any]) -> list[str]:
    """Return the report as text for users: shape, floor, captures, and a line per batch; only the
    error, if it has one.
    """
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
            f"{name} x{gain['speed_up']:.2f} ({gain['draft_tokens']:.0f} draft tokens)"
            for name, gain in entry["speed_up"].items()
        )
        how = "in the round" if entry["drafted_within_rounds"] else "pass by pass"
        drafted = " ".join(f"{ms / steps[1]:.2f}" for ms in entry["drafted_ms"].values())
        share = entry["host_share"]
        host = "no rounds" if share is None else f"host {100 * share:.1f} %"
        found.append(
            f"batch {rows:4}: plain {steps[1]:9.3f} ms = {steps[1] / report['floor_ms']:6.2f} x "
            f"floor, {host}, {ratios}; drafted {how} {drafted}, a pass "
            f"{entry['draft_ms']:.3f} ms; {gains}"
        )
    return found
