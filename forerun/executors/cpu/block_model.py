"""A block drafter beside the compiled core: the core's features, the drafter in NumPy."""

import numpy as np

from forerun.errors import EngineError
from forerun.executors.cpu import native
from forerun.executors.cpu.executor import CpuExecutor, CpuFeatures
from forerun.executors.host_block import BorrowedRows, HostBlockModel
from forerun.interface.features import Features, KeptFeatures
from forerun.models.block_folder import BlockFile
from forerun.models.checkpoint import Checkpoint
from forerun.types import Floats


def cpu_block_model(
    executor: CpuExecutor, checkpoint: Checkpoint, draft: BlockFile
) -> HostBlockModel:
    """The drafter, whose features the core keeps from the next step on."""
    layers, library = np.array(draft.head.features, np.int32), native.load()
    model = executor.native_model()
    if library.forerun_request_aux_hidden_states(model, layers.ctypes.data, len(layers)):
        raise EngineError(library.forerun_error().decode())
    executor.adopt(None, len(layers) * draft.head.target_hidden)
    return HostBlockModel(executor.limits, draft, BorrowedRows.of(checkpoint), _read)


def _read(features: Features) -> Floats:
    if isinstance(features, KeptFeatures):
        return features.values.astype(np.float32)
    if not isinstance(features, CpuFeatures):
        raise EngineError("a block drafter was extended without features of the compiled core")
    count = int(features.nodes.max()) + 1
    values: Floats = features.executor.features(count, features.width)[features.nodes]
    return values
