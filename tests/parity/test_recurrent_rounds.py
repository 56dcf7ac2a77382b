"""Recurrent states in captured rounds and on XLA: texts, states and checkpoints are those of eager
steps of torch, whatever is drafted, wherever a path is decided, preempted and found again.
"""

from dataclasses import replace

import numpy as np
import pytest

from forerun.build.target import open_target
from forerun.errors import EngineError
from forerun.executors.jax import JaxExecutor, JaxOptions
from forerun.executors.torch import TorchExecutor
from forerun.executors.torch.captured.states import RoundStates
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import NodeMasks
from tests.covering import every
from tests.models import tiny
from tests.parity.driver import Driver, Row, as_draft, emitted_behind, limits
from tests.parity.tape import Tape, on_tape
from tests.worlds.answers import answered, drafting, plain, resumed, tokens, wanted
from tests.worlds.draft_models import configured, make

GREEDY = Sampling(temperature=0.0)
SLOW = pytest.mark.slow
TEXT = list(range(40, 58))
ROOM = limits(tiny.VOCAB, page_size=4, pages=60, checkpoints=6, context=128, max_nodes=32, slots=4)
FAMILIES = "qwen3_5_text", "lfm2"
TREE, CHAIN = drafting(12, 4, 4), drafting(4, 4, 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method", "page", "shape", "overlap"),
    [
        ("rounds", "NEXTN, states", 4, TREE, True),
        ("rounds", "NEXTN, states", 1, CHAIN, False),
        ("rounds", "STANDALONE, states", 4, CHAIN, True),
        *(
            ("jax", method, page, {}, page == 4)
            for method in ("STANDALONE, states", "NEXTN, states")
            for page in (4, 1)
        ),
    ],
)
def test_preempted_texts_go_on_from_what_rounds_have_kept(
    folders, monkeypatch, quickly, kind, method, page, shape, overlap
):
    """Little room; on torch every text is sent again, longer, behind its answer."""
    little = {"kv_tokens": 96, "context": 96, "max_sequences": 5}
    if kind == "jax":
        little |= {"executor": "jax", "threads": None}
    settings = replace(configured(folders, method, page), **little)
    with pytest.MonkeyPatch.context() as patch:
        if kind == "rounds":
            on_tape(patch, warm=False)
        rounds = open_target(replace(settings, overlap=overlap or kind == "rounds"))
    eager = open_target(settings) if kind == "rounds" else rounds
    begin = np.random.default_rng(4).integers(3, 300, 24).astype(np.int32)
    prompts = [begin[:9], begin[:20], begin, np.append(begin[:16], np.int32(7)), begin[3:12]]
    behind = resumed(monkeypatch)

    def meets_plain(texts):
        requests = wanted(texts, 28, [0.8 * (n % 2) for n in range(len(texts))])
        expected = plain(eager, requests)
        behind.clear()
        actual, stats = answered(rounds, requests, kind == "rounds", overlap=overlap, **shape)
        assert tokens(actual) == expected and stats.accepted > 0
        return expected, stats

    try:
        expected, stats = meets_plain(prompts)
        assert stats.preemptions > 0
        if kind == "rounds":
            longer = [[*prompt, *text] for prompt, text in zip(prompts, expected, strict=True)]
            meets_plain([text[:50] for text in longer])
            rounds.executor.states.book.check()
        assert any(behind)
    finally:
        for target in {id(each): each for each in (rounds, eager)}.values():
            target.close()


# --- what is kept, step by step ------------------------------------------------------------------


def captured(source, **changes):
    with pytest.MonkeyPatch.context() as patch:
        on_tape(patch, Tape())
        return TorchExecutor(source, replace(ROOM, **changes)).capture()


@pytest.fixture(scope="module", params=every(["rounds", "jax"], FAMILIES))
def pair(request, checkpoint, compiled, quickly):
    """An executor of rounds, and one of eager steps."""
    kind, family = request.param
    source = checkpoint(family)
    if kind == "rounds":
        made = captured(source)
    else:
        made = JaxExecutor(source, ROOM, JaxOptions(draft_nodes=4, cache_dir=compiled))
    return made, TorchExecutor(source, ROOM)


def book_of(made):
    return made._states.book if isinstance(made, JaxExecutor) else made.states.book


def states_of(made):
    """Each row's state, all layers, as one vector."""
    if isinstance(made, JaxExecutor):
        parts = made.programs.state.recurrent
    else:
        parts = made.states.windows, made.states.matrices
    parts = [np.asarray(part) for part in parts if part is not None]
    return lambda row: np.concatenate([part[:, row].ravel() for part in parts])


def ran(made, sampling=GREEDY):
    """A prompt in two steps and steps of drafts that are right now and then: the text, how much of
    it is cached, and the states behind what is kept of it.
    """
    with Driver(made) as driver:
        driver.open(0, TEXT[:13], sampling)
        driver.step([Row(0, known=6)])
        driver.step([Row(0)])
        for step in range(5):
            last = driver.sequences[0].tokens[-1]
            tree = as_draft([last, 5, last, 9], [-1, -1, 0, 2])
            driver.step([Row(0, draft=tree if step % 2 == 0 else as_draft([], []))])
        text, length = list(driver.sequences[0].tokens), driver.sequences[0].kv_len
        book, state = book_of(made), states_of(made)
        whole = np.array(text, np.int32)
        states = {n: state(book.row(whole[:n])) for n in book.lengths(whole)}
        return text, length, states | {length: state(0)}


def test_states_and_checkpoints_are_those_of_eager_steps(pair):
    (text, length, actual), (expected, there, others) = map(ran, pair)
    assert (text, length) == (expected, there)
    assert actual.keys() == others.keys() and len(actual) > 2
    for key, state in actual.items():
        np.testing.assert_allclose(state, others[key], atol=5e-5)
    book_of(pair[0]).check()


def test_a_sequence_goes_on_behind_what_was_kept(pair):
    made, eager = pair
    text, length, states = ran(made)
    kept = max(n for n in states if n < length)
    assert made.reusable_prefix_len(np.array(text, np.int32)) == kept > 12
    with Driver(eager, seed=3) as driver:
        driver.open(3, text, GREEDY)
        expected = driver.step([Row(3)]).emitted(0)
    for each in pair:
        ran(each)
        assert emitted_behind(each, text, kept) == expected


def free_grammar(plan, trees):
    """Every token may follow every node."""
    bits = np.full((1, -(-tiny.VOCAB // 32)), 0xFFFFFFFF, np.uint32)
    return NodeMasks(np.zeros(len(trees.tokens), np.int32), bits)


LOSSY = Sampling(temperature=0.7, seed=3, accept_threshold_single=0.99)


@pytest.mark.parametrize("pair", every(["rounds"], FAMILIES), indirect=True)
@pytest.mark.parametrize(("masks_of", "sampling"), [(free_grammar, GREEDY), (None, LOSSY)])
def test_rows_that_the_host_decides_are_advanced(pair, monkeypatch, masks_of, sampling):
    """Rows of a grammar whose masks come after the forward pass, and with accept thresholds."""
    followed, actual = [], []
    follow = RoundStates._follow_host

    def following(self, round, inputs, outcome, left):
        followed.append(len(left))
        follow(self, round, inputs, outcome, left)

    monkeypatch.setattr(RoundStates, "_follow_host", following)
    for made in pair:
        with Driver(made) as driver:
            driver.open(0, TEXT[:6], sampling)
            driver.open(1, TEXT[2:9], sampling)
            driver.step([Row(0), Row(1)])
            for _ in range(3):
                right = driver.sequences[0].tokens[-1]
                tree = as_draft([5, right, right], [-1, -1, 1])
                driver.step([Row(0, draft=tree), Row(1)], masks_of)
            state = states_of(made)
            actual.append([state(0), state(1), driver.sequences[0].tokens])
    assert followed == [2, 2, 2]
    for one, other in zip(*actual, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("pair", every(["jax"], FAMILIES), indirect=True)
def test_on_xla_their_states_catch_up_in_the_next_step(pair):
    (text, *_), (expected, *_) = (ran(made, LOSSY) for made in pair)
    assert text == expected
    made = pair[0]
    with Driver(made) as driver:
        driver.open(0, text[:13], LOSSY)
        driver.step([Row(0)])
        driver.step([Row(0, draft=as_draft([text[14]], [-1]))])
        behind = made._states._lengths[0]
        assert behind < driver.sequences[0].kv_len
        driver.step([Row(0)])
        assert behind < made._states._lengths[0]


def test_a_step_behind_another_length_is_refused(pair):
    with Driver(pair[0]) as driver:
        driver.open(0, TEXT[:6], GREEDY)
        driver.step([Row(0)])
        driver.sequences[0].kv_len -= 1
        with pytest.raises(EngineError, match="recurrent state after 6 tokens"):
            driver.step([Row(0, known=1)])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_that_fails_leaves_its_rows(checkpoint, monkeypatch, family):
    made = captured(checkpoint(family))
    book = made.states.book
    with Driver(made) as driver:
        driver.open(0, TEXT[:7], GREEDY)
        driver.step([Row(0)])
        free = len(book._free)
        with monkeypatch.context() as patch:
            patch.setattr(made.rounds.runner, "launch", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                driver.step([Row(0)])
        assert len(book._free) == free
        driver.step([Row(0)])
    book.check()


def test_without_checkpoints_rounds_keep_none(checkpoint):
    source = checkpoint("lfm2")
    text, length, states = ran(captured(source, checkpoints=0))
    assert text == ran(TorchExecutor(source, ROOM))[0] and list(states) == [length]


def test_a_rehearsal_leaves_nothing_to_go_on_from(checkpoint):
    made = captured(checkpoint("qwen3_5_text"))
    made.rehearse(16)
    assert made.reusable_prefix_len(np.zeros(17, np.int32)) == 0
