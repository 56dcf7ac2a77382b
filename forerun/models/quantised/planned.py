"""A quantised checkpoint of which only the configuration is here."""

from collections.abc import Mapping
from typing import Any

from forerun.models.arch import Architecture
from forerun.models.grouped import Grouped, GroupedKind, GroupedRows
from forerun.models.quantised.method import read_method
from forerun.models.shapes import RandomCheckpoint


class PlannedCheckpoint(RandomCheckpoint):
    """What a config.json says of a checkpoint: shapes, and how matrices are stored in few bits, all
    of them in the first way that it names. For plans: no number of a matrix in few bits is read.
    """

    def __init__(self, architecture: Architecture, config: Mapping[str, Any]) -> None:
        """Raises ModelError as read_method."""
        super().__init__(architecture)
        self._methods = read_method(config)

    def grouped(self, name: str) -> Grouped | None:
        """How a matrix is stored in few bits; None: in floats, or not so that it may stay so."""
        shape = self.shape(name)
        method = next(iter(self._methods), None)
        if method is None or len(shape) != 2 or method.bits not in (4, 8):
            return None
        if method.layout == "mxfp4":
            return None
        kind: GroupedKind = "int4" if method.bits == 4 else "int8"
        kind = "float8" if method.layout == "float8" else kind
        rows, columns = shape
        group = min(method.group or columns, columns)
        scale = "F32" if kind == "float8" else "F16"
        return Grouped(kind, (rows, columns), group, method.zeros, scale, None, _unread)


def _unread(rows: slice) -> GroupedRows:
    raise AssertionError("only the configuration of this checkpoint is here")
