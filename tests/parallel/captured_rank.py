"""Another rank than 0 whose rounds are captured on the recorder: `... FD SHARED`, as rank.py.

What it launches is done at once: it waits for nothing, as a device need not be waited for.
"""

import os
import sys

from forerun.executors.torch import model_runner
from forerun.executors.torch.parallel import rank, rounds
from tests.parallel.rounds import Recorded
from tests.parity.tape import Tape
from tests.twins.kernels import SLOW_TWINS


class Eager(Tape):
    """A device that is quick."""

    def launch(self, work):
        wait = super().launch(work)
        wait()
        return wait


if __name__ == "__main__":
    model_runner.kernels_for = lambda device: SLOW_TWINS
    rank.Processes = Recorded
    tape = Eager()
    rounds.recorder = lambda device: tape
    status = rank.main(sys.argv)
    os._exit(status)
