"""Recurrent states on disk, beside the pages at whose ends they stand."""

from dataclasses import dataclass

from forerun.cache.store import PageStore
from forerun.interface.executor import StateContents
from forerun.types import Ints


@dataclass(frozen=True, slots=True)
class DiskStates:
    """The recurrent states of an executor, and their store, in which each has the digest of the
    page at whose end it stands.
    """

    store: PageStore
    contents: StateContents

    def places(self, tokens: Ints, page_size: int, salt: bytes) -> list[int]:
        """Return after how many pages of a text, int32[T] of this salt, the executor has a state,
        ascending.
        """
        return [length // page_size for length in self.contents.state_lengths(tokens, salt)]
