"""The torch executor: reference on CPU, and CUDA."""

from forerun.executors.torch.draft_model import TorchDraftModel
from forerun.executors.torch.executor import TorchExecutor

__all__ = ["TorchDraftModel", "TorchExecutor"]
