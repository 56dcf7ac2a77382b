"""Recurrent states in captured rounds: texts are those of eager steps, whatever is drafted,
preempted and found again; checkpoints are made where eager steps make them.
"""

from dataclasses import replace

import numpy as np
import pytest

from forerun.build.target import open_target
from forerun.client.completion import make_request
from forerun.errors import EngineError
from forerun.executors.state_slots import StateSlots
from forerun.executors.torch import TorchExecutor
from forerun.executors.torch.captured.recurrent import StateRows
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import NodeMasks
from tests.models import tiny
from tests.parity.driver import Driver, Row, as_draft, emitted_behind, limits
from tests.parity.tape import Tape, on_tape
from tests.parity.test_rounds_that_draft import answered, configured, make, plain, tokens

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made"))


@pytest.fixture
def counted(monkeypatch):
    """Sequences that went on from a checkpoint, by executor."""
    found, opened = [], StateSlots.open

    def counting(self, slot_init):
        found.append(slot_init.cached)
        return opened(self, slot_init)

    monkeypatch.setattr(StateSlots, "open", counting)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "page", "shape", "overlap"),
    [
        ("NEXTN, states", 4, "tree", True),
        ("NEXTN, states", 1, "chain", False),
        ("STANDALONE, states", 4, "chain", True),
    ],
)
def test_preempted_texts_go_on_from_what_rounds_have_kept(
    folders, counted, method, page, shape, overlap
):
    """Little room; every text is asked again, longer, behind its answer."""
    little = {"kv_tokens": 96, "context": 96, "max_sequences": 5}
    with pytest.MonkeyPatch.context() as patch:
        on_tape(patch, warm=False)
        settings = replace(configured(folders, method, page, overlap=True), **little)
        rounds = open_target(settings)
    eager = open_target(replace(settings, overlap=None))
    begin = np.random.default_rng(4).integers(3, 300, 24).astype(np.int32)
    prompts = [begin[:9], begin[:20], begin, np.append(begin[:16], np.int32(7)), begin[3:12]]

    def wanted(texts):
        return [
            make_request(text, max_tokens=28, ignore_eos=True, temperature=0.8 * (n % 2), seed=n)
            for n, text in enumerate(texts)
        ]

    try:
        expected = plain(eager, wanted(prompts))
        found, stats = answered(rounds, wanted(prompts), shape, pause=1, overlap=overlap)
        assert tokens(found) == expected
        assert stats.preemptions > 0
        longer = [[*prompt, *text] for prompt, text in zip(prompts, expected, strict=True)]
        longer = [np.array(text[:50], np.int32) for text in longer]
        expected = plain(eager, wanted(longer))
        counted.clear()
        found, stats = answered(rounds, wanted(longer), shape, pause=1, overlap=overlap)
        assert tokens(found) == expected
        assert any(counted)
        rounds.executor.states.book.check()
    finally:
        rounds.close()
        eager.close()


# --- what is kept, step by step ------------------------------------------------------------------


def pair_of(source, **changes):
    small = limits(tiny.VOCAB, **{"page_size": 4, "pages": 60, "checkpoints": 6} | changes)
    with pytest.MonkeyPatch.context() as patch:
        on_tape(patch, Tape())
        captured = TorchExecutor(source, small).capture()
    return captured, TorchExecutor(source, small)


@pytest.fixture(scope="module", params=["qwen3_5_text", "lfm2"])
def pair(request, checkpoint):
    return pair_of(checkpoint(request.param))


TEXT = list(range(40, 58))


def ran(made, drafts=True):
    """A prompt and steps of drafts that are right now and then; the state, and what is kept."""
    with Driver(made) as driver:
        driver.open(0, TEXT[:6], GREEDY)
        driver.step([Row(0)])
        for step in range(5):
            right = driver.sequences[0].tokens[-1] if drafts else 0
            tree = as_draft([right, 5, right, 9], [-1, -1, 0, 2])
            driver.step([Row(0, draft=tree if step % 2 == 0 else as_draft([], []))])
        states, text = made.states, list(driver.sequences[0].tokens)
        length = driver.sequences[0].kv_len
        kept = states.book.lengths(np.array(text, np.int32))
        rows = {n: states.book.row(np.array(text[:n], np.int32)) for n in kept}
        found = {n: states.content(row) for n, row in rows.items()}
        found[length] = states.content(0)
        return text, length, found


def test_states_and_checkpoints_are_those_of_eager_steps(pair):
    (text, length, found), (expected, there, others) = map(ran, pair)
    assert (text, length) == (expected, there)
    assert found.keys() == others.keys() and len(found) > 1
    for key, content in found.items():
        one, other = (np.frombuffer(each, np.float32) for each in (content, others[key]))
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_a_sequence_goes_on_behind_what_a_round_has_kept(pair):
    captured, eager = pair
    text, length, found = ran(captured)
    kept = max(n for n in found if n < length)
    assert captured.reusable_prefix_len(np.array(text, np.int32)) == kept
    for made in (captured, eager):
        assert emitted_behind(made, text, kept) == driver_text(eager, text)


def driver_text(made, text):
    with Driver(made, seed=3) as driver:
        driver.open(3, text, GREEDY)
        return driver.step([Row(3)]).emitted(0)


def free_grammar(plan, trees):
    """Every token may follow every node."""
    bits = np.full((1, -(-tiny.VOCAB // 32)), 0xFFFFFFFF, np.uint32)
    return NodeMasks(np.zeros(len(trees.tokens), np.int32), bits)


def test_rows_that_the_host_decides_are_advanced_by_it(pair, monkeypatch):
    """Rows of a grammar whose masks come after the forward pass."""
    followed, found = [], []
    follow = StateRows._follow

    def following(self, round, outcome, left):
        followed.append(len(left))
        follow(self, round, outcome, left)

    monkeypatch.setattr(StateRows, "_follow", following)
    for made in pair:
        with Driver(made) as driver:
            driver.open(0, TEXT[:6], GREEDY)
            driver.open(1, TEXT[2:9], GREEDY)
            driver.step([Row(0), Row(1)])
            for _ in range(3):
                right = driver.sequences[0].tokens[-1]
                tree = as_draft([5, right, right], [-1, -1, 1])
                driver.step([Row(0, draft=tree), Row(1)], free_grammar)
            states = made.states
            found.append([np.frombuffer(states.content(row), np.float32) for row in (0, 1)])
            found[-1].append(driver.sequences[0].tokens)
    assert followed == [2, 2, 2]
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_a_round_behind_another_length_is_refused(pair):
    with Driver(pair[0]) as driver:
        driver.open(0, TEXT[:6], GREEDY)
        driver.step([Row(0)])
        driver.sequences[0].kv_len -= 1
        with pytest.raises(EngineError, match="recurrent state after 6 tokens"):
            driver.step([Row(0, known=1)])


def test_a_round_that_fails_leaves_its_rows(pair, monkeypatch):
    captured, book = pair[0], pair[0].states.book
    with Driver(captured) as driver:
        driver.open(0, TEXT[:7], GREEDY)
        driver.step([Row(0)])
        free = len(book._free)
        with monkeypatch.context() as patch:
            patch.setattr(captured.rounds.runner, "launch", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                driver.step([Row(0)])
        assert len(book._free) == free
        driver.step([Row(0)])
    book.check()


def test_without_checkpoints_rounds_keep_none(checkpoint):
    captured, eager = pair_of(checkpoint("lfm2"), checkpoints=0)
    (text, length, found), (expected, *_) = ran(captured), ran(eager)
    assert text == expected and list(found) == [length]


def test_a_rehearsal_leaves_nothing_to_go_on_from(checkpoint):
    captured, _ = pair_of(checkpoint("qwen3_5_text"))
    captured.rehearse(16)
    assert captured.reusable_prefix_len(np.zeros(17, np.int32)) == 0
