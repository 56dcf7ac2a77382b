"""Which binaries and sizes a mixed load asks for, of a small model with a draft head, by Triton's
own keys and the executor's own choice of sizes; no device and no compiler is needed.

    python -m tests.parity.kernel_keys [--steps N]

Prints JSON. A process of its own: in the tests' process the kernels' modules are interpreted.

    ready       sizes that start-up captured
    declared    binaries that it compiled, by kernel
    late        binaries that the load needed beyond these
    captures    captures that the load caused
    rounds, eager  steps of the load that were rounds, and that were not
    captured    the last progress that start-up reported of its captures
"""

import argparse
import json
import sys
from collections import Counter

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.step_bench import random_draft
from forerun.build.shapes import SHAPES, RandomCheckpoint
from forerun.draft_shape import DraftShape
from forerun.executors.torch import TorchExecutor, executor, model_runner
from forerun.executors.torch.drafts.eagle import TorchEagleModel
from forerun.executors.torch.triton import compile_ahead
from forerun.interface.executor import ExecutorLimits
from forerun.interface.next_draft import OnDeviceDraftSpec
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.sampling import Sampling
from tests.parity.driver import SHAPED
from tests.parity.launches import kernels
from tests.parity.tape import Tape

DRAFT = DraftShape(nodes=3, width=1, depth=2)
LIMITS = ExecutorLimits(page_size=16, pages=96, slots=8, max_nodes=128, context=256, vocab=512)


class Target:
    """What Triton asks of a driver: an H100, on which nothing is launched."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def recorded(keys):
    """In place of compiling: what is needed, by kernel and key."""

    def compile_(self, key, *rest):
        keys.append((self.fn.__name__, key))
        self.device_caches[0][0][key] = made = object()
        return made

    return compile_


def opened():
    """An executor whose every sequence asks for something else, with a draft head."""
    model_runner.kernels_for = lambda device: kernels()
    executor.recorder = lambda device: Tape()
    checkpoint = RandomCheckpoint(SHAPES["tiny"])
    made = TorchExecutor(checkpoint, LIMITS).capture(overlap=True)
    draft = random_draft(checkpoint.architecture, 64)
    made.draft_with(TorchEagleModel(made, checkpoint, draft))
    return made


def load(made, steps):
    """Sizes of a mixed load's steps, and rows' prompts, by how many steps had them."""
    random, sizes = np.random.default_rng(0), Counter()
    samplings = [Sampling(**shaped) for shaped in SHAPED]
    samplings += [Sampling(temperature=0.0, logprobs=count) for count in (0, 3, 20)]
    for slot in range(LIMITS.slots):
        sampling = samplings[slot % len(samplings)] if slot % 2 else Sampling(temperature=0.0)
        made.open(SlotInit(slot, TokenText([0, 0, 0]), 3, sampling))
    for _ in range(steps):
        slots = random.permutation(LIMITS.slots)[: random.integers(1, LIMITS.slots + 1)]
        if random.random() < 0.5:
            slots = np.unique(slots // 2 * 2)  # No row with more than a temperature.
        levels = int(random.integers(0, DRAFT.depth + 1))
        request = OnDeviceDraftSpec(slots, DRAFT.width, levels) if levels else None
        nodes = int(random.integers(1, DRAFT.nodes + 2))
        if random.random() < 0.1:  # Somebody's prompt.
            sizes[None, int(random.integers(1, LIMITS.max_nodes + 1))] += 1
        else:
            size = made.rounds._size(slots, nodes, request, bool(random.random() < 0.2))
            sizes[size, len(slots) * nodes] += 1
    for slot in range(LIMITS.slots):
        made.close(slot)
    return sizes


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    arguments = parser.parse_args()
    driver.set_active(Target())
    keys, facts = [], {}
    JITFunction._do_compile = recorded(keys)
    JITFunction.run = compile_ahead._compiling(JITFunction.run)
    with compile_ahead._Zeros():
        made = opened()
        made.warm_up(DRAFT, lambda what, *news: facts.__setitem__(what, news))
        runner = made.rounds.runner
        ready, declared, tape = set(runner.programs.captured), len(keys), runner._records
        captures, sizes = tape.captures, load(made, arguments.steps)
        for size, nodes in sizes:
            with torch.inference_mode():
                if size is None:
                    made.rehearse(nodes)
                else:
                    runner.launch(size, runner.staging(size))()
    rounds = sum(count for (size, _), count in sizes.items() if size is not None)
    json.dump(
        {
            "ready": len(ready),
            "wanted": len({size for size, _ in sizes}),
            "declared": Counter(name for name, _ in keys[:declared]),
            "late": keys[declared:],
            "captures": tape.captures - captures,
            "rounds": rounds,
            "eager": arguments.steps - rounds,
            "captured": facts["preparing step sizes"],
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
