"""A rank that has no memory left from its next step on, once somebody limits it: as
`forerun.executors.torch.parallel.rank`, whose arguments it takes.
"""

import os
import sys

from forerun.executors.torch.model_runner import ModelRunner
from forerun.executors.torch.parallel.rank import main
from tests.chaos.hoard import hoard


def limited(argv: list[str]) -> int:
    """Be the rank."""
    work, kept = ModelRunner.run, []

    def worked(self, *args, **kwargs):
        hoard(kept)
        return work(self, *args, **kwargs)

    ModelRunner.run = worked
    return main(argv)


if __name__ == "__main__":
    os._exit(limited(sys.argv))
