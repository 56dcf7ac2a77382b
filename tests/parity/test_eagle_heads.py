"""Draft heads on every executor: their passes against one token at a time, in the class that is
trained. What served ones propose, and what of it is accepted: tests/drafters/test_contract.py.
"""

import ctypes
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from forerun.build.target import open_target
from forerun.draft_shape import DraftShape
from forerun.drafters.model_drafter import ModelDrafter
from forerun.drafts.eagle_folder import open_draft
from forerun.errors import EngineError, ModelError
from forerun.executors import cpu
from forerun.executors.cpu import CpuEagleModel, CpuExecutor
from forerun.executors.jax import JaxEagleModel, JaxExecutor, JaxOptions
from forerun.executors.torch import TorchEagleModel, TorchExecutor
from forerun.interface.features import HostFeatures
from forerun.interface.slot_init import SlotInit
from forerun.speculative.sampling import Sampling
from tests.models import tiny
from tests.parity.driver import Driver, Row, chain_draft, limits
from tests.parity.heads import (
    SWITCHES,
    RandomHead,
    check_few_children,
    check_refusals,
    compare,
    extension,
    level,
    opened,
    serve,
    within,
)

NARROW = SWITCHES[-1]
EAGLE_1 = SWITCHES[-2]
NATIVE = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
MODELS = {"cpu": CpuEagleModel, "torch": TorchEagleModel, "jax": JaxEagleModel}


def near(actual, wanted):
    """8 bits a product, compounded over draft tokens; a wrong feature, norm or position gives less
    than 0.5.
    """
    for a, b in zip(np.atleast_2d(actual), np.atleast_2d(wanted), strict=True):
        assert np.corrcoef(a, b)[0, 1] > 0.97, np.abs(a - b).max()
        assert np.abs(a - b).max() < 0.25 * np.abs(b).max()


CLOSE = {"cpu": near, "torch": within(1e-5), "jax": within(2e-5)}
"""Log-probabilities down to -50: float32 rounds them by some 1e-5 at best."""


@pytest.fixture
def executors(dense, compiled, quickly):
    """The target on an executor, by name."""
    opened = []

    def of(name, **changes):
        if name == "cpu":
            made = CpuExecutor(dense.checkpoint, limits(tiny.VOCAB), threads=2)
        elif name == "torch":
            made = TorchExecutor(dense.checkpoint, limits(tiny.VOCAB), **changes)
        else:
            options = JaxOptions(draft_nodes=3, stacked=True, cache_dir=compiled)
            made = JaxExecutor(dense.checkpoint, limits(tiny.VOCAB, context=192, pages=24), options)
        opened.append(made)
        return made

    yield of
    for made in opened:
        made.shutdown()


@pytest.fixture
def made(executors):
    """On the core."""
    return executors("cpu")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(pytest.param("cpu", changes, marks=NATIVE) for changes in SWITCHES),
        *(
            pytest.param(("jax", "torch")[place % 2], changes, marks=pytest.mark.slow)
            for place, changes in enumerate(SWITCHES)
        ),
    ],
)
def test_extensions_and_trees_are_the_unrolled_forward(dense, executors, tmp_path, name, changes):
    dense_head = RandomHead(dense, tmp_path, changes)
    if (name, changes) == ("cpu", NARROW):
        with pytest.raises(ModelError, match="width"):
            CpuEagleModel(executors(name), dense.checkpoint, dense_head.draft)
        return
    compare(dense_head, executors(name), CLOSE[name], MODELS[name])


@pytest.mark.parametrize("name", [pytest.param("cpu", marks=NATIVE), "torch"])
def test_few_children_are_the_best_of_all(dense, executors, tmp_path, name):
    """In 8 bits; in bfloat16, in which it is still the same head."""
    executor = executors(name, dtype="bfloat16")
    dense_head = RandomHead(dense, tmp_path, {})
    pairs = check_few_children(dense_head, executor, MODELS[name])
    if name == "cpu":
        near(*pairs)
        return
    for actual, wanted in zip(*pairs, strict=True):
        assert np.corrcoef(actual, wanted)[0, 1] > 0.99
    opened = TorchEagleModel(executor, dense.checkpoint, dense_head.draft)
    assert opened.describe()["draft_cache_bytes"]


@pytest.mark.parametrize("name", [pytest.param("cpu", marks=NATIVE), "torch"])
def test_bad_passes_are_refused(dense, executors, tmp_path, name):
    """By name. On the core only what follows a token is read of an extension."""
    dense_head = RandomHead(dense, tmp_path, {})
    check_refusals(dense_head, executors(name), MODELS[name], "tokens" if name == "cpu" else None)


def test_torch_names_parents_and_nodes(dense, executors, tmp_path):
    executor, dense_head = executors("torch"), RandomHead(dense, tmp_path, {})
    one, rows = np.ones(1, np.int32), [(0, 2, [0])]
    with pytest.raises(EngineError, match="refused: parents"):
        device = TorchEagleModel(executor, dense.checkpoint, dense_head.draft)
        device.expand(level([5], one, [0, 1], rows))
    with Driver(executor) as driver:
        driver.open(0, [1, 2, 3])
        features = driver.step([Row(0)]).outcome.features
        for node in (-one, one * 3):
            with pytest.raises(EngineError, match=r"outside of 0\.\.2"):
                features.select(node)


def test_a_narrow_head_without_its_embedding_is_refused(dense, executors, tmp_path):
    dense_head = RandomHead(dense, tmp_path, {"hidden": 48, "trained_head": True})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["embed_tokens.weight"]
    save_file(tensors, file)
    executor = executors("torch")
    with pytest.raises(ModelError, match="needs embed_tokens"):
        TorchEagleModel(executor, dense.checkpoint, open_draft(tmp_path, dense_head.dense.arch))


# --- on the core ---------------------------------------------------------------------------------


@NATIVE
def test_features_of_nodes_that_there_were_not_are_refused(dense, made, tmp_path):
    device = CpuEagleModel(made, dense.checkpoint, RandomHead(dense, tmp_path, {}).draft)
    with Driver(made) as driver:
        driver.open(1, [3, 4])
        features = driver.step([Row(1)]).outcome.features
        work = extension([3, 4], [4, 5], [0, 2], [(1, 0, driver.sequences[1].pages)])
        beyond = np.array([0, made.limits.max_nodes], np.int32)
        with pytest.raises(EngineError, match="refused"):
            device.extend(work, replace(features, nodes=beyond))


@NATIVE
def test_a_draft_token_beyond_the_context_is_refused(dense, made, tmp_path):
    device = CpuEagleModel(made, dense.checkpoint, RandomHead(dense, tmp_path, {}).draft)
    last = made.limits.context - 1
    rows = [(0, last, list(range(-(-last // made.limits.page_size))))]
    device.expand(level([5], np.full(1, -1, np.int32), [0, 1], rows))
    with pytest.raises(EngineError, match="a draft node beyond the context"):
        device.expand(level([6], np.zeros(1, np.int32), [0, 1], rows, first=1))


@NATIVE
def test_chunks_and_company_change_no_bit(dense, made, tmp_path):
    """The same positions give the same draft, extended at once or in pieces."""
    drafts, draft = [], RandomHead(dense, tmp_path, {}).draft
    tokens = np.random.default_rng(2).integers(0, tiny.VOCAB, 13).astype(np.int32)
    for chunks in ((13,), (5, 4, 4), (1, 1, 10, 1)):
        model = CpuEagleModel(made, dense.checkpoint, draft)
        drafter = ModelDrafter(model, made.limits, DraftShape(width=3, depth=3))
        with Driver(made) as driver:
            driver.open(1, tokens, Sampling(temperature=0.0))
            drafter.begin(SlotInit(1, driver.sequences[1].text, 13, Sampling(temperature=0.0)))
            for count in chunks:
                done = driver.step([Row(1, known=count)])
                drafter.observe(done.plan, done.trees, done.outcome)
            plan, _ = driver.plan([Row(1, draft=chain_draft([0] * 8))])  # With pages for it.
            (tree,) = drafter.propose(replace(plan, max_depth=np.array([3], np.int32)))
        assert len(tree) == 8
        drafts.append((tree.tokens.tolist(), tree.parents.tolist(), tree.score.tolist()))
    assert drafts[0] == drafts[1] == drafts[2]


@NATIVE
@pytest.mark.parametrize("changes", [{}, {"feature_norm": "each"}, EAGLE_1])
def test_features_that_were_kept_do_as_well(dense, made, tmp_path, changes):
    """What a head that lags gets later is what it would have got at once, bit for bit."""
    device = CpuEagleModel(made, dense.checkpoint, RandomHead(dense, tmp_path, changes).draft)
    tokens = np.random.default_rng(2).integers(0, tiny.VOCAB, 9)
    with Driver(made) as driver:
        driver.open(1, tokens[:-1])
        features = driver.step([Row(1)]).outcome.features
        work = extension(
            tokens[:-1], tokens[1:], [0, 8], [(1, 0, driver.sequences[1].pages)], candidates=5
        )
        at_once = device.extend(work, features)
        slots, positions = np.ones(8, np.int32), np.arange(8, dtype=np.int32)
        kept = features.select(positions[::-1]).store().at(slots, positions)
        driver.open(0, tokens[:3])
        driver.step([Row(0)])
        later = device.extend(work, kept)
        assert (at_once.ids == later.ids).all() and (at_once.log_probs == later.log_probs).all()
        wrong = device.extend(work, features.select(np.zeros(8, np.int32)))
        assert (wrong.log_probs != later.log_probs).any()


@NATIVE
def test_a_ring_holds_features_of_its_own_width(dense, made, tmp_path):
    """The core writes into it: other features leave it alone."""
    CpuEagleModel(made, dense.checkpoint, RandomHead(dense, tmp_path, {}).draft)
    library, ring = made.model._library, made.model.ring.values
    at, width = ring.ctypes.data, ring.shape[1]
    with pytest.raises(EngineError, match="features of another width"):
        library.forerun_set_ring(made.native_model(), at, 256, width + 1)
    library.forerun_set_ring(made.native_model(), at, 256, width)
    with Driver(made) as driver:
        for reading in (True, False):
            if not reading:
                wider = (ctypes.c_int32 * 4)(0, 1, 1, 1)
                library.forerun_request_aux_hidden_states(made.native_model(), wider, 4)
            ring[:] = 0
            driver.open(int(reading), np.arange(4, 9))
            driver.step([Row(int(reading))])
            assert bool(ring.any()) == reading


@NATIVE
def test_a_draft_of_more_layers_is_refused(dense, made, tmp_path):
    draft = RandomHead(dense, tmp_path, {}).draft
    about = {name: getattr(draft.head, name) for name in draft.head.__dataclass_fields__}
    deeper = SimpleNamespace(**about, cache=draft.head.cache * 3)
    with pytest.raises(ModelError, match="runs drafts of one EAGLE layer, not of 3; use the torch"):
        CpuEagleModel(made, dense.checkpoint, SimpleNamespace(head=deeper, path="deeper"))


@NATIVE
def test_a_token_map_keeps_some_rows_of_an_eagle_1_head(dense, made, tmp_path):
    draft = RandomHead(dense, tmp_path, EAGLE_1).draft
    kept = np.arange(1, tiny.VOCAB, 3, dtype=np.int32)
    given = np.random.default_rng(0).normal(size=(6, dense.arch.hidden)).astype(np.float16)
    tokens, drafts = np.arange(3, 10, dtype=np.int32), []
    for limited in (draft, draft.limited(kept)):
        device = CpuEagleModel(made, dense.checkpoint, limited)
        work = extension(tokens[:-1], tokens[1:], [0, 6], [(1, 0, [7])])
        drafts.append(device.extend(work, HostFeatures(given)))
    every, some = drafts
    whole = np.empty(tiny.VOCAB)
    whole[every.ids[0]] = every.log_probs[0]
    wanted = whole[kept] - np.logaddexp.reduce(whole[kept])
    np.testing.assert_allclose(some.log_probs[0], wanted[some.ids[0]], atol=1e-3)
    assert device.traits.target_ids.tolist() == kept.tolist()


def test_a_head_with_its_own_vocabulary_takes_no_token_map(dense, tmp_path):
    with pytest.raises(ModelError, match="its own draft vocabulary"):
        RandomHead(dense, tmp_path, {}).draft.limited(np.arange(5, dtype=np.int32))


# --- served --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(folder, learned):
    target = opened(folder, learned[0])
    yield target
    target.close()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"executor": "cpu", "dtype": "auto"}, marks=NATIVE),
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_the_price_of_a_head_is_measured(target, learned, changes):
    """With the adaptive policy, whatever it decides, the text is the same."""
    config = replace(target.config, policy="adaptive", **changes)
    with closing(open_target(config)) as adaptive:
        assert adaptive.costs.draft_ms > 0 and adaptive.costs.follow_ms > 0
        prompts = list(learned[1][:4, :12])
        served = serve(adaptive, prompts)
        assert [item.tokens for item in served] == [
            item.tokens for item in serve(adaptive, prompts, "OFF")
        ]
