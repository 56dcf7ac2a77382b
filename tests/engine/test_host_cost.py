"""What the host costs per step, in lines of Python and, among the slow tests, in units of processor
time.

A unit is the time of a plain Python loop of 1,000 turns, 40 to 120 microseconds. Bounds leave a
factor of about 1.5 over the lines that were counted when they were written, and of 2.5 over the
units; whoever makes the host slower than that should know it.
"""

import time
from collections import deque

import numpy as np
import pytest

from forerun.cache.prefix import PrefixIndex
from forerun.cache.table import PageTable
from forerun.control.step_costs import StepCosts
from forerun.drafters.ngram import NgramDrafter
from forerun.executors.toy import ToyExecutor
from forerun.interface.plan import Outcome, Round
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.text.stream import TextStream
from tests.control.steps import FREE, PolicyOnTable, seen
from tests.counted import lines
from tests.drafters.test_ngram import plan as one_row
from tests.engine.toys import GREEDY, TOKENIZER, Ear, ask, limits, make, step

ROWS = 32


def cpu_time(work, repeats=5):
    """The least CPU seconds that `work()` took."""
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        work()
        best = min(best, time.thread_time() - start)
    return best


def turns():
    seen = {}
    for i in range(1000):
        seen[i & 63] = i * 3 % 7


@pytest.fixture(params=["lines", pytest.param("units", marks=pytest.mark.slow)])
def cheap(request):
    """Whether `work()` costs no more than so many lines, or units, for each of `times`."""

    def check(work, times, most_lines, most_units):
        if request.param == "lines":
            return lines(work) / times < most_lines
        return cpu_time(work) / cpu_time(turns, 20) / times < most_units

    return check


class Parrot(ToyExecutor):
    """Says "a" at once, whatever the tree: what is left is the engine's own work."""

    def open(self, slot_init):
        pass

    def close(self, slot):
        pass

    def begin(self, plan, trees, masks=None):
        return Round(plan, trees)

    def finish(self, round, masks=None):
        plan, trees = round.plan, round.trees
        output_tokens = plan.samples.astype(np.int32)
        return Outcome(
            n_tokens=output_tokens,
            tokens=np.full((plan.rows, 1), 97, np.int32),
            n_draft_tokens=(np.diff(trees.start) - trees.known).astype(np.int32),
            finite=np.ones(plan.rows, np.bool_),
        )


def running(name, rows=ROWS, policy=None, sink=None):
    shape = limits(slots=rows, pages=128 * rows, max_nodes=512, page_size=16, context=2000)
    engine = make(name, executor=Parrot(shape), policy=policy, nodes=8, depth=8)
    for i in range(rows):
        engine.submit(ask(str(i), f"Prompt {i} " * 20, 1000), sink or Ear())
    while engine.stats().load.waiting or not engine.stats().output_tokens:
        engine.step_once()
    return engine


@pytest.mark.parametrize(("name", "most"), [("none", (310, 0.6)), ("ngram", (1800, 3.0))])
def test_a_row_of_a_step(cheap, name, most):
    """Planning, trees, pages, stop conditions, text and deltas (and drafting), per row."""
    engine = running(name)
    work = lambda: [engine.step_once() for _ in range(10)]  # noqa: E731
    assert cheap(work, 10 * ROWS, *most)


def test_what_one_more_row_costs():
    """Count the lines that a row without draft tokens adds to a step, between 16 and 64 rows, pages
    of 16 tokens included. Loops that a reader can follow have room: each of their turns counts as a
    line. What rows cost in processor time is measured by bench/host.py. (78 lines take .61 ms at 64
    rows, where 6 lines over columns of attributes took .64.)
    """
    counted = []
    for rows in (16, 64):
        engine = running("none", rows, sink=deque(maxlen=0).append)
        counted.append(lines(lambda: [engine.step_once() for _ in range(160)]) / 160)  # noqa: B023
    assert (counted[1] - counted[0]) / 48 <= 80
    assert counted[1] <= 5700


def test_speculation_at_rest_costs_next_to_nothing():
    """Count the lines that a drafter at rest adds to each of 64 rows, trials included. (Counted:
    14.8, of some 80 that a row may have.)
    """
    dear = StepCosts((1, 64, 128), (1.0, 10.0, 40.0))
    policy = seen(PolicyOnTable(dear, 8, 8, FREE))
    counted = []
    for engine in (running("none", 64), running("ngram", 64, policy)):
        step(engine, 256)
        counted.append(lines(lambda: [engine.step_once() for _ in range(128)]))  # noqa: B023
    plain, resting = counted
    assert resting - plain < 16 * 64 * 128


def test_planning_a_row(cheap):
    engine = running("none")
    work = lambda: [engine._core.scheduler.plan() for _ in range(10)]  # noqa: E731
    assert cheap(work, 10 * ROWS, 90, 0.1)


def test_matching_a_prefix(cheap):
    """Per page of 16 tokens."""
    index = PrefixIndex(256, 16)
    tokens = np.arange(4096, dtype=np.int32)
    table = PageTable(index)
    table.reserve(4096)
    table.commit(4096, tokens)
    table.release()

    def match():
        table = PageTable(index)
        assert table.start(tokens) == 4096
        table.release()

    assert cheap(match, 256, 29, 0.03)


def test_text_of_a_token(cheap):
    stream = TextStream(TOKENIZER, ("never", "nor this"))
    work = lambda: [stream.push(97 + i % 20) for i in range(1000)]  # noqa: E731
    assert cheap(work, 1000, 38, 0.06)


def test_lookup_of_a_continuation(cheap):
    """One draft of eight draft tokens from a text of 2,000 tokens that repeats itself."""
    drafter = NgramDrafter(2)
    tokens = np.tile(np.arange(250, dtype=np.int32), 8)
    drafter.begin(SlotInit(1, TokenText(tokens), len(tokens), GREEDY))
    work = lambda: [drafter.propose(one_row(8, 8)) for _ in range(20)]  # noqa: E731
    assert len(drafter.propose(one_row(8, 8))[0]) == 8
    assert cheap(work, 20, 1300, 2.2)


def test_indexing_a_prompt(cheap):
    """Per token, when a sequence takes a slot."""
    drafter = NgramDrafter(2)
    tokens = np.random.default_rng(0).integers(0, 50000, 4096).astype(np.int32)
    work = lambda: drafter.begin(SlotInit(1, TokenText(tokens), len(tokens), GREEDY))  # noqa: E731
    assert cheap(work, 4096, 0.05, 0.012)
