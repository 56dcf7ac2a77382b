"""Recurrent states on XLA: texts, states and checkpoints are those of torch, whatever is drafted,
wherever a path is decided, and from where a sequence goes on.
"""

from dataclasses import replace

import numpy as np
import pytest

from forerun.build.engine import make_engine
from forerun.build.target import open_target
from forerun.client.completion import make_request
from forerun.errors import EngineError
from forerun.executors.jax import JaxExecutor, JaxOptions
from forerun.executors.state_slots import StateSlots
from forerun.executors.torch import TorchExecutor
from forerun.speculative.sampling import Sampling
from tests.models import tiny
from tests.parity.driver import Driver, Row, as_draft, emitted_behind, limits
from tests.parity.test_rounds_that_draft import configured, make

GREEDY = Sampling(temperature=0.0)
TEXT = list(range(40, 58))
ROOM = limits(tiny.VOCAB, page_size=4, pages=60, checkpoints=6, context=128, max_nodes=32, slots=4)


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5_text"])
def pair(request, checkpoint, compiled, quickly):
    source = checkpoint(request.param)
    options = JaxOptions(draft_nodes=4, cache_dir=compiled)
    return JaxExecutor(source, ROOM, options), TorchExecutor(source, ROOM)


def states_of(made):
    """Each row's state, all layers, as one vector."""
    if isinstance(made, TorchExecutor):
        parts = [made.states.windows, made.states.matrices]
        parts = [np.asarray(part) for part in parts if part is not None]
    else:
        parts = [np.asarray(part) for part in made.programs.state.recurrent if part is not None]
    return lambda row: np.concatenate([part[:, row].ravel() for part in parts])


def book_of(made):
    return made.states.book if isinstance(made, TorchExecutor) else made._states.book


def ran(made, sampling=GREEDY):
    """A prompt in two steps and steps of drafts that are right now and then; what is kept."""
    with Driver(made) as driver:
        driver.open(0, TEXT[:13], sampling)
        driver.step([Row(0, known=6)])
        driver.step([Row(0)])
        for step in range(5):
            last = driver.sequences[0].tokens[-1]
            tree = as_draft([last, 5, last, 9], [-1, -1, 0, 2])
            driver.step([Row(0, draft=tree if step % 2 == 0 else as_draft([], []))])
        text, length = list(driver.sequences[0].tokens), driver.sequences[0].kv_len
        kept, found = book_of(made).lengths(np.array(text, np.int32)), states_of(made)
        rows = {n: book_of(made).row(np.array(text[:n], np.int32)) for n in kept}
        made_of = {n: found(row) for n, row in rows.items()}
        return text, length, made_of | {length: found(0)}


def test_states_and_checkpoints_are_those_of_torch(pair):
    (text, length, found), (expected, there, others) = map(ran, pair)
    assert (text, length) == (expected, there)
    assert found.keys() == others.keys() and len(found) > 2
    for key, state in found.items():
        np.testing.assert_allclose(state, others[key], atol=5e-5)
    book_of(pair[0]).check()


def test_a_sequence_goes_on_behind_a_checkpoint(pair):
    executor, eager = pair
    text, length, found = ran(executor)
    kept = max(n for n in found if n < length)
    assert executor.reusable_prefix_len(np.array(text, np.int32)) == kept > 12
    again = emitted_behind(executor, text, kept)
    with Driver(eager, seed=3) as driver:
        driver.open(3, text, GREEDY)
        assert again == driver.step([Row(3)]).emitted(0)


def test_a_state_that_the_host_has_left_behind_catches_up(pair):
    """Rows with accept thresholds, which the host decides."""
    asked = Sampling(temperature=0.7, seed=3, accept_threshold_single=0.99)
    (text, length, _), (expected, there, others) = (ran(made, asked) for made in pair)
    assert (text, length) == (expected, there)
    executor = pair[0]
    with Driver(executor) as driver:
        driver.open(0, text[:13], asked)
        driver.step([Row(0)])
        driver.step([Row(0, draft=as_draft([text[14]], [-1]))])
        behind = executor._states._lengths[0]
        assert behind < driver.sequences[0].kv_len
        driver.step([Row(0)])
        done = executor._states._lengths[0]
        assert behind < done
    assert others


def test_a_step_behind_another_length_is_refused(pair):
    with Driver(pair[0]) as driver:
        driver.open(0, TEXT[:6], GREEDY)
        driver.step([Row(0)])
        driver.sequences[0].kv_len -= 1
        with pytest.raises(EngineError, match="recurrent state after 6 tokens"):
            driver.step([Row(0, known=1)])


@pytest.mark.slow
@pytest.mark.parametrize(("page", "overlap"), [(4, True), (1, False)])
@pytest.mark.parametrize("method", ["STANDALONE, states", "NEXTN, states"])
def test_preempted_texts_are_those_of_plain_decoding(
    tmp_path, monkeypatch, quickly, method, page, overlap
):
    resumed, opened = [], StateSlots.open

    def counting(self, slot_init):
        resumed.append(slot_init.cached)
        return opened(self, slot_init)

    monkeypatch.setattr(StateSlots, "open", counting)
    folders = make(tmp_path)
    config = replace(
        configured(folders, method, page),
        **{"executor": "jax", "threads": None, "kv_tokens": 96, "context": 96},
        overlap=overlap,
    )
    begin = np.random.default_rng(4).integers(3, 300, 24).astype(np.int32)
    prompts = [begin[:9], begin[:20], begin, np.append(begin[:16], np.int32(7)), begin[3:12]]
    target = open_target(config)
    try:
        expected, _ = answered(target, prompts, speculative_algorithm="OFF")
        found, stats = answered(target, prompts)
        assert found == expected and stats.preemptions > 0 and any(resumed)
        assert stats.accepted > 0
    finally:
        target.close()


def answered(target, prompts, **changes):
    engine = make_engine(target, replace(target.config, **changes))
    found = [[] for _ in prompts]
    for n, prompt in enumerate(prompts):
        request = make_request(
            prompt, max_tokens=24, ignore_eos=True, temperature=0.8 * (n % 2), seed=n
        )
        engine.submit(request, lambda delta, n=n: found[n].extend(delta.tokens))
    while engine.step_once():
        pass
    engine.check()
    stats = engine.stats()
    engine.shutdown()
    return found, stats
