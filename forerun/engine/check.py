"""Checks for leaks: run when the engine becomes idle, and by tests after every step."""

from collections import Counter
from collections.abc import Iterable, Mapping

from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Sequence
from forerun.types import RequestId


def check_all(
    scheduler: Scheduler,
    open: list[Sequence],
    slots: Iterable[int],
    live: Mapping[RequestId, list[Sequence]],
) -> None:
    """Check that no page, slot or sequence leaked. Raises AssertionError with the fault.

    open   sequences that have a slot
    slots  that are open in executor, drafter and grammars
    live   the choices of each request that have not ended
    """
    check_scheduler(scheduler, open)
    assert set(slots) == {s.slot for s in open}, "a slot is open without a sequence"
    known = {id(sequence) for sequences in live.values() for sequence in sequences}
    assert known == set(map(id, scheduler.running + scheduler.waiting)), "a sequence is lost"
    if not known and not open:
        assert scheduler.index.held == 0, "pages are held, but there is no sequence"


def check_scheduler(scheduler: Scheduler, open: list[Sequence]) -> None:
    """Raise AssertionError if a page or a slot leaked; `open` are the sequences with a slot."""
    index, waiting = scheduler.index, scheduler.waiting
    index.check()
    held = Counter(scheduler.disk.held if scheduler.disk is not None else ())
    for sequence in open + waiting:
        check_sequence(sequence)
        for page in sequence.table.pages:
            held[page] += 1
    for page, count in held.items():
        assert index.references(page) == count, f"page {page} is counted wrongly"
    assert index.held == len(held), "a page leaked: it is held, but in no table"
    open_slots = [s.slot for s in open if s.slot is not None]
    slots = range(min(scheduler.limits.slots, scheduler.num_logits_rows))
    assert sorted(scheduler.free_slots + open_slots) == [*slots], "a slot leaked"
    assert all(s.slot is None for s in waiting), "a waiting sequence has a slot"
    for queue in (waiting, scheduler.running):
        orders = [s.order for s in queue]
        assert orders == sorted(orders), "a queue is out of order"


def check_sequence(sequence: Sequence) -> None:
    """Raise AssertionError unless a sequence's counters are in order (see Sequence)."""
    table = sequence.table
    assert 0 < sequence.prompt_len <= sequence.total <= len(sequence.buffer)
    assert 0 <= table.length < sequence.total, "more keys and values than tokens"
    assert sequence.slot is not None or table.reserved == 0, "pages without a slot"
    table.check()
