"""Vectors of concatenated named parts, which are copied to a device in one transfer."""

from math import prod
from typing import Any

import numpy as np

from forerun.types import Ints

Shapes = dict[str, tuple[int, ...]]
"""Shapes of a vector's parts, by name, in their order."""


def total(shapes: Shapes) -> int:
    """Return the length of a vector that concatenates parts of these shapes."""
    return sum(map(prod, shapes.values()))


def views_of(flat: Any, shapes: Shapes) -> dict[str, Any]:
    """Return the parts of a vector of any array library, by the names of `shapes`; as views if the
    library has views.
    """
    views, begin = {}, 0
    for name, shape in shapes.items():
        end = begin + prod(shape)
        views[name] = flat[begin:end].reshape(shape)
        begin = end
    return views


def zeros_of(shapes: Shapes) -> tuple[Ints, dict[str, Any]]:
    """Return a vector int32[total] of zeros, and its parts by name, which are views of it."""
    flat: Ints = np.zeros(total(shapes), np.int32)
    return flat, views_of(flat, shapes)
