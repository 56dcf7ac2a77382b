"""An attribute of many objects, read or written without a line of Python for each of them.

    lengths: Column[PageTable, int] = column("length")
    list(lengths(tables))  # as [table.length for table in tables]
    consume(map(setattr, tables, repeat("length"), ends))  # writes `length` of each

Why steps do so: decision 0031.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

Object = TypeVar("Object")
Value = TypeVar("Value")

Column: TypeAlias = Callable[[Iterable[Object]], Iterator[Value]]


def column(name: str) -> Column[Any, Any]:
    """A function from objects to an iterator over attribute `name` of each, in order; dots lead to
    attributes of attributes. Raises AttributeError, when it is read, for an object without it.
    """
    return partial(map, attrgetter(name))


consume: Callable[[Iterable[object]], None] = deque[object](maxlen=0).extend
"""Run an iterator to its end, for what it changes; what it yields is dropped."""
