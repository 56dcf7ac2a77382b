"""The compiled core's index of what stands where in texts: opened with the rules of ngram.py."""

import ctypes
from array import array
from weakref import finalize

from forerun.control.constants import DECAY
from forerun.control.host_drafts import ALMOST
from forerun.drafters import ngram, ngram_cache
from forerun.errors import EngineError
from forerun.executors.cpu import native
from forerun.models.ngram_table import NgramTable


class NgramIndex:
    """Of so many slots; closed when nobody has it any more.

    library, handle  the core, and what its forerun_ngram_... functions take first (csrc/ngram.h)

    Raises OSError where there is no core, EngineError where it refuses.
    """

    def __init__(
        self, slots: int, min_prob: float, table: NgramTable | None, capacity: int
    ) -> None:
        self.library = native.load_short()
        # Draft tokens that should have been right by their scores, and that were: the core's.
        self._trust = array("d", [1.0, 1.0])
        rules = native.NgramRules(
            slots=slots,
            orders=ngram.ORDERS,
            places=ngram.PLACES,
            longest=ngram.LONGEST,
            tail=ngram.TAIL,
            counted=ngram.COUNTED,
            capacity=capacity,
            discount=ngram_cache.DISCOUNT,
            doubt=ngram.DOUBT,
            sure=ngram.SURE,
            min_prob=min_prob,
            decay=DECAY,
            almost=ALMOST,
            trust=self._trust.buffer_info()[0],
            table=_arrays(table) if table else native.TableArrays(),
        )
        self.handle: int = self.library.forerun_ngram_open(ctypes.byref(rules))
        if not self.handle:
            raise EngineError(self.error())
        finalize(self, self.library.forerun_ngram_close, self.handle)

    @property
    def trust(self) -> float:
        """How far scores are to be believed: the share of what they say that was right."""
        return min(1.0, self._trust[1] / self._trust[0])

    @property
    def contexts(self) -> int:
        """How many the cache remembers."""
        return int(self.library.forerun_ngram_contexts(self.handle))

    def error(self) -> str:
        """Why the core refused the last call."""
        error: bytes = self.library.forerun_error()
        return error.decode()


def _arrays(table: NgramTable) -> native.TableArrays:
    """The table as the core reads it: it must outlive what is returned."""
    names = ("extensions", "earlier", "predictions", "tokens", "rest", "shares")
    arrays = {name: getattr(table, name) for name in names}
    if not all(array.flags.c_contiguous and array.itemsize == 4 for array in arrays.values()):
        raise EngineError("an n-gram table's arrays are not as the core reads them")
    places = {name: array.ctypes.data for name, array in arrays.items()}
    return native.TableArrays(contexts=table.contexts, **places)
