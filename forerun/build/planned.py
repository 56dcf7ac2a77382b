"""A quantised checkpoint of which only the configuration is here."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from forerun.build.shapes import RandomCheckpoint
from forerun.checkpoints.grouped import Grouped, GroupedKind, GroupedRows
from forerun.checkpoints.quantised.method import read_method
from forerun.networks.arch import Architecture


class PlannedCheckpoint(RandomCheckpoint):
    """A checkpoint from a config.json alone: shapes, and how matrices are quantised, all of them by
    its first method. Numbers are random: for plans, and for timing steps.
    """

    def __init__(self, architecture: Architecture, config: Mapping[str, Any]) -> None:
        """Raises ModelError as read_method."""
        super().__init__(architecture)
        self._methods = read_method(config)

    def grouped(self, name: str) -> Grouped | None:
        """Return how a matrix is quantised; None: it is floats, or must be widened."""
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
        about = Grouped(kind, (rows, columns), group, method.zeros, scale, None, _nothing)
        return replace(about, read=partial(self._random_rows, about))

    def _random_rows(self, about: Grouped, rows: slice) -> GroupedRows:
        """Random numbers; the same for every matrix of the same width."""
        first, last, _ = rows.indices(about.shape[0])
        count, random = last - first, np.random.default_rng(0)
        high = 16 if about.kind == "int4" else 120  # No NaN of float8.
        numbers = random.integers(0, high, (1, about.shape[1]), np.uint8)
        if about.kind == "int8":
            numbers = (numbers - np.uint8(60)).view(np.int8)
        zeros = np.full((count, about.groups), numbers.dtype.type(8), numbers.dtype)
        scales = np.full((count, about.groups), 0.002, np.float32)
        shape = count, about.shape[1]
        return GroupedRows(np.broadcast_to(numbers, shape), scales, zeros if about.zeros else None)


def _nothing(rows: slice) -> GroupedRows:
    raise AssertionError("no part of the model uses it")
