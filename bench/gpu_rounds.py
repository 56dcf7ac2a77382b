"""Rounds at a large model's size, random weights, on a device: call by call of docs/gpu-pending.md.

    python bench/gpu_rounds.py rounds|served|formats --out DIR [--device cuda] [--shape SHAPE]

rounds   each of (rows, nodes, levels): replays timed with events, whole steps on the host's clock,
         the floor (weights, keys and values once, at the bandwidth of a copy) and the kernels that
         the profiler names; and 64 rows with top_p 0.9
served   the engine end to end with a model from a file: tokens per second at 1, 16 and 64 streams,
         overlap on and off in turns, with top_p, and with prompts and answers of mixed lengths
formats  a plain step in bfloat16, in float8, and with float8 pages; prompt tokens per second

Writes DIR/NAME.json after every number, so that what was measured stays when time runs out. What
fails is in it under "errors". On the CPU everything is tiny: does it run at all?
"""

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from forerun.bench.sized import Steps, Sweep, copy_bandwidth, milliseconds, wait
from forerun.bench.workload import read_prompts
from forerun.client.completion import complete, make_request
from forerun.client.llm import LLM
from forerun.executors.torch import CapturedExecutor
from forerun.machine import stamp
from forerun.models.shapes import RandomCheckpoint, random_draft, shape_named
from forerun.speculative.sampling import Sampling

POINTS = (
    *((1, 1, 0), (1, 2, 0), (1, 8, 0), (64, 1, 0), (64, 2, 0)),
    *((1, 1, 1), (1, 1, 3), (1, 4, 3), (64, 2, 1), (64, 4, 3)),
)
"""Rows, nodes of each, levels of a chain that the head grows: also in docs/gpu-roofline.md."""

TOP_P = Sampling(temperature=0.8, top_p=0.9, seed=1)
DRAFT_VOCAB = 32_000


class Report:
    """Numbers by name, written to a file whenever there is one more."""

    def __init__(self, path: Path, device: torch.device, shape: str) -> None:
        self._path = path
        self.found: dict[str, Any] = {"machine": stamp(), "torch": torch.__version__}
        self.found |= {"device": str(device), "shape": shape, "errors": {}}
        if device.type == "cuda":
            self.found["gpu"] = torch.cuda.get_device_properties(device).name
        path.parent.mkdir(parents=True, exist_ok=True)

    def measure(self, name: str, work: Callable[[], Any]) -> None:
        """Keep what `work` gives, or the error it ends with, and go on."""
        begun = time.perf_counter()
        try:
            self.found[name] = work()
        except Exception as error:  # noqa: BLE001 - the next number may still be worth it
            traceback.print_exc()
            self.found["errors"][name] = f"{type(error).__name__}: {error}"
        self._path.write_text(json.dumps(self.found, indent=1) + "\n")
        said = self.found.get(name, self.found["errors"].get(name))
        took = time.perf_counter() - begun
        sys.stdout.write(f"{name} ({took:.1f} s): {json.dumps(said)[:400]}\n")
        sys.stdout.flush()


def replay_ms(executor: Any, device: torch.device, rounds: int) -> float | None:
    """Milliseconds of a replay of the last round, many behind each other; None without rounds."""
    if not isinstance(executor, CapturedExecutor):
        return None
    runner = executor.runner
    if device.type != "cuda":
        with torch.inference_mode():
            return milliseconds(runner.replay, device, rounds)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.inference_mode(), torch.cuda.device(device):
        begin.record()
        for _ in range(rounds):
            runner.replay()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / rounds


def kernels_of(work: Callable[[], object], device: torch.device, times: int = 3) -> list[Any]:
    """[name, calls, microseconds] of what `work` runs there, per call of it, longest first."""
    on_cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if on_cuda else activity.CPU]) as seen:
        for _ in range(times):
            work()
        wait(device)
    rows = [
        [each.key[:80], each.count / times, took / times]
        for each in seen.key_averages()
        if (took := each.self_device_time_total if on_cuda else each.self_cpu_time_total) > 0
    ]
    return sorted(rows, key=lambda row: -row[2])[:30]


def point(
    steps: Steps, at: tuple[int, int, int], device: torch.device, sweep: Sweep, floor: float
) -> dict[str, Any]:
    """All numbers of one (rows, nodes, levels)."""
    rows, nodes, levels = at
    work = steps.step(rows, nodes) if not levels else steps.drafted(rows, nodes, levels)
    if work is None:
        return {"error": "no round drafts here"}
    step = milliseconds(work, device, sweep.rounds)
    replay = replay_ms(steps.executor, device, sweep.rounds)
    found = {"step_ms": step, "replay_ms": replay, "floor_ms": floor}
    if replay is not None:
        found |= {"over_floor": replay / floor, "host": 1 - replay / step}
    return found | {"kernels": kernels_of(work, device)}


def rounds(report: Report, device: torch.device, shape: str, model: str) -> None:
    """Fill `report` with every point."""
    real = device.type == "cuda"
    points = POINTS if real else tuple((min(r, 2), n, min(lv, 1)) for r, n, lv in POINTS)
    most = max(rows for rows, _, _ in points)
    sweep = Sweep((most,), (1, 2, 4, 8), *((1024, 50, 4 << 30) if real else (40, 2, 1 << 22)))
    arch, dtype = shape_named(shape), "bfloat16" if real else "float32"
    draft = random_draft(arch, min(DRAFT_VOCAB, arch.vocab))
    bandwidth = copy_bandwidth(device, sweep.copy_bytes)
    report.found["bandwidth_bytes_per_s"] = bandwidth
    begun = time.perf_counter()
    steps = Steps(RandomCheckpoint(arch), str(device), dtype, most, sweep, draft)
    report.found["load_and_prompts_s"] = time.perf_counter() - begun
    width = 2 if real else 4
    # A step reads a row of the input embedding per node, not the matrix: only a tied head reads it.
    lookup = 0 if arch.tied_head else arch.vocab * arch.hidden * width
    weights = steps.executor.describe()["weight_bytes"] - lookup
    kept = 2 * arch.layers * arch.kv_heads * arch.head_size * width * sweep.context
    for at in points:
        floor = (weights + at[0] * kept) / bandwidth * 1e3
        report.measure(str(at), lambda at=at, floor=floor: point(steps, at, device, sweep, floor))

    def top_p() -> dict[str, Any]:
        steps.sample(TOP_P)
        at, floor = (most, 1, 0), (weights + most * kept) / bandwidth * 1e3
        return point(steps, at, device, sweep, floor)

    report.measure(f"top_p ({most}, 1, 0)", top_p)
    facts = steps.executor.describe()
    report.found |= {name: facts.get(name) for name in ("captured", "capture_seconds")}
    steps.executor.shutdown()


def formats(report: Report, device: torch.device, shape: str, model: str) -> None:
    """Fill `report` with steps by number format, and with the speed of prompts."""
    real = device.type == "cuda"
    arch, plain = shape_named(shape), "bfloat16" if real else "float32"
    context, count = (8192, 30) if real else (96, 2)
    rows = 16 if real else 2
    sweep = Sweep((rows,), (1,), 1024 if real else 40)

    def step(dtype: str, kv_dtype: str) -> dict[str, Any]:
        steps = Steps(RandomCheckpoint(arch), str(device), dtype, rows, sweep, kv_dtype=kv_dtype)
        found = {}
        for batch in (1, rows):
            found[f"{batch} rows, step_ms"] = milliseconds(steps.step(batch, 1), device, count)
            found[f"{batch} rows, replay_ms"] = replay_ms(steps.executor, device, count)
        steps.executor.shutdown()
        return found

    def prompt(backend: str) -> dict[str, Any]:
        long = Sweep((1,), (1,), context)
        steps = Steps(RandomCheckpoint(arch), str(device), plain, 1, long, prompts=backend)
        taken = {}
        for chunk in (2048, 4096, 8192) if real else (32, 96):
            took = milliseconds(steps.prompt(chunk), device, 3)
            taken[f"chunks of {chunk}, tokens/s"] = chunk / took * 1e3
        found = taken | {"kernels": kernels_of(steps.prompt(chunk), device, 1)}
        steps.executor.shutdown()
        return found

    for backend in ("triton", "torch_native") if real else ("triton",):
        report.measure(f"prefill, {backend}", lambda backend=backend: prompt(backend))
        gc.collect()
    for dtype, kv_dtype in ((plain, "same"), ("float8", "same"), (plain, "float8")):
        report.measure(f"{dtype}, pages {kv_dtype}", lambda a=dtype, b=kv_dtype: step(a, b))
        gc.collect()
    if real:
        report.measure("float8 over bfloat16", lambda: gain(report.found))


def gain(found: dict[str, Any]) -> dict[str, float]:
    """How many times faster float8 is, by number."""
    slow, fast = found["bfloat16, pages same"], found["float8, pages same"]
    return {name: slow[name] / fast[name] for name in slow if slow[name] and fast[name]}


def served(report: Report, device: torch.device, shape: str, model: str) -> None:
    """Fill `report` with tokens per second through the engine."""
    real = device.type == "cuda"
    streams = (1, 16, 64) if real else (1, 2)
    where = {"executor": "torch", "device": str(device), "speculative_algorithm": "OFF"}
    where |= {"max_sequences": streams[-1], "context": 1024, "kv_tokens": 1024 * streams[-1]}
    begun = time.perf_counter()
    with LLM(model, overlap=False, **where) as without:
        report.found["start_s"] = time.perf_counter() - begun
        with LLM(model, overlap=True, **where) as with_it:
            for at_once in streams:
                for kind in ("greedy", "top_p", "mixed"):
                    report.measure(
                        f"{at_once} streams, {kind}",
                        lambda at_once=at_once, kind=kind: turns(
                            without, with_it, at_once, kind, 128 if real else 6
                        ),
                    )


def turns(without: LLM, with_it: LLM, at_once: int, kind: str, tokens: int) -> dict[str, float]:
    """Both in turns; the first turn warms up and does not count."""
    taken: dict[str, list[float]] = {"off": [], "on": []}
    texts: dict[str, Any] = {}
    for _ in range(4):
        for name, llm in (("off", without), ("on", with_it)):
            begun = time.perf_counter()
            texts[name] = asked(llm, at_once, kind, tokens)
            count = sum(map(len, texts[name]))
            taken[name].append(count / (time.perf_counter() - begun))
    parted = sum(one != two for one, two in zip(texts["off"], texts["on"], strict=True))
    ratios = [on / off for on, off in zip(taken["on"][1:], taken["off"][1:], strict=True)]
    speeds = {f"overlap {name}, tokens/s": median(each[1:]) for name, each in taken.items()}
    return speeds | {"on over off": median(ratios), "texts that differ": parted}


def asked(llm: LLM, at_once: int, kind: str, tokens: int) -> list[list[int]]:
    """The tokens of one answer for each stream."""
    prompts, random = read_prompts(), np.random.default_rng(at_once)
    how: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9} if kind == "top_p" else {}
    requests, room = [], llm.loaded.context - 24
    for index in range(at_once):
        text = prompts[index % len(prompts)].messages[-1]["content"]
        known = llm.loaded.tokenizer.encode(text).astype(np.int32)
        length = tokens
        if kind == "mixed":
            known = np.tile(known, 1 + int(random.integers(8)))[: room - tokens]
            length = int(random.integers(tokens // 2, tokens))
        requests.append(
            make_request(known, (), max_tokens=length, ignore_eos=True, seed=index, **how)
        )
    return [choice.tokens for (choice,) in complete(llm.loaded.engine, requests, at_once)]


CALLS = {"rounds": rounds, "served": served, "formats": formats}


def main() -> int:
    """Measure and write. 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=CALLS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="llama-3.1-8b", help="of rounds and formats")
    parser.add_argument("--model", default="smollm2-135m", help="that is served")
    parser.add_argument("--out", type=Path, required=True, help="the folder of NAME.json")
    options = parser.parse_args()
    device = torch.device(options.device)
    report = Report(options.out / f"{options.what}.json", device, options.shape)
    report.measure(
        "took", lambda: CALLS[options.what](report, device, options.shape, options.model)
    )
    return int(bool(report.found["errors"]))


if __name__ == "__main__":
    sys.exit(main())
