"""Copies matrices from memory-mapped files to a device: several threads read into pinned memory,
from which several streams copy, so that disk, host and device work in parallel. The reference is
`Tensor.copy_` piece by piece, which is used on the CPU.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LANES = 4
"""Pinned buffers, each with a thread that fills it and a stream that copies from it. Not
measured.
"""

Piece = tuple[Tensor, NDArray[np.uint8], torch.dtype]
"""The target tensor [n,K], its bytes uint8[n,bytes of a row], and their dtype."""


class CudaLane:
    """A pinned buffer and a stream of a CUDA device. Used by one thread at a time.

    cuda  the library; tests use a replacement without a device
    """

    cuda: Any = torch.cuda

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with self.cuda.device(device):
            self._stream, self._sent = self.cuda.Stream(), self.cuda.Event()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def begin(self) -> None:
        """Order all later copies after all work that the device has received before."""
        self._stream.wait_stream(self.cuda.current_stream(self._device))

    def buffer(self, size: int) -> Tensor:
        """Return uint8[size] in pinned memory; waits until all copies from it have finished."""
        self._sent.synchronize()
        if len(self._buffer) < size:
            self._buffer = self.pinned(size)
        return self._buffer[:size]

    def pinned(self, size: int) -> Tensor:
        """Return uint8[size] in host memory that the device can read directly."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def send(self, out: Tensor, held: Tensor) -> None:
        """Copy `held`, a view of the buffer, to `out` of the same shape. Does not wait. The dtype
        is converted on the device, whereas `copy_` from the host would convert it on the host.
        """
        with self.cuda.stream(self._stream):
            there = held if held.dtype == out.dtype else held.to(out.device, non_blocking=True)
            out.copy_(there, non_blocking=True)
            self._sent.record(self._stream)

    def end(self) -> None:
        """Order all later device work after all copies sent. Does not wait."""
        self.cuda.current_stream(self._device).wait_stream(self._stream)


class Staging:
    """Copies pieces of files to a device with at least one lane."""

    def __init__(self, lanes: list[CudaLane]) -> None:
        self._lanes = lanes
        self._threads = ThreadPoolExecutor(len(lanes), "forerun-load")
        self._free: SimpleQueue[CudaLane] = SimpleQueue()
        for lane in lanes:
            self._free.put(lane)

    def copy(self, pieces: Iterable[Piece]) -> None:
        """Copy all pieces; later work on the device sees the results. Raises the exceptions of
        reading them.
        """
        for lane in self._lanes:
            lane.begin()
        list(self._threads.map(self._send, pieces))
        for lane in self._lanes:
            lane.end()

    def _send(self, piece: Piece) -> None:
        out, rows, dtype = piece
        lane = self._free.get()
        try:
            held = lane.buffer(rows.nbytes)
            np.copyto(held.numpy().reshape(rows.shape), rows)  # Releases the GIL.
            lane.send(out, held.view(dtype).view(out.shape))
        finally:
            self._free.put(lane)


def staging(device: torch.device) -> Staging | None:
    """Return the copier to `device`; None if the device needs no pinned memory."""
    if device.type != "cuda":
        return None
    return Staging([CudaLane(device) for _ in range(LANES)])
