"""One rank of several that run captured rounds on the recorder, each with the same host's program:

    python -m tests.parallel.rounds RANK SIZE PORT FOLDER

writes what `texts` gives, as JSON, and how many rounds were replayed.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.tensor_parallel import RankCheckpoint, TensorParallel
from forerun.executors.host_sampler import HostSampler
from forerun.executors.torch import TorchExecutor, launched, model_runner
from forerun.executors.torch.group import Processes
from forerun.executors.torch.model_runner import ModelRunner, TorchOptions
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft
from tests.parity.driver import Driver, Row, limits
from tests.parity.tape import Tape
from tests.twins.kernels import SLOW_TWINS

VOCAB = 323
LIMITS = limits(VOCAB, context=128, pages=40, max_nodes=128)
GROUPS = {}


@torch.library.custom_op("rehearsal::everywhere", mutates_args=())
def everywhere(x: torch.Tensor) -> list[torch.Tensor]:
    """A collective that a recorder sees, as NCCL's are launches on a stream."""
    return GROUPS["one"](x)


class Recorded(Processes):
    """Processes whose collectives are recorded, and happen again in every replay."""

    def __init__(self, *where, **how):
        super().__init__(*where, **how)
        GROUPS["one"] = super().everywhere

    def everywhere(self, x):
        return torch.ops.rehearsal.everywhere(x)


class Eager(TorchExecutor):
    """A rank's part, of which nothing is told to the others."""

    def __init__(self, part, group):
        ModelRunner.__init__(self, part, LIMITS, TorchOptions(), group)
        self.sampler = HostSampler(LIMITS.slots, VOCAB)


def texts(executor, drafts=None):
    """Of a greedy sequence and two sampled ones: the tokens of 12 steps; with `drafts`, what those
    were, trees in which some of them stand.
    """
    random, found = np.random.default_rng(3), [[], [], []]
    with Driver(executor) as driver:
        for slot, temperature in enumerate((0.0, 1.0, 0.7)):
            prompt = random.integers(0, VOCAB, 9 + 7 * slot)
            driver.open(slot, prompt, Sampling(temperature=temperature, seed=slot + 5))
        driver.step([Row(slot) for slot in range(3)])
        begun = [len(driver.sequences[slot].tokens) for slot in range(3)]
        for _ in range(12):
            rows = []
            for slot in range(3):
                tree = Draft()
                if drafts:
                    done = len(driver.sequences[slot].tokens) - begun[slot]
                    right = drafts[slot][done : done + 3]
                    tokens = random.integers(0, VOCAB, 6).astype(np.int32)
                    tokens[: len(right)] = right
                    tree = Draft(tokens, np.array([-1, 0, 1, -1, 0, 3], np.int32))
                rows.append(Row(slot, draft=tree))
            step = driver.step(rows)
            for slot in range(3):
                found[slot] += step.emitted(slot)
    return found


def main(rank, size, port, folder):
    """Run, and say it."""
    torch.set_num_threads(1)
    model_runner.kernels_for = lambda device: SLOW_TWINS
    store = TCPStore("127.0.0.1", port, size, is_master=rank == 0, wait_for_workers=False)
    group = Recorded(store, TensorParallel(rank, size), torch.device("cpu"))
    part = RankCheckpoint(FolderCheckpoint(Path(folder)), TensorParallel(rank, size))
    tape = Tape()
    launched.recorder = lambda device: tape
    executor = Eager(part, group).capture()
    plain = texts(executor)
    before = tape.replays
    trees = texts(executor, plain)
    sizes = [list(each) for each in executor.describe()["captured"]]
    print(json.dumps([plain, trees, before, tape.replays - before, sizes]))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4])
