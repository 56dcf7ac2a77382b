"""What the host costs per step, in lines of Python. Bounds leave a factor of about 1.5 over what
was counted; what it costs in processor time is measured by bench/host.py.
"""

from collections import deque

import numpy as np

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
from tests.engine.toys import GREEDY, TOKENIZER, RecordingSink, ask, limits, make, step

ROWS = 32


class ConstantToy(ToyExecutor):
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
    engine = make(name, executor=ConstantToy(shape), policy=policy, nodes=8, depth=8)
    for i in range(rows):
        engine.submit(ask(str(i), f"Prompt {i} " * 20, 1000), sink or RecordingSink())
    while engine.stats().load.waiting or not engine.stats().output_tokens:
        engine.step_once()
    return engine


def test_a_row_that_drafts():
    """Planning, drafting, trees, pages, stop conditions, text and deltas."""
    engine = running("ngram")
    assert lines(lambda: [engine.step_once() for _ in range(10)]) / (10 * ROWS) < 1800


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


def test_matching_a_prefix():
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

    assert lines(match) / 256 < 29


def test_text_of_a_token():
    stream = TextStream(TOKENIZER, ("never", "nor this"))
    assert lines(lambda: [stream.push(97 + i % 20) for i in range(1000)]) / 1000 < 38


def test_lookup_of_a_continuation():
    """One draft of eight draft tokens from a text of 2,000 tokens that repeats itself."""
    drafter = NgramDrafter(2)
    tokens = np.tile(np.arange(250, dtype=np.int32), 8)
    drafter.begin(SlotInit(1, TokenText(tokens), len(tokens), GREEDY))
    assert len(drafter.propose(one_row(8, 8))[0]) == 8
    assert lines(lambda: [drafter.propose(one_row(8, 8)) for _ in range(20)]) / 20 < 1300


def test_indexing_a_prompt():
    """Per token, when a sequence takes a slot."""
    drafter = NgramDrafter(2)
    tokens = np.random.default_rng(0).integers(0, 50000, 4096).astype(np.int32)
    begin = SlotInit(1, TokenText(tokens), len(tokens), GREEDY)
    assert lines(lambda: drafter.begin(begin)) / 4096 < 0.05
