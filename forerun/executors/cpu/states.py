"""Recurrent states on the compiled core (csrc/recurrent.cpp), in one pool of its memory."""

from collections.abc import Callable

import numpy as np

from forerun.executors.cpu import native
from forerun.executors.state_slots import rows_of
from forerun.executors.state_steps import StateStep, StateSteps
from forerun.interface.executor import ExecutorLimits
from forerun.networks.arch import Architecture
from forerun.networks.layer_spec import GatedDelta, ShortConvolution
from forerun.types import Ints


def net_sizes(arch: Architecture, limits: ExecutorLimits) -> dict[str, int]:
    """Return the fields of native.Sizes for recurrent layers and gated attention."""
    gated: dict[str, int] = {"gated": any(spec.attention.gated for spec in arch.layer_specs)}
    about = arch.recurrent
    if about is None:
        return gated
    common = {
        "recurrent": arch.recurrent_layers,
        "states": rows_of(limits),
        "channels": about.channels,
        "convolved": about.window,
    }
    if not isinstance(about, GatedDelta):
        return gated | common
    names = ("key_heads", "value_heads", "key_size", "value_size", "tiled")
    return gated | common | {name: int(getattr(about, name)) for name in names}


def node_numbers(arch: Architecture) -> tuple[int, int]:
    """Return the float32 elements of a step's node in recurrent layers: (scratch of any
    node, what a draft token stores until it is accepted).
    """
    match arch.recurrent:
        case GatedDelta() as delta:
            between = 2 * delta.channels + 2 * delta.values + 4 * delta.value_heads
        case ShortConvolution(channels):
            between = 4 * channels
        case None:
            between = 0
    return between, arch.draft_state_numbers


class CpuStates(StateSteps):
    """The states of a native model, whose handle `handle()` returns."""

    def __init__(self, handle: Callable[[], int], limits: ExecutorLimits) -> None:
        super().__init__(limits)
        self._handle, self._library = handle, native.load()

    def copy(self, row: int | None, to: int) -> None:
        """Implement StateSteps.copy. Raises EngineError if the core rejects a row."""
        source = -1 if row is None else row
        self._library.forerun_copy_state(self._handle(), source, to)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state, summed over all layers."""
        return int(self._library.forerun_state_bytes(self._handle()))

    def content(self, row: int) -> bytes:
        """Implement StateSteps.content."""
        content = np.empty(self.state_bytes, np.uint8)
        self._library.forerun_copy_state_outside(self._handle(), row, content.ctypes.data, 1)
        return content.tobytes()

    def put(self, row: int, content: bytes | memoryview) -> None:
        """Implement StateSteps.put."""
        state = np.frombuffer(content, np.uint8)
        self._library.forerun_copy_state_outside(self._handle(), row, state.ctypes.data, 0)

    def follow(self, step: StateStep, slots: Ints, nodes: Ints) -> None:
        """Implement StateSteps.follow; the step must be the model's last one. Raises EngineError if
        the core rejects it.
        """
        rows = np.ascontiguousarray(slots, np.int64)
        drafts = np.ascontiguousarray(nodes, np.int32)
        arguments = rows.ctypes.data, drafts.ctypes.data, len(rows)
        self._library.forerun_follow(self._handle(), *arguments)
