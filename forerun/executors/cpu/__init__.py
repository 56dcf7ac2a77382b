"""Executor on the compiled CPU core (built by hatch_build.py); needs no torch."""

from forerun.executors.cpu.executor import CpuExecutor, cache_bytes_per_token
from forerun.executors.cpu.head import CpuHead
from forerun.executors.cpu.native import available
from forerun.executors.cpu.ngram import CpuNgramDrafter
from forerun.executors.cpu.states import HiddenStates

__all__ = [
    "CpuExecutor",
    "CpuHead",
    "CpuNgramDrafter",
    "HiddenStates",
    "available",
    "cache_bytes_per_token",
]
