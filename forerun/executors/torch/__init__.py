"""The torch executor: reference on CPU, and CUDA."""

from forerun.executors.torch.executor import TorchExecutor
from forerun.executors.torch.head import TorchHead

__all__ = ["TorchExecutor", "TorchHead"]
