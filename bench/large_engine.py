"""The engine at a large model's size on a device, with random weights: what is not measured by
steps alone (bench/gpu.py).

    python bench/large_engine.py wrong|prompts ... --out DIR [--device cuda] [--shape llama-3.1-8b]

wrong    a draft head of random weights, whose draft tokens are never right, under the adaptive
         policy, and n-grams, each beside an engine that speculates not at all, in turns: 160 tokens
         at 1, 16 and 64 streams. Speculation has to notice and to cost nothing; random text repeats
         itself, so that n-grams find some of it
prompts  64 prompts of 20 to 1,500 tokens at once, by each way to attend in prompts, in turns

Prompts are the default model's, whose vocabulary the shape gets. On the CPU everything is tiny.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from bench.gpu import Report, turns
from bench.records import ended
from bench.step_bench import random_draft
from forerun.build import target as built
from forerun.build.shapes import SHAPES, RandomCheckpoint
from forerun.client.completion import complete, make_request
from forerun.client.llm import LLM
from forerun.hub.catalog import open_model, shipped_draft

DRAFT_VOCAB = 32_000


@contextmanager
def random_weights(chosen: argparse.Namespace) -> Iterator[None]:
    """Until this ends, models that open have random weights of the shape, and so have heads."""
    real = open_model(chosen.model)
    arch = replace(SHAPES[chosen.shape], vocab=real.architecture.vocab)
    drafts = built._drafts

    def random_model(*args: Any, **options: Any) -> Any:
        return replace(open_model(*args, **options), checkpoint=RandomCheckpoint(arch))

    def random_head(config: Any, model: Any) -> Any:
        if config.speculative_algorithm != "EAGLE":
            return drafts(config, model)
        head = drafts(config, replace(model, checkpoint=real.checkpoint))
        return replace(head, model=random_draft(arch, min(DRAFT_VOCAB, arch.vocab)), table=None)

    with patch.multiple(built, open_model=random_model, _drafts=random_head):
        yield


def opened(args: argparse.Namespace, rows: int, context: int, **how: Any) -> LLM:
    """An engine of `rows` sequences of `context` tokens."""
    where: dict[str, Any] = {"executor": "torch", "device": args.device, "max_sequences": rows}
    if args.device != "cpu":
        where["dtype"] = "bfloat16"
    return LLM(args.model, context=context, kv_tokens=context * rows, **where, **how)


def wrong(report: Report, args: argparse.Namespace) -> None:
    """Fill `report` with each way to speculate beside none."""
    streams, tokens = ((1, 16, 64), 160) if args.device != "cpu" else ((1, 2), 6)
    head = {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(shipped_draft("smollm2-135m")),
    }
    with opened(args, streams[-1], 1280, speculative_algorithm="OFF") as without:
        for name, how in (("head", head), ("ngram", {"speculative_algorithm": "NGRAM"})):
            with opened(args, streams[-1], 1280, **how) as with_it:
                for at_once in streams:
                    work = partial(turns, without, with_it, at_once, "greedy", tokens)
                    report.measure(f"{name}, {at_once} streams", work)
                facts = with_it.loaded.engine.describe()["speculation"]
                report.results[f"{name}, why"] = facts["reasons"]


def prompts(report: Report, args: argparse.Namespace) -> None:
    """Fill `report` with prompt tokens per second of each way to attend in prompts."""
    real = args.device != "cpu"
    rows, most, turns_each = (64, 1500, 5) if real else (4, 60, 2)
    ways = ("triton", "torch_native") if real else ("triton",)
    engines = {
        way: opened(args, rows, 2048, speculative_algorithm="OFF", prefill_attention_backend=way)
        for way in ways
    }
    random, speeds = np.random.default_rng(0), {way: list[float]() for way in ways}
    for _ in range(turns_each):
        lengths = random.integers(20, most, rows)
        texts = [random.integers(10, 49_000, length).astype(np.int32) for length in lengths]
        for way, llm in engines.items():
            begun = time.perf_counter()
            complete(llm.loaded.engine, [make_request(text, (), max_tokens=1) for text in texts])
            speeds[way].append(int(lengths.sum()) / (time.perf_counter() - begun))
    for way, llm in engines.items():
        llm.close()
        later = speeds[way][1:]
        about = {"median": median(later), "least": min(later), "most": max(later)}
        report.measure(f"{way}, tokens/s", partial(dict, about))


CALLS = {"wrong": wrong, "prompts": prompts}


def main() -> int:
    """Measure and write. 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", nargs="+", choices=CALLS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer and prompts")
    parser.add_argument("--out", type=Path, required=True, help="the folder of NAME.json")
    args, failed = parser.parse_args(), False
    with random_weights(args):
        for name in args.what:
            report = Report(args.out / f"{name}.json", torch.device(args.device), args.shape)
            report.measure("took", partial(CALLS[name], report, args))
            failed |= bool(report.results["errors"])
    return int(failed)


if __name__ == "__main__":
    ended(main)
