"""An engine's process that stops at a phase: `python -m tests.chaos.phased_engine SOCKET PHASE FD`.

It connects to the socket at this path when the phase begins, and goes on when it hears a byte. It
is rank 0 of several: of a step the others know by then, and wait for it in the middle of it.

load     rank 0 is about to read its part of the weights
warm-up  the first step that is timed
prefill  the first step of a request that has a prompt
decode   the first step that decodes two sequences
"""

import socket
import sys

from forerun.cli.engine_process import load_started
from forerun.client.engine_worker import run
from forerun.executors.torch.model_runner import ModelRunner
from forerun.executors.torch.parallel.processes import Ranks
from tests.chaos.hoard import hoard

RANK = (sys.executable, "-m", "tests.chaos.phased_rank")


class Phases:
    """Stops at one phase, once."""

    def __init__(self, path: str, wanted: str) -> None:
        self.path, self.wanted, self.loaded = path, wanted, False
        self.hoarded: list[bytearray] = []

    def reached(self, phase: str) -> None:
        """Stop here, if this is the phase."""
        if phase != self.wanted:
            return
        self.wanted = ""
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(self.path)
            end.recv(1)
        hoard(self.hoarded)

    def of_step(self, plan) -> str:
        """The phase that a step belongs to."""
        if not self.loaded:
            return "warm-up"
        if any(len(known) > 1 for known in plan.known):
            return "prefill"
        return "decode" if plan.rows == 2 else ""

    def load(self, start, report):
        """As load_started."""
        loaded = load_started(start, report)
        self.loaded = True
        return loaded


def main(path: str, phase: str, connection: str) -> int:
    """Be the engine of a server."""
    phases, prepare, work = Phases(path, phase), ModelRunner.__init__, ModelRunner.run
    begin = Ranks.__init__

    def prepared(self, *args):
        phases.reached("load")
        prepare(self, *args)

    def worked(self, plan, *args, **kwargs):
        phases.reached(phases.of_step(plan))
        return work(self, plan, *args, **kwargs)

    Ranks.__init__ = lambda self, starts, command: begin(self, starts, RANK)
    ModelRunner.__init__ = prepared
    ModelRunner.run = worked
    return run(int(connection), phases.load)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
