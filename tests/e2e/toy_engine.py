"""The process of a toy server's engine: `python -m tests.e2e.toy_engine FD`."""

import sys

from forerun.client.engine_worker import run
from tests.e2e.toy_server import configure_logs, load_toy


def load(start, told):
    configure_logs()
    for words in start.options.get("loading", ()):
        told(*words)
    return load_toy(start.options), {}


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), load))
