"""What coupled drafting brings: the same draft, its children chosen with the seed's noise or not.

    python bench/coupling.py prompts.jsonl --temperatures 0.8 1 --out coupling.json

At T > 0 the target's choice at a position is settled by the seed's noise. A coupled draft adds
the same noise before it chooses; an uncoupled one hangs the likeliest tokens, as at T = 0. The
text is the same; tokens per step are not.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from forerun.bench.acceptance import CHAIN, TREE, Question, ask
from forerun.bench.workload import read_prompts, spread
from forerun.build.engine import open_target
from forerun.drafters.draft_state import DraftState
from forerun.machine import stamp
from forerun.options.config import EngineConfig

COUPLED = DraftState.best


def uncoupled(self: Any, found: Any, width: int, depth: int, mask: Any = None) -> Any:
    """The candidates that the head finds likeliest, whatever the noise."""
    greedy = replace(self, sampling=replace(self.sampling, temperature=0.0))
    return COUPLED(greedy, found, width, depth, mask)


def main() -> None:
    """Measure both, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--count", type=int)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.8, 1.0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    prompts = tuple(spread(read_prompts(args.prompts), args.count))
    target = open_target(EngineConfig(kv_tokens=32768, context=2048, speculative_algorithm="EAGLE"))
    rows = []
    for temperature in args.temperatures:
        question = Question(args.prompts.stem, prompts, temperature, args.tokens, args.group)
        for name, best in (("coupled", COUPLED), ("uncoupled", uncoupled)):
            DraftState.best = best  # type: ignore[method-assign]
            for found in ask(target, target.config, question, [CHAIN, TREE], lambda *_: None):
                facts = {"temperature": temperature, "children": name, "shape": found.shape}
                rows.append(facts | {"tokens_per_step": round(found.length, 3)})
                Console().print(rows[-1])
    target.close()
    if args.out:
        facts = {"command": sys.argv, "machine": stamp(), "rows": rows}
        args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
