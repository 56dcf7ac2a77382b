"""The n-gram drafter of the compiled core against the one in NumPy: the same draft tokens, bit for
bit."""

import time
from array import array
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.client.completion import complete, make_request
from forerun.control.host_drafts import ScoreCalibration, cut, ranked, scored
from forerun.drafters.native_ngram import CpuNgramDrafter
from forerun.drafters.ngram import NgramDrafter
from forerun.drafts.ngram_counts import count_ngrams
from forerun.errors import EngineError
from forerun.executors.cpu import native
from forerun.interface.plan import NodeCosts, Outcome, Plan
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.options.config import EngineConfig
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import NO_DRAFT, DraftSource, batch
from tests.cli.toys import toy_loaded
from tests.counted import lines
from tests.covering import every, some_of, values
from tests.engine.toys import GREEDY

SLOTS = 4


def slot_init(slot, tokens, prediction=(), sampling=GREEDY, output=0):
    """The last `output` of the tokens are no prompt."""
    predicted = np.array(prediction, np.int32)
    prompt = len(tokens) - min(output, len(tokens))
    return SlotInit(slot, TokenText(tokens), prompt, sampling, predicted)


def plan_of(slots, nodes, depths, min_prob=0.0, prices=None):
    rows = len(slots)
    return Plan(
        slots=np.array(slots, np.int32),
        kv_len=np.zeros(rows, np.int32),
        known=(np.zeros(1, np.int32),) * rows,
        samples=np.ones(rows, np.bool_),
        max_nodes=np.array(nodes, np.int32),
        max_depth=np.array(depths, np.int32),
        page_table=np.zeros((rows, 1), np.int32),
        constrained=np.zeros(rows, np.bool_),
        min_prob=min_prob,
        node_costs=prices,
    )


def outcome_of(emitted):
    """What the target said, row by row."""
    rows, width = len(emitted), max(map(len, emitted))
    tokens = np.full((rows, max(width, 1)), -1, np.int32)
    for row, output_tokens in enumerate(emitted):
        tokens[row, : len(output_tokens)] = output_tokens
    counts = np.array([len(output_tokens) for output_tokens in emitted], np.int32)
    return Outcome(counts, tokens, np.zeros(rows, np.int32), np.ones(rows, np.bool_))


class PricedNgramDrafter(NgramDrafter):
    """The drafter in NumPy with the policy's own way to choose what pays, by prices.

    waiting  by slot: what was found at the last proposal, verified or not, and what came since
    """

    def __init__(self, *settings):
        super().__init__(*settings)
        self.calibration, self.waiting = ScoreCalibration(), {}

    def begin(self, slot_init):
        super().begin(slot_init)
        self.waiting[slot_init.slot] = NO_DRAFT, []

    def propose(self, plan):
        trees = super().propose(plan)
        wanted = ((plan.max_nodes > 0) & (plan.max_depth > 0)).tolist()
        for slot, draft, some in zip(plan.slots.tolist(), trees, wanted, strict=True):
            if some:
                self.calibration.learn(*self.waiting[slot])
                self.waiting[slot] = (NO_DRAFT if plan.node_costs is None else draft), []
        return (
            trees if plan.node_costs is None else bought(self.calibration, trees, plan.node_costs)
        )

    def observe(self, plan, trees, outcome):
        super().observe(plan, trees, outcome)
        for slot, tokens in zip(plan.slots.tolist(), outcome.output_tokens, strict=True):
            self.waiting[slot][1].extend(tokens)


def bought(trust, drafts, prices):
    """Of all rows what brings most beyond its price."""
    believed = [trust.calibrate(draft) for draft in drafts]
    scores, owners = scored(believed)
    layers = ranked(scores, owners, together=prices.padded)[: len(prices.tokens)]
    brought = np.cumsum([sum(scores[index] for index in layer) for layer in layers])
    won = [0.0, *(brought - np.array(prices.tokens)[: len(layers)])]
    return cut(believed, [index for layer in layers[: int(np.argmax(won))] for index in layer])


class BothDrafters:
    """Both drafters on the same tokens; every proposal is compared."""

    def __init__(self, min_prob=0.2, table=None, capacity=0):
        kinds = (PricedNgramDrafter, CpuNgramDrafter)
        self.both = [kind(SLOTS, min_prob, table, capacity) for kind in kinds]
        self.open: dict[int, TokenText] = {}

    def begin(self, slot, tokens, *more, tenant=0):
        opened = replace(slot_init(slot, tokens, *more), tenant=tenant)
        for drafter in self.both:
            drafter.begin(opened)
        self.open[slot] = opened.text

    def use(self, table):
        for drafter in self.both:
            drafter.use(table)

    def end(self, slot):
        for drafter in self.both:
            drafter.end(slot)
        self.open.pop(slot, None)
        slow, fast = (drafter.describe()["cache"] for drafter in self.both)
        assert slow == fast

    def step(self, slots, nodes, depths, emitted, min_prob=0.0, prices=None):
        """Returns how many draft tokens there were."""
        plan = plan_of(slots, nodes, depths, min_prob, prices)
        slow, fast = (drafter.propose(plan) for drafter in self.both)
        assert len(slow) == len(fast) == len(slots)
        for one, other in zip(slow, fast, strict=True):
            for name in ("tokens", "parents", "score", "source") if len(one) else ():
                mine, others = getattr(one, name), getattr(other, name)
                assert mine.dtype == others.dtype and mine.tobytes() == others.tobytes(), name
            assert prices is not None or (one.score >= min_prob - 1e-6).all()
        if prices is not None:
            counts = list(map(len, fast))
            assert (max if prices.padded else sum)(counts) <= len(prices.tokens)
        trust = self.both[1].describe()["trust_in_scores"]
        assert trust == pytest.approx(self.both[0].calibration.share, abs=6e-4)
        trees, outcome = batch(list(plan.known), fast), outcome_of(emitted)
        for slot, tokens in zip(slots, emitted, strict=True):
            self.open[slot].append(tokens)
        for drafter in self.both:
            drafter.observe(plan, trees, outcome)
        return sum(map(len, fast))


EMITTED = st.lists(st.integers(0, 3), max_size=60)
AGAIN = st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(2, 40), EMITTED)
WORDS = st.one_of(EMITTED, AGAIN.map(lambda it: (it[0] * it[1])[:40] + it[2][:20]))
"""Of which some repeat themselves for longer than is looked back."""
PRICES = st.one_of(
    st.none(),
    st.builds(
        NodeCosts,
        st.lists(st.floats(0.0, 0.4), max_size=40).map(lambda each: array("d", np.cumsum(each))),
        st.booleans(),
    ),
)
SAMPLINGS = st.one_of(
    st.just(GREEDY), st.builds(Sampling, temperature=st.just(0.8), seed=st.integers(0, 2**64 - 1))
)
LIMITS = st.tuples(st.sampled_from([0, 1, 3, 8, 64]), st.sampled_from([0, 1, 2, 5, 64]))


def table_of(answers, vocab):
    """The n-gram table of some answers."""
    starts = np.append(0, np.cumsum([len(answer) for answer in answers])).astype(np.int64)
    tokens = np.concatenate([*map(np.array, answers), []]).astype(np.int64)
    return count_ngrams(tokens, np.ones(len(tokens), np.bool_), starts, vocab)


@settings(max_examples=25)
@given(st.data(), st.sampled_from([0.0, 0.05, 0.2, 0.6]), st.sampled_from([0, 8, 1 << 20]))
def test_any_course_of_events(data, min_prob, capacity):
    """With a table, a cache, both or neither; a table may come later. capacity: of the cache."""
    tables = st.lists(WORDS, max_size=9).map(lambda answers: table_of(answers, 4))
    pair = BothDrafters(min_prob, data.draw(st.none() | tables), capacity)
    for _ in range(data.draw(st.integers(1, 20))):
        if not pair.open or data.draw(st.integers(0, 4)) == 0:
            prediction = data.draw(st.one_of(st.just([]), WORDS))
            more = prediction, data.draw(SAMPLINGS), data.draw(st.integers(0, 3))
            tenant = data.draw(st.sampled_from([0, 1, (1 << 64) - 1]))
            pair.begin(data.draw(st.integers(0, SLOTS - 1)), data.draw(WORDS), *more, tenant=tenant)
        elif data.draw(st.integers(0, 9)) == 0:
            pair.use(data.draw(tables))
        elif data.draw(st.integers(0, 9)) == 0:
            pair.end(data.draw(st.sampled_from(sorted(pair.open))))
            continue
        slots = data.draw(st.lists(st.sampled_from(sorted(pair.open)), min_size=1, unique=True))
        limits = [data.draw(LIMITS) for _ in slots]
        emitted = [data.draw(st.lists(st.integers(0, 3), max_size=6)) for _ in slots]
        nodes, depths = zip(*limits, strict=True)
        least = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
        pair.step(slots, nodes, depths, emitted, least, data.draw(PRICES))


def texts(random, kind, length):
    """Random tokens; words of a vocabulary drawn like a language's; a page said again and again
    with a few tokens changed.
    """
    if kind == "noise":
        return random.integers(0, 50, length)
    if kind == "language":
        words = [random.integers(0, 49152, random.integers(1, 6)) for _ in range(200)]
        drawn = np.minimum(random.zipf(1.3, length), len(words)) - 1
        return np.concatenate([words[i] for i in drawn])[:length]
    page = random.integers(0, 2**31 - 1, 150)
    text = np.tile(page, length // len(page) + 1)[:length]
    text[random.integers(0, length, length // 40)] = 7
    return text


@pytest.mark.parametrize(
    ("kind", "tabled", "each"),
    some_of(
        every(["noise", "language", "repeated"], [False, True], [None, 0.02, 0.2, -0.2]), values
    ),
)
def test_long_texts(random, kind, tabled, each):
    """each: the price of a draft token; negative: of one of every row, of rows that are padded."""
    prices = None
    if each is not None:
        prices = NodeCosts(array("d", abs(each) * np.arange(1, 33)), padded=each < 0.0)
    length = 3000
    table = table_of([texts(random, kind, length) for _ in range(9)], 2**31) if tabled else None
    pair = BothDrafters(0.02, table)
    rest = {}
    for slot in range(SLOTS):
        text = texts(random, kind, length).tolist()
        at = int(random.integers(0, length // 2))
        pair.begin(slot, text[:at], (), (GREEDY, Sampling(temperature=1.0, seed=slot))[slot % 2])
        rest[slot] = text[at:]
    draft_tokens = 0
    for turn in range(250):
        slots = random.permutation(SLOTS)[: random.integers(1, SLOTS + 1)].tolist()
        # Now and then nothing is drafted for a while, and much has to be taken in at once.
        busy = turn % 50 < 30
        nodes = (random.choice([0, 4, 16, 64], len(slots)) * busy).tolist()
        depths = random.choice([1, 4, 16, 64], len(slots)).tolist()
        emitted = []
        for slot in slots:
            count = int(random.integers(0, 9))
            emitted.append(rest[slot][:count])
            rest[slot] = rest[slot][count:]
        draft_tokens += pair.step(slots, nodes, depths, emitted, prices=prices)
    if each is None or kind != "noise":
        assert draft_tokens > (300 if each is None else 80)


def test_many_answers():
    """The cache over halves that are full and forgotten."""
    random = np.random.default_rng(11)
    words = [random.integers(0, 49152, random.integers(1, 6)).tolist() for _ in range(300)]
    pair = BothDrafters(0.02, capacity=3000)
    drafted = []
    for _ in range(60):
        drawn = np.minimum(random.zipf(1.3, 40), len(words)) - 1
        text = [token for word in drawn.tolist() for token in words[word]]
        pair.begin(0, text[:5])
        steps = [text[at : at + 3] for at in range(5, len(text), 3)]
        drafted.append(sum(pair.step([0], [8], [8], [some]) for some in steps) / len(steps))
        pair.end(0)
    assert 1500 < pair.both[1].describe()["cache"] <= 3000
    assert np.mean(drafted[-20:]) > 1.5 * drafted[0]


def test_a_prediction_with_half_of_the_votes_is_where_a_token_comes_from():
    """As many for 5 after 1, 2 within the prediction as outside of it."""
    pair = BothDrafters(0.0)
    pair.begin(0, [8, 1, 2, 5, 7, 1, 2], [9, 1, 2, 5, 6, 9, 1, 2, 5, 6])
    plan = plan_of([0], [12], [4])
    (draft,) = pair.both[1].propose(plan)
    (slow,) = pair.both[0].propose(plan)
    assert draft.source.tobytes() == slow.source.tobytes()
    assert DraftSource.PREDICTION in draft.source[draft.tokens == 5]


def test_drafts_survive_the_next_proposal():
    drafter = CpuNgramDrafter(2, 0.0)
    drafter.begin(slot_init(0, [1, 2, 3, 1, 2, 4, 1]))
    drafter.begin(slot_init(1, [5, 6, 7, 8, 5]))
    (first,) = drafter.propose(plan_of([0], [8], [4]))
    kept = first.tokens.tolist()
    drafter.propose(plan_of([1], [8], [4]))
    assert first.tokens.tolist() == kept and kept[0] == 2


@pytest.mark.parametrize("kind", [NgramDrafter, CpuNgramDrafter])
@pytest.mark.parametrize("slot", [-1, 1, SLOTS, 2**31 - 1])
def test_wrong_slots_are_refused(kind, slot):
    drafter = kind(SLOTS)
    drafter.begin(slot_init(0, [1, 2, 1]))
    plan = plan_of([0, slot], [4, 4], [4, 4])
    with pytest.raises(EngineError, match=f"slot {slot} is not open"):
        drafter.propose(plan)
    if slot != 1:
        with pytest.raises(EngineError, match=f"there is no slot {slot}"):
            drafter.begin(slot_init(slot, [1]))
    drafter.end(1)
    assert len(drafter.propose(plan_of([0], [4], [4]))[0])


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ([1, 4, 4, 0], "slot 1 is not open"),
        ([-1, 4, 4, 0], "slot -1 is not open"),
        ([9, 4, 4, 0], "slot 9 is not open"),
        ([0, 4, 4], "shorter than it says"),
        ([0, 4, 4, 2, 7], "shorter than it says"),
        ([0, 4, 4, -1], "shorter than it says"),
    ],
)
def test_the_core_checks_its_arguments(message, fault):
    drafter, library = CpuNgramDrafter(2), native.load_short()
    drafter.begin(slot_init(0, [1, 2, 1]))
    numbers, out = array("i", message), np.empty(64, np.int32)
    code = library.forerun_ngram_propose(
        drafter._index, *numbers.buffer_info(), 1, out.ctypes.data, 0.0, None, -1, False
    )
    assert code == -1 and fault in library.forerun_error().decode()
    assert library.forerun_ngram_end(drafter._index, 1, None, 0) == -1


def test_the_core_is_used_where_there_is_one(monkeypatch, tmp_path):
    def native_drafter():
        with toy_loaded(EngineConfig(model="toy")) as loaded:
            complete(loaded.engine, [make_request(np.array([72, 105], np.int32), max_tokens=60)])
            assert loaded.engine.stats().acceptance_length > 1
            return loaded.engine.describe()["drafter"]["native"]

    assert native_drafter()
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "_core.so")
    assert not native_drafter()


PLACES, MIXED = 65_536, 0x9E3779B97F4A7C15
"""Places of the core's table for 20,000 tokens, and what it multiplies by."""


def crowded(length):
    """A text whose runs of four tokens lie side by side where hashes begin with 0."""
    random, text = np.random.default_rng(1), [1, 2, 3]
    while len(text) < length:
        key = 0
        for token in text[-3:]:
            key = (key ^ token) * MIXED % 2**64
        few = random.integers(0, 49_152, 20_000 if len(text) < 500 else 400).astype(np.uint64)
        places = ((np.uint64(key) ^ few) * np.uint64(MIXED) >> np.uint64(32)) % np.uint64(PLACES)
        text.append(int(few[(places <= max(len(text), 16)).argmax()]))
    return text


def test_no_text_takes_time_with_its_square():
    """Other sequences wait meanwhile. (20,000 tokens of the crowded text took 270 ms where hashes
    began with 0, others 2.)
    """
    with np.errstate(over="ignore"):
        text = crowded(20_000)
    assert len({*zip(text, text[1:], text[2:], text[3:], strict=False)}) > 19_000
    drafter = CpuNgramDrafter(1)
    drafter.begin(slot_init(0, text))
    begun = time.thread_time()
    drafter.propose(plan_of([0], [4], [4]))
    assert time.thread_time() - begun < 0.06


@pytest.mark.parametrize(("nodes", "most"), [(0, 4), (8, 35)])
def test_what_a_row_costs(random, nodes, most):
    """Proposing and observing, in lines of Python."""
    drafter, rows = CpuNgramDrafter(32), 32
    opened = [slot_init(slot, texts(random, "repeated", 1000)) for slot in range(rows)]
    for each in opened:
        drafter.begin(each)
    plan, outcome = plan_of(range(rows), [nodes] * rows, [nodes] * rows), outcome_of([[7]] * rows)
    trees = batch(list(plan.known), [NO_DRAFT] * rows)

    def work():
        drafter.propose(plan)
        drafter.observe(plan, trees, outcome)

    counted = 0
    for _ in range(10):
        counted += lines(work)
        for each in opened:
            each.text.append([7])
    assert counted / (10 * rows) < most
