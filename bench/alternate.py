"""Two source trees against each other: the same command in each, in alternating order.

    python bench/alternate.py OLD NEW --rounds 7 --out x.json \
        --value ms1 "ms.plain.cpu step.1x1.median" -- -m bench.steps --json {out}

The command is run by this Python in each tree (the tree first on its path), {out} being a file
that it writes as JSON; `--value NAME PATH` names a number in it (keys and list places, dotted).
Which tree goes first is drawn anew in every round, so a slow moment of the machine hits both. For
each number: the median of both, and the median and quartiles of the rounds' ratios NEW / OLD.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bench.records import keep, quartiles


def found(data: Any, path: str) -> float:
    """The number at a dotted path. Raises KeyError or IndexError where there is none."""
    for part in path.split("."):
        data = data[int(part)] if isinstance(data, list) else data[part]
    return float(data)


def measured(tree: Path, command: list[str], values: list[tuple[str, str]]) -> dict[str, float]:
    """One run of the command in a tree. Raises SystemExit where it fails, with what it said."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        line = [sys.executable, *(part.replace("{out}", str(out)) for part in command)]
        ran = subprocess.run(
            line,
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            raise SystemExit(f"{tree}: {' '.join(line)} ended with {ran.returncode}: {ran.stderr}")
        data = json.loads(out.read_text() if out.exists() else ran.stdout)
    return {name: found(data, path) for name, path in values}


def compared(rounds: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, Any]:
    """By name: both medians, and median and quartiles of the ratios new / old."""
    table = {}
    for name in rounds[0][0]:
        old, new = ([side[name] for side in sides] for sides in zip(*rounds, strict=True))
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        low, middle, high = quartiles(ratios)
        table[name] = {
            "old": statistics.median(old),
            "new": statistics.median(new),
            "ratio": middle,
            "quartiles": [low, high],
        }
    return table


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--value", nargs=2, action="append", required=True, metavar=("NAME", "PATH")
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("command", nargs="+", help="after --: what Python is given")
    asked = parser.parse_args()
    draw, rounds = np.random.default_rng(asked.seed), []
    console = Console(highlight=False)
    values = [tuple(pair) for pair in asked.value]
    for number in range(asked.rounds):
        trees = {"old": asked.old.resolve(), "new": asked.new.resolve()}
        order = draw.permutation(sorted(trees)).tolist()
        sides = {name: measured(trees[name], asked.command, values) for name in order}
        rounds.append((sides["old"], sides["new"]))
        console.print(f"round {number + 1}: {sides}")
    table = compared(rounds)
    for name, row in table.items():
        low, high = row["quartiles"]
        console.print(
            f"{name}: old {row['old']:.4g}, new {row['new']:.4g}, "
            f"new/old {row['ratio']:.3f} ({low:.3f} to {high:.3f})"
        )
    if asked.out:
        keep(asked.out, {"rounds": rounds, "table": table})


if __name__ == "__main__":
    main()
