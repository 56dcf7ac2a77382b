"""The interface of a checkpoint on disk, for every format, and the check that it is complete."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from forerun.checkpoints.mapped import Packed
from forerun.errors import ModelError
from forerun.networks.arch import Architecture, expected_tensors
from forerun.types import Floats

_NAMED = 12
"""Most tensors named in one message; the rest are counted."""


class Checkpoint(Protocol):
    """Named tensors, read from a mapped file on use and not cached. Names and shapes are those of
    `expected_tensors(architecture)`; the output head is absent if it is the embedding. A checkpoint
    that could be opened is complete.
    """

    @property
    def architecture(self) -> Architecture:
        """The network that the tensors belong to."""
        ...

    @property
    def path(self) -> Path:
        """The file, or the folder of files, that they are read from."""
        ...

    def names(self) -> tuple[str, ...]:
        """Return the canonical names of all tensors (arch.expected_tensors)."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor of that canonical name. Raises KeyError for an unknown
        one.
        """
        ...

    def tensor(self, name: str) -> Floats:
        """Return the tensor of that canonical name as float32, of its `shape`, possibly a read-only
        view of the file. Raises KeyError for an unknown name.
        """
        ...

    def packed(self, name: str) -> Packed | None:
        """Return a matrix as the file stores it; None for a vector, and for a matrix that has no
        such form. Raises KeyError for an unknown name.
        """
        ...


@runtime_checkable
class ReadInParts(Protocol):
    """A checkpoint that can read a part of a matrix for which `packed` returns None."""

    def part(self, name: str, rows: slice, columns: slice) -> Floats:
        """Return float32[n,k], some rows and columns of a matrix, reading little else. Raises
        KeyError for an unknown name.
        """
        ...


@runtime_checkable
class Repeated(Protocol):
    """A checkpoint whose matrices all repeat the same elements, float32[n], row after row: a device
    can be filled with them without creating the matrices on the host.
    """

    @property
    def block(self) -> Floats:
        """float32: the elements that every matrix repeats."""
        ...


def check_complete(
    arch: Architecture,
    found: Mapping[str, tuple[int, ...]],
    where: Path,
    expected_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Raise ModelError naming every missing, unexpected or wrongly shaped tensor.

    found   name -> shape of the tensors there are
    expected_shapes  name -> shape of the tensors there must be; None: the canonical tensors
    """
    expected = expected_tensors(arch) if expected_shapes is None else expected_shapes
    faults = [f"missing {name}" for name in expected if name not in found]
    faults += [f"unexpected {name}" for name in found if name not in expected]
    faults += [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    if faults:
        raise ModelError(
            f"{where}: its tensors are not those of the {arch.family} model it describes: "
            + shortened(faults)
        )


def shortened(items: Iterable[str]) -> str:
    """Join the first few items and count the rest; each is cut to a readable length."""
    listed = list(items)
    text = "; ".join(item[:200] for item in listed[:_NAMED])
    return text + (f"; and {len(listed) - _NAMED} more" if len(listed) > _NAMED else "")
