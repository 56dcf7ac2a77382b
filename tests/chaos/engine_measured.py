"""The engine's process of serve_measured: `... PIPE IMPATIENT FD`, a path, 0 or 1, a number."""

import os
import sys

from forerun.cli.engine_process import load_started
from forerun.client.engine_worker import run
from tests.chaos.serve_measured import measured

if __name__ == "__main__":
    pipe, impatient, connection = sys.argv[1:]
    measured(os.open(pipe, os.O_WRONLY), impatient == "1")
    sys.exit(run(int(connection), load_started))
