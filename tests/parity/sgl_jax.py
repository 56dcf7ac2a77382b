"""Run by test_jax_commands.py: `forerun` where forced host devices stand in for TPUs.

Programs are compiled when they come up, and quickly: this is about the command line.
"""

import sys

import jax
import jax.stages

from forerun.cli.main import main
from forerun.executors.jax import JaxExecutor

OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def pretend() -> None:
    devices, compile_ = jax.devices, jax.stages.Lowered.compile
    jax.devices = lambda kind=None: devices("cpu" if kind == "tpu" else kind)
    jax.stages.Lowered.compile = lambda self: compile_(self, OPTIONS)
    JaxExecutor.warm_up = lambda *_: None


if __name__ == "__main__":
    pretend()
    sys.exit(main(sys.argv[1:]))
