"""Layers with a window give back what lies behind it, in memory and beside a store, and no text
changes: on the compiled core; in torch, eager, by kernels' references, in captured rounds, and
begin from each other; and in JAX, whose rounds do too. Against an engine that keeps everything.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.build import calibration
from forerun.control.policy import FixedPolicy
from forerun.draft_shape import DraftShape
from forerun.drafters.model_drafter import ModelDrafter
from forerun.drafts.standalone_draft import StandaloneDraft, equal_vocabulary
from forerun.engine import disk_pages
from forerun.engine.thread import Engine, EngineOptions
from forerun.errors import EngineError
from forerun.executors import cpu
from forerun.executors.cpu import CpuExecutor, WindowedCpuExecutor
from forerun.executors.jax import JaxDecoderModel, JaxExecutor, JaxOptions, jax_executor
from forerun.executors.jax.program.functions import Key
from forerun.executors.jax.program.programs import JaxPrograms
from forerun.executors.jax.rounds.batches import Bucket
from forerun.executors.torch import (
    TorchDecoderModel,
    TorchExecutor,
    TorchPages,
    model_runner,
    torch_executor,
)
from forerun.executors.torch.memory import target_kv_shape
from forerun.executors.windowed import WindowedPages
from forerun.interface.grammars import NoGrammars
from forerun.speculative.sampling import Sampling
from tests.covering import every
from tests.drafters.served import padded
from tests.engine.drafters import ErraticDrafter
from tests.engine.toys import TOKENIZER, VOCAB, RecordingSink, ask
from tests.engine.window_schedules import (
    BASE,
    Known,
    Schedule,
    answered,
    attach_store,
    engine_on,
    finished,
    reads_what_was_given_back,
    shaped,
    stored,
)
from tests.parity.driver import Driver, Row
from tests.parity.tape import on_tape
from tests.references.kernels import REFERENCE_KERNELS

NATIVE = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
SLOW = pytest.mark.slow
CACHES = {
    "cpu": (None, "same", "float32"),
    "cpu, float16": ("Q8_0", "same", "float16"),
    "cpu, q8_0": ("Q8_0", "q8_0", "q8_0"),
}
"""Of a file of which kind, kv_dtype, and how the core then stores keys and values."""


def cells(fast, slow=()):
    """Parameters of a test of which the first is a kind of executor."""
    return [
        pytest.param(*cell, marks=[SLOW] * (cell in slow) + [NATIVE] * cell[0].startswith("cpu"))
        for cell in (*fast, *slow)
    ]


@pytest.fixture(scope="module")
def source(checkpoint):
    return checkpoint("gemma3_text", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def sources(checkpoint, source):
    """By the kind of executor."""
    return lambda kind: (
        checkpoint("gemma3_text", CACHES[kind][0], vocab_size=VOCAB) if kind in CACHES else source
    )


@pytest.fixture(scope="module")
def known(sources):
    """Texts of an executor that keeps everything; those of torch for XLA and for kernels, too."""
    made = {}

    def of(kind):
        kind = kind if kind in CACHES else "torch"
        if kind not in made:
            executor = (
                CpuExecutor(sources(kind), Known.LIMITS, 1, kv_dtype=CACHES[kind][1])
                if kind in CACHES
                else TorchExecutor(sources(kind), Known.LIMITS)
            )
            made[kind] = Known(executor)
        return made[kind]

    yield of
    for each in made.values():
        each.executor.shutdown()


@pytest.fixture
def windowed(sources, monkeypatch, compiled, quickly):
    """An executor of a kind: one of CACHES; "eager"; "kernels", whose prompts are FlashAttention's;
    or "rounds", which begin from each other, as those of "jax" do.
    """
    native = []

    def build(kind="eager", of=None, **shape):
        source, limits = of or sources(kind), shaped(**shape)
        with monkeypatch.context() as patch:
            if kind in CACHES:
                made = WindowedCpuExecutor(source, limits, 1, kv_dtype=CACHES[kind][1])
                native.append(made)
                return made
            if kind == "jax":
                return on_xla(patch, source, limits, compiled)
            if kind != "eager":
                patch.setattr(model_runner, "kernels_for", lambda device: REFERENCE_KERNELS)
            if kind == "rounds":
                on_tape(patch, warm=False)
            prompts = "torch_native" if kind == "kernels" else "triton"
            made = torch_executor(limits)(source, limits, prompts=prompts)
            return made.capture(overlap=True) if kind == "rounds" else made

    yield build
    for each in native:
        each.shutdown()


def on_xla(patch, source, limits, compiled):
    """Rounds of one size, and layers in a scan where they repeat; what a step needs is compiled by
    it.
    """
    padded(patch, "rows", "nodes", "chunks")
    options = JaxOptions(draft_nodes=6, overlap=True, stacked=True, cache_dir=compiled)
    return jax_executor(limits)(source, limits, options)


@pytest.mark.parametrize(
    ("kind", "page", "drafts", "seed", "requests"),
    cells(
        [
            *(("eager", 16, True, 7, 5), ("rounds", 16, False, 13, 5), ("cpu", 16, True, 2, 16)),
            *(("cpu, float16", 16, False, 1, 16), ("cpu, q8_0", 1, True, 0, 16)),
        ],
        [
            *(("eager", 16, True, 2, 10), ("rounds", 1, True, 0, 10), ("rounds", 16, False, 1, 10)),
            *(("kernels", 16, True, 3, 10), ("rounds", 16, True, 2, 10)),
            *(("rounds", 1, False, 5, 10), ("jax", 16, True, 2, 10), ("jax", 1, False, 5, 10)),
        ],
    ),
)
def test_any_schedule_meets_the_same_texts(windowed, known, kind, page, drafts, seed, requests):
    """Of window pages there are too few for all sequences at once, and of pages too."""
    executor = windowed(kind, page=page, tokens=304)
    assert kind not in CACHES or executor.describe()["cache_dtype"] == CACHES[kind][2]
    drafter = ErraticDrafter(known(kind).following, VOCAB, seed) if drafts else None
    begins_early = kind in ("rounds", "jax")
    engine = engine_on(executor, drafter, overlap=begins_early)
    Schedule(engine, executor, known(kind), seed).run(requests)
    assert engine.stats().preemptions > 0 or page == 1 or requests < 10
    assert (engine.stats().acceptance_length > 1.05) == drafts
    assert not begins_early or drafts or engine.stats().carried > 4


@pytest.mark.parametrize(
    ("kind", "page"), cells(every(["eager", "rounds", "cpu"], [1, 16]), every(["jax"], [1, 16]))
)
def test_a_text_goes_on_where_its_window_is_still_there(windowed, known, kind, page):
    executor = windowed(kind, page=page, tokens=1408)
    engine, whole = engine_on(executor), 389 // page * page

    def cached(prompt):
        return answered(engine, executor, known(kind), ask("r", prompt, 4))[0]

    assert cached(BASE[:390]) == 0
    assert cached(BASE[:390]) == whole, "its window was not needed by others"
    assert cached(np.append(BASE[:304], BASE[30:50])) < 300, "far behind the window"
    # The prefix index knew these pages already; now they have window pages again.
    assert cached(np.append(BASE[:304], BASE[340:350])) == 304
    if kind != "cpu":
        return
    cached(BASE[:395][::-1])
    assert cached(BASE[:390]) == whole, "a long text needs its own window alone"
    for length in range(40, 130, 10):
        cached(BASE[:length][::-1])
    assert cached(BASE[:390]) < whole, "others needed it"
    assert cached(BASE[:390]) == whole


@NATIVE
def test_long_texts_need_no_more_window_pages(windowed, known):
    """Many windows long, several at once, with pages for one step and two windows alone."""
    executor = windowed("cpu", tokens=1408)
    requests = [ask(str(n), BASE[n : 390 + n], 60) for n in range(3)]
    assert answered(engine_on(executor), executor, known("cpu"), *requests) == [0, 0, 0]
    assert executor.limits.window_pages < 3 * (450 // 16)


FAMILIES = {
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB},
    "gemma3_text": {"num_hidden_layers": 5},
    "mistral": {"sliding_window": 24},
    "qwen2": {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 0},
    "gpt_oss": {},
    "exaone4": {},
}


@pytest.mark.parametrize(
    ("kind", "family"),
    cells(
        [
            ("eager", "gemma4_text"),
            *(("cpu", f) for f in ("gemma4_text", "gpt_oss", "exaone4", "mistral", "qwen2")),
        ],
        [
            *(("eager", family) for family in ("gpt_oss", "exaone4", "mistral")),
            *(("jax", f) for f in ("gpt_oss", "gemma3_text", "gemma4_text", "mistral")),
        ],
    ),
)
def test_layers_of_any_family(checkpoint, windowed, kind, family):
    """Shared keys and values, sinks, windows everywhere, and in a scan beside layers without: the
    logits of a long text, bit for bit.
    """
    source = checkpoint(family, vocab_size=VOCAB, **FAMILIES[family])
    if kind == "cpu":
        kept = CpuExecutor(source, shaped(windows=0), 1)
    else:
        kept = windowed(kind, source, windows=0)
        assert kept.windows is None
    actual = []
    for executor in (kept, windowed(kind, source)):
        with Driver(executor) as driver:
            driver.open(0, BASE[:200])
            logits = []
            while driver.sequences[0].kv_len < 200:
                result = driver.step([Row(0, known=20)])
                logits.append(result.logits(0, 0).numpy().copy())
            actual.append(np.stack(logits))
    assert actual[0].tobytes() == actual[1].tobytes()


# --- beside a store ------------------------------------------------------------------------------


@pytest.fixture
def stores(windowed, tmp_path, monkeypatch):
    """Makes executors, and engines on them that keep pages in one folder; the last engine that was
    made is shut down before another begins.
    """
    monkeypatch.setattr(disk_pages, "LEAST_SECONDS", 60.0)
    engines = []

    def build(kind="cpu", executor=None, drafter=None, least=40, **shape):
        if executor is None:
            executor = windowed(kind, **shape)
            if kind != "cpu":
                executor.pages = WindowedPages(TorchPages(executor), executor.windows)
                executor.window_contents = executor.pages
        for engine in engines[-1:]:
            engine.shutdown()
        engines.append(engine_on(executor, drafter, overlap=kind == "rounds"))
        attach_store(engines[-1], executor, tmp_path / "kv", least)
        return executor, engines[-1]

    yield build
    engines[-1].shutdown()


@pytest.fixture
def cached_of(known):
    """(engine, executor, prompt) -> cached tokens of the prompt; its answer is checked."""

    def cached(engine, executor, prompt):
        kind = "cpu" if isinstance(executor, CpuExecutor) else "torch"
        return answered(engine, executor, known(kind), ask("r", prompt, 4))[0]

    return cached


@pytest.mark.parametrize(
    ("kind", "page"), cells([("eager", 16), ("cpu", 1), ("cpu", 16)], [("rounds", 16)])
)
def test_a_restart_continues_behind_the_last_window(stores, cached_of, kind, page):
    executor, engine = stores(kind, page=page, tokens=1408)
    whole = 389 // page * page
    assert cached_of(engine, executor, BASE[:390]) == 0
    windows = {*executor.windows.needed(390 // page), *executor.windows.needed(whole // page)}
    assert stored(engine) == (390 // page, len(windows))
    for where in (None, executor):  # The pool's pages begin another life with each engine.
        executor, engine = stores(kind, where, page=page, tokens=1408)
        assert cached_of(engine, executor, BASE[:390]) == whole
        assert engine.stats().store.hits == 1
    # In the middle of it no window is left, not even on disk.
    executor, engine = stores(kind, page=page, tokens=1408)
    assert cached_of(engine, executor, np.append(BASE[:200], [120] * 9)) == 0
    stored(engine)
    # Where texts part there is one from now on.
    executor, engine = stores(kind, page=page, tokens=1408)
    parted = np.append(BASE[:200], [121] * 9)
    assert cached_of(engine, executor, parted) == 200 // page * page


@NATIVE
def test_windows_come_back_to_pages_in_memory(stores, cached_of):
    executor, engine = stores(tokens=1408)
    cached_of(engine, executor, BASE[:390])
    stored(engine)
    for length in range(40, 130, 10):
        cached_of(engine, executor, BASE[:length][::-1])
    before = engine.stats().store
    assert cached_of(engine, executor, BASE[:390]) == 384
    after = engine.stats().store
    assert after.hits == before.hits + 1, "others needed its window pages"
    assert after.read_bytes - before.read_bytes == 2 * executor.pages.window_page_bytes


@NATIVE
def test_damaged_windows_are_misses(stores, cached_of, tmp_path):
    executor, engine = stores(tokens=1408)
    cached_of(engine, executor, BASE[:390])
    stored(engine)
    engine.shutdown()
    (path,) = (tmp_path / "kv").glob("*/*.windows")
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    executor, engine = stores(tokens=1408)
    assert cached_of(engine, executor, BASE[:390]) == 0
    assert engine.stats().store.misses == {"corrupt": 1}
    stored(engine)
    executor, engine = stores(tokens=1408)
    assert cached_of(engine, executor, BASE[:390]) == 384  # It was written again.


@NATIVE
@pytest.mark.parametrize(("seed", "drafts"), [(0, False), (1, True)])
def test_any_schedule_meets_the_same_texts_after_restarts(stores, known, seed, drafts):
    """Of window pages there are too few; a pool's pages begin another life with each engine."""
    executor, hits = None, 0
    for _ in range(4):
        drafter = ErraticDrafter(known("cpu").following, VOCAB, seed) if drafts else None
        executor, engine = stores("cpu", executor, drafter, tokens=496, least=16)
        Schedule(engine, executor, known("cpu"), seed).run(12)
        stored(engine)
        hits += engine.stats().store.hits
    assert hits > 4


@pytest.mark.parametrize("kind", ["eager", pytest.param("cpu", marks=NATIVE)])
def test_window_pages_that_do_not_exist(stores, kind):
    pages = stores(kind)[0].pages.contents
    with pytest.raises(EngineError, match=r"no such page|there is no window page"):
        pages.read_window_page(10**6)
    with pytest.raises(EngineError, match="are not a window page of"):
        pages.write_window_page(0, b"x")


# --- rounds --------------------------------------------------------------------------------------


def beside_itself(executor, source, shape):
    """The target itself as draft model, with which rounds grow trees."""
    draft = StandaloneDraft("itself", source, equal_vocabulary(VOCAB, VOCAB))
    if isinstance(executor, JaxExecutor):
        model = JaxDecoderModel(executor, draft)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(JaxPrograms, "warm_up", lambda *_: None)
            executor.warm_up(shape, lambda *_: None)
        return model
    model = TorchDecoderModel(executor.draft_target, draft)
    executor.draft_with(model)
    return model


def grown(executor, source, known, overlap):
    """Texts of an engine whose rounds grow trees with the target itself as draft model, and its
    statistics. A text's last token would be the first in its page.
    """
    shape = DraftShape(nodes=6, width=2, depth=3)
    model = beside_itself(executor, source, shape)
    drafter, options = ModelDrafter(model, executor.limits, shape), EngineOptions(overlap=overlap)
    engine = Engine(executor, drafter, FixedPolicy(6, 3), TOKENIZER, NoGrammars(), options)
    sink = RecordingSink()
    requests = [ask(str(n), BASE[n : 60 + 30 * n], 53 + 3 * n, seed=n) for n in range(3)]
    for request in requests:
        engine.submit(request, sink)
    finished(engine, executor)
    assert [[sink.tokens(request.id)] for request in requests] == [known.texts(r) for r in requests]
    return engine.stats()


@pytest.mark.parametrize(
    ("kind", "overlap"),
    [
        ("rounds", True),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in [("rounds", False), ("jax", True), ("jax", False)]
        ),
    ],
)
def test_rounds_that_grow_trees_accept_as_much(windowed, source, known, kind, overlap):
    """All draft tokens are right; the host knows only bounds of how many were accepted."""
    executor = windowed(kind, windows=3)
    stats = grown(executor, source, known(kind), overlap)
    assert stats.acceptance_length > 3.2
    assert (stats.carried > 10) == overlap


def test_rounds_wait_where_bounds_are_far_apart(windowed, monkeypatch):
    """A round that might need more window pages than are planned for a sequence does not begin."""
    executor = windowed("rounds")
    with Driver(executor) as driver:
        driver.open(0, BASE[:30], Sampling(temperature=0.0))
        driver.step([Row(0)])
        driver.step([Row(0)])
        plan, _ = driver.plan([Row(0)])
        late = replace(plan, kv_len=plan.kv_len + 62, max_depth=np.array([3], np.int32))
        assert executor.begin_after(executor.rounds.last, late, np.array([400], np.int32)) is None
        before = executor.windows.of.copy()
        assert (executor.windows.of == before).all()


@pytest.mark.parametrize("kind", cells([("eager",), ("cpu",)], [("jax",)]))
def test_what_was_given_back_is_never_read_or_written(windowed, kind):
    reads_what_was_given_back(windowed(kind))


def test_no_more_is_allocated_than_planned(source, windowed):
    executor = windowed(tokens=2816)
    near, far = executor.cache.near.parts, executor.cache.parts
    held = sum(part.numbers.nbytes for part in (*near, *far))
    limits = executor.limits
    assert held == target_kv_shape(source.architecture, limits).bytes(limits, torch.float32)
    assert held == executor.describe()["cache_bytes"]
    everything = replace(limits, window=0, window_pages=0)
    kept = TorchExecutor(source, everything).describe()["cache_bytes"]
    assert held < kept / 2


@pytest.mark.slow
def test_no_more_is_allocated_on_xla_than_planned(source, windowed):
    """And no round copies a cache of either kind."""
    executor = windowed("jax", tokens=2816)
    state, text = executor.programs.state, executor.programs.text(Key("round", Bucket(3, 7)))
    held = sum(part.nbytes for part in (*state.keys, *state.values))
    assert held == executor.describe()["cache_bytes"]
    kept = windowed("jax", tokens=2816, windows=0).describe()["cache_bytes"]
    assert len(state.keys) == 2 and held < kept / 2
    for part in state.keys:
        shape = ",".join(map(str, part.shape))
        assert f"f32[{shape}]" in text
        assert not re.search(rf"= f32\[{shape}\]\S* copy\(", text)


@NATIVE
def test_steps_are_timed(windowed, monkeypatch):
    """Start-up runs steps behind texts that it computes first."""
    monkeypatch.setattr(calibration, "SECONDS", 0.02)
    executor = windowed("cpu", slots=8, windows=8)
    assert calibration.measure_costs(executor).attend_ms >= 0.0
    executor.windows.check()
    assert not executor.capabilities.unwritten
