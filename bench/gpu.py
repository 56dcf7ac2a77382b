"""What the torch executor costs on a device, against what its memory would allow.

    python bench/gpu.py [model] [--device cuda] [--out bench/results/gpu.json] [--quick]
                        [--sections plain,served]

plain    one token for each of B sequences: whole steps (draft nothing, verify, accept, commit)
         against the floor, the weights' bytes over the copy bandwidth measured first
t(k)     a chain of k nodes of one sequence over one node
sized    steps at a large model's size with random weights, and SYNTHETIC speed-ups
served   the engine end to end, speculation off and on: tokens per second of wall time; host is
         the share of it outside of captured rounds (prompts, which are eager, included)
leak     bytes that so many rounds leave behind, on the device and in the process
author   dense generation, as `forerun train` uses it
overlap  served with overlap over served without, in turns; only where it is named (--sections)

Every section is measured by itself: where one fails, its error stands in the table and the rest
goes on. Prints a table last and writes JSON with the machine's stamp.
"""

import argparse
import json
import resource
import sys
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from forerun.bench.sized import (
    Steps,
    Sweep,
    copy_bandwidth,
    host_share,
    lines,
    measure,
    milliseconds,
)
from forerun.bench.workload import read_prompts
from forerun.client.completion import complete, make_request
from forerun.client.llm import LLM
from forerun.hub.catalog import Model, open_model, shipped_draft
from forerun.machine import stamp
from forerun.models.shapes import SHAPES
from forerun.train.answers import Ask
from forerun.train.generate import DenseAuthor
from forerun.train.target import DenseTarget


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
    shape: str
    """Measured with random weights (forerun/models/shapes.py)."""
    leak: int
    """Step after which memory is looked at."""


FULL = Size(
    512,
    (1, 4, 16, 64, 256),
    (1, 2, 4, 8, 16, 32),
    30,
    16,
    128,
    1024,
    4 << 30,
    "llama-3.1-8b",
    10_000,
)
QUICK = Size(40, (1, 2), (1, 4), 2, 2, 8, 4, 1 << 24, "tiny", 20)


def say(text: str) -> None:
    """One line on stdout, now."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def dtype_of(device: torch.device) -> str:
    """What is measured there."""
    return "bfloat16" if device.type == "cuda" else "float32"


def steps_of(model: Model, device: torch.device, rows: int, size: Size) -> Steps:
    """An executor for `model` with `rows` sequences."""
    sweep = Sweep(batches=(rows,), nodes=size.nodes, context=size.context)
    return Steps(model.checkpoint, str(device), dtype_of(device), rows, sweep)


def measure_plain(model: Model, device: torch.device, size: Size) -> dict[str, Any]:
    """Milliseconds of a plain step by batch; the floor is one reading of the weights."""
    bandwidth = copy_bandwidth(device, size.copy)
    found = {}
    for rows in size.batches:
        steps = steps_of(model, device, rows, size)
        found[rows] = milliseconds(steps.step(rows, 1), device, size.rounds)
        weights = steps.executor.describe()["weight_bytes"]
        steps.executor.shutdown()
    floor = weights / bandwidth * 1e3
    return {"bandwidth_bytes_per_s": bandwidth, "floor_ms": floor, "step_ms": found}


def measure_nodes(model: Model, device: torch.device, size: Size) -> dict[str, Any]:
    """Milliseconds of a step of one sequence by nodes."""
    steps = steps_of(model, device, 1, size)
    found = {k: milliseconds(steps.step(1, k), device, size.rounds) for k in size.nodes}
    steps.executor.shutdown()
    return {"step_ms": found}


def measure_served(model: Model, device: torch.device, size: Size) -> dict[str, Any]:
    """Tokens per second of wall time through the engine, greedy: one stream, then all."""
    found: dict[str, Any] = {}
    for name, how in _speculations(model).items():
        with _llm(model, device, size, how) as llm:
            for at_once in (1, size.prompts):
                where = f"{name}, {at_once} at once"
                made: list[Any] = []
                serving = partial(_serve, llm, size, at_once, made)
                start = time.perf_counter()
                outside = host_share(llm.loaded.target.executor, serving)
                rate = sum(len(choice.tokens) for choice in made) / (time.perf_counter() - start)
                found[f"{where}, tokens/s"] = rate
                found[f"{where}, tokens per step"] = _mean_length(made)
                if outside is not None:
                    found[f"{where}, host %"] = 100 * outside
    return found


def measure_overlap(model: Model, device: torch.device, size: Size) -> dict[str, Any]:
    """Overlap and none side by side, with nothing that drafts from the text: the median ratio of
    TURNS turns, the share of steps that were begun early, and how many texts are not the same.
    """
    found: dict[str, Any] = {}
    for name, how in _speculations(model).items():
        if how["speculative_algorithm"] == "NGRAM":
            continue
        with (
            _llm(model, device, size, how | {"overlap": False}) as without,
            _llm(model, device, size, how | {"overlap": True}) as with_it,
        ):
            for at_once in (1, size.prompts):
                where = f"{name}, {at_once} at once"
                found |= {
                    f"{where}, {what}": value
                    for what, value in _compare(without, with_it, size, at_once).items()
                }
    return found


def _compare(without: LLM, with_it: LLM, size: Size, at_once: int) -> dict[str, float]:
    """Both serve the same, in turns; the first turn warms up and does not count."""
    rates: dict[LLM, list[float]] = {without: [], with_it: []}
    output_tokens: dict[LLM, list[Any]] = {}
    before = with_it.loaded.engine.stats()
    for _ in range(TURNS + 1):
        for llm, seen in rates.items():
            made: list[Any] = []
            start = time.perf_counter()
            _serve(llm, size, at_once, made)
            seen.append(sum(len(choice.tokens) for choice in made) / (time.perf_counter() - start))
            output_tokens[llm] = [choice.tokens for choice in made]
    after = with_it.loaded.engine.stats()
    pairs = list(zip(rates[with_it][1:], rates[without][1:], strict=True))
    parted = [
        one != two for one, two in zip(output_tokens[without], output_tokens[with_it], strict=True)
    ]
    return {
        "ratio": median(mine / other for mine, other in pairs),
        "tokens/s": median(mine for mine, _ in pairs),
        "carried %": 100 * (after.carried - before.carried) / max(1, after.steps - before.steps),
        "texts that differ": sum(parted),
    }


def _llm(model: Model, device: torch.device, size: Size, how: dict[str, Any]) -> LLM:
    rows = max(size.prompts, 2)
    where = {"executor": "torch", "device": str(device), "max_sequences": rows, "context": 1024}
    # Two may be loaded at a time, and memory is filled with pages otherwise.
    return LLM(str(model.path), kv_tokens=rows * 1024, **where, **how)


def _speculations(model: Model) -> dict[str, dict[str, Any]]:
    """Ways to speculate; with a draft head where one comes with this model."""
    found: dict[str, dict[str, Any]] = {
        "off": {"speculative_algorithm": "OFF"},
        "ngram": {"speculative_algorithm": "NGRAM"},
    }
    folder = shipped_draft("smollm2-135m")
    if folder and model.architecture.parameters == SHAPES["smollm2-135m"].parameters:
        head = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(folder)}
        fixed = {"policy": "fixed", "speculative_num_draft_tokens": 4, "speculative_num_steps": 3}
        found |= {"head": head, "head, always 3": head | fixed}
    return found


def _serve(llm: LLM, size: Size, at_once: int, made: list[Any]) -> None:
    """Fill `made` with answers to all prompts at once, or to four, one by one."""
    loaded = llm.loaded
    assert loaded.chat is not None
    prompts = read_prompts()[: size.prompts]
    requests = [
        make_request(
            loaded.chat.encode(list(prompt.messages)),
            loaded.tokenizer.eos_ids,
            max_tokens=size.tokens,
        )
        for prompt in prompts[: 4 if at_once == 1 else None]
    ]
    made += [choice for (choice,) in complete(loaded.engine, requests, at_once)]


def _mean_length(answers: list[Any]) -> float:
    stats = [answer.stats for answer in answers]
    return 1 + sum(each.accepted for each in stats) / max(1, sum(each.steps for each in stats))


def measure_leak(model: Model, device: torch.device, size: Size) -> dict[str, Any]:
    """Bytes allocated by torch on the device, and by the process, before and after many steps."""
    steps = steps_of(model, device, 1, size)
    work = steps.step(1, 2)
    for _ in range(10):
        work()
    before = _held(device)
    elapsed = milliseconds(lambda: [work() for _ in range(size.leak // 4)], device, 1) * 4
    after = _held(device)
    steps.executor.shutdown()
    return {
        "rounds": size.leak,
        "seconds": elapsed / 1e3,
        "device bytes": after[0] - before[0],
        "process bytes": after[1] - before[1],
    }


def _held(device: torch.device) -> tuple[int, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return held, pages * resource.getpagesize()


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

    elapsed = milliseconds(run, device, 1)
    return {"width": author.width, "tokens/s": author.width * size.tokens / elapsed * 1e3}


def measure_sized(model: Model, device: torch.device, size: Size) -> dict[str, Any]:
    """`forerun bench --random-weights` for one shape."""
    sweep = Sweep(size.batches, (1, 2, 4, 8), size.context, size.rounds, size.copy)
    return measure(size.shape, str(device), dtype_of(device), sweep)


SECTIONS = {
    "plain": measure_plain,
    "t(k)": measure_nodes,
    "sized": measure_sized,
    "served": measure_served,
    "leak": measure_leak,
    "author": measure_author,
    "overlap": measure_overlap,
}
USUAL = [name for name in SECTIONS if name != "overlap"]

TURNS = 3
"""Comparisons of overlap with none, after one that warms up."""


def device_facts(device: torch.device) -> dict[str, Any]:
    """The machine, and the device where it is another one."""
    facts = stamp() | {"torch": torch.__version__, "device": str(device)}
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        facts |= {"gpu": about.name, "gpu_bytes": about.total_memory, "cuda": torch.version.cuda}
    return facts


def rows_of(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The table: (what, value)."""
    table: list[tuple[str, str]] = []
    for section in SECTIONS:
        if section not in report:
            continue
        found = report[section]
        if "error" in found:
            table.append((section, f"FAILED: {found['error']}"))
            continue
        if section == "sized":
            table += [(section, line) for line in lines(found)]
            continue
        steps = found.get("step_ms", {})
        floor = found.get("floor_ms", next(iter(steps.values()), 0))
        word = "floor" if "floor_ms" in found else "t(1)"
        for name, value in found.items():
            if name != "step_ms":
                table.append((f"{section}: {name}", f"{value:,.3f}"))
        table += [
            (f"{section}: {count}", f"{value:9.3f} ms  {value / floor:7.2f} x {word}")
            for count, value in steps.items()
        ]
    return table


def main() -> int:
    """Measure, write JSON, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--sections", default=",".join(USUAL), help="what is measured")
    options = parser.parse_args()
    sections = {name: SECTIONS[name] for name in options.sections.split(",")}
    device, size = torch.device(options.device), QUICK if options.quick else FULL
    model = open_model(options.model)
    report: dict[str, Any] = {"machine": device_facts(device), "model": model.name}
    for name, section in sections.items():
        start = time.perf_counter()
        try:
            report[name] = section(model, device, size)
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
    return int(any("error" in report[name] for name in sections))


if __name__ == "__main__":
    sys.exit(main())
