"""Speculation on against off, in random pairs: same prompts, same process, order drawn.

    python bench/never_slower.py 1 2 4 8 16 32 64 --out bench/results/never-slower.json

Each round takes other prompts, runs both sides on them on one loaded model, in an order that is
drawn, and compares their tokens. The ratio of a batch is the median over rounds, which are short,
so that a slow moment of the machine hits both sides, with an interval that holds the true one 95
times in 100 (fewer where there are less than six rounds: it says how often). At one stream the
ratio of decoding alone, from the first token to the last, stands beside it. `--adversary` drafts
tokens that are always wrong.
"""

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from forerun.bench.paired import median_interval
from forerun.bench.workload import Prompt, read_prompts, spread
from forerun.build.engine import Target, encode_chat, make_engine, open_target
from forerun.client.completion import complete, make_request
from forerun.drafters.native_ngram import CpuNgramDrafter
from forerun.drafters.ngram import NgramDrafter
from forerun.interface.plan import Plan
from forerun.machine import stamp
from forerun.options.config import EngineConfig
from forerun.speculative.tree import Draft


def wrong(_: object, plan: Plan) -> list[Draft]:
    """Instead of `propose`: a chain of tokens that no text continues with, called likely."""
    drafts = []
    for nodes, depth in zip(plan.max_nodes, plan.max_depth, strict=True):
        count = int(min(nodes, depth, 4))
        tokens = np.full(count, 3, np.int32)
        parents = np.arange(-1, count - 1, dtype=np.int32)
        drafts.append(Draft(tokens, parents, np.full(count, 0.9, np.float32)))
    return drafts


@dataclass(frozen=True)
class Served:
    """One side of a round. decoding: tokens per second after the first; at one stream only."""

    tokens: list[tuple[int, ...]]
    speed: float
    decoding: float
    per_step: float


def serve(
    target: Target, side: str, prompts: list[Prompt], batch: int, args: argparse.Namespace
) -> Served:
    """Answer the prompts on one side."""
    config = replace(target.config, speculative_algorithm="OFF") if side == "off" else target.config
    requests = [
        make_request(
            encode_chat(target, prompt.messages),
            max_tokens=args.tokens,
            ignore_eos=True,
            temperature=args.temperature,
            seed=index,
        )
        for index, prompt in enumerate(prompts)
    ]
    engine = make_engine(target, config)
    engine.start()
    begun = perf_counter()
    done = complete(engine, requests, batch)
    seconds = perf_counter() - begun
    stats = engine.stats()
    engine.shutdown()
    tokens = [choice.tokens for choices in done for choice in choices]
    count = sum(map(len, tokens))
    after = seconds - stats.first_token.total
    decoding = (count - len(tokens)) / after if batch == 1 else 0.0
    return Served(tokens, count / seconds, decoding, stats.acceptance_length)


def _row(batch: int, prompts: int, on: list[Served], off: list[Served]) -> dict[str, Any]:
    ratios = [a.speed / b.speed for a, b in zip(on, off, strict=True)]
    ratio = median_interval(ratios)
    decoding = [a.decoding / b.decoding for a, b in zip(on, off, strict=True) if b.decoding]
    return {
        "batch": batch,
        "prompts": prompts,
        "on": statistics.median(one.speed for one in on),
        "off": statistics.median(one.speed for one in off),
        "ratio": ratio.middle,
        "interval": [round(ratio.low, 3), round(ratio.high, 3)],
        "confidence": round(ratio.confidence, 4),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "decoding": statistics.median(decoding) if decoding else None,
        "decodings": [round(ratio, 3) for ratio in decoding],
        "tokens_per_step": statistics.mean(one.per_step for one in on),
    }


def main() -> int:
    """Measure, print, write. 1 where tokens differed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("batches", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--seed", type=int, default=0, help="of which side of a round comes first")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=2, help="least prompts of a round")
    parser.add_argument("--set", type=Path, help="jsonl of chats (default: built in)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--adversary", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.adversary:
        NgramDrafter.propose = CpuNgramDrafter.propose = wrong
    target = open_target(EngineConfig(kv_tokens=max(*args.batches, 4) * 1024, context=2048))
    every = read_prompts(args.set)
    rows, same, draw = [], True, np.random.default_rng(args.seed)
    for batch in args.batches:
        size = max(args.prompts, batch)
        wanted = size * args.rounds
        prompts = list(islice(cycle(spread(every, min(wanted, len(every)))), wanted))
        on: list[Served] = []
        off: list[Served] = []
        for step in range(args.rounds):
            part = prompts[step * size : (step + 1) * size]
            for side in draw.permutation(["on", "off"]).tolist():
                done = on if side == "on" else off
                done.append(serve(target, side, part, batch, args))
            same &= on[-1].tokens == off[-1].tokens
        rows.append(_row(batch, size, on, off))
        Console(stderr=True).print(rows[-1])
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
    Console().print(table)
    if args.out:
        facts = {"command": sys.argv, "machine": stamp(), "same_tokens": same, "rows": rows}
        args.out.write_text(json.dumps(facts, indent=1) + "\n")
    target.close()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
