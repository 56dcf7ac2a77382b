"""Rounds that are captured and replayed, by a recorder that has a CUDA graph's manners."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.draft_shape import DraftShape
from forerun.errors import EngineError
from forerun.executors.torch import TorchExecutor
from forerun.executors.torch.attention.geometry import tree_intervals
from forerun.executors.torch.captured.declared import declared
from forerun.executors.torch.executor import MOST_NODES
from forerun.executors.torch.sizes import Size
from forerun.speculative.accept import NOTHING, accept_row
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft, batch
from tests.covering import spread
from tests.models import tiny
from tests.parity.driver import Driver, Row, as_draft, chain_draft, limits
from tests.parity.tape import Tape, on_tape
from tests.parity.test_torch_invariance import half_true_draft
from tests.references.rounds import walk
from tests.speculative.worlds import drafts

SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=(1 << 63) + 5),
    Sampling(temperature=0.8, seed=7, top_k=20),
    Sampling(temperature=0.7, seed=9, logprobs=2),
]
LENGTHS = (30, 4, 17, 40)
COUNT = 24


@pytest.fixture(scope="module")
def pair(checkpoint):
    """The same model with captured rounds and without."""
    return pair_of(checkpoint("qwen3"))


def pair_of(source):
    """Executors of a checkpoint with captured rounds and without, and the recorder."""
    tape = Tape()
    small = limits(tiny.VOCAB, context=128, pages=40, max_nodes=128)
    with pytest.MonkeyPatch.context() as patch:
        on_tape(patch, tape)
        captured = TorchExecutor(source, small).capture()
    return captured, TorchExecutor(source, small), tape


def texts(made, draft_tokens, count=COUNT):
    """`count` tokens of all SAMPLINGS at once; draft_tokens(slot, tokens) -> Draft."""
    prompts = [np.random.default_rng(n).integers(8, tiny.VOCAB, n) for n in LENGTHS]
    with Driver(made) as driver:
        for slot, sampling in enumerate(SAMPLINGS):
            driver.open(slot, prompts[slot], sampling)
        driver.step([Row(slot) for slot in range(4)])
        short = set(range(4))
        while short:
            rows = [
                Row(s, draft=draft_tokens(s, driver.sequences[s].tokens)) for s in sorted(short)
            ]
            driver.step(rows)
            short = {s for s in short if len(driver.sequences[s].tokens) < LENGTHS[s] + count}
        return [s.tokens[: LENGTHS[i] + count] for i, s in driver.sequences.items()]


def no_draft(slot, tokens):
    return Draft()


def half_true(expected, most):
    """At most so many draft tokens, of which many are what is expected to come."""
    random = np.random.default_rng(0)
    return lambda slot, tokens: half_true_draft(
        random, expected[slot][len(tokens) :], tiny.VOCAB, most
    )[0]


FAMILIES = ["gemma2", "gemma3_text", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss"]


@pytest.mark.parametrize("family", [*spread(FAMILIES, 2), "qwen3_next", "lfm2"])
def test_windows_caps_experts_latents_and_states_in_rounds_give_the_eager_text(checkpoint, family):
    captured, eager, tape = pair_of(checkpoint(family))
    expected = texts(eager, no_draft)
    assert texts(captured, half_true(expected, 5)) == expected
    assert tape.replays > 5
    assert captured.describe()["captured"]


def test_features_are_those_of_an_eager_step(pair):
    features = []
    for made in pair[:2]:
        made.request_aux_hidden_states((1, 0))
        with Driver(made) as driver:
            for slot, length in enumerate((30, 4)):
                driver.open(slot, list(range(9, 9 + length)), SAMPLINGS[0])
            driver.step([Row(0), Row(1)])
            tree = as_draft([5, 6, 7], [-1, -1, 0])
            for _ in range(3):
                done = driver.step([Row(0, draft=tree), Row(1)])
            features.append(done.outcome.features.tensor().clone())
    assert features[0].shape == (5, 2 * 64)
    assert (features[0] - features[1]).abs().max() < 1e-5


def test_prompts_and_long_trees_run_eagerly(pair):
    captured, _, tape = pair
    with Driver(captured) as driver:
        driver.open(0, list(range(20, 60)))
        before = (tape.captures, tape.replays)
        driver.step([Row(0, known=10)])
        driver.step([Row(0)])
        driver.step([Row(0, draft=chain_draft(np.full(MOST_NODES, 5)))])
        assert (tape.captures, tape.replays) == before


def test_a_position_without_a_page_is_refused(pair):
    with Driver(pair[0]) as driver:
        driver.open(0, list(range(20, 36)))
        driver.step([Row(0)])
        plan, trees = driver.plan([Row(0, draft=chain_draft([5, 6]))])
        plan.page_table[0, 1] = -1
        with pytest.raises(EngineError, match="no page"):
            pair[0].begin(plan, trees)


def test_pages_hold_what_an_eager_step_writes(pair):
    """The rounds' commit, number by number, over pages in the same places."""
    pages = []
    for made in pair[:2]:
        made.cache.parts[0].numbers.zero_()
        with Driver(made, seed=3) as driver:
            driver.open(0, list(range(20, 30)), SAMPLINGS[0])
            driver.step([Row(0)])
            for _ in range(4):
                text = driver.sequences[0].tokens
                driver.step([Row(0, draft=as_draft([text[-1], 9, 8], [-1, -1, 0]))])
            size = made.limits.page_size
            kept = [p * size + o for p in driver.sequences[0].pages for o in range(size)]
            kept = kept[: driver.sequences[0].kv_len]
            pages.append(made.cache.parts[0].numbers[:, :, :, kept])
    assert pages[0].abs().sum() > 0
    assert (pages[0] - pages[1]).abs().max() < 1e-5


@settings(max_examples=100)
@given(
    rows=st.lists(st.tuples(drafts(12), st.booleans()), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_the_walk_is_the_rule(rows, seed):
    trees = batch([np.array([1], np.int32)] * len(rows), [draft for draft, _ in rows])
    random = np.random.default_rng(seed)
    # Few tokens: accepted paths, equal siblings and nodes without a choice all occur.
    tokens = random.integers(0, 3, len(trees.tokens)).astype(np.int32)
    object.__setattr__(trees, "tokens", tokens)
    chosen = random.integers(-1, 3, len(tokens)).astype(np.int32)
    row = np.repeat(np.arange(len(rows)), np.diff(trees.start))
    place = row * 16 + np.arange(len(row)) - trees.start[row]
    buffers = {name: np.zeros(64, np.int32) for name in ("tokens", "parents")}
    buffers["tree_intervals"] = np.stack(
        [np.tile(np.arange(16), 4) + 32, np.tile(np.arange(16), 4) + 33]
    )
    buffers["tokens"][place] = tokens
    buffers["parents"][place] = np.where(trees.parents < 0, -1, trees.parents - trees.start[row])
    buffers["tree_intervals"][:, place] = tree_intervals(trees)
    buffers["count"] = np.zeros(4, np.int32)
    buffers["count"][: len(rows)] = np.diff(trees.start)
    buffers["decided"] = np.zeros(4, np.int32)
    buffers["decided"][: len(rows)] = [decided for _, decided in rows]
    choices = np.full(64, NOTHING, np.int32)
    choices[place] = chosen
    facts = {name: torch.from_numpy(values) for name, values in buffers.items()}
    kept = walk(torch.from_numpy(choices), facts)
    for index, (_, decided) in enumerate(rows):
        path = accept_row(trees, index, lambda node, _: int(chosen[node]))
        nodes = [trees.root(index), *path.nodes] if path.tokens and decided else []
        expected = [node - int(trees.start[index]) for node in nodes]
        assert torch.nonzero(kept[index]).flatten().tolist() == expected
    assert not kept[len(rows) :].any()


@settings(max_examples=100)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_sizes_hold_the_step(pair, draft_tokens):
    with Driver(pair[0]) as driver:
        for slot in range(len(draft_tokens)):
            driver.open(slot, [5])
        rows = [Row(slot, draft=chain_draft(np.full(n, 5))) for slot, n in enumerate(draft_tokens)]
        size = pair[0].rounds.size_of(*driver.plan(rows))
    if size is None:
        assert len(rows) * (max(draft_tokens) + 1) > 128
    else:
        assert len(rows) <= size.rows and max(draft_tokens) + 1 <= size.nodes
        assert size.total <= 128


def test_declared_sizes_are_captured_before_the_first_step(pair):
    captured, _, tape = pair
    captured.request_aux_hidden_states((1,))  # What was captured before does not know of it.
    assert captured.describe()["captured"] == []
    progress, seconds = [], captured.describe()["capture_seconds"]
    captured.warm_up(DraftShape(nodes=3), lambda *news: progress.append(news[1:]))
    sizes = declared(captured.limits, DraftShape(nodes=3))
    assert set(captured.describe()["captured"]) == set(sizes)
    assert {size[:2] for size in sizes if not size.masked} == {
        (rows, nodes) for rows in (1, 2, 4) for nodes in (1, 2, 4)
    }
    assert captured.describe()["capture_seconds"] > seconds
    assert progress == [(0, 0), *((done, len(sizes)) for done in range(len(sizes) + 1))]
    assert captured.limits.row_nodes == (16, 16, 16, 16) and captured.capabilities.padded
    before = tape.captures
    with Driver(captured) as driver:
        for slot in range(3):
            driver.open(slot, [5, 6], SAMPLINGS[0])
        driver.step([Row(slot) for slot in range(3)])
        for count in (0, 3, 1, 2):
            driver.step([Row(slot, draft=chain_draft([5] * count)) for slot in range(3)])
    assert tape.captures == before


def test_only_what_was_captured_is_run(pair):
    """A size that was not declared is an error of the plan."""
    captured, _, tape = pair
    captured.warm_up(DraftShape(nodes=3), lambda *_: None)
    runner, before = captured.rounds.runner, tape.captures
    assert runner.runs_as(Size(3, 3)) == Size(4, 4) and runner.runs_as(Size(1, 17)) is None
    for _ in range(2):
        with pytest.raises(EngineError, match="no such size was captured"):
            runner.launch(Size(3, 3), runner.staging(Size(3, 3)))()
    assert tape.captures == before
