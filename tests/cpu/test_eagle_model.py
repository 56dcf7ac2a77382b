"""A draft head on the compiled core against the class that is trained, in torch."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from forerun.drafters.model_drafter import ModelDrafter
from forerun.errors import EngineError, ModelError
from forerun.executors.cpu import CpuEagleModel, CpuExecutor
from forerun.interface.features import KeptFeatures
from forerun.interface.plan import SlotInit
from forerun.models.folder import FolderCheckpoint
from forerun.speculative.draft_tree import TreeShape
from forerun.speculative.sampling import Sampling
from tests.models import tiny
from tests.parity.driver import Driver, Row, chain_draft, limits
from tests.parity.heads import (
    SWITCHES,
    Target,
    Twin,
    check_few_children,
    check_refusals,
    compare,
    extension,
)

NARROW = SWITCHES[-1]
EAGLE_1 = SWITCHES[-2]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    hf = tiny.model("llama", max_position_embeddings=512, num_hidden_layers=6)
    return Target(FolderCheckpoint(tiny.save_folder(hf, tmp_path_factory.mktemp("target"))))


@pytest.fixture
def made(dense):
    """The target on the core."""
    executor = CpuExecutor(dense.checkpoint, limits(tiny.VOCAB), threads=2)
    yield executor
    executor.shutdown()


def near(found, wanted):
    """8 bits a product, compounded over draft tokens; a wrong feature, norm or position gives less
    than 0.5.
    """
    for a, b in zip(np.atleast_2d(found), np.atleast_2d(wanted), strict=True):
        assert np.corrcoef(a, b)[0, 1] > 0.97, np.abs(a - b).max()
        assert np.abs(a - b).max() < 0.25 * np.abs(b).max()


@pytest.mark.parametrize("changes", SWITCHES[:-1])
def test_extensions_and_trees_are_the_unrolled_forward(dense, made, tmp_path, changes):
    compare(Twin(dense, tmp_path, changes), made, near, CpuEagleModel)


def test_few_children_are_the_best_of_all(dense, made, tmp_path):
    near(*check_few_children(Twin(dense, tmp_path, {}), made, CpuEagleModel))


def test_bad_passes_are_refused(dense, made, tmp_path):
    # Only what follows a token is read of an extension.
    check_refusals(Twin(dense, tmp_path, {}), made, CpuEagleModel, unread="tokens")


def test_features_of_nodes_that_there_were_not_are_refused(dense, made, tmp_path):
    device = CpuEagleModel(made, dense.checkpoint, Twin(dense, tmp_path, {}).draft)
    with Driver(made) as driver:
        driver.open(1, [3, 4])
        features = driver.step([Row(1)]).outcome.features
        work = extension([3, 4], [4, 5], [0, 2], [(1, 0, driver.sequences[1].pages)])
        beyond = np.array([0, made.limits.max_nodes], np.int32)
        with pytest.raises(EngineError, match="refused"):
            device.extend(work, replace(features, nodes=beyond))


def test_chunks_and_company_change_no_bit(dense, made, tmp_path):
    """The same positions give the same draft, extended at once or in pieces."""
    drafts, draft = [], Twin(dense, tmp_path, {}).draft
    tokens = np.random.default_rng(2).integers(0, tiny.VOCAB, 13).astype(np.int32)
    for chunks in ((13,), (5, 4, 4), (1, 1, 10, 1)):
        model = CpuEagleModel(made, dense.checkpoint, draft)
        drafter = ModelDrafter(model, made.limits, TreeShape(3, 3))
        with Driver(made) as driver:
            driver.open(1, tokens, Sampling(temperature=0.0))
            drafter.begin(SlotInit(1, tokens, 13, Sampling(temperature=0.0)))
            for count in chunks:
                done = driver.step([Row(1, known=count)])
                drafter.observe(done.plan, done.trees, done.outcome)
            plan, _ = driver.plan([Row(1, draft=chain_draft([0] * 8))])  # With pages for it.
            (found,) = drafter.propose(replace(plan, max_depth=np.array([3], np.int32)))
        assert len(found) == 8
        drafts.append((found.tokens.tolist(), found.parents.tolist(), found.score.tolist()))
    assert drafts[0] == drafts[1] == drafts[2]


def test_a_head_of_another_width_is_refused(dense, made, tmp_path):
    with pytest.raises(ModelError, match="width"):
        CpuEagleModel(made, dense.checkpoint, Twin(dense, tmp_path, NARROW).draft)


@pytest.mark.parametrize("changes", [{}, {"feature_norm": "each"}, EAGLE_1])
def test_features_that_were_kept_do_as_well(dense, made, tmp_path, changes):
    """What a head that lags gets later is what it would have got at once, bit for bit."""
    device = CpuEagleModel(made, dense.checkpoint, Twin(dense, tmp_path, changes).draft)
    tokens = np.random.default_rng(2).integers(0, tiny.VOCAB, 9)
    with Driver(made) as driver:
        driver.open(1, tokens[:-1])
        features = driver.step([Row(1)]).outcome.features
        work = extension(
            tokens[:-1], tokens[1:], [0, 8], [(1, 0, driver.sequences[1].pages)], candidates=5
        )
        at_once = device.extend(work, features)
        kept = features.select(np.arange(8)[::-1]).keep().select(np.arange(8)[::-1])
        rounded = KeptFeatures(features.keep().values.astype(np.float16))
        assert (kept.values == rounded.values).all()
        whole = KeptFeatures(made.features(8, kept.values.shape[1]))
        driver.open(0, tokens[:3])
        driver.step([Row(0)])
        later = device.extend(work, whole)
        assert (at_once.ids == later.ids).all() and (at_once.log_probs == later.log_probs).all()
        wrong = device.extend(work, features.select(np.zeros(8, np.int32)))
        assert (wrong.log_probs != later.log_probs).any()
        near_it = device.extend(work, kept)
    # Sixteen bits move a product's 8-bit scales by a step here and there.
    assert np.corrcoef(near_it.log_probs.ravel(), later.log_probs.ravel())[0, 1] > 0.99


def test_a_draft_of_more_layers_is_refused(dense, made, tmp_path):
    draft = Twin(dense, tmp_path, {}).draft
    about = {name: getattr(draft.head, name) for name in draft.head.__dataclass_fields__}
    deeper = SimpleNamespace(**about, cache=draft.head.cache * 3)
    with pytest.raises(ModelError, match="runs drafts of one EAGLE layer, not of 3; use the torch"):
        CpuEagleModel(made, dense.checkpoint, SimpleNamespace(head=deeper, path="deeper"))


def test_a_token_map_keeps_some_rows_of_an_eagle_1_head(dense, made, tmp_path):
    draft = Twin(dense, tmp_path, EAGLE_1).draft
    kept = np.arange(1, tiny.VOCAB, 3, dtype=np.int32)
    given = np.random.default_rng(0).normal(size=(6, dense.arch.hidden)).astype(np.float16)
    tokens, found = np.arange(3, 10, dtype=np.int32), []
    for limited in (draft, draft.limited(kept)):
        device = CpuEagleModel(made, dense.checkpoint, limited)
        work = extension(tokens[:-1], tokens[1:], [0, 6], [(1, 0, [7])])
        found.append(device.extend(work, KeptFeatures(given)))
    every, some = found
    whole = np.empty(tiny.VOCAB)
    whole[every.ids[0]] = every.log_probs[0]
    wanted = whole[kept] - np.logaddexp.reduce(whole[kept])
    np.testing.assert_allclose(some.log_probs[0], wanted[some.ids[0]], atol=1e-3)
    assert device.traits.target_ids.tolist() == kept.tolist()


def test_a_head_with_its_own_vocabulary_takes_no_token_map(dense, tmp_path):
    with pytest.raises(ModelError, match="its own draft vocabulary"):
        Twin(dense, tmp_path, {}).draft.limited(np.arange(5, dtype=np.int32))
