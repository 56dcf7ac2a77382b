"""The compiled core's steps are the specification's: what it leaves to it, whole paths, texts. Its
choices node by node: tests/parity/test_choices.py.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.executors.cpu import CpuExecutor
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import NodeMasks
from tests.models import tiny
from tests.parity.driver import Driver, Row, as_draft, limits
from tests.worlds.choices import Case, case, expected, native_choices, packed


@pytest.mark.parametrize("kernels", ["", "portable"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_left_to_the_specification(
    executor, checkpoint, random, kernels, bad
):
    source = checkpoint("llama", None, vocab_size=331, num_hidden_layers=1)
    made, places = executor(source, kernels=kernels), [0, 7, 319, 330]
    logits = random.normal(0, 1, (4, 331)).astype(np.float32)
    logits[range(4), places] = bad
    others = np.ones((4, 331), np.bool_)
    others[range(4), places] = False  # A mask hides it from the choice, not from the check.
    for temperature in (0.0, 1.0):
        for allowed in (None, others):
            choices = native_choices(made, logits, [(5, 0, temperature)] * 4, allowed)
            assert choices.tolist() == [-1] * 4


CUT_OFFS = (
    {"top_p": 0.9},
    {"top_p": 0.5},
    {"top_p": 0.0},
    {"top_p": 0.999999},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 2000, "top_p": 0.95},
    {"top_k": 1 << 40},
    {"min_p": 0.05},
    {"min_p": 1e-9},
    {"min_p": 1.0},
    {"min_p": 0.1, "top_k": 7, "top_p": 0.7},
    {"min_p": 1e-4, "top_p": 0.98},
)


@pytest.fixture(params=["", "portable"])
def core(request, executor, checkpoint):
    """(vocab) -> an executor of one layer."""
    return lambda vocab: executor(
        checkpoint("llama", None, vocab_size=vocab, num_hidden_layers=1), kernels=request.param
    )


@pytest.mark.parametrize("temperature", [1e-4, 0.3, 0.8, 1.0, 3.0])
@pytest.mark.parametrize("vocab", [331, 1003])
def test_cut_offs(core, random, vocab, temperature):
    """From a distribution that one token has to one that is flat: hundreds of tokens are left.
    Seldom is a token too close to the edge of the nucleus.
    """
    made, left, count = core(vocab), 0, len(CUT_OFFS)
    for spread in (0.01, 1.0, 4.0, 30.0):
        logits = random.normal(0, spread, (count, vocab)).astype(np.float32)
        for line in logits:
            line[random.integers(vocab, size=9)] = line[:9]  # Equal ones.
        cases = [(seed, int(random.integers(0, 1 << 20)), temperature) for seed in range(count)]
        for allowed in (None, random.random(logits.shape) < 0.3):
            choices = native_choices(made, logits, cases, allowed, CUT_OFFS)
            right = np.array(expected(logits, cases, allowed, CUT_OFFS))
            assert ((choices == -1) | (choices == right)).all()
            left += int((choices == -1).sum())
    assert left <= 2


def test_a_token_at_the_edge_of_the_nucleus_is_left_to_the_specification(core):
    """Four equal tokens: two have half of the probability, whatever sums round to."""
    logits, cases = np.full((40, 331), -1e4, np.float32), [(seed, 0, 1.0) for seed in range(40)]
    logits[:, [3, 90, 200, 330]] = 1.0
    edge, inside = [{"top_p": 0.5}] * 40, [{"top_p": 0.51}] * 40
    made = core(331)
    seen = native_choices(made, logits, cases, cuts=edge).tolist()
    for chosen, right in zip(seen, expected(logits, cases, cuts=edge), strict=True):
        assert right in ((3, 90) if chosen < 0 else (chosen,))
    assert set(seen) == {-1, 3, 90}
    chosen = native_choices(made, logits, cases, cuts=inside).tolist()
    assert chosen == expected(logits, cases, cuts=inside)


def test_a_nucleus_that_ends_in_the_middle_of_equal_tokens(core):
    """Hundreds are left, and halving them meets the edge: the first 512 of 1,024 have half."""
    logits, cases = np.zeros((64, 1024), np.float32), [(seed, 0, 1.0) for seed in range(64)]
    cuts = [{"top_p": 0.5}] * 64
    choices = native_choices(core(1024), logits, cases, cuts=cuts)
    right = np.array(expected(logits, cases, cuts=cuts))
    assert ((choices == -1) | (choices == right)).all() and right.max() < 512
    assert (choices == -1).sum() <= 1


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
    return NodeMasks(row, packed(some))


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
        assert np.all((choice == -1) | (choice == completed[0]) | (completed[0] == -1))
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
        assert np.array_equal(choice, one.accept()[0])
        assert (choice >= 0).sum() > 100


def nodes_of(one: Case):
    return [one.trees.nodes(row) for row in range(one.trees.rows)]


def same(first, second) -> bool:
    (choice, outcome), (other, again) = first, second
    return (
        np.array_equal(choice, other)
        and np.array_equal(outcome.finite, again.finite)
        and outcome.logprobs == again.logprobs
        and outcome.prompt_logprobs == again.prompt_logprobs
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
