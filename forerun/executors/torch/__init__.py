"""The torch executor: reference on CPU, and CUDA."""

from forerun.executors.torch.block_model import TorchBlockModel
from forerun.executors.torch.eagle_model import TorchEagleModel
from forerun.executors.torch.executor import TorchExecutor

__all__ = ["TorchBlockModel", "TorchEagleModel", "TorchExecutor"]
