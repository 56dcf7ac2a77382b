"""Recurrent states of a step by the compiled core (csrc/delta.inl): bit for bit those of
delta_walk.py, which fixes the order of sums, in one call a layer. Sixteen columns of a
state stay in the processor's first cache while all tokens of a prompt pass.
"""

from collections.abc import Iterable
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.cpu import native
from forerun.executors.torch.attention.delta_walk import DeltaWay
from forerun.executors.torch.decoder.delta import Tokens
from forerun.types import AnyArray, Ints


class NativeDelta:
    """Advances the states of a torch executor on the CPU, with as many threads as torch has.

    kernels  an instruction set by name; "": the best

    Raises OSError if there is no core, EngineError if it has no such kernels.
    """

    def __init__(self, kernels: str = "") -> None:
        self._library = native.load()
        self._handle = self._library.forerun_delta_open(kernels.encode(), torch.get_num_threads())
        if not self._handle:
            raise EngineError(f"the core: {self._library.forerun_error().decode()}")
        finalize(self, self._library.forerun_delta_close, self._handle)

    def advance(self, states: Tensor, way: DeltaWay, tokens: Tokens) -> Tensor:
        """Implement DeltaWalk.advance: float32[M,Hv,Dv], by the compiled core, in the nodes' own
        order.
        """
        found = torch.empty(tokens.values.shape)
        self._run(states, way, tokens, found)
        return found

    def follow(self, states: Tensor, rows: Ints, tokens: Tokens) -> None:
        """Implement DeltaWalk.follow: write the rows int32[n] of `states`, by the compiled core."""
        count = len(rows)
        ones, none = np.ones(count, np.int32), np.full(count, -1, np.int64)
        start = np.arange(count + 1, dtype=np.int32)
        way = DeltaWay(start, ones, none.astype(np.int32), _array(rows, np.int64), none)
        self._run(states, way, tokens, None)

    def _run(self, states: Tensor, way: DeltaWay, tokens: Tokens, out: Tensor | None) -> None:
        """Run one layer. Makes all tensors contiguous, since the core reads them by pointer."""
        assert states.is_contiguous() and states.dtype == torch.float32
        kept = [
            part.contiguous()
            for part in (tokens.queries, tokens.keys, tokens.values, tokens.decay, tokens.beta)
        ]
        queries, *others = (part.data_ptr() for part in kept)
        step = native.DeltaStep(
            len(way.slots),
            *(tokens.keys.shape[1], states.shape[1], *states.shape[2:], tokens.tiled),
            *_places((way.start, way.known, way.parents, way.slots, way.targets)),
            states.data_ptr(),
            queries if out is not None else None,
            *others,
            out.data_ptr() if out is not None else None,
        )
        if self._library.forerun_delta_run(self._handle, step):
            raise EngineError(f"the core: {self._library.forerun_error().decode()}")


def _array(values: AnyArray, kind: type[np.generic]) -> AnyArray:
    return np.ascontiguousarray(values, kind)


def _places(arrays: Iterable[AnyArray]) -> list[int]:
    return [array.ctypes.data for array in arrays]
