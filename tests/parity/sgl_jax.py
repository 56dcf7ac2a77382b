"""Run by test_jax_commands.py: `forerun` where forced host devices stand in for TPUs.

Programs are compiled when they come up, and quickly: this is about the command line.
"""

import sys
from functools import partial

import jax
import jax.stages

import forerun.executors.jax as built
from forerun.cli.main import main
from forerun.executors.jax import JaxExecutor

OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


def pretend() -> None:
    devices, compile_ = jax.devices, jax.stages.Lowered.compile
    built.JaxOptions = partial(built.JaxOptions, stacked=True)
    jax.devices = lambda kind=None: devices("cpu" if kind == "tpu" else kind)
    jax.stages.Lowered.compile = lambda self: compile_(self, OPTIONS)
    JaxExecutor.warm_up = lambda *_: None


if __name__ == "__main__":
    pretend()
    sys.exit(main(sys.argv[1:]))
