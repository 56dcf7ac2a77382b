"""`forerun serve` whose engine stops at a phase: `... SOCKET PHASE serve ...` (phased_engine)."""

import sys

from forerun.cli import serve_begin
from forerun.cli.main import console

if __name__ == "__main__":
    path, phase = sys.argv[1:3]
    del sys.argv[1:3]
    serve_begin.ENGINE = (sys.executable, "-m", "tests.chaos.phased_engine", path, phase)
    console()
