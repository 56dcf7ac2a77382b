"""Speculation on against off, in random pairs: same prompts, same process, order drawn.

    python bench/never_slower.py 1 2 4 8 16 32 64 --out bench/results/never-slower.json

Each round takes other prompts, runs both sides on them on one loaded model, in an order that is
drawn, and compares their tokens. The ratio of a batch is the median over rounds, which are short,
so that a slow moment of the machine hits both sides, with an interval that holds the true one 95
times in 100 (fewer where there are less than six rounds: it says how often). Answers are of a half
to three halves of --tokens, drawn, and follow each other in every stream: where all are equally
long and begin at once, plain decoding ends them at once too, which is faster than it is in service.
At one stream the
ratio of decoding alone, from the first token to the last, stands beside it. `--adversary` drafts
tokens that are always wrong; `--cut-loops` ends each answer where plain decoding begins to say the
same again and again, which small models do and n-grams love; `--heavier N` stands for a model N
times as large.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.records import ended, keep
from forerun.build import engine
from forerun.build.registry import EXECUTORS
from forerun.build.target import Target, open_target
from forerun.client.completion import acceptance_length, make_request
from forerun.drafters.ngram import NgramDrafter
from forerun.drafts.ngram_table import NgramTable
from forerun.engine.request import Request
from forerun.executors.cpu import CpuExecutor, native
from forerun.interface.plan import Plan
from forerun.measure.paired import median_interval
from forerun.measure.prove import Completions, answers, encode
from forerun.measure.sweep import Pair, pair
from forerun.measure.workload import read_prompts, spread
from forerun.options.config import EngineConfig
from forerun.speculative.tree import Draft, TreeBatch
from forerun.train.answers import before_loop


class Wrong(NgramDrafter):
    """Proposes a chain of tokens that no text continues with, and calls it likely."""

    def propose(self, plan: Plan) -> list[Draft]:
        """As NgramDrafter."""
        drafts = []
        for nodes, depth in zip(plan.max_nodes, plan.max_depth, strict=True):
            count = int(min(nodes, depth, 4))
            tokens = np.full(count, 3, np.int32)
            parents = np.arange(-1, count - 1, dtype=np.int32)
            drafts.append(Draft(tokens, parents, np.full(count, 0.9, np.float32)))
        return drafts


def wrong(slots: int, table: NgramTable | None = None, capacity: int = 0) -> Wrong:
    """Instead of the engine's drafter; the native one would buy by itself."""
    return Wrong(slots, table=table, capacity=capacity)


def heavier(times: int) -> Callable[..., Any]:
    """Return CpuExecutor.begin with the products of each step, 64 nodes at most, run `times` times:
    in place of a model so many times as large that says the same.
    """
    plain, library = CpuExecutor.begin, native.load()

    def begin(self: CpuExecutor, plan: Plan, trees: TreeBatch, *masks: Any) -> Any:
        begun, nodes = plain(self, plan, trees, *masks), min(len(trees.tokens), 64)
        scores = np.empty((nodes, self.limits.vocab), np.float32)
        for _ in range(times - 1):
            library.forerun_products(self.native_model(), nodes, scores.ctypes.data)
        return begun

    return begin


def decoding(run: Completions) -> float:
    """Tokens per second after the first, of one stream."""
    return sum(len(item.tokens) - 1 for item in run.done) / (run.seconds - run.waited)


def without_loops(target: Target, requests: list[Request], batch: int) -> list[Request]:
    """The requests, each to end where its plain answer begins to loop (one token at least)."""
    plain = answers(target, replace(target.config, speculative_algorithm="OFF"), requests, batch)
    lengths = [max(1, len(before_loop(np.array(item.tokens, np.int32)))) for item in plain.done]
    return [
        replace(request, stopping=replace(request.stopping, max_tokens=length))
        for request, length in zip(requests, lengths, strict=True)
    ]


def _row(batch: int, prompts: int, pairs: list[Pair]) -> dict[str, Any]:
    ratios = [on.speed / off.speed for off, on in pairs]
    alone = [decoding(on) / decoding(off) for off, on in pairs] if batch == 1 else []
    ratio = median_interval(ratios)
    return {
        "batch": batch,
        "prompts": prompts,
        "on": statistics.median(on.speed for _, on in pairs),
        "off": statistics.median(off.speed for off, _ in pairs),
        "ratio": ratio.middle,
        "interval": [round(ratio.low, 3), round(ratio.high, 3)],
        "confidence": round(ratio.confidence, 4),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "decoding": statistics.median(alone) if alone else None,
        "decodings": [round(ratio, 3) for ratio in alone],
        "tokens_per_step": acceptance_length([c.stats for _, on in pairs for c in on.done]),
    }


def main() -> int:
    """Measure, print, write. 1 where tokens differed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("batches", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--seed", type=int, default=0, help="of lengths and order")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, in the mean")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=2, help="of a stream and round")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--executor", default="auto", choices=("auto", *EXECUTORS))
    parser.add_argument("--algorithm", default="AUTO", help="what is on")
    parser.add_argument("--draft", help="the draft of an algorithm that takes one")
    parser.add_argument("--heavier", type=int, default=1, help="run the core's products so often")
    parser.add_argument("--set", type=Path, help="jsonl of chats (default: built in)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--adversary", action="store_true")
    parser.add_argument("--cut-loops", action="store_true", help="end answers where they loop")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.adversary:
        patch.object(engine, "ngram_drafter", wrong).start()
    if args.heavier > 1:
        patch.object(CpuExecutor, "begin", heavier(args.heavier)).start()
    tokens = max(*args.batches, 4) * 1024
    target = open_target(
        EngineConfig(
            model=args.model,
            executor=args.executor,
            kv_tokens=tokens,
            context=2048,
            speculative_algorithm=args.algorithm,
            speculative_draft_model_path=args.draft,
        )
    )
    every = read_prompts(args.set)
    if (text := engine.text_table_of(target)) is not None:
        text.wait()
    rows, same, draw = [], True, np.random.default_rng(args.seed)
    for batch in args.batches:
        size = args.prompts * batch
        wanted = size * args.rounds
        prompts = list(islice(cycle(spread(every, min(wanted, len(every)))), wanted))
        pairs: list[Pair] = []
        lengths = np.random.default_rng(args.seed).integers(
            args.tokens // 2, 3 * args.tokens // 2 + 1, wanted
        )
        for step in range(args.rounds):
            requests = [
                make_request(
                    encode(target, prompt, int(lengths.max())),
                    max_tokens=int(lengths[step * size + index]),
                    ignore_eos=True,
                    temperature=args.temperature,
                    seed=index,
                )
                for index, prompt in enumerate(prompts[step * size : (step + 1) * size])
            ]
            if args.cut_loops:
                requests = without_loops(target, requests, batch)
            pairs.append(pair(target, target.config, requests, batch, draw))
            off, on = ([item.tokens for item in side.done] for side in pairs[-1])
            same &= on == off
        rows.append(_row(batch, size, pairs))
        Console(stderr=True).print(rows[-1])
    Console().print(_table(rows))
    if args.out:
        keep(args.out, {"same_tokens": same, "rows": rows})
    target.close()
    return 0 if same else 1


def _table(rows: list[dict[str, Any]]) -> Table:
    sure = min(row["confidence"] for row in rows)
    table = Table(title=f"speculation on / off (interval at {sure:.0%} confidence or more)")
    for heading in ("streams", "on tok/s", "off tok/s", "ratio", "decoding", "tokens per step"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["batch"]),
            f"{row['on']:.0f}",
            f"{row['off']:.0f}",
            f"{row['ratio']:.3f} ({row['interval'][0]:.3f}-{row['interval'][1]:.3f})",
            f"{row['decoding']:.2f}" if row["decoding"] else "",
            f"{row['tokens_per_step']:.2f}",
        )
    return table


if __name__ == "__main__":
    ended(main)
