"""The torch executor: reference on CPU, and CUDA."""

from forerun.executors.torch.executor import TorchExecutor

__all__ = ["TorchExecutor"]
