"""Window pages in torch: eager, by kernels' twins, and in rounds that are captured and begin from
each other; and in JAX, whose rounds do too. Against an engine that keeps everything.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.control.policy import FixedPolicy
from forerun.draft_shape import DraftShape
from forerun.drafters.model_drafter import ModelDrafter
from forerun.drafts.whole_draft import WholeDraft, equal_vocabulary
from forerun.engine import disk_pages
from forerun.engine.thread import Engine, EngineOptions
from forerun.errors import EngineError
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
from tests.drafters.served import padded
from tests.engine.drafters import ErraticDrafter
from tests.engine.toys import TOKENIZER, VOCAB, Ear, ask
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
from tests.twins.kernels import SLOW_TWINS


@pytest.fixture(scope="module")
def source(checkpoint):
    return checkpoint("gemma3_text", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def known(source):
    """Of the reference; kernels' twins give the same tokens in float32."""
    return Known(TorchExecutor(source, Known.LIMITS))


@pytest.fixture
def windowed(source, monkeypatch, compiled, quickly):
    """An executor of a kind: "eager"; "kernels", whose prompts are FlashAttention's; or "rounds",
    which begin from each other, as those of "jax" do.
    """

    def build(kind="eager", of=None, **shape):
        with monkeypatch.context() as patch:
            limits = shaped(**shape)
            if kind == "jax":
                return on_xla(patch, of or source, limits, compiled)
            if kind != "eager":
                patch.setattr(model_runner, "kernels_for", lambda device: SLOW_TWINS)
            if kind == "rounds":
                on_tape(patch, warm=False)
            prompts = "torch_native" if kind == "kernels" else "triton"
            made = torch_executor(limits)(of or source, limits, prompts=prompts)
            return made.capture(overlap=True) if kind == "rounds" else made

    return build


def on_xla(patch, source, limits, compiled):
    """Rounds of one size, and layers in a scan where they repeat; what a step needs is compiled by
    it.
    """
    padded(patch, "rows", "nodes", "chunks")
    options = JaxOptions(draft_nodes=6, overlap=True, stacked=True, cache_dir=compiled)
    return jax_executor(limits)(source, limits, options)


@pytest.mark.parametrize(
    ("kind", "page", "drafts", "seed", "requests"),
    [
        ("eager", 16, True, 7, 5),
        ("rounds", 16, False, 13, 5),
        *(
            pytest.param(*values, 10, marks=pytest.mark.slow)
            for values in [
                ("eager", 16, True, 2),
                ("rounds", 1, True, 0),
                ("rounds", 16, False, 1),
                ("kernels", 16, True, 3),
                ("rounds", 16, True, 2),
                ("rounds", 1, False, 5),
                ("jax", 16, True, 2),
                ("jax", 1, False, 5),
            ]
        ),
    ],
)
def test_any_schedule_meets_the_same_texts(windowed, known, kind, page, drafts, seed, requests):
    """Of window pages there are too few for all sequences at once, and of pages too."""
    executor = windowed(kind, page=page, tokens=304)
    drafter = ErraticDrafter(known.following, VOCAB, seed) if drafts else None
    begins_early = kind in ("rounds", "jax")
    engine = engine_on(executor, drafter, overlap=begins_early)
    Schedule(engine, executor, known, seed).run(requests)
    assert engine.stats().preemptions > 0 or page == 1 or requests < 10
    assert (engine.stats().acceptance_length > 1.05) == drafts
    assert not begins_early or drafts or engine.stats().carried > 4


@pytest.mark.parametrize("kind", ["eager", pytest.param("rounds", marks=pytest.mark.slow)])
def test_texts_and_their_windows_come_back_from_disk(windowed, known, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(disk_pages, "LEAST_SECONDS", 60.0)
    executor = windowed(kind, tokens=1408)
    executor.pages = WindowedPages(TorchPages(executor), executor.windows)
    executor.window_contents = executor.pages
    for whole in (0, 384):  # The pool's pages begin another life with the second engine.
        engine = engine_on(executor, overlap=kind == "rounds")
        attach_store(engine, executor, tmp_path)
        asked = ask("r", BASE[:390], 8), ask("s", BASE[:390][::-1], 8)
        assert answered(engine, executor, known, *asked) == [whole, whole]
        assert stored(engine) == (48, 4) and engine.stats().store.hits == 2 * bool(whole)
        engine.shutdown()
    with pytest.raises(EngineError, match="there is no window page"):
        executor.pages.contents.read_window_page(10**6)
    with pytest.raises(EngineError, match="are not a window page of"):
        executor.pages.contents.write_window_page(0, b"x")


@pytest.mark.parametrize("kind", ["eager", "rounds", pytest.param("jax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("page", [1, 16])
def test_a_text_goes_on_where_its_window_is_still_there(windowed, known, kind, page):
    executor = windowed(kind, page=page, tokens=1408)
    engine, whole = engine_on(executor), 389 // page * page

    def cached(prompt):
        return answered(engine, executor, known, ask("r", prompt, 4))[0]

    assert cached(BASE[:390]) == 0
    assert cached(BASE[:390]) == whole, "its window was not needed by others"
    assert cached(np.append(BASE[:304], BASE[30:50])) < 300, "far behind the window"
    assert cached(np.append(BASE[:304], BASE[340:350])) == 304


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("eager", "gemma4_text"),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in [
                *(("eager", family) for family in ("gpt_oss", "exaone4", "mistral")),
                *(("jax", f) for f in ("gpt_oss", "gemma3_text", "gemma4_text", "mistral")),
            ]
        ),
    ],
)
def test_layers_of_any_family(checkpoint, windowed, kind, family):
    """Shared keys and values, sinks, windows everywhere, and in a scan beside layers without: the
    logits of a long text, bit for bit.
    """
    changes = {
        "gemma4_text": {"vocab_size_per_layer_input": VOCAB},
        "gemma3_text": {"num_hidden_layers": 5},
        "mistral": {"sliding_window": 24},
    }.get(family, {})
    source = checkpoint(family, vocab_size=VOCAB, **changes)
    kept = windowed(kind, source, windows=0)
    assert kept.windows is None
    found = []
    for executor in (kept, windowed(kind, source)):
        with Driver(executor) as driver:
            driver.open(0, BASE[:200])
            logits = []
            while driver.sequences[0].kv_len < 200:
                result = driver.step([Row(0, known=20)])
                logits.append(result.logits(0, 0).numpy().copy())
            found.append(np.stack(logits))
    assert found[0].tobytes() == found[1].tobytes()


def beside_itself(executor, source, shape):
    """The target itself as draft model, with which rounds grow trees."""
    draft = WholeDraft("itself", source, equal_vocabulary(VOCAB, VOCAB))
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
    ear = Ear()
    asked = [ask(str(n), BASE[n : 60 + 30 * n], 53 + 3 * n, seed=n) for n in range(3)]
    for request in asked:
        engine.submit(request, ear)
    finished(engine, executor)
    assert [[ear.tokens(request.id)] for request in asked] == [known.texts(r) for r in asked]
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
    stats = grown(executor, source, known, overlap)
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


@pytest.mark.parametrize("kind", ["eager", pytest.param("jax", marks=pytest.mark.slow)])
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
