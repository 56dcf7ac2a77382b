"""Speculation on against off, side by side: same prompts, same process, alternating order.

    python bench/never_slower.py 1 2 4 8 16 32 64 --out bench/results/never-slower.json

Each round runs both sides on one loaded model and compares their tokens; the ratio of a batch is
the median over rounds. `--adversary` drafts guesses that are always wrong.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.table import Table

from forerun.api import Target, encode_chat, make_engine, open_target
from forerun.bench.workload import Prompt, read_prompts, spread
from forerun.completion import complete, make_request
from forerun.config import EngineConfig
from forerun.drafters.ngram import NgramDrafter
from forerun.engine.plan import Plan
from forerun.executors.cpu import CpuNgramDrafter
from forerun.machine import stamp
from forerun.spec.tree import Draft


def wrong(_: object, plan: Plan) -> list[Draft]:
    """Instead of `propose`: a chain of tokens that no text continues with, called likely."""
    drafts = []
    for nodes, depth in zip(plan.max_nodes, plan.max_depth, strict=True):
        count = int(min(nodes, depth, 4))
        tokens = np.full(count, 3, np.int32)
        parents = np.arange(-1, count - 1, dtype=np.int32)
        drafts.append(Draft(tokens, parents, np.full(count, 0.9, np.float32)))
    return drafts


def serve(
    target: Target, side: str, prompts: list[Prompt], batch: int, args: argparse.Namespace
) -> tuple[float, list[tuple[int, ...]], float]:
    """Tokens per second, all tokens, tokens per step."""
    config = replace(target.config, speculation="off") if side == "off" else target.config
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
    return sum(map(len, tokens)) / seconds, tokens, stats.acceptance_length


def main() -> int:
    """Measure, print, write. 1 where tokens differed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("batches", type=int, nargs="+")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="least prompts of a round")
    parser.add_argument("--set", type=Path, help="jsonl of chats (default: built in)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--adversary", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.adversary:
        NgramDrafter.propose = CpuNgramDrafter.propose = wrong
    target = open_target(EngineConfig(kv_tokens=max(*args.batches, 4) * 1024, context=2048))
    every = read_prompts(args.set)
    rows, same = [], True
    for batch in args.batches:
        prompts = spread(every, min(max(args.prompts, batch), len(every)))
        ratios, speeds = [], {"on": [], "off": []}
        for turn in range(args.rounds):
            order = ("on", "off") if turn % 2 == 0 else ("off", "on")
            found = {side: serve(target, side, prompts, batch, args) for side in order}
            same &= found["on"][1] == found["off"][1]
            for side in order:
                speeds[side].append(found[side][0])
            ratios.append(found["on"][0] / found["off"][0])
        rows.append(
            {
                "batch": batch,
                "prompts": len(prompts),
                "on": statistics.median(speeds["on"]),
                "off": statistics.median(speeds["off"]),
                "ratio": statistics.median(ratios),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "tokens_per_step": found["on"][2],
            }
        )
        Console(stderr=True).print(rows[-1])
    table = Table(title="speculation on / off")
    for heading in ("streams", "on tok/s", "off tok/s", "ratio", "rounds", "tokens per step"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["batch"]),
            f"{row['on']:.0f}",
            f"{row['off']:.0f}",
            f"{row['ratio']:.2f}",
            " ".join(f"{ratio:.2f}" for ratio in row["ratios"]),
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
