"""The n-gram drafter on the compiled core: the same draft tokens as drafters.ngram, 4 to 20 times
faster.
"""

import ctypes
from array import array
from typing import Any
from weakref import finalize

import numpy as np

from forerun.control.constants import DECAY
from forerun.control.host_drafts import ALMOST
from forerun.drafters import ngram, ngram_cache
from forerun.drafts.ngram_table import NgramTable
from forerun.errors import EngineError
from forerun.executors.cpu import native
from forerun.interface.drafter import DrafterTraits
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SequenceText, SlotInit
from forerun.speculative.tree import NO_DRAFT, Draft, TreeBatch


class NgramIndex:
    """The compiled core's index of token runs in texts, for `slots` slots, with the constants of
    ngram.py. Closed when it is garbage-collected.

    library, handle  the core, and the first argument of its forerun_ngram_... functions
                     (csrc/ngram.h)

    Raises OSError if there is no core, EngineError if it refuses.
    """

    def __init__(
        self, slots: int, min_prob: float, table: NgramTable | None, capacity: int
    ) -> None:
        self.library = native.load_short()
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
        """The factor, at most 1, that makes scores honest: draft tokens that were right, over the
        sum of their scores.
        """
        return min(1.0, self._trust[1] / self._trust[0])

    @property
    def contexts(self) -> int:
        """How many contexts the cache has."""
        return int(self.library.forerun_ngram_contexts(self.handle))

    def use(self, table: NgramTable) -> None:
        """Replace the table. The caller keeps it alive. Raises EngineError as the constructor."""
        self.library.forerun_ngram_use(self.handle, ctypes.byref(_arrays(table)))

    def error(self) -> str:
        """Return the core's message about the last call that failed."""
        error: bytes = self.library.forerun_error()
        return error.decode()


class CpuNgramDrafter:
    """Looks up continuations in prompt and output, and in a table of the target's usual ones; one
    native call per step, none if no row may draft.

    slots, min_prob, table, capacity  as of NgramDrafter

    Raises OSError if there is no core.
    """

    def __init__(
        self,
        slots: int,
        min_prob: float = ngram.MIN_PROB,
        table: NgramTable | None = None,
        capacity: int = 0,
    ) -> None:
        self.traits = DrafterTraits(name="ngram", max_depth=64, free=True, buys=True)
        self._table, self._min_prob = table, min_prob
        self._core = NgramIndex(slots, min_prob, table, capacity)
        self._library, self._index = self._core.library, self._core.handle
        # By slot: the text, and how many of its tokens the core has received.
        self._sent: ngram.OpenSlots[tuple[SequenceText, int]] = ngram.OpenSlots()
        self._out = np.empty(0, np.int32)
        self._out_at = 0

    def use(self, table: NgramTable) -> None:
        """Draft by this table from the next call on."""
        self._table = table
        self._core.use(table)

    def begin(self, slot_init: SlotInit) -> None:
        """Pass all tokens of the sequence to the core. Raises EngineError with the core's
        message.
        """
        text_tokens, predicted = ngram.indexed(slot_init)
        tokens = np.ascontiguousarray(text_tokens, np.int32)
        text = tokens.ctypes.data, len(tokens), predicted, slot_init.prompt_len
        noise = ngram.coupling(slot_init.sampling)
        if self._library.forerun_ngram_begin(
            self._index, slot_init.slot, *text, *noise, slot_init.tenant
        ):
            raise EngineError(self._core.error())
        self._sent[slot_init.slot] = slot_init.text, slot_init.text.total

    def propose(self, plan: Plan) -> list[Draft]:
        """Return one draft per row, empty if nothing is probable enough or worth its price. With
        prices, the core stores what it proposed until the next call, to learn from it. Raises
        EngineError with the core's message.
        """
        slots, depths = plan.slots.tolist(), plan.max_depth.tolist()
        drafts = [NO_DRAFT] * len(slots)
        drafting: list[int] = []
        message: list[int] = []
        most = 0
        for row, nodes in enumerate(plan.max_nodes.tolist()):
            if nodes and (depth := depths[row]):
                unsent = self._unsent(slots[row])
                message += (slots[row], nodes, depth, len(unsent))
                message += unsent
                drafting.append(row)
                most += nodes
        if not drafting:
            return drafts
        rows = len(drafting)
        if len(self._out) < rows + 4 * most:
            self._out = np.empty(2 * (rows + 4 * most), np.int32)
            self._out_at = self._out.ctypes.data
        # The array lives until the call is over, because `numbers` names it.
        numbers = array("i", message)
        address, length = numbers.buffer_info()
        prices, (at, most) = plan.prices, (None, -1)
        if prices is not None:
            at, most = prices.tokens.buffer_info()
        padded = prices is not None and prices.padded
        total = self._library.forerun_ngram_propose(
            self._index, address, length, rows, self._out_at, plan.min_prob, at, most, padded
        )
        if total < 0:
            raise EngineError(self._core.error())
        if total:
            self._take(drafts, drafting, total)
        return drafts

    def _take(self, drafts: list[Draft], drafting: list[int], total: int) -> None:
        """Copy the `total` draft tokens in `_out` (csrc/ngram.h) into the drafts of `rows`."""
        rows = len(drafting)
        packed = self._out[rows : rows + 4 * total].reshape(4, total).copy()
        tokens, parents, scored, sources = packed
        scores, begin = scored.view(np.float32), 0
        for row, count in zip(drafting, self._out[:rows].tolist(), strict=True):
            if count:
                part = slice(begin, begin + count)
                drafts[row] = Draft(tokens[part], parents[part], scores[part], sources[part])
                begin += count

    def draft_request(self, plan: Plan) -> None:
        """Return None: there is no draft model."""

    def can_overlap(self, plan: Plan, running: Round) -> bool:
        """Return True only without draft tokens: they need the text of the running round."""
        return not plan.max_nodes.any()

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Do nothing: emitted tokens are read in the text once the row may draft."""

    def _unsent(self, slot: int) -> list[int]:
        """Return the tokens that the core has not received; from now on it has. Raises EngineError
        if the slot is not open.
        """
        text, sent = self._sent[slot]
        self._sent[slot] = text, text.total
        unsent: list[int] = text.tokens[sent:].tolist()
        return unsent

    def end(self, slot: int) -> None:
        """Discard the sequence, here and in the core, after the cache has counted its answer. Does
        nothing for a slot that is not open.
        """
        if slot in self._sent:
            # The array lives until the call is over, because `numbers` names it.
            numbers = array("i", self._unsent(slot))
            del self._sent[slot]
            self._library.forerun_ngram_end(self._index, slot, *numbers.buffer_info())

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: `drafter`, `native`, and those of `ngram.shared_facts`."""
        shared = ngram.shared_facts(self._min_prob, self._table, self._core.contexts)
        trust = round(self._core.trust, 3)
        return {"drafter": self.traits.name, "native": True, "trust_in_scores": trust} | shared


def _arrays(table: NgramTable) -> native.TableArrays:
    """Return the table as the core reads it; it must outlive the result."""
    names = ("extensions", "earlier", "predictions", "tokens", "rest", "shares")
    arrays = {name: getattr(table, name) for name in names}
    if not all(array.flags.c_contiguous and array.itemsize == 4 for array in arrays.values()):
        raise EngineError("an n-gram table's arrays must be contiguous, with 4-byte items")
    places = {name: array.ctypes.data for name, array in arrays.items()}
    return native.TableArrays(contexts=table.contexts, **places)
