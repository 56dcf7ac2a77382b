"""Processor time that the engine's host side of a step takes, by rows, in turns with other trees.

    python bench/host.py [OTHER_TREE] [--rows 1 16 64] [--drafters none ngram] [--rounds 7]
        [--out x.json]

An executor that answers every row at once stands in for the model, so planning, pages, trees, stop
conditions, text and deltas are all that is left ("ngram": and drafting in Python). One process per
tree and round, trees in an order drawn anew; OTHER_TREE is a checkout of another commit, such as

    git worktree add build/before HEAD~1 && python bench/host.py build/before

Milliseconds of a step: median over the rounds, and of this tree over the other one the median and
quartiles of the rounds' ratios.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bench.records import ended, keep, quartiles

ROOT = Path(__file__).parents[1]
STEPS = 150
REPEATS = 5


def measured(names: list[str], rows: list[int]) -> dict[str, float]:
    """Milliseconds of processor time per step, by "drafter xROWS": the least of REPEATS times."""
    from tests.engine.test_host_cost import running  # noqa: PLC0415 - of the tree being measured

    times = {}
    for name in names:
        for count in rows:
            engine, least = running(name, count), float("inf")
            for _ in range(REPEATS):
                begin = time.thread_time()
                for _ in range(STEPS):
                    engine.step_once()
                least = min(least, time.thread_time() - begin)
            times[f"{name} x{count}"] = 1000 * least / STEPS
            engine.shutdown()
    return times


def in_tree(tree: Path, args: argparse.Namespace) -> dict[str, float]:
    """Run `measured` in a process that imports everything but this file from `tree`.

    Raises CalledProcessError where that fails.
    """
    command = [sys.executable, __file__, "--worker", "--drafters", *args.drafters]
    command += ["--rows", *map(str, args.rows)]
    env = os.environ | {"PYTHONPATH": str(tree)}
    ran = subprocess.run(command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, float] = json.loads(ran.stdout)
    return answer


def table(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Sum up by size: the median of each tree, and the ratios' quartiles if there are two trees."""
    rows: dict[str, dict[str, Any]] = {}
    for size in rounds[0]["this"]:
        rows[size] = {
            tree: statistics.median(each[tree][size] for each in rounds) for tree in rounds[0]
        }
        if "other" in rounds[0]:
            ratios = [each["this"][size] / each["other"][size] for each in rounds]
            rows[size]["this / other"] = quartiles(ratios)
    return rows


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--drafters", nargs="+", default=["none", "ngram"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        sys.stdout.write(json.dumps(measured(args.drafters, args.rows)))
        return
    trees = {"this": ROOT} | ({"other": args.other.resolve()} if args.other else {})
    draw, rounds = np.random.default_rng(args.seed), []
    for _ in range(args.rounds):
        order = draw.permutation(list(trees)).tolist()
        sides = {name: in_tree(trees[name], args) for name in order}
        rounds.append({name: sides[name] for name in trees})
    console = Console(highlight=False)
    for size, row in table(rounds).items():
        line = ", ".join(f"{name} {row[name]:.3f} ms" for name in trees)
        if "this / other" in row:
            low, middle, high = row["this / other"]
            line += f"; this / other {middle:.3f} ({low:.3f} to {high:.3f})"
        console.print(f"{size}: {line}")
    if args.out:
        keep(args.out, {"rounds": rounds, "table": table(rounds)})


if __name__ == "__main__":
    ended(main)
