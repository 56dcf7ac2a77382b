"""Run by test_jax_sharding.py in a process of its own, on 8 forced host devices.

Prints one JSON line: tokens by (shards, page size), and collectives of the compiled rounds.
"""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.errors import ConfigError
from forerun.executors.jax import JaxExecutor, JaxOptions, jax_executor
from forerun.executors.jax.program.functions import Key
from forerun.executors.jax.rounds.batches import Bucket
from forerun.speculative.sampling import Sampling
from tests.models import tiny
from tests.parity.conftest import little_optimised
from tests.parity.driver import Driver, Row, as_draft, limits

CASES = [
    *(("dense", shards, page, False) for shards, page in ((1, 16), (2, 1), (4, 64), (8, 5))),
    ("dense", 2, 16, True),
    *(("experts", shards, 16, False) for shards in (1, 8)),
    *((name, shards, 16, False) for name in ("shapes", "states") for shards in (1, 2)),
]
"""Model, shards, page size, layers in a scan."""
COLLECTIVE = re.compile(r"= \S+ (all-reduce|all-gather|all-to-all|collective-permute)\w*\(")


def text(executor):
    """Tokens of two sequences, one of them sampled, under trees that are now and then right."""
    with Driver(executor) as driver:
        driver.open(0, list(range(20, 50)), Sampling(temperature=0.8, seed=5))
        driver.open(1, list(range(60, 77)), Sampling(temperature=0.0))
        driver.step([Row(0, 9), Row(1)])
        for step in range(12):
            tree = as_draft([(7 * step + n) % tiny.VOCAB for n in range(3)], [-1, 0, -1])
            rows = [Row(slot, draft=tree) for slot in (0, 1)]
            driver.step([Row(0), rows[1]] if step == 0 else rows)
        return [driver.sequences[slot].tokens for slot in (0, 1)]


def main(folder: Path, compiled: str) -> None:
    assert jax.device_count() == 8
    report = {"tokens": [], "collectives": [], "refused": []}
    for name, shards, page, stacked in CASES:
        checkpoint = FolderCheckpoint(folder / name)
        small = limits(tiny.VOCAB, context=128, page_size=page, pages=192 // page + 1, slots=2)
        if (name, shards) == ("shapes", 2):  # What lies behind windows is given back.
            small = replace(small, window=25, window_pages=24)
        options = JaxOptions(draft_nodes=3, shards=shards, stacked=stacked, cache_dir=compiled)
        made = jax_executor(small)(checkpoint, small, options)
        report["tokens"].append(text(made))
        kinds = COLLECTIVE.findall(made.programs.text(Key("round", Bucket(2, 4))))
        counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
        report["collectives"].append(counts)
    for shards in (3, 16):
        try:
            JaxExecutor(checkpoint, small, JaxOptions(shards=shards))
        except ConfigError as error:
            report["refused"].append(str(error))
    print(json.dumps(report, default=np.ndarray.tolist))


if __name__ == "__main__":
    with little_optimised():
        main(Path(sys.argv[1]), sys.argv[2])
