"""Decides which sequences run in the next step, on which tokens, with how many draft tokens.
Bookkeeping on the host only.
"""

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace

import numpy as np

from forerun.control.policy import Budget, Decision, Policy
from forerun.engine.admission import Admission
from forerun.engine.pooling import with_hidden
from forerun.engine.sequence import Sequence
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Plan
from forerun.types import Ints

DISABLED_BY_REQUEST = Budget(0, 0, "off: the request disables speculation")
NO_DECISION = Decision("", ())
REASON_REQUEST = "limited by the request"
REASON_ROOM = "limited: the answer ends there, or the step or the page pool is full"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan and its sequences. Valid until the next call of the scheduler.

    rows    B sequences, in row order; first those that the decision is about
    opened  those of them that just took their slot: open it before the step
    closed  slots whose sequences were preempted: close them before opening any
    """

    plan: Plan
    rows: tuple[Sequence, ...]
    decision: Decision = NO_DECISION
    opened: tuple[Sequence, ...] = ()
    closed: tuple[int, ...] = ()


def max_min_fair_split(wanted: list[int], room: int) -> list[int]:
    """Return how much of `room` each entry of `wanted` gets, as evenly as possible: small demands
    in full, the rest the same amount each (max-min fairness).

    The result sums to min(sum(wanted), room); a remainder goes to the largest demands, of equal
    ones to the first.
    """
    if sum(wanted) <= room:
        return wanted
    given = [0] * len(wanted)
    for served, row in enumerate(sorted(range(len(wanted)), key=lambda row: (wanted[row], -row))):
        given[row] = min(wanted[row], room // (len(wanted) - served))
        room -= given[row]
    return given


class Scheduler(Admission):
    """Continuous batching over slots and pages.

    First come, first served: sequences are admitted and get pages in order of arrival; the last one
    is the first to be preempted, and returns to its place in the queue. So the oldest always
    advances. Two kinds can be overtaken: a sequence that waits for pages that a running one
    computes for both (`_awaits_pages`), and a prompt that costs more than a later one, by half of a
    step's prompt tokens (PromptShares).

    features  the drafter needs features (DrafterTraits.needs_features)
    ready  whether a sequence with a slot can take part in the next step
    reusable_prefix_len, copy_page  see Admission
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        policy: Policy,
        features: bool = False,
        ready: Callable[[Sequence], bool] = lambda sequence: True,
        reusable_prefix_len: Callable[[Ints, bytes, Ints], int] = lambda tokens, *_: len(tokens),
        copy_page: Callable[[int, int], bool] = lambda *_: False,
    ) -> None:
        super().__init__(limits, features, ready, reusable_prefix_len, copy_page)
        self.policy = policy

    def preempt(self, sequence: Sequence) -> int:
        """Return a running sequence to the queue, and release its pages. Returns its slot, which
        the caller must close.
        """
        self.running.remove(sequence)
        insort(self.waiting, sequence, key=lambda s: s.order)
        return self.free_slot(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, whose slot must be closed, and release its slot and pages."""
        if self.disk is not None:
            self.disk.save(sequence)
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.free_slot(sequence)

    def plan(self) -> Schedule | None:
        """Plan the next step; None if no sequence is ready. A schedule without rows only opens and
        closes slots.

        Pages go first to rows that must grow by a token (preempting the youngest if they run out),
        then to waiting sequences, and the rest to draft tokens.
        """
        if (self.waiting and self.free_slots) or self.index.available < len(self.running):
            for sequence in self.running:  # Release pages that its draft tokens did not need.
                sequence.table.rollback(sequence.pending)
        closed = self._grow()
        opened = () if closed or not self.waiting else self._admit()
        if not self.running and not closed:
            return None
        schedule = self._schedule(opened, closed)
        return schedule if schedule.rows or opened or closed else None

    # --- pages and slots ---------------------------------------------------------------

    def _grow(self) -> tuple[int, ...]:
        """Reserve one position for every decoding row, oldest first. Returns slots of preempted
        sequences.
        """
        closed: list[int] = []
        while self.limits.window_pages and not self._windows_fit():
            closed.append(self.preempt(self.running[-1]))
        for sequence in tuple(self.running):
            while sequence.slot is not None and not sequence.table.reserve(1):
                closed.append(self.preempt(self.running[-1]))
        return tuple(closed)

    def free_slot(self, sequence: Sequence) -> int:
        """Release slot and pages of a sequence that is no longer in `running`. Returns the slot,
        which the caller must close.
        """
        slot, sequence.slot = sequence.slot, None
        assert slot is not None
        sequence.table.release()
        self.free_slots.append(slot)
        return slot

    # --- rows --------------------------------------------------------------------------

    def _schedule(self, opened: tuple[Sequence, ...], closed: tuple[int, ...]) -> Schedule:
        """Divide the step's nodes; the first rows are those that the decision is about.

        0 ... decoding rows ... + draft tokens ............ max_nodes
              one node each     | at most half of the | prefill chunks,
                                | rest if any prefill | by PromptPace and PromptShares
        """
        decoding, prefill = list[Sequence](), list[Sequence]()
        for sequence in self.running:
            if not sequence.constrained or self._ready(sequence):
                (decoding if sequence.pending == 1 else prefill).append(sequence)
        room = self.limits.max_nodes - len(decoding)
        logits = self.num_logits_rows - len(decoding) - len(prefill)
        # These are not open in drafter and policy yet: they get no draft tokens.
        fresh = [sequence for sequence in opened if sequence in decoding]
        rows = [sequence for sequence in decoding if sequence not in fresh] if fresh else decoding
        draft_tokens = min(room // 2 if prefill else room, logits)
        kv_len = [sequence.table.length for sequence in rows]
        budgets, decision = self.allocate_draft_tokens(rows, draft_tokens, kv_len)
        room -= sum(budget.nodes for budget in budgets)
        rows, known = rows + fresh, [1] * len(decoding)
        kv_len += [sequence.table.length for sequence in fresh]
        if prefill:
            room = self.pace.bound(room, not decoding)
        chunks = self.shares.divide(prefill, room) if prefill else []
        for sequence, chunk in zip(prefill, chunks, strict=True):
            if chunk:
                rows.append(sequence)
                known.append(chunk)
                kv_len.append(sequence.table.length)
        plan = self.make_plan(rows, known, kv_len, budgets, decision)
        if self.pools and any(sequence.pooled for sequence in rows):
            plan = with_hidden(plan, [sequence.pooled for sequence in rows])
        return Schedule(plan, tuple(rows), decision, opened, closed)

    def allocate_draft_tokens(
        self, rows: list[Sequence], room: int, kv_len: list[int], own: int = 1
    ) -> tuple[Several[Budget], Decision]:
        """Return a budget for each row, at most `room` nodes in all, and the policy's decision;
        reserves their pages.

        kv_len  upper bounds of positions that will be in pages
        own     tokens of the target's own that each row emits first; draft paths leave room for
                them
        """
        if not rows:
            return [], NO_DECISION
        decision = self.policy.decide(
            np.array([row.slot for row in rows], np.int32),
            np.array(kv_len, np.int32),
            any(row.constrained for row in rows),
        )
        budgets = list(decision.rows)
        for place, row in enumerate(rows):
            if row.bounded:
                budgets[place] = _within_request(row, budgets[place])
            row.counts.reason = budgets[place].reason
        if any(budget.nodes for budget in budgets):
            budgets = self._within_room(rows, budgets, room, kv_len, own)
        self._budgets = budgets
        return budgets, decision

    def _within_room(
        self, rows: list[Sequence], budgets: list[Budget], room: int, kv_len: list[int], own: int
    ) -> list[Budget]:
        """Return the budgets, lowered to what `room`, the sequences' limits and the page pool
        allow; reserves their pages. Parameters as in `allocate_draft_tokens`.
        """
        max_nodes = sizes[len(self.running) - 1] - 1 if (sizes := self.limits.row_nodes) else room
        # A row at its limit, or beyond it without output tokens, gets none: others have its share.
        left = [max(row.limit - row.total - own, 0) for row in rows]
        wanted = [
            min(budget.nodes, max_nodes, max_nodes * rest)
            for budget, rest in zip(budgets, left, strict=True)
        ]
        given = list[Budget]()
        nodes = max_min_fair_split(wanted, room)
        for row, budget, count, rest, length in zip(
            rows, budgets, nodes, left, kv_len, strict=True
        ):
            depth = self._reserve_draft_tokens(row, min(budget.depth, count, rest), length + 1)
            same = count == budget.nodes and depth == budget.depth
            given.append(budget if same else _bounded(budget, count, depth))
        return given

    def _reserve_draft_tokens(self, row: Sequence, depth: int, first: int) -> int:
        """Reserve pages for a path of `depth` draft tokens from position `first` on. Returns the
        depth that pages suffice for. Preempts no sequence.
        """
        table = row.table
        if first + depth > table.reserved:
            within = table.reserved + self.index.available * self.index.page_size
            depth = max(min(depth, within - first), 0)
            if depth:  # The sequence's limit may be nearer.
                table.reserve(min(first + depth, row.limit) - table.length)
        return depth

    def make_plan(
        self,
        sequences: list[Sequence],
        counts: list[int],
        kv_len: list[int],
        budgets: Several[Budget],
        decision: Decision,
    ) -> Plan:
        """Return the arrays for an executor: counts[b] known tokens of sequence b run after at most
        kv_len[b] positions in pages; the first sequences may draft by `budgets`.
        """
        known: tuple[Ints, ...] | Ints
        if max(counts, default=1) == 1:
            pending = [sequence.buffer[sequence.table.length] for sequence in sequences]
            known = np.array(pending, np.int32).reshape(-1, 1)
        else:
            rows = zip(sequences, counts, strict=True)
            known = tuple(sequence.upcoming(count) for sequence, count in rows)
        ends = zip(sequences, kv_len, counts, strict=True)
        nothing = [0] * (len(sequences) - len(budgets))
        return Plan(
            slots=np.array([sequence.slot for sequence in sequences], np.int32),
            kv_len=np.array(kv_len, np.int32),
            known=known,
            samples=np.array([at + count >= each.total for each, at, count in ends], np.bool_),
            max_nodes=np.array([each.nodes for each in budgets] + nothing, np.int32),
            max_depth=np.array([each.depth for each in budgets] + nothing, np.int32),
            page_table=page_rows(sequences),
            constrained=np.array([sequence.constrained for sequence in sequences], np.bool_),
            min_prob=min((each.min_prob for each in budgets if each.nodes), default=0.0),
            node_costs=decision.node_costs,
            model_depth=np.array([each.model_depth for each in budgets] + nothing, np.int32),
            pass_prob=min((each.pass_prob for each in budgets if each.nodes), default=0.0),
        )


def page_rows(sequences: list[Sequence]) -> Ints:
    """Return int32[B,W], the page tables of `sequences`, padded with -1 to the longest."""
    pages = [sequence.table.pages for sequence in sequences]
    width = max(map(len, pages), default=0)
    rows = b"".join([each.tobytes().ljust(4 * width, b"\xff") for each in pages])
    return np.frombuffer(bytearray(rows), np.int32).reshape(len(pages), width)


def _within_request(row: Sequence, budget: Budget) -> Budget:
    """Return the budget, limited by the request's own settings."""
    bounds = row.request.speculation
    if not bounds.enabled:
        return DISABLED_BY_REQUEST
    nodes = budget.nodes if bounds.max_nodes is None else bounds.max_nodes
    return _bounded(
        budget, nodes, nodes if bounds.max_depth is None else bounds.max_depth, REASON_REQUEST
    )


def _bounded(budget: Budget, nodes: int, depth: int, reason: str = REASON_ROOM) -> Budget:
    """Return the budget with at most these nodes and this depth; `reason` replaces its own if that
    lowers it.
    """
    if not budget.nodes or (budget.nodes <= nodes and budget.depth <= depth):
        return budget
    drafts = nodes > 0 and depth > 0
    nodes, depth = drafts * min(budget.nodes, nodes), drafts * min(budget.depth, depth)
    model_depth = min(budget.model_depth, depth)
    return replace(budget, nodes=nodes, depth=depth, model_depth=model_depth, reason=reason)
