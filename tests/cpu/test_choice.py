"""The native choices and paths are the specification's."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.executors.cpu import CpuExecutor, native
from forerun.executors.cpu.executor import StepBuffers
from forerun.executors.host_sampler import HostSampler
from forerun.interface.plan import Plan
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.accept import choose
from forerun.speculative.noise import gumbel
from forerun.speculative.sampling import History, Sampling, process
from forerun.speculative.tree import Draft, NodeMasks, TreeBatch, batch
from tests.models import tiny
from tests.parity.driver import Driver, Row, as_draft, limits

EMPTY = History(np.zeros(1, np.int32), 1)


@dataclass
class Case:
    """A step whose logits float32[M,V] are given instead of computed."""

    plan: Plan
    trees: TreeBatch
    logits: np.ndarray
    sampler: HostSampler

    def accept(self, choice=None, masks=None):
        logits = self.logits.__getitem__
        return self.sampler.accept(self.plan, self.trees, logits, masks, choice)

    def native(self, executor, masks=None):
        """`choice` of the rows that the core decides, -1 in the others."""
        scored = self.sampler.scored(self.plan, self.trees)
        box, logits = (
            StepBuffers(len(self.trees.tokens), self.sampler.choosing),
            np.ascontiguousarray(self.logits[scored]),
        )
        box.fill(self.plan, self.trees, scored, logits)
        box.step.logits_row = None
        box.put_masks(masks)
        assert native.load().forerun_accept(executor.native_model(), box.step, box.walk) == 0
        return box.choice


def case(rows: list[tuple[int, Draft, Sampling]], logits, samples=None) -> Case:
    """rows: (length of the known chain, draft, sampling), each in a slot of its own."""
    known = [np.arange(length, dtype=np.int32) for length, _, _ in rows]
    sampler = HostSampler(len(rows), logits.shape[1], cut_offs=True)
    for slot, (chain, (_, _, sampling)) in enumerate(zip(known, rows, strict=True)):
        sampler.open(SlotInit(slot, TokenText(chain), 1, sampling))
    count = len(rows)
    zeros = np.zeros(count, np.int32)
    plan = Plan(
        slots=np.arange(count, dtype=np.int32),
        kv_len=zeros,
        known=tuple(known),
        samples=np.ones(count, np.bool_) if samples is None else samples,
        max_nodes=zeros,
        max_depth=zeros,
        page_table=np.zeros((count, 1), np.int32),
        constrained=np.zeros(count, np.bool_),
    )
    return Case(plan, batch(known, [draft for _, draft, _ in rows]), logits, sampler)


@pytest.fixture(params=["", "portable"])
def native_choice(request, executor, checkpoint):
    """(logits, sampling, position) -> token, or -1."""
    made = {}

    def call(logits, sampling, position, masks=None):
        if len(logits) not in made:
            changes = {"vocab_size": len(logits), "num_hidden_layers": 1}
            source = checkpoint("llama", None, **changes)
            made[len(logits)] = executor(source, kernels=request.param)
        one = case([(1, Draft(), sampling)], np.asarray(logits, np.float32)[None])
        one.plan.kv_len[:] = position
        return int(one.native(made[len(logits)], masks)[0])

    return call


def expected(logits, sampling, position):
    return choose(process(np.asarray(logits, np.float32), sampling, EMPTY), sampling, position)


@pytest.mark.parametrize("vocab", [320, 331, 1003])
@pytest.mark.parametrize("temperature", [0.0, 0.05, 0.8, 1.0, 3.0])
def test_same_token(native_choice, random, vocab, temperature):
    for spread in (0.01, 1.0, 10.0):
        for seed in range(40):
            logits = random.normal(0, spread, vocab).astype(np.float32)
            sampling = Sampling(temperature=temperature, seed=seed * 0x123456789ABCDEF)
            position = int(random.integers(0, 1 << 20))
            found = native_choice(logits, sampling, position)
            assert found == expected(logits, sampling, position)


@pytest.mark.parametrize("position", [8356, 22866, 29132, 33050])
def test_rounded_scores_that_are_equal(native_choice, position):
    """Scores of millions are rounded to eighths: at these positions two tokens tie that way, and
    the one of the lower id is chosen, though logit and noise together are less.
    """
    logits = np.full(331, -20.0, np.float32)
    logits[[3, 300]] = 20.0, np.nextafter(np.float32(20.0), np.float32(21.0))
    sampling = Sampling(temperature=1e-5, seed=0)
    heated = logits / np.float32(1e-5) + gumbel(0, position, 331)
    assert heated[3] == heated[300] and expected(logits, sampling, position) == 3
    assert native_choice(logits, sampling, position) == 3


def test_a_score_beyond_float32_is_no_choice(native_choice):
    logits = np.full(331, -20.0, np.float32)
    logits[5] = 1e36
    sampling = Sampling(temperature=1e-3, seed=0)
    with np.errstate(over="ignore"):
        assert expected(logits, sampling, 0) == -1
    assert native_choice(logits, sampling, 0) == -1


@pytest.mark.parametrize("temperature", [1e-4, 0.8, 3.0])
def test_excluded_tokens_are_never_chosen(native_choice, random, temperature):
    for seed in range(60):
        logits = random.normal(0, 5, 1003).astype(np.float32)
        bits = packed(random.random(1003) < random.choice([0.01, 0.5, 0.99]))
        masks = NodeMasks(np.zeros(1, np.int32), bits[None])
        sampling = Sampling(temperature=temperature, seed=seed)
        expected = choose(process(logits, sampling, EMPTY, (), bits), sampling, 7)
        assert native_choice(logits, sampling, 7, masks) == expected
    nothing = NodeMasks(np.zeros(1, np.int32), packed(np.zeros(1003, np.bool_))[None])
    assert native_choice(logits, sampling, 7, nothing) == -1


def packed(allowed):
    """uint32[.] of bool[V], as NodeMasks has them."""
    padded = np.append(allowed, np.zeros(-len(allowed) % 32, np.bool_))
    return np.packbits(padded, bitorder="little").view(np.uint32)


CUT_OFFS = (
    {"top_p": 0.9},
    {"top_p": 0.5},
    {"top_p": 0.0},
    {"top_p": 0.999999},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 2000, "top_p": 0.95},
    {"min_p": 0.05},
    {"min_p": 1e-9},
    {"min_p": 1.0},
    {"min_p": 0.1, "top_k": 7, "top_p": 0.7},
    {"min_p": 1e-4, "top_p": 0.98},
)


@pytest.mark.parametrize("temperature", [1e-4, 0.3, 0.8, 1.0, 3.0])
@pytest.mark.parametrize("vocab", [331, 1003])
def test_cut_offs(native_choice, random, vocab, temperature):
    """From a distribution that one token has to one that is flat: hundreds of tokens are left.
    Seldom is a token too close to the edge of the nucleus.
    """
    left = 0
    for spread in (0.01, 1.0, 4.0, 30.0):
        for seed, cut in enumerate(CUT_OFFS):
            logits = random.normal(0, spread, vocab).astype(np.float32)
            logits[random.integers(vocab, size=9)] = logits[:9]  # Equal ones.
            sampling = Sampling(temperature=temperature, seed=seed, **cut)
            position = int(random.integers(0, 1 << 20))
            bits = packed(random.random(vocab) < 0.3)
            masks = NodeMasks(np.zeros(1, np.int32), bits[None])
            for mask, allowed in ((None, None), (masks, bits)):
                found = native_choice(logits, sampling, position, mask)
                processed = process(logits, sampling, EMPTY, (), allowed)
                assert found in (-1, choose(processed, sampling, position))
                left += found == -1
    assert left <= 2


def test_a_token_at_the_edge_of_the_nucleus_is_left_to_the_specification(native_choice):
    """Four equal tokens: two have half of the probability, whatever sums round to."""
    logits, seen = np.full(331, -1e4, np.float32), []
    logits[[3, 90, 200, 330]] = 1.0
    for seed in range(40):
        sampling = Sampling(temperature=1.0, seed=seed, top_p=0.5)
        seen.append(native_choice(logits, sampling, 0))
        assert expected(logits, sampling, 0) in ((3, 90) if seen[-1] < 0 else (seen[-1],))
        inside = Sampling(temperature=1.0, seed=seed, top_p=0.51)
        assert native_choice(logits, inside, 0) == expected(logits, inside, 0)
    assert set(seen) == {-1, 3, 90}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ties_go_to_the_lowest_id(native_choice, random, temperature):
    for seed in range(60):
        logits = random.integers(-2, 2, 331).astype(np.float32)
        sampling = Sampling(temperature=temperature, seed=seed)
        assert native_choice(logits, sampling, 3) == expected(logits, sampling, 3)


def test_the_greatest_noise_wins_from_far_below(native_choice):
    """Logits so far below the best one that nothing but rare noise brings them up: csrc/sample.inl
    looks at none that cannot come up.
    """
    sampling, seen = Sampling(temperature=1.0, seed=11), []
    for position in range(400):
        noise = gumbel(sampling.seed, position, 1003)
        token, other = int(noise.argmax()), int(noise[:32].argmin())
        if noise[token] < 10 or token < 32:
            continue
        logits = np.full(1003, -40, np.float32)
        logits[other], logits[token] = 0, noise[other] - noise[token] + np.float32(0.25)
        found = native_choice(logits, sampling, position)
        assert found == expected(logits, sampling, position) == token
        seen.append(noise[token])
    assert len(seen) > 10 and max(seen) > 12


def test_ties_by_noise_go_to_the_lowest_id(native_choice):
    """The likelier token and one below it whose noise makes up for the difference exactly."""
    ties, heat = 0, np.float32(1e-4)
    for position in range(60):
        sampling = Sampling(temperature=float(heat), seed=5)
        noise = gumbel(sampling.seed, position, 331)
        low, high = 3 + position % 5, 300
        best = np.float32(1) / heat + noise[high]
        logits = np.full(331, -1, np.float32)
        logits[high], logits[low] = 1, np.float32((best - noise[low]) * heat)
        if logits[low] >= 1 or logits[low] / heat + noise[low] != best:
            continue
        ties += 1
        assert native_choice(logits, sampling, position) == low
        assert expected(logits, sampling, position) == low
    assert ties > 5


@pytest.mark.parametrize("place", [0, 7, 319, 330])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_left_to_the_specification(native_choice, random, place, bad):
    logits = random.normal(0, 1, 331).astype(np.float32)
    logits[place] = bad
    others = packed(np.arange(331) != place)  # A mask hides it from the choice, not from the check.
    for temperature in (0.0, 1.0):
        assert native_choice(logits, Sampling(temperature=temperature), 0) == -1
        masks = NodeMasks(np.zeros(1, np.int32), others[None])
        assert native_choice(logits, Sampling(temperature=temperature), 0, masks) == -1


KINDS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.7, seed=3),
    Sampling(temperature=1.3, seed=(1 << 64) - 5),
    Sampling(temperature=0.0, logprobs=1),
    Sampling(temperature=1.0, seed=9, prompt_logprobs=0),
    Sampling(temperature=1.0, seed=4, top_k=5),
    Sampling(temperature=0.0, frequency_penalty=0.5),
)


def random_case(random, vocab) -> Case:
    """Rows of every kind. Few distinct logits, so that ties are common and draft tokens come true;
    now and then something that is not finite.
    """
    rows = []
    for _ in range(int(random.integers(1, 9))):
        count = int(random.choice([0, 0, 3, 12]))
        parents = [int(random.integers(max(-1, i - 4), i)) for i in range(count)]
        draft = as_draft(random.integers(0, 6, count).tolist(), parents)
        kind = KINDS[int(random.integers(len(KINDS)))]
        rows.append((int(random.integers(1, 5)), draft, kind))
    nodes = sum(length + len(draft) for length, draft, _ in rows)
    logits = random.integers(-2, 1, (nodes, vocab)).astype(np.float32)
    logits[:, :6] += 3
    for _ in range(int(random.integers(0, 4))):
        bad = (np.nan, np.inf, -np.inf)[int(random.integers(3))]
        logits[random.integers(nodes), random.integers(vocab)] = bad
    drafting = np.array([len(draft) > 0 for _, draft, _ in rows])
    return case(rows, logits, drafting | (random.random(len(rows)) < 0.8))


def random_masks(random, nodes, vocab) -> NodeMasks | None:
    """None in half of all cases. Mask 0 allows all, 1 most likely tokens, 2 nothing, 3 few."""
    if random.random() < 0.5:
        return None
    some = np.ones((4, vocab), np.bool_)
    some[1, random.integers(0, 6, 2)] = False
    some[2] = False
    some[3] = random.random(vocab) < 0.02
    row = random.choice([-1, -1, 0, 1, 1, 2, 3], nodes).astype(np.int32)
    return NodeMasks(row, np.stack(list(map(packed, some))))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_whole_paths(executor, checkpoint, random):
    """Decided by the core where it can, and by the specification alone: the same step."""
    made, decided = executor(checkpoint("llama", None, num_hidden_layers=1), threads=2), 0
    for _ in range(300):
        one = random_case(random, tiny.VOCAB)
        masks = random_masks(random, len(one.trees.tokens), tiny.VOCAB)
        choice = one.native(made, masks)
        decided += int((choice >= 0).sum())
        alone = one.accept(masks=masks)
        completed = one.accept(choice.copy(), masks)
        assert same(completed, alone)
        # An echo that is not finite fails a row that the core decided.
        assert np.all((choice == -1) | (choice == completed.choice) | (completed.choice == -1))
        plain = one.sampler.choosing.on_device[one.plan.slots]
        plain &= one.plan.samples
        if masks is not None:
            plain &= np.array([(masks.row[r.start : r.stop] < 2).all() for r in nodes_of(one)])
        finite = np.array([np.isfinite(one.logits[r.start : r.stop]).all() for r in nodes_of(one)])
        assert np.all(choice[one.trees.roots][plain & finite] >= 0)
    assert decided > 500


def test_many_rows_are_shared_by_threads(executor, checkpoint, random):
    """Enough logits that the pool's threads divide the rows."""
    vocab = 4096
    source = checkpoint("llama", None, vocab_size=vocab, num_hidden_layers=1)
    for threads in (1, 3):
        made = executor(source, threads=threads)
        draft = as_draft([1, 2, 3], [-1, -1, 1])
        rows = [(1, draft, KINDS[row % 3]) for row in range(80)]
        logits = random.normal(0, 1, (320, vocab)).astype(np.float32)
        logits[:, :4] += 9
        one = case(rows, logits)
        choice = one.native(made)
        assert np.all(choice[one.trees.roots] >= 0)
        assert np.array_equal(choice, one.accept().choice)
        assert (choice >= 0).sum() > 100


def nodes_of(one: Case):
    return [one.trees.nodes(row) for row in range(one.trees.rows)]


def same(first, second) -> bool:
    return (
        np.array_equal(first.choice, second.choice)
        and np.array_equal(first.finite, second.finite)
        and first.logprobs == second.logprobs
        and first.prompt_logprobs == second.prompt_logprobs
    )


@settings(max_examples=25)
@given(seed=st.integers(0, (1 << 64) - 1), temperature=st.sampled_from([0.3, 1.0, 1.7]))
def test_generated_text_is_the_same(small, seed, temperature):
    """A whole generation with the native choice and one with the specification's."""
    texts = []
    # A bias of nothing takes the row away from the core.
    for bias in ((), ((0, 0.0),)):
        with Driver(small) as driver:
            sampling = Sampling(temperature=temperature, seed=seed, logit_bias=bias)
            driver.open(0, [5, 6, 7], sampling)
            for _ in range(12):
                driver.step([Row(0)])
            texts.append(driver.sequences[0].tokens)
    assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def small(checkpoint):
    made = CpuExecutor(checkpoint(), limits(tiny.VOCAB), 1)
    yield made
    made.shutdown()
