"""Acceptance on the host, for executors with logits in host memory: slots, rows, outcomes.
host_choice.py decides the rows that the executor has not decided itself.
"""

from itertools import zip_longest

import numpy as np

from forerun.errors import EngineError
from forerun.executors.device_choice import CUT_OFFS, Choosing
from forerun.executors.host_choice import Logits, ReportsOf, complete
from forerun.interface.features import StepFeatures
from forerun.interface.next_draft import NextDrafts
from forerun.interface.plan import Outcome, Plan, Reports, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.accept import NOTHING
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import Ints

_NONE: Ints = np.zeros(0, np.int32)


class HostSampler:
    """The sampling state of each slot, and acceptance by forerun.speculative.

    cut_offs  whether the executor also decides rows with cut-offs
    """

    def __init__(self, slots: int, vocab: int, cut_offs: bool = False) -> None:
        self._open: list[SlotInit | None] = [None] * slots
        self._vocab, self._cut_offs = vocab, cut_offs
        self.choosing = Choosing(
            on_device=np.zeros(slots, np.bool_),
            temperature=np.zeros(slots, np.float32),
            seed=np.zeros(slots, np.uint64),
            prompt_len=np.zeros(slots, np.int32),
            cut_offs=np.zeros(slots, CUT_OFFS),
        )
        # Slots with log-probabilities, and those with their prompts' too.
        self._reports: set[int] = set()
        self._echoes: set[int] = set()

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot. Raises EngineError if the slot is open or a token is outside
        the vocabulary.
        """
        slot, sampling = slot_init.slot, slot_init.sampling
        if self._open[slot] is not None:
            raise EngineError(f"slot {slot} is already open; close it first")
        tokens = slot_init.text.tokens
        if not np.all((tokens >= 0) & (tokens < self._vocab)):
            raise EngineError(f"slot {slot}: a token is outside 0..{self._vocab - 1}")
        self._open[slot] = slot_init
        cut = self._cut_offs and sampling.cut_offs_only
        self.choosing.on_device[slot] = cut or sampling.temperature_only
        self.choosing.cut_offs[slot] = (
            sampling.top_p,
            sampling.log_min_p,
            min(max(sampling.top_k, 0), self._vocab),
        )
        self.choosing.temperature[slot] = sampling.temperature
        self.choosing.seed[slot] = sampling.seed & 0xFFFFFFFFFFFFFFFF
        self.choosing.prompt_len[slot] = slot_init.prompt_len
        if sampling.prompt_logprobs is not None:
            self._echoes.add(slot)
        if sampling.prompt_logprobs is not None or sampling.logprobs is not None:
            self._reports.add(slot)

    def close(self, slot: int) -> None:
        """Discard the slot's sequence, if it has one."""
        self._open[slot] = None
        self.choosing.on_device[slot] = False
        self._reports.discard(slot)
        self._echoes.discard(slot)

    def reports(self, slots: Ints) -> bool:
        """Return whether one of the slots int32[n] requests log-probabilities."""
        return bool(self._reports) and not self._reports.isdisjoint(slots.tolist())

    def scored(self, plan: Plan, trees: TreeBatch) -> Ints:
        """Return int32[n] flat nodes, ascending, whose logits `finish` may need."""
        starts, roots, nodes = trees.start.tolist(), trees.roots.tolist(), list[int]()
        slots, samples = plan.slots.tolist(), plan.samples.tolist()
        for row, slot in enumerate(slots):
            if slot in self._echoes:
                nodes.extend(range(starts[row], starts[row + 1]))
            elif samples[row]:  # Others have no draft token.
                nodes.extend(range(roots[row], starts[row + 1]))
        return np.array(nodes, np.int32)

    def finish(
        self,
        round: Round,
        logits: Logits,
        masks: NodeMasks | None,
        choice: Ints | None = None,
        reports: ReportsOf | None = None,
        features: StepFeatures | None = None,
        drafts: NextDrafts | None = None,
    ) -> Outcome:
        """Decide every row and return the outcome of the round, whose plan and trees are complete.

        choice   int32[M] the target's choice at every node of an accepted path, from the root to
                 the last accepted draft token, for rows that the executor decided as the
                 specification would; NOTHING elsewhere. Completed in place
        reports  computes log-probabilities without `logits`, if the executor has such a function
        features, drafts   as in Outcome

        A row whose root has NaN or +inf among its logits, or a grammar mask that allows nothing,
        emits nothing and has `finite` False; other rows are unaffected. At a draft token the same
        faults end the path before it. Stop tokens do not end a path; the engine cuts there.

        Raises EngineError, and decides nothing, if the known tokens of a row that samples do not
        end where its text does.
        """
        plan, trees = round.plan, round.trees
        if choice is None:
            choice = np.full(len(trees.tokens), NOTHING, np.int32)
        # Lists: a call of NumPy takes ten times as long right after a forward pass.
        chosen, finite, left = choice.tolist(), [True] * plan.rows, list[tuple[int, SlotInit]]()
        arrays = plan.slots, plan.samples, plan.kv_len, trees.known, trees.roots
        rows = zip(*(array.tolist() for array in arrays), strict=True)
        for row, (slot, samples, kv_len, known, root) in enumerate(rows):
            slot_init = self._open[slot] or self.of_row(plan, row)
            if samples and kv_len + known != slot_init.text.total:
                raise EngineError(
                    f"row {row} samples after {kv_len + known} tokens, but slot {slot} holds "
                    f"{slot_init.text.total}"
                )
            finite[row] = not samples or chosen[root] >= 0
            if not finite[row] or slot in self._reports:
                left.append((row, slot_init))
        logprobs: list[tuple[Reports, ...]] = [((),) * plan.rows] * 2
        if left:
            logprobs = complete(round, left, choice, finite, logits, masks, reports)
        emitted, accepted = _paths(trees, choice)
        counts = list(map(len, emitted))
        padded = zip(*zip_longest(*emitted, fillvalue=NOTHING), strict=True)
        tokens = list(padded) if min(counts) < max(counts) else emitted
        round.outcome = Outcome(
            n_tokens=np.array(counts, np.int32),
            tokens=np.array(tokens, np.int32),
            n_draft_tokens=trees.n_draft_tokens,
            finite=np.array(finite, np.bool_),
            logprobs=logprobs[0],
            prompt_logprobs=logprobs[1],
            accepted=accepted,
            drafts=drafts,
            features=features,
        )
        return round.outcome

    def of_row(self, plan: Plan, row: int) -> SlotInit:
        """Return the sequence in plan row `row`'s slot. Raises EngineError if the slot is not
        open.
        """
        slot_init: SlotInit | None = self._open[plan.slots[row]]
        if slot_init is None:
            raise EngineError(f"row {row} plans slot {plan.slots[row]}, which is not open")
        return slot_init


def _paths(trees: TreeBatch, choice: Ints) -> tuple[list[list[int]], Ints]:
    """Return the tokens that each row emits, and the nodes of all accepted draft tokens."""
    chosen = choice.tolist()
    if trees.decode_only and min(chosen) >= 0:
        return [[token] for token in chosen], _NONE
    emitted, accepted, starts = list[list[int]](), list[int](), trees.start.tolist()
    for root, begin, end in zip(trees.roots.tolist(), starts[:-1], starts[1:], strict=True):
        nodes = [node for node in range(begin, end) if chosen[node] >= 0]
        emitted.append([chosen[node] for node in nodes])
        accepted += [node for node in nodes if node != root]
    return emitted, np.array(accepted, np.int32) if accepted else _NONE
