"""The compiled core's index of token runs in texts, opened with the constants of ngram.py."""

import ctypes
from array import array
from collections.abc import Callable
from math import isfinite
from weakref import finalize

import numpy as np

from forerun.control.constants import DECAY
from forerun.control.host_drafts import ALMOST
from forerun.drafters import ngram, ngram_cache
from forerun.drafts.ngram_table import NgramTable
from forerun.errors import EngineError
from forerun.executors.cpu import native
from forerun.types import Ints


class NgramIndex:
    """The compiled core's index of n-grams in the texts of `slots` slots; closed when it is
    garbage-collected.

    library, handle  the core, and the first argument of its forerun_ngram_... functions
                     (csrc/ngram.h)
    counted          see AnswerCounts

    Raises OSError if there is no compiled core, EngineError if it rejects the parameters.
    """

    def __init__(
        self, slots: int, min_prob: float, table: NgramTable | None, capacity: int
    ) -> None:
        self.library = native.load_short()
        self.counted: Callable[[Ints, int, int], None] = ngram_cache.counted_nothing
        # Draft tokens that scores predicted right, and that were right; the core writes both.
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
            surest=ngram.SUREST,
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
        """Factor, at most 1, that calibrates scores: draft tokens that were right, over the sum of
        their scores.
        """
        return min(1.0, self._trust[1] / self._trust[0])

    @property
    def contexts(self) -> int:
        """The number of contexts in the cache."""
        return int(self.library.forerun_ngram_contexts(self.handle))

    def count(self, tokens: Ints, first: int, tenant: int) -> None:
        """Implement AnswerCounts.count. Raises EngineError as the constructor."""
        tokens = np.ascontiguousarray(tokens, np.int32)
        text = tokens.ctypes.data, first, len(tokens)
        if self.library.forerun_ngram_count(self.handle, *text, tenant):
            raise EngineError(self.error())

    def learnt(self) -> bytes:
        """Implement Learner.learnt: the calibration of scores."""
        return self._trust.tobytes()

    def relearn(self, learnt: bytes) -> bool:
        """Implement Learner.relearn."""
        trust = array("d", learnt[: len(learnt) // 8 * 8])
        sound = len(learnt) == 16 and all(isfinite(each) and each >= 0.0 for each in trust)
        if sound := sound and trust[0] > 0.0:
            self._trust[0], self._trust[1] = trust
        return sound

    def use(self, table: NgramTable) -> None:
        """Replace the n-gram table, which must outlive its use. Raises EngineError if its arrays
        are not contiguous with 4-byte items.
        """
        self.library.forerun_ngram_use(self.handle, ctypes.byref(_arrays(table)))

    def error(self) -> str:
        """Return the core's message about the last call that failed."""
        error: bytes = self.library.forerun_error()
        return error.decode()


def _arrays(table: NgramTable) -> native.TableArrays:
    """Return the table's arrays as pointers for the core; the table must outlive the result."""
    names = ("extensions", "earlier", "predictions", "tokens", "rest", "shares")
    arrays = {name: getattr(table, name) for name in names}
    if not all(array.flags.c_contiguous and array.itemsize == 4 for array in arrays.values()):
        raise EngineError("an n-gram table's arrays must be contiguous, with 4-byte items")
    places = {name: array.ctypes.data for name, array in arrays.items()}
    return native.TableArrays(contexts=table.contexts, **places)
