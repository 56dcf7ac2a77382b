"""The common part of all kinds of drafts on disk, after reading their folder."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np

from forerun.checkpoints.mapped import Packed, TensorFile
from forerun.errors import ModelError
from forerun.networks.cache_layer import CacheLayer
from forerun.types import AnyArray, Floats, Ints


class DraftDescription(Protocol):
    """The description of a draft's network, from its configuration and tensors."""

    @property
    def parameters(self) -> int:
        """Number of weights that run in a pass."""
        ...

    @property
    def cache(self) -> tuple[CacheLayer, ...]:
        """What each layer caches per position, in order."""
        ...

    @property
    def vocab(self) -> int:
        """Vd, the number of draft ids."""
        ...

    @property
    def features(self) -> tuple[int, ...]:
        """Indices of the target's hidden states that it reads; empty: none."""
        ...

    @property
    def target_hidden(self) -> int:
        """H, the width of the target's hidden states."""
        ...


Head = TypeVar("Head", bound=DraftDescription)


@dataclass(frozen=True, slots=True)
class OpenedDraft(Generic[Head]):
    """A draft's folder, read and checked.

    target_ids  int32[Vd] target id of every draft id
    warnings    sentences about likely mistakes, each naming the configuration key
    files       by canonical name: the file that holds a tensor, and its name there
    """

    path: Path
    head: Head
    target_ids: Ints
    warnings: tuple[str, ...]
    files: Mapping[str, tuple[TensorFile, str]]

    @property
    def parameters(self) -> int:
        """Number of weights that run in a pass."""
        return self.head.parameters

    @property
    def cache(self) -> tuple[CacheLayer, ...]:
        """What each layer caches per position, in order."""
        return self.head.cache

    @property
    def vocab(self) -> int:
        """Vd, the number of draft ids."""
        return self.head.vocab

    @property
    def node_numbers(self) -> int:
        """0: a node of a pass takes next to no scratch besides its logits."""
        return 0

    @property
    def feature_numbers(self) -> int:
        """F*H: the elements per token that it reads of the target's hidden states."""
        return len(self.head.features) * self.head.target_hidden

    def some_rows(self, name: str, rows: AnyArray) -> Floats:
        """Return float32[n,.], the rows `rows` int[n] of a matrix by its canonical name; reads only
        these. Raises KeyError for an unknown name.
        """
        file, stored = self.files[name]
        packed = file.packed(stored)
        assert packed is not None, "a matrix"
        packed_rows = Packed(packed.kind, np.ascontiguousarray(packed.rows[rows]), packed.columns)
        return packed_rows.floats()

    def tensor(self, name: str) -> Floats:
        """Return a weight as float32 by its canonical name. Raises KeyError for an unknown name,
        ModelError if a number is not finite.
        """
        file, stored = self.files[name]
        values = file.floats(stored)
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: {stored} holds NaN or infinity; the draft is damaged")
        return values

    def read(self, names: Iterable[str]) -> None:
        """Read and check these weights, except the map of ids. Raises ModelError as `tensor`."""
        for name in names:
            if name != "d2t":
                self.tensor(name)
