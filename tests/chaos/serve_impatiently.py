"""`forerun serve` whose processes are given up sooner: `python -m tests.chaos.serve_impatiently`.

A process that was stopped is given up after a multiple of the processor time that its answer may
take; of the chat template's that is two minutes. Here all are seconds.
"""

import sys

from forerun import sandbox
from forerun.cli.main import console
from forerun.text import rendering

sandbox.SILENCE, sandbox.START_SECONDS = 6.0, 60.0
rendering.SECONDS = 1.0

if __name__ == "__main__":
    sys.exit(console())
