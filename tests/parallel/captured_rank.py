"""Another rank than 0 whose rounds are captured on the recorder: `... FD SHARED`, as rank.py.

What it launches is done at once: it waits for nothing, as a device need not be waited for.
"""

import os
import sys

import torch

from forerun.executors.torch import model_runner
from forerun.executors.torch.group import Group
from forerun.executors.torch.parallel import rank, rounds
from tests.parity.tape import Tape
from tests.references.kernels import REFERENCE_KERNELS

GROUPS = {}


@torch.library.custom_op("rehearsal::everywhere", mutates_args=())
def everywhere(x: torch.Tensor) -> list[torch.Tensor]:
    """A collective that a recorder sees, as NCCL's are launches on a stream."""
    return GROUPS["one"](x)


class Recorded(Group):
    """A Group whose collectives are recorded, and happen again in every replay."""

    def __init__(self, *where, **how):
        super().__init__(*where, **how)
        GROUPS["one"] = super().everywhere

    def everywhere(self, x):
        return torch.ops.rehearsal.everywhere(x)


class Eager(Tape):
    """A device that is quick."""

    def launch(self, work):
        wait = super().launch(work)
        wait()
        return wait


if __name__ == "__main__":
    model_runner.kernels_for = lambda device: REFERENCE_KERNELS
    rank.Group = Recorded
    tape = Eager()
    rounds.recorder = lambda device: tape
    status = rank.main(sys.argv)
    os._exit(status)
