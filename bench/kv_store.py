"""Time to the first token of long prompts: read, found in memory, found on disk after a restart.

    python bench/kv_store.py [--model smollm2-135m] [--tokens 1000 4000 8000] [--rounds 3]
        [--out x.json]

Each round has a folder of its own and prompts of its own. Before a prompt is found on disk the
model is loaded anew; the file cache of the system is warm then: a disk adds what it takes to read
the bytes that are told. Seconds, medians over the rounds, and of the last two their share of
reading the prompt.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console

from bench.records import ended, keep
from forerun.build.engine import Loaded, load
from forerun.client.completion import complete, make_request
from forerun.options.config import EngineConfig
from forerun.types import Ints

HOW = ("read", "memory", "disk")


def first_token(loaded: Loaded, prompt: Ints) -> tuple[float, int]:
    """Seconds until a prompt's first token, and how many tokens of it were found."""
    begin = perf_counter()
    ((done,),) = complete(loaded.engine, [make_request(prompt, max_tokens=1)])
    return perf_counter() - begin, done.cached_tokens


def measured(config: EngineConfig, prompts: list[Ints]) -> list[dict[str, float]]:
    """Seconds of each prompt by HOW, and the bytes that were read from disk."""
    times: list[dict[str, float]] = []
    loaded = load(config)
    try:
        for prompt in prompts:
            times.append({how: first_token(loaded, prompt)[0] for how in HOW[:2]})
    finally:
        loaded.close()
    loaded, before = load(config), 0
    try:
        for prompt, seconds in zip(prompts, times, strict=True):
            seconds["disk"], cached = first_token(loaded, prompt)
            store = loaded.engine.stats().store
            assert store is not None and cached > len(prompt) - 2 * config.page_size, store
            seconds["bytes"], before = store.read_bytes - before, store.read_bytes
    finally:
        loaded.close()
    return times


def main() -> None:
    """Measure, print a table, and write it with --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000, 8000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rounds: list[list[dict[str, float]]] = []
    for number in range(args.rounds):
        chance = np.random.default_rng(number)
        # Above what is worth writing when it is new.
        lengths = [max(tokens, 1024) for tokens in args.tokens]
        prompts = [chance.integers(300, 20_000, count).astype(np.int32) for count in lengths]
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(measured(EngineConfig(model=args.model, kv_store=folder), prompts))
    table: list[dict[str, Any]] = []
    console = Console(highlight=False)
    console.print("tokens     read   memory     disk  memory/read  disk/read      MB")
    for place, tokens in enumerate(args.tokens):
        row = {key: statistics.median(each[place][key] for each in rounds) for key in rounds[0][0]}
        table.append({"tokens": tokens, **row})
        shares = row["memory"] / row["read"], row["disk"] / row["read"]
        console.print(
            f"{tokens:6d} {row['read']:8.3f} {row['memory']:8.3f} {row['disk']:8.3f} "
            f"{shares[0]:12.3f} {shares[1]:10.3f} {row['bytes'] / 1e6:7.1f}"
        )
    if args.out:
        keep(args.out, {"model": args.model, "rounds": rounds, "table": table})


if __name__ == "__main__":
    ended(main)
