"""What a round costs at least, by bytes, and what it launches: bench/results/gpu-roofline.md.

    python -m bench.roofline --table bench/results/gpu-roofline.md [--check]

Counted over the round's own program without a GPU (tests/parity/launches.py).
"""

import argparse
import sys
from difflib import unified_diff
from pathlib import Path

import numpy as np

from bench.records import ended
from forerun.executors.torch.captured.declared import padded_rows
from forerun.executors.torch.sizes import KEYS, Size, programs_for, split_of
from tests.parity.launches import (
    AIMS,
    BEHIND,
    COUNTED,
    DRAFT_VOCAB,
    DRAFTS,
    DTYPE,
    LLAMA,
    Setting,
    budget,
    budget_of,
    count,
    modules,
)

SHAPES_RUN = (
    *((1, 1, 0), (1, 2, 0), (1, 4, 0), (1, 8, 0), (16, 1, 0), (33, 5, 0), (64, 1, 0), (64, 2, 0)),
    *((64, 8, 0), (1, 1, 3), (1, 4, 3), (16, 4, 3), (64, 2, 1), (64, 4, 3)),
)
"""Rows, nodes of each, levels of a chain that is grown: what the table has."""

NARROW = (1, 1, 0), (16, 1, 0), (64, 1, 0)
"""The same, of layers whose products read weights in float8, in 8 and in 4 bits."""

BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes per second that NVIDIA's data sheets give for the SXM modules."""

FLOPS = 989e12
"""Of both, in bfloat16 without sparsity, by the same sheets."""

MIXES = {
    "64 of 1k": [1024] * 64,
    "1 of 32k, 63 of 1k": [32_768] + [1024] * 63,
    "8 of 1k": [1024] * 8,
    "1 of 32k, 7 of 1k": [32_768] + [1024] * 7,
    "1 of 32k": [32_768],
}
"""Tokens behind rows of one node each."""

HEAD = f"""# What a round costs at least, by bytes

Written by `python -m bench.roofline --table bench/results/gpu-roofline.md` and
checked by `--check`; what an H100 took: [results](../../docs/results/gpu.md). Llama-3.1-8B in
bfloat16, an EAGLE-3 head of {DRAFT_VOCAB:,} tokens where levels are grown, {BEHIND} tokens
behind every row; the layers' weights (embedding and output head stay in bfloat16) in
float8, with a scale per row, and in 8 and 4 bits, integers with a scale and a zero point
for each 128 columns, as a checkpoint has them. Launches are counted over the round's own program
(tests/parity/launches.py). Floor: the bytes of weights, keys and values; all: those
of every kernel's tensors, as if nothing stayed in a cache. Milliseconds are the
floor's bytes over the data sheet's bandwidth, or its products over the data sheet's
{FLOPS / 1e12:.0f} TFLOP/s, where that is more (marked *). Times that a
device shows go beside them, from rounds.json ([runbook](../../docs/inside/gpu-runbook.md)).

"""


def table() -> str:
    """The document."""
    heads = ("rows x nodes, levels", "run as", "padding", "launches", "floor, GB", "all, GB")
    lines = ["| " + " | ".join((*heads, *(f"{name}, ms" for name in BANDWIDTH))) + " |"]
    lines.append("| --- " * (len(heads) + len(BANDWIDTH)) + "|")
    lines += [line(*shape, "bfloat16") for shape in SHAPES_RUN]
    for numbers in ("float8", "8 bits", "4 bits"):
        lines += [line(*shape, numbers) for shape in NARROW]
    return HEAD + "\n".join(lines) + "\n\n" + budgets() + "\n" + splits()


def line(rows: int, nodes: int, levels: int, numbers: str) -> str:
    """One of the table's."""
    size = Size(padded_rows(rows), nodes, levels, min(levels, 1))
    total = count(Setting(LLAMA, drafts=levels > 0, numbers=numbers), size, rows)
    multiplied = 2 * size.total * LLAMA.parameters / FLOPS
    times = [
        f"{max(read, multiplied) * 1e3:.2f}{'*' * (read < multiplied)}"
        for read in (total.floor / speed for speed in BANDWIDTH.values())
    ]
    cells = (
        f"{rows} x {nodes}, {levels}" + f", {numbers}" * (numbers != "bfloat16"),
        *(f"{size.rows} x {size.nodes}", f"{size.total / (rows * nodes):.2f}"),
        *(total.launches.total(), f"{total.floor / 1e9:.2f}", f"{total.traffic / 1e9:.2f}", *times),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def splits() -> str:
    """How attention is cut where lengths differ (sizes.split_of)."""
    heads = ("rows", "programs", "at work", "turns by rows alone", "turns by length", "keys, GB")
    lines = [
        "Turns of 64 keys that the longest program of attention takes in a layer, of 8 key/value",
        "heads: as many parts for every row, and parts by length.",
        "",
        f"| {' | '.join(heads)} |",
        "| --- " * len(heads) + "|",
    ]
    groups = LLAMA.kv_heads
    for name, behind in MIXES.items():
        lengths, programs = np.array(behind), programs_for(len(behind), groups)
        split = split_of(lengths, programs)
        works = split[split[:, 0] >= 0]
        alone = parts_for(len(behind) * groups)
        turns = [
            int(np.ceil(np.ceil(lengths[which] / KEYS) / parts).max())
            for which, parts in ((slice(None), alone), (works[:, 0], works[:, 2]))
        ]
        read = 2 * sum(behind) * groups * LLAMA.head_size * DTYPE.itemsize * LLAMA.layers
        numbers = (name, programs * groups, len(works) * groups, *turns, f"{read / 1e9:.2f}")
        lines.append(f"| {' | '.join(map(str, numbers))} |")
    return "\n".join(lines) + "\n"


def parts_for(programs: int) -> int:
    """Of attention, by rows alone."""
    return int(modules()[0].parts_for(programs))


def budgets() -> str:
    """Launches beside what they should be."""
    heads = (
        "launches",
        "a layer",
        "outside",
        "first level",
        "a level more",
        "index_copy_",
        "carried",
    )
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for name, launches in {"aim": AIMS, **{n: budget_of(n) for n in COUNTED}}.items():
        numbers = (
            *(launches.layer, launches.outside, launches.first, launches.level, launches.moves),
            launches.carried,
        )
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    return "\n".join([*lines, "", *of_drafts()]) + "\n"


def of_drafts() -> list[str]:
    """Launches of the other draft models' part, beside the head's."""
    size = COUNTED["drafted"]
    lines = ["| a chain of three below a chain of three | first level | a level more |"]
    lines.append("| --- | --- | --- |")
    for method in DRAFTS:
        launches = budget(size, method=method)
        lines.append(f"| {method} | {launches.first} | {launches.level} |")
    return lines


def main() -> int:
    """Write the table, or say what of it is out of date."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--check", action="store_true", help="say what is out of date, and fail")
    arguments = parser.parse_args()
    text = table()
    if arguments.check:
        written = arguments.table.read_text()
        lines = written.splitlines(), text.splitlines()
        changes = unified_diff(*lines, str(arguments.table), "now", n=0, lineterm="")
        sys.stdout.writelines(f"{line}\n" for line in changes)
        return int(written != text)
    arguments.table.write_text(text)
    return 0


if __name__ == "__main__":
    ended(main)
