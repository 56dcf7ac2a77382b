"""What the torch executor costs on a device, against what its memory would allow.

    python bench/gpu.py rounds|formats|served|overlap|leak ... --out DIR
                        [--device cuda] [--shape llama-3.1-8b] [--model smollm2-135m]

rounds   at a large model's size, random weights: each of (rows, nodes, levels), replays timed with
         events, whole steps on the host's clock, the floor (weights, keys and values once, at the
         bandwidth of a copy) and the kernels that the profiler names; and 64 rows with top_p 0.9
formats  there too: a plain step in bfloat16, in float8, with float8 pages, and with weights kept in
         4 and 8 bits; prompt tokens per second
served   the engine end to end with a real model, each way to speculate and none in turns: tokens
         per second of wall time at 1, 16 and 64 streams, answers of 160 and of 1,000 tokens
overlap  overlap on and off in turns, nothing drafted: at 1, 16 and 64 streams, greedy, with top_p,
         and with prompts and answers of mixed lengths
leak     bytes that so many rounds leave behind, on the device and in the process

Writes DIR/NAME.json after every number, so that what was measured stays when time runs out. What
fails is in it under "errors". On the CPU everything is tiny: does it run at all? Which call of
docs/inside/gpu-runbook.md runs what stands there.
"""

import argparse
import gc
import json
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.records import ended
from bench.step_bench import StepBench, limits_for, milliseconds, random_draft
from forerun.build.shapes import (
    SHAPES,
    PlannedCheckpoint,
    RandomCheckpoint,
)
from forerun.checkpoints.checkpoint import Checkpoint
from forerun.client.completion import acceptance_length, complete, make_request
from forerun.client.llm import LLM
from forerun.drafts.eagle_folder import DraftFile
from forerun.executors.torch import TorchEagleModel, TorchExecutor
from forerun.hub.catalog import open_model, shipped_draft
from forerun.machine import stamp
from forerun.measure.workload import read_prompts
from forerun.speculative.sampling import Sampling

POINTS = (
    *((1, 1, 0), (1, 2, 0), (1, 8, 0), (64, 1, 0), (64, 2, 0)),
    *((1, 1, 1), (1, 1, 3), (1, 4, 3), (64, 2, 1), (64, 4, 3)),
)
"""Rows, nodes of each, levels of a grown chain, as in bench/results/gpu-roofline.md."""

TOP_P = Sampling(temperature=0.8, top_p=0.9, seed=1)
SAMPLED = {"top_p": {"temperature": 0.8, "top_p": 0.9}, "sampled": {"temperature": 0.8}}


DRAFT_VOCAB = 32_000


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
    return 2 * size / median(times) * 1e3


class Report:
    """Numbers by name, written to a file whenever there is one more."""

    def __init__(self, path: Path, device: torch.device, shape: str) -> None:
        self._path = path
        self.results: dict[str, Any] = {"machine": stamp(), "torch": torch.__version__}
        self.results |= {"device": str(device), "shape": shape, "errors": {}}
        if device.type == "cuda":
            self.results["gpu"] = torch.cuda.get_device_properties(device).name
        path.parent.mkdir(parents=True, exist_ok=True)

    def measure(self, name: str, work: Callable[[], Any]) -> None:
        """Keep what `work` gives, or the error it ends with, and go on."""
        begun = time.perf_counter()
        try:
            self.results[name] = work()
        except Exception as error:  # noqa: BLE001 - the next number may still be worth it
            traceback.print_exc()
            self.results["errors"][name] = f"{type(error).__name__}: {error}"
        self._path.write_text(json.dumps(self.results, indent=1) + "\n")
        said = self.results.get(name, self.results["errors"].get(name))
        took = time.perf_counter() - begun
        sys.stdout.write(f"{name} ({took:.1f} s): {json.dumps(said)[:400]}\n")
        sys.stdout.flush()


def replay_ms(executor: Any, device: torch.device, rounds: int) -> float | None:
    """Milliseconds of a replay of the last round on what still lies on the device, many behind each
    other; None without rounds.
    """
    assert isinstance(executor, TorchExecutor)
    captured = executor.rounds
    if captured is None or captured.last is None:
        return None
    replay = captured.runner.programs[captured.last.size]
    if device.type != "cuda":
        with torch.inference_mode():
            return median(milliseconds(replay, rounds))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.inference_mode(), torch.cuda.device(device):
        begin.record()
        for _ in range(rounds):
            replay()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / rounds


def kernels_of(work: Callable[[], object], device: torch.device) -> list[Any]:
    """[name, calls, microseconds] of what one call of `work` runs there, longest first."""
    on_cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if on_cuda else activity.CPU]) as seen:
        work()
        wait(device)
    rows = [
        [each.key[:80], each.count, took]
        for each in seen.key_averages()
        if (took := each.self_device_time_total if on_cuda else each.self_cpu_time_total) > 0
    ]
    return sorted(rows, key=lambda row: -row[2])[:30]


def profiled(steps: StepBench, work: Callable[[], object], device: torch.device) -> list[Any]:
    """`kernels_of` a step, whose sequences are what they were before."""
    steps.rewind()
    return kernels_of(work, device)


def point(
    steps: StepBench, at: tuple[int, int, int], device: torch.device, count: int, floor: float
) -> dict[str, Any]:
    """All numbers of one (rows, nodes, levels)."""
    rows, nodes, levels = at
    work = steps.step(rows, nodes) if not levels else steps.drafted(rows, nodes, levels)
    if work is None:
        return {"error": "no round drafts here"}
    step = steps.median(work, count)
    replay = replay_ms(steps.executor, device, count)
    numbers = {"step_ms": step, "replay_ms": replay, "floor_ms": floor}
    if replay is not None:
        numbers |= {"over_floor": replay / floor, "host": 1 - replay / step}
    return numbers | {"kernels": profiled(steps, work, device)}


def rounds(report: Report, device: torch.device, args: argparse.Namespace) -> None:
    """Fill `report` with every point."""
    real = device.type == "cuda"
    points = POINTS if real else tuple((min(r, 2), n, min(lv, 1)) for r, n, lv in POINTS)
    most = max(rows for rows, _, _ in points)
    sweep = StepSweep((most,), (1, 2, 4, 8), *((1024, 50, 4 << 30) if real else (40, 2, 1 << 22)))
    bandwidth = copy_bandwidth(device, sweep.copy_bytes)
    report.results["bandwidth_bytes_per_s"] = bandwidth
    arch, dtype = SHAPES[args.shape], "bfloat16" if real else "float32"
    draft = random_draft(arch, min(DRAFT_VOCAB, arch.vocab))
    begun = time.perf_counter()
    steps = torch_bench(RandomCheckpoint(arch), str(device), dtype, sweep, draft)
    report.results["load_and_prompts_s"] = time.perf_counter() - begun
    width = 2 if real else 4
    # A step reads a row of the input embedding per node, not the matrix: only a tied head reads it.
    lookup = 0 if arch.tied_head else arch.vocab * arch.hidden * width
    facts: dict[str, Any] = steps.executor.describe()
    weights = facts["weight_bytes"] - lookup
    kept = 2 * arch.layers * arch.kv_heads * arch.head_size * width * sweep.context
    for at in points:
        floor = (weights + at[0] * kept) / bandwidth * 1e3
        report.measure(str(at), partial(point, steps, at, device, sweep.rounds, floor))

    def top_p() -> dict[str, Any]:
        steps.fill(TOP_P)
        floor = (weights + most * kept) / bandwidth * 1e3
        return point(steps, (most, 1, 0), device, sweep.rounds, floor)

    report.measure(f"top_p ({most}, 1, 0)", top_p)
    facts = steps.executor.describe()
    report.results |= {name: facts.get(name) for name in ("captured", "capture_seconds")}
    steps.executor.shutdown()


QUANTISED = {
    "4 bits": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "8 bits": {"quant_method": "gptq", "bits": 8, "group_size": 128},
}
"""`quantization_config` of checkpoints whose weights stay in few bits."""


def formats(report: Report, device: torch.device, args: argparse.Namespace) -> None:
    """Fill `report` with steps by number format, and with the speed of prompts."""
    real = device.type == "cuda"
    arch, plain = SHAPES[args.shape], "bfloat16" if real else "float32"
    context, count = (8192, 30) if real else (96, 2)
    rows = 16 if real else 2
    sweep = StepSweep((rows,), (1,), 1024 if real else 40)

    def step(dtype: str, kv_dtype: str) -> dict[str, Any]:
        checkpoint = RandomCheckpoint(arch)
        if dtype in QUANTISED:
            settings = {"quantization_config": QUANTISED[dtype]}
            checkpoint, dtype = PlannedCheckpoint(arch, settings), "file"
        steps = torch_bench(checkpoint, str(device), dtype, sweep, kv_dtype=kv_dtype)
        report: dict[str, Any] = {}
        for batch in (1, rows):
            report[f"{batch} rows, step_ms"] = steps.median(steps.step(batch, 1), count)
            report[f"{batch} rows, replay_ms"] = replay_ms(steps.executor, device, count)
        steps.executor.shutdown()
        return report

    def prompt(backend: str) -> dict[str, Any]:
        long = StepSweep((1,), (1,), context)
        steps = torch_bench(RandomCheckpoint(arch), str(device), plain, long, prompts=backend)
        taken = {}
        for chunk in (2048, 4096, 8192) if real else (32, 96):
            took = steps.median(steps.prompt(chunk), 3)
            taken[f"chunks of {chunk}, tokens/s"] = chunk / took * 1e3
        report = taken | {"kernels": profiled(steps, steps.prompt(chunk), device)}
        steps.executor.shutdown()
        return report

    for backend in ("triton", "torch_native") if real else ("triton",):
        report.measure(f"prefill, {backend}", partial(prompt, backend))
        gc.collect()
    for dtype, kv_dtype in ((plain, "same"), ("float8", "same"), (plain, "float8")):
        report.measure(f"{dtype}, pages {kv_dtype}", partial(step, dtype, kv_dtype))
        gc.collect()
    for numbers in QUANTISED:
        report.measure(f"{numbers}, pages same", partial(step, numbers, "same"))
        gc.collect()
    if real:
        for numbers in ("float8", *QUANTISED):
            report.measure(f"{numbers} over bfloat16", partial(gain, report.results, numbers))


def gain(measured: dict[str, Any], numbers: str) -> dict[str, float]:
    """How many times faster weights in these numbers are, by what was measured."""
    slow, fast = measured["bfloat16, pages same"], measured[f"{numbers}, pages same"]
    return {name: slow[name] / fast[name] for name in slow if slow[name] and fast[name]}


def opened(args: argparse.Namespace, device: torch.device, rows: int, **how: Any) -> LLM:
    """The model with `rows` sequences of 1,280 tokens; two may be loaded at a time, and memory is
    filled with pages otherwise.
    """
    where: dict[str, Any] = {"executor": "torch", "device": str(device), "context": 1280}
    return LLM(args.model, max_sequences=rows, kv_tokens=1280 * rows, **where, **how)


def speculations(name: str) -> dict[str, dict[str, Any]]:
    """Ways to speculate; with a draft head where one comes with this model."""
    settings: dict[str, dict[str, Any]] = {
        "off": {"speculative_algorithm": "OFF"},
        "ngram": {"speculative_algorithm": "NGRAM"},
    }
    folder, shape = shipped_draft("smollm2-135m"), SHAPES["smollm2-135m"]
    if folder and open_model(name).architecture.parameters == shape.parameters:
        head = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(folder)}
        fixed = {"policy": "fixed", "speculative_num_draft_tokens": 4, "speculative_num_steps": 3}
        settings |= {"head": head, "head, always 3": head | fixed}
    return settings


def served(report: Report, device: torch.device, args: argparse.Namespace) -> None:
    """Fill `report` with every way to speculate beside none, in turns: greedy and at temperature
    0.8, in short answers, and of the adaptive head in long ones.
    """
    real = device.type == "cuda"
    streams, short, long = ((1, 16, 64), 160, 1000) if real else ((1, 2), 6, 12)
    points = [(kind, at, short) for kind in ("greedy", "sampled") for at in streams]
    ways = speculations(args.model)
    with opened(args, device, streams[-1], **ways.pop("off")) as without:
        for name, how in ways.items():
            begun = time.perf_counter()
            with opened(args, device, streams[-1], **how) as with_it:
                report.results[f"{name}, start_s"] = time.perf_counter() - begun
                longer = [("greedy", at, long) for at in streams] if name == "head" else []
                for kind, at_once, tokens in points + longer:
                    work = partial(turns, without, with_it, at_once, kind, tokens)
                    report.measure(f"{name}, {kind}, {at_once} x {tokens}", work)
                facts = with_it.loaded.target.executor.describe()
                kept = {key: facts.get(key) for key in ("captured", "capture_seconds")}
                report.results[f"{name}, rounds"] = kept


def overlap(report: Report, device: torch.device, args: argparse.Namespace) -> None:
    """Fill `report` with overlap and none side by side."""
    real = device.type == "cuda"
    streams = (1, 16, 64) if real else (1, 2)
    how, begun = {"speculative_algorithm": "OFF"}, time.perf_counter()
    with opened(args, device, streams[-1], overlap=False, **how) as without:
        report.results["start_s"] = time.perf_counter() - begun
        with opened(args, device, streams[-1], overlap=True, **how) as with_it:
            for at_once in streams:
                for kind in ("greedy", "top_p", "mixed"):
                    work = partial(turns, without, with_it, at_once, kind, 128 if real else 6)
                    report.measure(f"{at_once} streams, {kind}", work)


def turns(without: LLM, with_it: LLM, at_once: int, kind: str, tokens: int) -> dict[str, float]:
    """Both in turns; the first turn warms up and does not count."""
    taken: dict[str, list[float]] = {"off": [], "on": []}
    texts: dict[str, list[list[int]]] = {}
    accepted: list[float] = []
    before = with_it.loaded.engine.stats()
    for _ in range(4):
        for name, llm in (("off", without), ("on", with_it)):
            begun = time.perf_counter()
            done = asked_of(llm, at_once, kind, tokens, at_once)
            texts[name] = [choice.tokens for choice in done]
            taken[name].append(sum(map(len, texts[name])) / (time.perf_counter() - begun))
        accepted.append(acceptance_length([choice.stats for choice in done]))
    after = with_it.loaded.engine.stats()
    ratios = [on / off for on, off in zip(taken["on"][1:], taken["off"][1:], strict=True)]
    speeds = {f"{name}, tokens/s": median(each[1:]) for name, each in taken.items()}
    return speeds | {
        "on over off": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "tokens per step": median(accepted[1:]),
        "carried": (after.carried - before.carried) / max(1, after.steps - before.steps),
        "texts that differ": sum(a != b for a, b in zip(texts["off"], texts["on"], strict=True)),
    }


def asked_of(llm: LLM, at_once: int, kind: str, tokens: int, count: int) -> list[Any]:
    """`count` answers, so many at once."""
    prompts, random = read_prompts(), np.random.default_rng(at_once)
    how: dict[str, Any] = SAMPLED.get(kind, {})
    requests, room = [], llm.loaded.context - 24
    for index in range(count):
        text = prompts[index % len(prompts)].messages[-1]["content"]
        known = llm.loaded.tokenizer.encode(text).astype(np.int32)
        length = tokens
        if kind == "mixed":
            known = np.tile(known, 1 + int(random.integers(8)))[: room - tokens]
            length = int(random.integers(tokens // 2, tokens))
        requests.append(
            make_request(known, (), max_tokens=length, ignore_eos=True, seed=index, **how)
        )
    return [choice for (choice,) in complete(llm.loaded.engine, requests, at_once)]


def leak(report: Report, device: torch.device, args: argparse.Namespace) -> None:
    """Fill `report` with what torch holds on the device, and the process, after many steps."""
    real = device.type == "cuda"
    count, sweep = 10_000 if real else 20, StepSweep((1,), (1, 2), 512 if real else 40)
    dtype = "bfloat16" if real else "float32"
    steps = torch_bench(open_model(args.model).checkpoint, str(device), dtype, sweep)
    work = steps.step(1, 2)
    steps.times(work, 10)
    before = _held(device)
    seconds = sum(steps.times(work, count)) / 1e3
    after = _held(device)
    steps.executor.shutdown()
    report.results |= {"steps": count, "seconds": seconds}
    report.results |= {"device bytes": after[0] - before[0], "process bytes": after[1] - before[1]}


def _held(device: torch.device) -> tuple[int, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return held, pages * resource.getpagesize()


CALLS = {
    "rounds": rounds,
    "formats": formats,
    "served": served,
    "overlap": overlap,
    "leak": leak,
}


def main() -> int:
    """Measure and write. 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", nargs="+", choices=CALLS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="llama-3.1-8b", help="of rounds and formats")
    parser.add_argument("--model", default="smollm2-135m", help="of all else")
    parser.add_argument("--out", type=Path, required=True, help="the folder of NAME.json")
    args = parser.parse_args()
    device, failed = torch.device(args.device), False
    for name in args.what:
        report = Report(args.out / f"{name}.json", device, args.shape)
        report.measure("took", partial(CALLS[name], report, device, args))
        failed |= bool(report.results["errors"])
    return int(failed)


if __name__ == "__main__":
    ended(main)
