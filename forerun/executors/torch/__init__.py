"""The torch executor: reference on CPU, and CUDA."""

from forerun.executors.torch.drafts.assistant_model import TorchAssistantModel
from forerun.executors.torch.drafts.block import TorchBlockModel
from forerun.executors.torch.drafts.decoder_model import TorchDecoderModel
from forerun.executors.torch.drafts.eagle import TorchEagleModel
from forerun.executors.torch.drafts.prediction_model import TorchPredictionModel
from forerun.executors.torch.drafts.target import TorchTarget
from forerun.executors.torch.executor import TorchExecutor
from forerun.executors.torch.page_contents import TorchPages
from forerun.executors.torch.windowed import WindowedTorchExecutor, torch_executor

__all__ = [
    "TorchAssistantModel",
    "TorchBlockModel",
    "TorchDecoderModel",
    "TorchEagleModel",
    "TorchExecutor",
    "TorchPages",
    "TorchPredictionModel",
    "TorchTarget",
    "WindowedTorchExecutor",
    "torch_executor",
]
