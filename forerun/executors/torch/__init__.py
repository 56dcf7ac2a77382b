"""The torch executor: reference on CPU, and CUDA."""

from forerun.executors.torch.block import TorchBlockModel
from forerun.executors.torch.captured.executor import (
    CapturedExecutor,
    with_captures,
)
from forerun.executors.torch.decoder_model import TorchDecoderModel
from forerun.executors.torch.eagle import TorchEagleModel
from forerun.executors.torch.executor import TorchExecutor
from forerun.executors.torch.prediction_model import TorchPredictionModel
from forerun.executors.torch.target import TorchTarget

__all__ = [
    "CapturedExecutor",
    "TorchBlockModel",
    "TorchDecoderModel",
    "TorchEagleModel",
    "TorchExecutor",
    "TorchPredictionModel",
    "TorchTarget",
    "with_captures",
]
