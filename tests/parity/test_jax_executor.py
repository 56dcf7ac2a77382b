"""What is particular to the JAX executor: programs, dispatches, transfers, donation, refusals."""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from threading import Event

import jax
import jax.monitoring
import numpy as np
import pytest

from forerun.draft_shape import DraftShape
from forerun.errors import ConfigError, EngineError, MemoryPlanError
from forerun.executors.host_choice import report_in, reports_of
from forerun.executors.jax import JaxExecutor, JaxOptions
from forerun.executors.jax.network.kv import StateShape
from forerun.executors.jax.network.sharding import check_shards
from forerun.executors.jax.program import program_cache
from forerun.executors.jax.program.functions import Key
from forerun.executors.jax.program.programs import JaxPrograms
from forerun.executors.jax.program.step import Answers
from forerun.executors.jax.rounds.batches import Bucket, Buckets, batches, chunks
from forerun.executors.jax.rounds.reports import TOP, line_size, lines
from forerun.executors.torch import TorchExecutor
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft
from tests.drafters.served import padded
from tests.models import tiny
from tests.parity import sharded_jax
from tests.parity.driver import EVERYTHING, Driver, Row, chain_draft, limits
from tests.parity.test_executors import PARAMETERS, grammar

SMALL = limits(tiny.VOCAB, context=128, pages=32, max_nodes=32, slots=4)
COMPILING = "/jax/core/compile/backend_compile_duration"


PADS = [("rows",), pytest.param((), marks=pytest.mark.slow)]
"""Fields that are padded to their largest size: of rows one and four, or four alone."""


@pytest.fixture(scope="module", params=PADS, ids=["padded", "every size"])
def pads(request):
    return request.param


def begun(checkpoint, folder, pads, tell=lambda *_: None):
    """An executor that keeps its programs in a folder, when those of start-up are there."""
    options = JaxOptions(draft_nodes=3, cache_dir=str(folder))
    with pytest.MonkeyPatch.context() as patch:
        padded(patch, *pads)
        made = JaxExecutor(checkpoint("llama"), SMALL, options)
        made.warm_up(DraftShape(3), tell)
    return made


@pytest.fixture(scope="module")
def warm(checkpoint, compiled, quickly, pads):
    """Everything compiled at start-up."""
    seen = []
    made = begun(checkpoint, compiled, pads, lambda *progress: seen.append(progress))
    made.progress, made.first = seen, made.programs.compiled
    made.warm_up_rest()
    made.programs.wait()
    return made


@pytest.fixture
def prompt():
    return np.random.default_rng(6).integers(8, tiny.VOCAB, 30).tolist()


@pytest.fixture
def compilations():
    """Names of everything that XLA compiles meanwhile."""
    names = []

    def listen(event, duration, **_):
        if event == COMPILING:
            names.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def test_start_up_compiles_what_any_text_needs_and_the_rest_afterwards(warm, pads):
    rows = 1 if pads else 2
    keys, first = warm.programs.keys, set(warm.first)
    assert [news[1:] for news in warm.progress] == [(n, len(first)) for n in range(len(first) + 1)]
    assert len(first) == 1 + 2 and {key.kind for key in first} == {"chunk", "round"}
    assert {key.size.rows for key in first} == {1, warm.buckets.rows[0]}
    assert set(warm.programs.compiled) == set(keys)
    assert warm.describe()["compiled"] == len(keys) == 1 + 4 * rows + 4
    assert warm.describe()["to_compile"] == 0
    assert warm.capabilities.padded


@pytest.mark.slow
def test_what_comes_out_of_jaxs_cache_is_not_kept(checkpoint, quickly, tmp_path, prompt):
    """XLA would write it without its functions, and a later start fail when it runs."""
    texts = []
    for start in range(3):
        texts.append(text(begun(checkpoint, tmp_path, ("rows",)), prompt))
        if not start:
            shutil.rmtree(tmp_path / "programs")
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
def test_steps_run_in_the_sizes_that_there_are(checkpoint, compiled, quickly, prompt, monkeypatch):
    """While rounds of more rows are compiled their rows run one by one, and say the same."""
    made = JaxExecutor(checkpoint("llama"), SMALL, JaxOptions(draft_nodes=3, cache_dir=compiled))
    made.warm_up(DraftShape(3), lambda *_: None)
    programs, gate, ran = made.programs, Event(), []
    make, run = programs._made, programs.run
    monkeypatch.setattr(programs, "_made", lambda key: gate.wait(60) and make(key))
    monkeypatch.setattr(programs, "run", lambda key, *given: ran.append(key) or run(key, *given))

    def texts():
        ran.clear()
        with Driver(made) as driver:
            for slot in range(3):
                driver.open(slot, prompt[slot:9], Sampling(temperature=0.8, seed=slot))
            driver.step([Row(0), Row(1), Row(2)])
            for _ in range(4):
                driver.step([Row(slot, draft=chain_draft([5, 6])) for slot in range(3)])
            return [driver.sequences[slot].tokens for slot in range(3)]

    made.warm_up_rest()
    alone = texts()
    assert {key.size.rows for key in ran} == {1} and programs.late == 0
    gate.set()
    programs.wait()
    assert texts() == alone
    assert {key.size.rows for key in ran if key.kind == "round"} == {4}
    made.shutdown()


@pytest.fixture
def lowered(monkeypatch):
    """Keys of the programs that are traced meanwhile."""
    names, real = [], JaxPrograms._lowered

    def of(self, key):
        names.append(key)
        return real(self, key)

    monkeypatch.setattr(JaxPrograms, "_lowered", of)
    return names


def text(executor, prompt):
    with Driver(executor) as driver:
        driver.open(0, prompt, Sampling(temperature=0.8, seed=3))
        driver.step([Row(0, 20)])
        for _ in range(6):
            driver.step([Row(0, draft=chain_draft([5, 6]))])
        driver.step([Row(0)], grammar)
        assert executor.describe()["compiled_late"] == 0
        return driver.sequences[0].tokens


def test_a_later_start_traces_nothing(checkpoint, pads, warm, compiled, tmp_path, prompt, lowered):
    """Programs that are kept give the same text, and take the state as those that were compiled;
    what is damaged is compiled again.
    """

    def later(folder):
        made = begun(checkpoint, folder, pads)
        (before,) = made.programs.state.keys
        result = text(made, prompt)
        assert before.is_deleted(), "donated"
        return result

    expected = text(warm, prompt)
    assert later(compiled) == expected and lowered == []
    shutil.copytree(Path(compiled) / "programs", tmp_path / "programs")
    for file in sorted((tmp_path / "programs").glob("*/round-*"))[::2]:
        file.write_bytes(file.read_bytes()[:-1])
    assert later(tmp_path) == expected
    assert {key.kind for key in lowered} == {"round"}


def test_settings_are_kept_apart_and_the_oldest_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(program_cache, "KEPT", 2)
    key, add = Key("round"), jax.jit(lambda x: x + 1).lower(1.0).compile()
    trees = jax.tree.structure(((1.0,), {})), jax.tree.structure(1.0)

    def of(about):
        return program_cache.ProgramCache(tmp_path, about, jax.devices()[:1])

    for about in "abc":
        assert of(about).load(key, trees) is None
        of(about).store(key, add)
        assert of(about).load(key, trees)(1.0) == 2
    assert of("b").load(key, trees) and of("c").load(key, trees)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " ")
    assert of("c").load(key, trees) is None
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_compiles_and_nothing_is_transferred_in_secret(warm, compilations):
    """Prompts, batches, trees, masks, parameters and reports after start-up."""
    jax.jit(lambda x: x + 1)(np.float32(len(compilations)))
    assert compilations, "the listener hears nothing"
    compilations.clear()
    random = np.random.default_rng(0)
    samplings = [EVERYTHING, Sampling(temperature=0.8, seed=3), *PARAMETERS[:2]]
    with jax.transfer_guard("disallow"), Driver(warm) as driver:
        for slot, sampling in enumerate(samplings):
            driver.open(slot, random.integers(8, 250, 9 + slot), sampling)
        for step in range(60):
            chosen = random.permutation(4)[: random.integers(1, 5)].tolist()
            rows = []
            for slot in chosen:
                sequence = driver.sequences[slot]
                if len(sequence.tokens) > 110:
                    driver.close(slot)
                    driver.open(slot, random.integers(8, 250, 20), samplings[slot])
                    sequence = driver.sequences[slot]
                missing = len(sequence.tokens) - sequence.kv_len
                known = int(random.integers(1, min(missing, 5) + 1))
                draft = chain_draft(random.integers(8, 250, random.integers(0, 4)))
                rows.append(Row(slot, known, draft if known == missing else Draft()))
            driver.step(rows, grammar if step % 5 == 0 else None)
    assert compilations == []
    assert warm.describe()["compiled_late"] == 0


@pytest.fixture
def copied(monkeypatch):
    """Bytes of every copy to the host."""
    result, get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: result.append(x.nbytes) or get(x))
    return result


def test_a_decoding_step_is_one_dispatch_and_one_small_copy(warm, prompt, copied):
    with Driver(warm) as driver:
        for slot in range(3):
            driver.open(slot, prompt[slot:9], Sampling(temperature=0.5, seed=slot))
        driver.step([Row(slot) for slot in range(3)])
        copied.clear()
        before = warm.programs.dispatches
        for _ in range(5):
            driver.step([Row(0, draft=chain_draft([5, 6])), Row(1), Row(2)])
    assert warm.programs.dispatches == before + 5
    assert copied == [4 * 4 * 4] * 5  # Choices of four rows of four nodes.


@pytest.mark.parametrize("masks_of", [None, grammar])
def test_so_is_one_with_parameters_reports_and_masks(warm, prompt, copied, masks_of):
    """And beside each choice its log-probability and those of 20 others, not the logits."""
    samplings = [*PARAMETERS[:3], Sampling(temperature=0.5, seed=3)]
    with Driver(warm) as driver:
        for slot, sampling in enumerate(samplings):
            driver.open(slot, prompt[slot:9], replace(sampling, logprobs=slot or None))
        driver.step([Row(slot) for slot in range(4)])
        copied.clear()
        before = warm.programs.dispatches
        for _ in range(5):
            rows = [Row(0, draft=chain_draft([5, 6])), Row(1), Row(2), Row(3)]
            outcome = driver.step(rows, masks_of).outcome
            tops = [[len(entry.top) for entry in tops] for tops in outcome.logprobs]
            assert tops == [[], *([n] * outcome.n_tokens[n] for n in (1, 2, 3))]
    assert warm.programs.dispatches == before + 5
    assert copied == [4 * 4 * 4 * (1 + line_size(tiny.VOCAB))] * 5


@pytest.mark.parametrize("masks_of", [None, grammar])
def test_accept_thresholds_cost_their_own_row_alone(warm, prompt, masks_of):
    """Its logits cross to the host; the row beside it is decided where it is. What passes is held
    to the other executors in test_executors.py.
    """
    lossy = Sampling(temperature=0.8, seed=3, accept_threshold_single=0.2, accept_threshold_acc=0.6)
    with Driver(warm) as driver:
        for slot, sampling in enumerate((lossy, Sampling(temperature=0.8, seed=4))):
            driver.open(slot, prompt[slot:9], sampling)
        driver.step([Row(0), Row(1)])
        before = warm.programs.dispatches
        for _ in range(3):
            round = driver.step([Row(0, draft=chain_draft([5, 6])), Row(1)], masks_of).round
            assert round.rows.decided.tolist() == [False, True]
        # A round, its logits, and what was accepted goes to its page.
        assert warm.programs.dispatches == before + 3 * 3


def test_the_state_is_donated_and_nothing_else_stays(warm, prompt):
    with Driver(warm) as driver:
        driver.open(0, prompt, Sampling(temperature=1.0))
        driver.step([Row(0)])
        old = warm.programs.state
        driver.step([Row(0)])
        assert all(array.is_deleted() for array in jax.tree.leaves(old))
        alive = len(jax.live_arrays())
        for _ in range(20):
            driver.step([Row(0)])
        assert len(jax.live_arrays()) <= alive


def test_no_program_copies_the_cache(warm):
    """Read off the compiled text: no other test sees a copy of all pages."""
    shape = ",".join(map(str, warm.programs.state.keys[0].shape))
    for key in warm.programs.compiled:
        assert not re.search(rf"= f32\[{shape}\]\S* copy\(", warm.programs.text(key)), key


@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 16])
def test_caches_of_several_shapes(checkpoint, compiled, quickly, page):
    """Gemma 4's windows, layers that read others' keys and values, and tokens' vectors under trees
    say what torch says; no cache is copied.
    """
    model = checkpoint("gemma4_text")
    small = limits(tiny.VOCAB, context=128, page_size=page, pages=192 // page + 1, slots=2)
    made = JaxExecutor(model, small, JaxOptions(draft_nodes=3, cache_dir=compiled))
    assert sharded_jax.text(made) == sharded_jax.text(TorchExecutor(model, small))
    (one, other), round = made.programs.state.keys, made.programs.text(Key("round", Bucket(2, 4)))
    assert one.shape[0] == other.shape[0] == 1 and one.shape[3] < other.shape[3]
    for held in (one, other):
        shape = ",".join(map(str, held.shape))
        assert not re.search(rf"= f32\[{shape}\]\S* copy\(", round)


@pytest.mark.parametrize("top", [3, TOP, TOP + 5])
def test_log_probabilities_are_the_hosts(warm, prompt, top, copied):
    """Of prompts, of what is chosen, and of draft tokens that are; beyond TOP by the host."""
    sampling = replace(EVERYTHING, logprobs=top, prompt_logprobs=top)
    with Driver(warm) as driver:
        driver.open(0, prompt, sampling)
        result = driver.step([Row(0)])
        answers = Answers(warm.programs, result.round, tiny.VOCAB)
        expected = reports_of(answers.of_node, top, list(enumerate(prompt[1:])))
        close(result.outcome.prompt_logprobs[0], expected)
        close(
            result.outcome.logprobs[0],
            reports_of(answers.of_node, top, [(29, result.emitted(0)[0])]),
        )
        following = []
        for _ in range(3):
            following += driver.step([Row(0)]).emitted(0)
        driver.close(0)
        driver.open(1, [*prompt, result.emitted(0)[0]], sampling, prompt_len=30)
        driver.step([Row(1, 29)])
        copied.clear()
        result = driver.step([Row(1, draft=chain_draft(following[:2]))])
        assert (max(copied) < 8 * 4 * tiny.VOCAB) == (top <= TOP)
        assert result.emitted(0) == following
        answers = Answers(warm.programs, result.round, tiny.VOCAB)
        first = result.trees.root(0)
        pairs = list(enumerate(following, first))
        close(result.outcome.logprobs[0], reports_of(answers.of_node, top, pairs))


def close(actual, expected):
    """Reports of the same tokens, whose alternatives are in the same order."""
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        assert one.token == other.token
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        values = [[r.logprob, *(value for _, value in r.top)] for r in (one, other)]
        np.testing.assert_allclose(*values, atol=1e-5)


def test_lines_are_the_hosts():
    """Ties, excluded tokens, what is not finite, and a vocabulary below TOP."""
    random = np.random.default_rng(2)
    for vocab in (700, 9):
        logits = np.round(random.normal(size=(6, vocab)) * 3).astype(np.float32)
        logits[1] = random.normal(size=vocab) * 9
        logits[2, 3:] = -np.inf
        logits[3, 5] = np.nan
        logits[4, 5] = np.inf
        tokens = random.integers(0, 3, 6).astype(np.int32)
        rows = np.asarray(jax.jit(lines)(logits, tokens))
        assert rows.shape[1] == line_size(vocab)
        for line, row, token in zip(rows, logits, tokens.tolist(), strict=True):
            if not np.isfinite(row.max()):
                assert np.isnan(report_in(line, token, 0).logprob)
                continue
            close([report_in(line, token, 7)], reports_of(lambda _: row, 7, [(0, token)]))  # noqa: B023


def test_steps_are_cut_into_few_dispatches():
    small = limits(tiny.VOCAB, max_nodes=300, slots=20)
    buckets = Buckets.of(small, draft_nodes=8)
    assert buckets.rows == (1, 4, 16, 20) and buckets.nodes == (1, 4, 9)
    assert buckets.chunks == (32, 256)
    shape = StateShape.of(small, buckets.most, 256)

    class Planner(Driver):
        def __init__(self):
            self.limits, self.executor = small, None
            self._random, self._free = np.random.default_rng(0), list(range(96))
            self.sequences = {}

    driver = Planner()
    driver.executor = type("NoExecutor", (), {"open": lambda *_: None})
    for slot, length in enumerate([280, 5, *[1] * 16]):
        driver.open(slot, [9] * length)
    rows = [Row(0, 270), *(Row(slot) for slot in range(1, 18))]
    cut = batches(*driver.plan(rows), buckets, shape)
    assert [(b.size, b.chunk) for b in cut] == [
        *((Bucket(1, 256), True), (Bucket(1, 32), True), (Bucket(1, 32), True)),
        (Bucket(20, 1), False),
    ]
    places = np.concatenate([b.places().ravel()[: sum(map(len, b.nodes))] for b in cut])
    assert len(set(places.tolist())) == len(places) == 270 + 4 + 17
    assert places.max() < shape.hidden
    # Where one round holds all, every row is as long as the longest: Capabilities.padded.
    rows = [Row(slot, draft=chain_draft([5] * 2 * (slot == 2))) for slot in range(2, 6)]
    assert [b.size for b in batches(*driver.plan(rows), buckets, shape)] == [(4, 4)]
    # Two large trees beside many single nodes.
    buckets = replace(buckets, most=100)
    rows = [Row(slot, draft=chain_draft([5] * 8) if slot < 4 else Draft()) for slot in range(2, 18)]
    cut = batches(*driver.plan(rows), buckets, shape)
    assert [b.size for b in cut] == [(4, 1), (4, 1), (4, 1), (1, 1), (1, 1), (1, 9), (1, 9)]
    assert sorted(row for b in cut for row in b.rows) == list(range(16))
    # Rows that change many logits do not all fit into one round.
    rows = [Row(slot) for slot in range(2, 18)]
    weights = dict.fromkeys(range(0, 16, 3), 40)
    cut = batches(*driver.plan(rows), buckets, shape, 100, weights)
    assert [row for b in cut for row in b.rows] == list(range(16))
    assert all(sum(weights.get(row, 0) for row in b.rows) <= 100 for b in cut)
    assert [b.size.rows for b in cut] == [4, 1, 1, 4, 1, 1, 4]
    assert all(len(b.rows) == b.size.rows for b in cut)


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(0, []), (16, [32]), (40, [32, 32]), (130, [32] * 5), (200, [256]), (300, [256, 32, 32])],
)  # fmt: skip
def test_prompts_are_padded_little_in_few_chunks(count, sizes):
    cut = list(chunks(np.arange(count), (32, 256)))
    assert [size for size, _ in cut] == [(1, size) for size in sizes]
    assert all(0 < len(part) <= size.nodes for size, part in cut)
    assert [node for _, part in cut for node in part] == list(range(count))


def test_what_it_refuses(checkpoint, warm, prompt):
    whole = checkpoint("llama")
    alive = len(jax.live_arrays())
    with pytest.raises(MemoryPlanError, match=r"cache 8,796,\d.* bytes do not fit .*kv-tokens"):
        JaxExecutor(whole, limits(tiny.VOCAB, pages=1 << 30))
    with pytest.raises(MemoryPlanError, match=r"round \d\d\d,\d.* do not fit .*draft-nodes"):
        JaxExecutor(whole, limits(tiny.VOCAB, max_nodes=1 << 24, slots=1 << 22))
    with pytest.raises(ConfigError, match="dtype is 'int3'"):
        JaxExecutor(whole, SMALL, JaxOptions(dtype="int3"))
    with pytest.raises(ConfigError, match="vocabulary is 5, the model's 320"):
        JaxExecutor(whole, limits(5))
    with pytest.raises(ConfigError, match="context is 1024, the model was made for 512"):
        JaxExecutor(whole, limits(tiny.VOCAB, context=1024))
    with pytest.raises(ConfigError, match="tp-size is 64, but jax sees 1 device here"):
        JaxExecutor(whole, SMALL, JaxOptions(shards=64))
    assert len(jax.live_arrays()) == alive, "something was allocated first"
    with Driver(warm) as driver:
        driver.open(0, prompt)
        plan, trees = driver.plan([Row(0, known=20)])
        plan.page_table[:] = -1
        with pytest.raises(EngineError, match="no page"):
            warm.begin(plan, trees)
        plan, trees = driver.plan([Row(0, draft=chain_draft([5] * 4))])
        with pytest.raises(EngineError, match="a step of 34 nodes; at most 32 fit"):
            warm.begin(plan, trees)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "the model's 4 attention heads do not divide"),
        ({"heads": 6}, "the model's 2 key/value heads do not divide"),
        ({"heads": 6, "kv_heads": 3}, "the model's 320 tokens of the vocabulary do not divide"),
    ],
)
def test_what_does_not_divide_is_named(checkpoint, changes, says):
    arch = replace(checkpoint("llama").architecture, **changes)
    with pytest.raises(ConfigError, match=f"tp-size is 3, but {says}"):
        check_shards(arch, 3, 8)
    check_shards(arch, 1, 8)


@pytest.mark.parametrize("host", [False, True])
def test_of_a_tree_that_is_too_large_the_first_nodes_run(warm, prompt, host):
    """As a grammar's forced tokens may make it: programs for 4 nodes are there."""
    sampling = Sampling(temperature=0.0, repetition_penalty=1.1 if host else 1.0)
    with Driver(warm) as driver:
        driver.open(0, prompt[:9], sampling)
        text = [driver.step([Row(0)]).emitted(0)[0] for _ in range(8)]
        driver.close(0)
        driver.open(1, prompt[:9], sampling)
        result = driver.step([Row(1, draft=chain_draft(text[:7]))])
        assert result.emitted(0) == text[:4]
        assert driver.step([Row(1, draft=chain_draft(text[4:6]))]).emitted(0) == text[4:7]
