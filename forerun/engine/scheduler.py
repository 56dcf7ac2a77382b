"""Who runs in the next step, on which tokens, with how many draft tokens. Bookkeeping only."""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from forerun.cache.pages import PagePool
from forerun.cache.prefix import PrefixIndex
from forerun.control.policy import Decision, Policy
from forerun.engine.sequence import Sequence
from forerun.engine.stats import Load
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Budget, Plan, Round
from forerun.types import Ints

UNWANTED = Budget(0, 0, "off: the request wants no speculation")
NO_BUDGET = Budget(0, 0, "")
NOBODY = Decision("", ())
BOUND = "no more: the request's own bound"
CRAMPED = "no more: the answer ends there, or the step or the pages have no room"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan and the sequences behind it. Valid until the next call of the scheduler.

    rows    B sequences, in row order; those that the decision is about come first
    opened  of which these took their slot just now: open it before the step
    closed  slots whose sequences were preempted: close them before anything is opened
    """

    plan: Plan
    rows: tuple[Sequence, ...]
    decision: Decision = NOBODY
    opened: tuple[Sequence, ...] = ()
    closed: tuple[int, ...] = ()


@dataclass(slots=True)
class _Row:
    """One row of a plan while it takes shape.

    in_flight  positions by which the running step, not looked at yet, may be further than the
               sequence
    budget     what it may draft, at first by the policy, then by all that bounds it
    """

    sequence: Sequence
    known: int
    in_flight: int = 0
    budget: Budget = NO_BUDGET


def share_out(wanted: list[int], room: int) -> list[int]:
    """Serve `wanted` as evenly as `room` allows: all below one level in full, the rest up to it.

    The result sums to min(sum(wanted), room); what does not divide goes to those who want most,
    of equals to the first.
    """
    given = [0] * len(wanted)
    for served, row in enumerate(sorted(range(len(wanted)), key=lambda row: (wanted[row], -row))):
        given[row] = min(wanted[row], room // (len(wanted) - served))
        room -= given[row]
    return given


class Scheduler:
    """Continuous batching over slots and pages.

    First come, first served: sequences are admitted, prefilled and given pages in order of
    arrival; whoever came last is the first to be preempted, and comes back to the place in the
    queue that its arrival gives it. So the oldest always advances. One may be passed: who waits
    for pages that a running sequence computes for both (`_awaits_pages`).

    ready  whether a sequence with a slot can take part in the next step
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        policy: Policy,
        features: bool = False,
        ready: Callable[[Sequence], bool] = lambda sequence: True,
    ) -> None:
        self.limits, self._scored, self.policy = limits, limits.scored_nodes, policy
        self._ready = ready
        self.index = PrefixIndex(PagePool(limits.pages), limits.page_size, lookahead=int(features))
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.leaving: list[Sequence] = []
        # What the decoding rows of the last step that had any were allowed.
        self._granted: tuple[Budget, ...] = ()
        # Every running row needs a node and its logits in every step.
        self._slots = list(range(min(limits.slots, self._scored)))[::-1]

    @property
    def context(self) -> int:
        """Longest sequence that fits the executor and the page pool."""
        return min(self.limits.context, self.limits.pages * self.limits.page_size)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence at its place."""
        sequence.attach(self.index)
        insort(self.waiting, sequence, key=lambda s: s.order)

    def preempt(self, sequence: Sequence) -> int:
        """Send a running sequence back to the queue. Its slot, now to be closed."""
        self.running.remove(sequence)
        insort(self.waiting, sequence, key=lambda s: s.order)
        return self._vacate(sequence)

    def remove(self, sequence: Sequence, held: bool = False) -> int | None:
        """Forget a sequence and give back all it holds. Its slot, now to be closed, if any.

        held: a step runs that it has a part in; it is `leaving` until `release`.
        """
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return None
        self.running.remove(sequence)
        if held:
            self.leaving.append(sequence)
            return None
        return self._vacate(sequence)

    def release(self, sequence: Sequence) -> int:
        """The last step of a leaving sequence is over: as `remove`."""
        self.leaving.remove(sequence)
        return self._vacate(sequence)

    def plan(self) -> Schedule | None:
        """Plan the next step; None when nobody waits or runs, or nobody who runs is ready.

        A schedule without rows opens and closes slots, no more.

        Pages go first to rows that must grow by a token (preempting the youngest where they
        run out), then to sequences that wait, and what is left over to draft tokens.
        """
        closed = self._grow()
        opened = () if closed else self._admit()
        if not self.running:
            return None
        rows, decision = self._rows(opened)
        if not (rows or opened or closed):
            return None
        sequences = tuple(row.sequence for row in rows)
        return Schedule(self._plan(rows), sequences, decision, opened, closed)

    def plan_after(self, round: Round, sequences: tuple[Sequence, ...]) -> Schedule | None:
        """Plan the step that goes on from a running round of these sequences: they once more, but
        those that end there whatever comes. None where that must be known first.

        Pages are reserved for the longest that the running step can become; where they run out,
        nobody is preempted for that.
        """
        rows = [
            _Row(sequence, 1, in_flight=1 + depth)
            for sequence, depth in zip(sequences, round.plan.max_depth.tolist(), strict=True)
            if not sequence.over
        ]
        waits = self.waiting and (self._slots or self.leaving)
        if waits or len(rows) != len(self.running):
            return None  # Somebody could join, or is not in the running step.
        rows = [row for row in rows if row.sequence.remaining > 1]
        if not rows or not all(row.sequence.table.reserve(row.in_flight + 1) for row in rows):
            return None
        decision = self._grant(rows, self._scored - len(rows))
        ends = np.array([row.sequence.end for row in rows], np.int32)
        plan = replace(self._plan(rows), after=round, ends=ends)
        return Schedule(plan, tuple(row.sequence for row in rows), decision)

    # --- pages and slots ---------------------------------------------------------------

    def _grow(self) -> tuple[int, ...]:
        """Reserve one position for every decoding row, oldest first. Slots thereby preempted."""
        closed: list[int] = []
        for sequence in tuple(self.running):
            while sequence.slot is not None and not sequence.table.reserve(1):
                closed.append(self.preempt(self.running[-1]))
        return tuple(closed)

    def _admit(self) -> tuple[Sequence, ...]:
        """Move waiting sequences to free slots while this step's nodes and the pages suffice."""
        if not self.waiting:
            return ()
        opened: list[Sequence] = []
        nodes = sum(sequence.pending for sequence in self.running if self._ready(sequence))
        for sequence in tuple(self.waiting):
            if not self._slots or nodes >= self.limits.max_nodes:
                break
            if self._awaits_pages(sequence):
                continue
            if not self._reserve_prompt(sequence):
                break
            self.waiting.remove(sequence)
            sequence.slot = self._slots.pop()
            insort(self.running, sequence, key=lambda s: s.order)
            opened.append(sequence)
            nodes += sequence.pending
        return tuple(opened)

    def _awaits_pages(self, sequence: Sequence) -> bool:
        """Someone is computing a page that this sequence begins with too: better wait for it.

        Other choices of the same request above all, but also a new system prompt that many
        requests share.
        """
        if not sequence.reuses_prefix:
            return False
        size = self.index.page_size
        for other in self.running:
            if other.pending > 1 and self._ready(other):
                shared = common(other.tokens, sequence.tokens[:-1]) // size * size
                if shared > other.table.length:
                    return True
        return False

    def _reserve_prompt(self, sequence: Sequence) -> bool:
        """Pages for all known tokens, found or new, leaving one for each running row to grow."""
        table, index = sequence.table, self.index
        if sequence.reuses_prefix:
            # One token at least must run, or nothing would be there to sample from.
            table.start(sequence.tokens[: sequence.total - 1 + index.lookahead])
        missing = -(-(sequence.total - table.reserved) // index.page_size)
        if missing + len(self.running) > index.available:
            table.release()
            return False
        if sequence.cached_tokens is None:
            sequence.cached_tokens = table.length
        return table.reserve(sequence.pending)

    def _vacate(self, sequence: Sequence) -> int:
        """Take slot and pages from a sequence that is no longer in `running`."""
        slot = sequence.slot
        assert slot is not None
        sequence.table.release()
        sequence.slot = None
        self._slots.append(slot)
        return slot

    # --- rows --------------------------------------------------------------------------

    def _rows(self, opened: tuple[Sequence, ...]) -> tuple[list[_Row], Decision]:
        """Divide the step's nodes; the first rows are those that the decision is about.

        0 ... decoding rows ... + draft tokens ............ max_nodes
              one node each     | at most half of the | prefill chunks,
                                | rest if any prefill | oldest first
        """
        ready = list(filter(self._ready, self.running))
        decoding = [sequence for sequence in ready if sequence.pending == 1]
        prefill = [sequence for sequence in ready if sequence.pending > 1]
        room, logits = self.limits.max_nodes - len(decoding), self._scored - len(ready)
        fresh = [s for s in decoding if s in opened]  # Nobody knows anything of them yet.
        rows = [_Row(sequence, 1) for sequence in decoding if sequence not in fresh]
        decision = self._grant(rows, min(room // 2 if prefill else room, logits))
        room -= sum(row.budget.nodes for row in rows)
        rows += [_Row(sequence, 1) for sequence in fresh]
        for sequence in prefill:
            chunk = min(sequence.pending, room)
            if chunk:
                rows.append(_Row(sequence, chunk))
                room -= chunk
        return rows, decision

    def _grant(self, rows: list[_Row], room: int) -> Decision:
        """Let rows have draft tokens for at most `room` nodes in all, and pages for them."""
        if not rows:
            return NOBODY
        most = sizes[len(self.running) - 1] - 1 if (sizes := self.limits.row_nodes) else room
        decision = self.policy.decide(
            np.array([row.sequence.slot for row in rows], np.int32),
            np.array([row.sequence.table.length + row.in_flight for row in rows], np.int32),
            any(row.sequence.request.grammar is not None for row in rows),
        )
        for row, budget in zip(rows, decision.rows, strict=True):
            if not row.sequence.request.speculation.enabled:
                budget = UNWANTED  # noqa: PLW2901
            row.sequence.tally.reason = budget.reason
            row.budget = _bounded(_within_request(row, budget), most, most, CRAMPED)
        given = share_out([row.budget.nodes for row in rows], room)
        for row, nodes in zip(rows, given, strict=True):
            if row.budget.nodes:
                depth = self._reserve_draft_tokens(row, min(row.budget.depth, nodes))
                row.budget = _bounded(row.budget, nodes, depth, CRAMPED)
        self._granted = tuple(row.budget for row in rows)
        return decision

    def _reserve_draft_tokens(self, row: _Row, depth: int) -> int:
        """Pages for paths of up to `depth` draft tokens; how deep they may be. Preempts nobody."""
        table = row.sequence.table
        within = table.reserved + self.index.available * self.index.page_size
        depth = min(depth, within - table.length - row.in_flight - 1)
        if depth > 0:
            last = row.sequence.end + 1 - table.length  # The end of the text may be nearer.
            table.reserve(min(row.in_flight + 1 + depth, last))
        return max(depth, 0)

    def _plan(self, rows: list[_Row]) -> Plan:
        """The rows as the arrays that an executor takes."""
        sequences = [row.sequence for row in rows]
        facts = [  # In the order of the columns below.
            (
                row.sequence.slot,
                row.sequence.table.length + row.in_flight,
                row.budget.nodes,
                row.budget.depth,
                row.known == row.sequence.pending,
                row.sequence.request.grammar is not None,
                row.budget.model_depth,
            )
            for row in rows
        ]
        columns = np.array(facts, np.int32).reshape(-1, 7).T.copy()
        slots, kv_len, nodes, depth, samples, constrained, model_depth = columns
        return Plan(
            slots=slots,
            kv_len=kv_len,
            known=tuple(row.sequence.upcoming(row.known) for row in rows),
            samples=samples.astype(np.bool_),
            max_nodes=nodes,
            max_depth=depth,
            page_table=page_rows(sequences),
            constrained=constrained.astype(np.bool_),
            min_prob=min((row.budget.min_prob for row in rows if row.budget.nodes), default=0.0),
            model_depth=model_depth,
        )

    def load(self, entering: int) -> Load:
        """What is held now; `entering` more sequences are on their way into the queue."""
        return Load(
            waiting=len(self.waiting) + entering,
            running=len(self.running),
            pages=self.limits.pages,
            pages_held=self.limits.pages - self.index.available,
            pages_kept=self.index.kept,
            granted=self._granted,
        )

    def check(self) -> None:
        """Prove that no page and no slot leaked. Raises AssertionError with what is wrong."""
        self.index.check()
        held: dict[int, int] = {}
        for sequence in self.running + self.leaving + self.waiting:
            sequence.check()
            for page in sequence.table.pages:
                held[page] = held.get(page, 0) + 1
        pool = self.index.pool
        for page, count in held.items():
            assert pool.references(page) == count, f"page {page} has a holder too many"
        assert pool.held == len(held), "a page leaked: it is held, but in no table"
        open_slots = [s.slot for s in self.running + self.leaving if s.slot is not None]
        slots = range(min(self.limits.slots, self._scored))
        assert sorted(self._slots + open_slots) == [*slots], "a slot leaked"
        assert all(s.slot is None for s in self.waiting), "a waiting sequence has a slot"
        for queue in (self.waiting, self.running):
            orders = [s.order for s in queue]
            assert orders == sorted(orders), "a queue is out of order"


def common(one: Ints, two: Ints) -> int:
    """How many tokens two texts begin with in common."""
    length = min(len(one), len(two))
    different = np.flatnonzero(one[:length] != two[:length])
    return int(different[0]) if len(different) else length


def page_rows(sequences: list[Sequence]) -> Ints:
    """int32[B,W] the page tables of `sequences`, padded with -1 to the longest."""
    width = max((len(s.table.pages) for s in sequences), default=0)
    rows = np.empty((len(sequences), width), np.int32)
    rows.fill(-1)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence.table.pages)] = sequence.table.pages
    return rows


def _within_request(row: _Row, budget: Budget) -> Budget:
    """The policy's budget, as far as the request and the end of its answer allow."""
    if not budget.nodes:
        return budget
    # The target adds a token of its own, so a path may leave room for one; a running step, too.
    left = row.sequence.remaining - 1 - (row.in_flight > 0)
    budget = _bounded(budget, budget.nodes, left, CRAMPED)
    bounds = row.sequence.request.speculation
    nodes = budget.nodes if bounds.max_nodes is None else bounds.max_nodes
    return _bounded(budget, nodes, nodes if bounds.max_depth is None else bounds.max_depth, BOUND)


def _bounded(budget: Budget, nodes: int, depth: int, reason: str) -> Budget:
    """The budget, with no more than that; where that is less, for this reason."""
    if budget.nodes <= nodes and budget.depth <= depth:
        return budget
    some = nodes > 0 and depth > 0
    nodes, depth = some * min(budget.nodes, nodes), some * min(budget.depth, depth)
    model_depth = min(budget.model_depth, depth)
    return replace(budget, nodes=nodes, depth=depth, model_depth=model_depth, reason=reason)
