"""Which executor runs captured rounds of a model, if its device captures."""

from forerun.executors.torch.captured.executor import CapturedExecutor
from forerun.executors.torch.captured.graphs import recorder
from forerun.executors.torch.captured.recurrent import RecurrentExecutor
from forerun.executors.torch.captured.windowed import WindowedRounds
from forerun.executors.torch.executor import TorchExecutor
from forerun.executors.torch.windowed import WindowedTorchExecutor


def with_captures(eager: TorchExecutor, overlap: bool = False) -> TorchExecutor | CapturedExecutor:
    """Return the executor behind captured rounds, which may begin from each other (`overlap`), if
    its device captures; else itself.
    """
    records = recorder(eager.device)
    if records is None or eager.kernels is None:
        return eager
    if isinstance(eager, WindowedTorchExecutor):
        return WindowedRounds(eager, eager.kernels, records, overlap)
    kind = CapturedExecutor if eager.states is None else RecurrentExecutor
    return kind(eager, eager.kernels, records, overlap)
