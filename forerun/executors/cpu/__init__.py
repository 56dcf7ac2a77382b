"""The executor on the compiled core (built by hatch_build.py); needs no torch."""

from forerun.executors.cpu.adapted import AdaptedCpuExecutor
from forerun.executors.cpu.assistant_model import CpuAssistantModel
from forerun.executors.cpu.block_model import CpuBlockModel
from forerun.executors.cpu.decoder_model import CpuDecoderModel
from forerun.executors.cpu.eagle_model import CpuEagleModel
from forerun.executors.cpu.executor import CpuExecutor
from forerun.executors.cpu.hidden_states import HiddenStates
from forerun.executors.cpu.limits import check_runs, refusal
from forerun.executors.cpu.native import available
from forerun.executors.cpu.prediction_model import CpuPredictionModel
from forerun.executors.cpu.states import node_numbers
from forerun.executors.cpu.weights import (
    bits_made,
    cache_bytes_per_token,
    cache_item,
    packed_bytes,
)
from forerun.executors.cpu.windowed import WindowedCpuExecutor, kind_of

__all__ = [
    "AdaptedCpuExecutor",
    "CpuAssistantModel",
    "CpuBlockModel",
    "CpuDecoderModel",
    "CpuEagleModel",
    "CpuExecutor",
    "CpuPredictionModel",
    "HiddenStates",
    "WindowedCpuExecutor",
    "available",
    "bits_made",
    "cache_bytes_per_token",
    "cache_item",
    "check_runs",
    "kind_of",
    "node_numbers",
    "packed_bytes",
    "refusal",
]
