"""Run by test_jax_sharding.py in a process of its own: a draft on 1 and on more forced devices.

    python -m tests.parity.sharded_head FOLDER SHARDS      with a target and a draft in FOLDER

Prints one JSON line: by number of shards, the trees that six rounds drafted, and the text.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.drafts.assistant import holds_assistant, open_assistant
from forerun.drafts.eagle_folder import open_draft
from forerun.executors.jax import JaxAssistantModel, JaxEagleModel, JaxExecutor, JaxOptions
from forerun.interface.next_draft import OnDeviceDraftSpec
from forerun.speculative.sampling import Sampling
from tests.models import tiny
from tests.parity.conftest import little_optimised
from tests.parity.driver import Driver, Row, limits


def drafted(folder: Path, shards: int) -> dict:
    checkpoint = FolderCheckpoint(folder / "target")
    small = limits(tiny.VOCAB, context=128, pages=24, slots=1)
    options = JaxOptions(draft_nodes=3, shards=shards, stacked=True)
    made = JaxExecutor(checkpoint, small, options)
    if holds_assistant(folder / "draft"):
        JaxAssistantModel(made, open_assistant(folder / "draft", checkpoint.architecture))
    else:
        JaxEagleModel(made, checkpoint, open_draft(folder / "draft", checkpoint.architecture))
    request = OnDeviceDraftSpec(np.zeros(1, np.int32), width=2, levels=3)
    trees = []
    with Driver(made) as driver:
        driver.open(0, list(range(20, 50)), Sampling(temperature=0.8, seed=5))
        driver.step([Row(0)])
        for _ in range(6):
            drafts = driver.step([Row(0)], on_device_draft=request).outcome.drafts
            trees.append([drafts.tokens.tolist(), drafts.parents.tolist()])
        return {"trees": trees, "text": driver.sequences[0].tokens}


if __name__ == "__main__":
    assert jax.device_count() == 4
    with little_optimised():
        print(json.dumps([drafted(Path(sys.argv[1]), shards) for shards in (1, int(sys.argv[2]))]))
