"""The order of a fair queue. Time is a number that the tests set."""

import threading

from forerun.constrain.isolation.fair_queue import FORGET, FairQueue, PrioritySemaphore


class ManualQueue:
    """A queue whose turns are held until they are ended by hand."""

    def __init__(self):
        self.now = 0.0
        self.queue = FairQueue(lambda: self.now)
        self.order: list[str] = []
        self._came: dict[str, threading.Event] = {}
        self._ends: dict[str, threading.Event] = {}
        self._threads: dict[str, threading.Thread] = {}

    @property
    def present(self) -> int:
        """How many wait or have the turn."""
        places = self.queue._places
        return len(places._waiting) + (places._free == 0)

    def come(self, name: str, client: str, cost: float) -> None:
        came, end = threading.Event(), threading.Event()
        self._came[name], self._ends[name] = came, end
        before = self.present

        def work():
            with self.queue.place(client, cost):
                self.order.append(name)
                came.set()
                assert end.wait(60)

        self._threads[name] = threading.Thread(target=work, daemon=True)
        self._threads[name].start()
        while self.present == before:
            self._threads[name].join(0.001)
        if not before:
            assert came.wait(60)

    def end(self, seconds: float = 0.0) -> None:
        """End the turn that is held, `seconds` after it began."""
        before, name = len(self.order), self.order[-1]
        self.now += seconds
        self._ends[name].set()
        self._threads[name].join(60)
        while len(self.order) == before < len(self._came):
            threading.Event().wait(0.001)


def test_small_work_passes_large_work_and_equal_work_keeps_its_order():
    office = ManualQueue()
    office.come("first", "a", 1.0)
    for name, cost in (("large", 5.0), ("one", 0.1), ("two", 0.1), ("small", 0.01)):
        office.come(name, "a", cost)
    for _ in range(5):
        office.end()
    assert office.order == ["first", "small", "one", "two", "large"]


def test_a_tenant_that_used_much_waits_for_others():
    office = ManualQueue()
    office.come("long", "greedy", 0.1)
    office.end(8.0)
    office.come("held", "x", 0.1)
    office.come("more", "greedy", 0.1)
    office.now += 2.0
    office.come("other", "modest", 1.0)
    for _ in range(3):
        office.end()
    assert office.order == ["long", "held", "other", "more"]


def test_no_request_waits_for_ever():
    office = ManualQueue()
    office.come("first", "a", 1.0)
    office.come("large", "a", 5.0)
    office.now += 6.0
    office.come("late", "a", 0.1)
    office.end()
    office.end()
    office.end()
    assert office.order == ["first", "large", "late"], "it has waited longer than it takes"


def test_what_was_used_is_forgotten():
    office = ManualQueue()
    office.come("long", "greedy", 0.1)
    office.end(8.0)
    assert office.queue._of("greedy") == 8.0
    office.now += 3 * FORGET
    assert office.queue._of("greedy") == 1.0


def test_the_least_worked_has_the_next_turn():
    """Two turns at a time; a turn lasts until its work ends."""
    queue, order, ends, threads = PrioritySemaphore(2), [], {}, []

    def come(name, worked):
        ends[name] = threading.Event()

        def work():
            with queue.place(worked):
                order.append(name)
                assert ends[name].wait(60)

        before = len(order) + len(queue._waiting)
        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
        while len(order) + len(queue._waiting) == before:
            threads[-1].join(0.001)

    def end(name):
        before = len(order)
        ends[name].set()
        while len(order) == before < len(ends):
            threading.Event().wait(0.001)

    for name, worked in (("one", 9.0), ("two", 9.0), ("long", 5.0), ("new", 0.0), ("some", 1.0)):
        come(name, worked)
    for name in ("one", "new", "two", "some", "long"):
        end(name)
    for thread in threads:
        thread.join(60)
    assert order == ["one", "two", "new", "some", "long"] and queue._free == 2
