"""A checkpoint that reports how much of it has been read."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

from forerun.checkpoints.checkpoint import Checkpoint, Repeated
from forerun.checkpoints.grouped import Grouped, GroupedRows
from forerun.checkpoints.mapped import Packed
from forerun.checkpoints.quantised_matrices import grouped_of
from forerun.networks.arch import Architecture
from forerun.types import Floats


def counted(checkpoint: Checkpoint, item: int, tell: Callable[[int, int], None]) -> Checkpoint:
    """Return a checkpoint of the same tensors that calls `tell` for each one that is read. Random
    numbers, which are not read, are returned unchanged.

    item  bytes of a number on its device
    tell  called with (bytes of the tensors read, each counted once; bytes of all)
    """
    return checkpoint if isinstance(checkpoint, Repeated) else _Counted(checkpoint, item, tell)


class _Counted:
    def __init__(self, checkpoint: Checkpoint, item: int, tell: Callable[[int, int], None]) -> None:
        self._whole, self._tell = checkpoint, tell
        self._left = {name: item * prod(checkpoint.shape(name)) for name in checkpoint.names()}
        self._total = sum(self._left.values())
        self._done = 0

    @property
    def architecture(self) -> Architecture:
        return self._whole.architecture

    @property
    def path(self) -> Path:
        return self._whole.path

    def names(self) -> tuple[str, ...]:
        return self._whole.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._whole.shape(name)

    def tensor(self, name: str) -> Floats:
        tensor_data = self._whole.tensor(name)
        self._count(name)
        return tensor_data

    def packed(self, name: str) -> Packed | None:
        found = self._whole.packed(name)
        self._count(name)
        return found

    def grouped(self, name: str) -> Grouped | None:
        found = grouped_of(self._whole, name)
        return None if found is None else replace(found, read=partial(self._read, name, found))

    def _read(self, name: str, matrix: Grouped, rows: slice) -> GroupedRows:
        self._count(name)
        return matrix.read(rows)

    def _count(self, name: str) -> None:
        if size := self._left.pop(name, 0):
            self._done += size
            self._tell(self._done, self._total)
