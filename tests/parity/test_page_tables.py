"""Page tables that are sent as differences, against whole ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.build.engine import make_engine
from forerun.client.completion import make_request
from forerun.executors.torch.captured.fixed import BufferDims, RoundBuffers, changes_of, room_of
from forerun.executors.torch.captured.round import PageTables, StagingBuffer
from forerun.executors.torch.captured.runner import CudaGraphRunner
from forerun.executors.torch.sizes import Size
from tests.parity.tape import Tape, taped
from tests.worlds import answers

CPU = torch.device("cpu")
SLOTS, WIDTH = 5, 9


class WholeTables(PageTables):
    """The reference: every round is sent its whole tables."""

    def send(self, buffers, slots, table):
        self.forget()
        return super().send(buffers, slots, table)


class Device:
    """What a round does of it, one after the other."""

    def __init__(self, kind, size, page_size):
        dims = BufferDims(WIDTH, SLOTS, 2, 32, 2, page_size)
        self.size, self.tables = size, kind(SLOTS, WIDTH, size.rows, CPU)
        room = torch.zeros(room_of(size.rows, size.total, dims), dtype=torch.int32)
        self.sized, self._staging = RoundBuffers(size, dims, room), StagingBuffer(room)

    def staging(self):
        self._staging.reset(self.sized)
        return self._staging

    def run(self, slots, page_table):
        """The rows' tables, and whether they fitted into the round's own facts."""
        staging = self.staging()
        staging.buffers["slot"][: len(slots)] = slots
        more = self.tables.send(staging.buffers, slots, page_table)
        for entries in more:
            entries()
        self.sized.flat.copy_(staging.flat)
        table = self.tables.of(self.size, self.sized.buffers)
        return table.clone().numpy(), not more


PAGES = st.lists(st.integers(0, 40), max_size=WIDTH)
STEP = st.tuples(
    st.permutations(range(SLOTS)), st.integers(1, SLOTS), st.lists(PAGES, min_size=5, max_size=5)
)


@settings(max_examples=25)
@given(st.lists(STEP, min_size=1, max_size=12), st.sampled_from([1, 4, 16]), st.integers(0, 3))
def test_tables_are_whole_after_any_steps(steps, page_size, lost):
    """Pages come, go and change their places, slots are taken by others, rounds do not begin."""
    size = Size(SLOTS + 1, 2)
    ours, whole = (Device(kind, size, page_size) for kind in (PageTables, WholeTables))
    for number, (order, count, pages) in enumerate(steps):
        slots, width = np.array(order[:count], np.int32), max(map(len, pages[:count]))
        table = np.full((count, width), -1, np.int32)
        for row, mine in zip(table, pages, strict=False):
            row[: len(mine)] = mine
        if number % 4 == lost:  # It was written, and never began.
            ours.tables.send(ours.staging().buffers, slots, table)
            ours.tables.forget()
            continue
        actual, expected = ours.run(slots, table)[0], whole.run(slots, table)[0]
        real = table >= 0
        assert (actual[:count, :width][real] == table[real]).all()
        assert (expected[:count, :width][real] == table[real]).all()
        assert (actual[count:, 0] == 0).all(), "a row without a slot is page 0"


def test_what_did_not_change_is_not_sent():
    device = Device(PageTables, Size(SLOTS, 1), 16)
    table = np.arange(2 * WIDTH, dtype=np.int32).reshape(2, WIDTH)
    slots = np.array([3, 1], np.int32)
    assert not device.run(slots, table)[1]  # Two whole rows are more than there is room for.
    staging = device.staging()
    assert device.tables.send(staging.buffers, slots, table) == ()
    assert not staging.buffers["sent"].any()
    table[1, 4] = 40
    assert device.tables.send(staging.buffers, slots, table) == ()
    assert staging.buffers["sent"].tolist()[:2] == [40, 0]
    assert staging.buffers["sent_to"].view(np.int64)[:, 0].tolist()[:2] == [1 * WIDTH + 4, 45]


def test_a_step_of_64_rows_of_32k_is_sent_kilobytes():
    """Room for two pages of every row, whatever the context: before, 2,048 of each were sent."""
    dims = BufferDims(32_768 // 16, 64, 4, 128_256, 8, 16)
    size = Size(64, 1)
    sized = RoundBuffers(size, dims, torch.zeros(room_of(64, 64, dims), dtype=torch.int32))
    sent = 12 * changes_of(size, 16)
    assert sent == 1_536
    assert 4 * sized.flat.numel() == 7_540
    assert 4 * sized.flat.numel() - sent + 4 * 64 * 2_048 == 530_292


class CheckingTape(Tape):
    """Holds the tables of every round that ran to what its plan said."""

    def __init__(self):
        super().__init__()
        self.plans, self.pending, self.checked, self.overflows = {}, None, 0, 0
        self.wrong = []

    def sent(self, tables, page_table, more):
        self.pending = tables, page_table.copy()
        self.overflows += bool(more)

    def launch(self, work):
        wait = super().launch(work)
        self.plans[self.launched], self.pending = self.pending, None
        return wait

    def _next(self):
        super()._next()
        plan = self.plans.pop(self.done)
        if plan is not None:
            tables, expected = plan
            count, width = expected.shape
            actual, real = tables._rows[:count, :width].numpy(), expected >= 0
            self.checked += 1
            if not (actual[real] == expected[real]).all():
                self.wrong.append((self.done, actual, expected))


@pytest.fixture(scope="module")
def device(folder, learned):
    """A small model with a head, on a device that is slow and looks at every table."""
    tape, send = CheckingTape(), PageTables.send
    shape = {"chunked_prefill_size": 128, "context": 128, "page_size": 4, "kv_tokens": 128}
    with pytest.MonkeyPatch.context() as patch:

        def send_recorded(self, buffers, slots, table):
            more = send(self, buffers, slots, table)
            tape.sent(self, table, more)
            return more

        patch.setattr(PageTables, "send", send_recorded)
        target = taped(folder, learned[0], tape, True, max_sequences=4, **shape)
        yield target, tape, learned[1]
        target.close()


def requests_of(texts):
    """Seven of them, with chances of their own."""
    prompts = [texts[n % len(texts)][: 6 + n] for n in range(7)]
    lengths = np.random.default_rng(3).integers(30, 60, 7)
    return answers.wanted(prompts, lengths, [0.8 * (n % 2) for n in range(7)])


@pytest.fixture(scope="module")
def plain(device):
    """What is answered without speculation when all come at once."""
    target, _, texts = device
    return answers.plain(target, requests_of(texts))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "overlap"),
    [
        (answers.OFF, True),
        ({"speculative_algorithm": "NGRAM"}, False),
        (answers.drafting(3, 3, 1, "EAGLE"), True),
    ],
)
def test_every_round_has_its_plans_tables(device, plain, algorithm, overlap):
    """More requests than slots and pages: sequences are preempted, slots reused, prefixes shared,
    and with overlap the next tables are sent before this round is over.
    """
    target, tape, texts = device
    before = tape.checked, tape.overflows
    actual, stats = answers.answered(target, requests_of(texts), 2, overlap=overlap, **algorithm)
    assert stats.preemptions > 0 and stats.failed_steps == 0
    assert not tape.wrong, "a round had another page table"
    assert tape.checked - before[0] > 30
    # More than a round has room for goes to those that have just read a prompt, mostly.
    assert 3 * (tape.overflows - before[1]) < tape.checked - before[0]
    assert answers.tokens(actual) == plain


def test_a_round_that_cannot_begin_leaves_nothing_behind(device, monkeypatch):
    target, _, texts = device
    launch, fails = CudaGraphRunner.launch, [True]

    def failing(self, *work):
        if fails:
            raise RuntimeError(f"nothing begins today{fails.pop()}")
        return launch(self, *work)

    monkeypatch.setattr(CudaGraphRunner, "launch", failing)
    engine = make_engine(target, replace(target.config, speculative_algorithm="OFF"))
    deltas = [[], []]
    for mine, length in zip(deltas, (8, 11), strict=True):
        request = make_request(np.array(texts[0][:length], np.int32), max_tokens=12)
        engine.submit(request, mine.append)
        while engine.step_once():
            pass
    engine.shutdown()
    assert "nothing begins today" in deltas[0][-1].error
    assert deltas[1][-1].error is None and len(answers.tokens(deltas)[1]) > 0
