"""Two replicas of the toy of which some never become ready, served until a signal:

    FAULTS="FOLDER HOW HOW ..." python -c "from tests.ray import faulty; faulty.main(SECONDS)"

HOW    well   it loads
       hangs  loading never ends; SECONDS are the bound
       fails  loading raises
       dies   the process is gone

The first that begins does as the first HOW says, the next as the next, and all later ones as the
last. While FOLDER has a file "broken", all that begin fail.
"""

import os
import signal
import sys
import time
from pathlib import Path

from forerun.cli.main import main as command_line
from forerun.errors import ModelError
from forerun.ray import app, local, replica


class Faulty(replica.Replica):
    """One of them."""

    def load(self, config):
        folder, *hows = os.environ["FAULTS"].split()
        folder = Path(folder)
        how = "fails" if (folder / "broken").exists() else hows[min(place(folder), len(hows) - 1)]
        match how:
            case "hangs":
                time.sleep(10_000)
            case "fails":
                raise ModelError("model.safetensors ends within a tensor.")
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().load(config)


def place(folder):
    """How many began before."""
    number = 0
    while True:
        try:
            (folder / str(number)).touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return number


def main(seconds):
    """Serve."""
    app.Replica, local.READY_SECONDS = Faulty, seconds
    line = ["serve", "toy", "--replicas", "2", "--port", "0", "--json", "--threads", "1"]
    sys.exit(command_line([*line, "--context", "256", "--max-sequences", "4"]))
