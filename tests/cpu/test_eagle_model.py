"""A draft head on the compiled core against the class that is trained, in torch."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forerun.drafters.model_drafter import ModelDrafter
from forerun.errors import EngineError, ModelError
from forerun.executors import cpu
from forerun.executors.cpu import CpuEagleModel, CpuExecutor
from forerun.executors.torch.decoder.layers import rotation
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.interface.draft_model import DraftBlock, DraftLevel, Extension
from forerun.interface.executor import ExecutorLimits
from forerun.interface.features import KeptFeatures
from forerun.interface.plan import Plan, SlotInit
from forerun.models.draft_config import head_for
from forerun.models.draft_folder import open_draft
from forerun.models.folder import FolderCheckpoint
from forerun.speculative.draft_tree import TreeShape
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft, batch
from forerun.train.export import export_head
from forerun.train.target import DenseTarget
from tests.models import tiny

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))

LIMITS = ExecutorLimits(page_size=4, pages=32, slots=3, max_nodes=64, context=128, vocab=320)
SWITCHES = [
    {},
    {"normed_residual": True},
    {"normed_feedback": True},
    {"feature_norm": "joint"},
    {"feature_norm": "each"},
    {"algorithm": "eagle1", "fc_bias": True},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    hf = tiny.model("llama", num_hidden_layers=6)
    folder = tmp_path_factory.mktemp("target")
    tiny.save_folder(hf, folder)
    return FolderCheckpoint(folder)


class World:
    """A target and a head on the CPU core, and both in torch."""

    def __init__(self, checkpoint, folder, changes):
        arch = checkpoint.architecture
        limits = replace(LIMITS, vocab=arch.vocab)
        self.ids = np.arange(0, arch.vocab, 2, dtype=np.int32)
        vocab = len(self.ids)
        if changes.get("algorithm") == "eagle1":
            changes = {**changes, "features": (arch.layers,), "vocab": arch.vocab}
            self.ids = np.arange(arch.vocab, dtype=np.int32)
        torch.manual_seed(0)
        self.head = EagleHead(replace(head_for(arch, vocab), **changes))
        for parameter in self.head.parameters():
            noise = torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15)
            parameter.data.copy_((noise + (parameter.dim() == 1)).bfloat16())
        self.target = DenseTarget(checkpoint, "cpu", torch.float32)
        ids = torch.from_numpy(self.ids).long()
        if self.head.head.hidden == arch.hidden:
            self.head.lm_head.weight.data.copy_(self.target.head[ids])
        export_head(self.head, self.ids, folder)
        self.draft = open_draft(folder, arch)
        self.executor = CpuExecutor(checkpoint, limits, threads=2)
        self.device = CpuEagleModel(self.executor, checkpoint, self.draft)
        self.limits = limits
        self.keys, self.values = [], []
        self.frequencies = torch.from_numpy(arch.rope.frequencies(arch.head_size))

    def features(self, tokens):
        known = torch.tensor(np.asarray(tokens)[None].astype(np.int64))
        about = self.head.head
        found, last = self.target.run(known, about.features)
        return (last if about.algorithm == "eagle1" else found)[0]

    @torch.no_grad()
    def run(self, position, token, hidden):
        def attend(_layer, heads):
            q, k, v = heads.turned()
            self.keys.append(k)
            self.values.append(v)
            group = q.shape[0] // k.shape[0]
            keys = torch.stack(self.keys).repeat_interleave(group, 1)
            values = torch.stack(self.values).repeat_interleave(group, 1)
            weights = torch.einsum("ae,tae->at", q, keys) * q.shape[-1] ** -0.5
            return torch.einsum("at,tae->ae", weights.softmax(-1), values)

        rotary = rotation(torch.tensor(position), self.frequencies, 1.0)
        token = torch.tensor(int(token))
        read, hidden = self.head(token, self.target.embed, hidden, rotary, attend)
        return self.head.logits(read).numpy(), hidden


def plan_of(known, kv_len=0, nodes=0, depth=0, slot=1):
    return Plan(
        slots=np.array([slot], np.int32),
        kv_len=np.array([kv_len], np.int32),
        known=(np.asarray(known, np.int32),),
        samples=np.ones(1, np.bool_),
        max_nodes=np.array([nodes], np.int32),
        max_depth=np.array([depth], np.int32),
        page_table=np.array([[7, 3, 9, 1, 5, 11]], np.int32),
        constrained=np.zeros(1, np.bool_),
    )


def extension_of(plan, tokens, candidates):
    """All but the last of `tokens` become permanent, in the one row of `plan`."""
    count = len(tokens) - 1
    return Extension(
        tokens=tokens[:-1],
        next_tokens=tokens[1:],
        start=np.array([0, count], np.int32),
        kv_len=plan.kv_len,
        slots=plan.slots,
        pages=plan.page_table,
        scored=np.arange(count, dtype=np.int32),
        candidates=candidates,
    )


def every(run, work):
    """float32[s,Vd] log-probabilities of all children, by draft id."""
    found = run(work)
    assert (np.diff(found.log_probs) <= 0).all()
    out = np.empty_like(found.log_probs)
    np.put_along_axis(out, found.ids.astype(np.int64), found.log_probs, -1)
    few = run(replace(work, candidates=3))
    assert few.ids.shape == (len(out), 3)
    assert (few.log_probs == found.log_probs[:, :3]).all()
    return out


def close(a, b):
    b = b - np.log(np.exp(b - b.max()).sum()) - b.max()
    # 8 bits a product, compounded over draft tokens; a wrong feature, norm or position gives < 0.5.
    assert np.corrcoef(a, b)[0, 1] > 0.97, np.abs(a - b).max()
    assert np.abs(a - b).max() < 0.25 * np.abs(b).max()


@pytest.mark.parametrize("changes", SWITCHES)
def test_extension_and_guesses_are_the_torch_heads(checkpoint, tmp_path, changes):
    world = World(checkpoint, tmp_path, changes)
    tokens = np.random.default_rng(1).integers(0, world.limits.vocab, 12).astype(np.int32)
    count = len(tokens) - 1
    plan = plan_of(tokens[:count])
    world.executor.open(SlotInit(1, tokens[:count], count, Sampling(temperature=0.0)))
    trees = batch(list(plan.known), [Draft()])
    outcome = world.executor.finish(world.executor.begin(plan, trees))
    found = every(
        lambda work: world.device.extend(work, outcome.features),
        extension_of(plan, tokens, world.device.traits.vocab),
    )
    features = world.features(tokens[:count])
    for q in range(count):
        with torch.no_grad():
            fused = world.head.fuse(features[q])
        logits, hidden = world.run(q, tokens[q + 1], fused)
        close(found[q], logits)
    for level, token in enumerate((5, 77, 123)):
        drafted = every(
            world.device.expand,
            DraftLevel(
                tokens=np.array([token], np.int32),
                parents=np.array([level - 1], np.int32),
                start=np.array([0, 1], np.int32),
                kv_len=np.array([count], np.int32),
                slots=plan.slots,
                pages=plan.page_table,
                first=level,
                candidates=world.device.traits.vocab,
            ),
        )[0]
        logits, hidden = world.run(count + level, token, hidden)
        close(drafted, logits)
    world.executor.shutdown()


def test_chunks_and_company_change_no_bit(checkpoint, tmp_path):
    """The same positions give the same draft, extended at once or in pieces."""
    drafts = []
    tokens = np.random.default_rng(2).integers(0, checkpoint.architecture.vocab, 14)
    tokens = tokens.astype(np.int32)
    for number, cuts in enumerate(((13,), (5, 9, 13), (1, 2, 12, 13))):
        world = World(checkpoint, tmp_path / str(number), {})
        drafter = ModelDrafter(world.device, world.limits, TreeShape(3, 3))
        slot_init = SlotInit(1, tokens[:13], 13, Sampling(temperature=0.0))
        world.executor.open(slot_init)
        drafter.begin(slot_init)
        begin = 0
        for end in cuts:
            plan = plan_of(tokens[begin:end], begin)
            plan.samples[:] = end == 13
            trees = batch(list(plan.known), [Draft()])
            outcome = world.executor.finish(world.executor.begin(plan, trees))
            drafter.observe(plan, trees, outcome)
            begin = end
        next_plan = plan_of(outcome.tokens[0, :1], 13, nodes=8, depth=3)
        draft = drafter.propose(next_plan)[0]
        assert len(draft) == 8
        drafts.append((draft.tokens.tolist(), draft.parents.tolist(), draft.score.tolist()))
        world.executor.shutdown()
    assert drafts[0] == drafts[1] == drafts[2]


def test_bad_passes_are_refused(checkpoint, tmp_path):
    world = World(checkpoint, tmp_path, {})
    one = np.zeros(1, np.int32)
    good = {
        "tokens": one,
        "parents": one - 1,
        "start": np.array([0, 1], np.int32),
        "kv_len": one,
        "slots": one,
        "pages": one[None],
        "first": 0,
        "candidates": 1,
    }
    world.device.expand(DraftLevel(**good))
    for change in (
        {"tokens": one + 10_000},
        {"parents": one + 3},
        {"kv_len": one + 20},
        {"first": 64},
        {"slots": one + 3},
    ):
        with pytest.raises(EngineError, match="refused"):
            world.device.expand(DraftLevel(**good | change))
    tokens = np.array([3, 4, 5], np.int32)
    plan, trees = plan_of(tokens[:2]), batch([tokens[:2]], [Draft()])
    world.executor.open(SlotInit(1, tokens[:2], 2, Sampling(temperature=0.0)))
    features = world.executor.finish(world.executor.begin(plan, trees)).features
    work = extension_of(plan, tokens, 1)
    world.device.extend(work, features)
    for change in (
        {"next_tokens": tokens[1:] + 10_000},
        {"kv_len": one + 23},
        {"slots": one + 3},
        {"scored": one + 2},
    ):
        with pytest.raises(EngineError, match="refused"):
            world.device.extend(replace(work, **change), features)
    with pytest.raises(EngineError, match="refused"):
        world.device.extend(work, replace(features, nodes=np.array([0, 64])))
    with pytest.raises(EngineError, match="one row per token"):
        world.device.extend(work, features.select(one))
    with pytest.raises(EngineError, match="without features"):
        world.device.extend(work, None)
    with pytest.raises(EngineError, match="does not exist"):
        world.device.extend(replace(work, pages=work.pages * 0 - 1), features)
    with pytest.raises(EngineError, match="level by level"):
        world.device.block(DraftBlock(one, one, one, one[None], depth=1, candidates=1))
    world.executor.shutdown()


def test_a_head_of_another_width_is_refused(checkpoint, tmp_path):
    with pytest.raises(ModelError, match="width"):
        World(checkpoint, tmp_path, {"hidden": 48, "trained_head": True})


@pytest.mark.parametrize("changes", [{}, {"feature_norm": "each"}, SWITCHES[-1]])
def test_features_that_were_kept_do_as_well(checkpoint, tmp_path, changes):
    """What a head that lags gets later is what it would have got at once, bit for bit."""
    world = World(checkpoint, tmp_path, changes)
    tokens = np.random.default_rng(2).integers(0, world.limits.vocab, 9).astype(np.int32)
    plan = plan_of(tokens[:-1])
    world.executor.open(SlotInit(1, tokens[:-1], 8, Sampling(temperature=0.0)))
    trees = batch(list(plan.known), [Draft()])
    features = world.executor.finish(world.executor.begin(plan, trees)).features
    work = extension_of(plan, tokens, 5)
    at_once = world.device.extend(work, features)
    kept = features.select(np.arange(8)[::-1]).keep().select(np.arange(8)[::-1])
    rounded = KeptFeatures(features.keep().values.astype(np.float16))
    assert (kept.values == rounded.values).all()
    whole = KeptFeatures(world.executor.features(8, kept.values.shape[1]))
    other = plan_of(tokens[:3], slot=0)
    world.executor.open(SlotInit(0, tokens[:3], 3, Sampling(temperature=0.0)))
    world.executor.begin(other, batch(list(other.known), [Draft()]))
    later = world.device.extend(work, whole)
    assert (at_once.ids == later.ids).all() and (at_once.log_probs == later.log_probs).all()
    wrong = world.device.extend(work, features.select(np.zeros(8, np.int32)))
    assert (wrong.log_probs != later.log_probs).any()
    near = world.device.extend(work, kept)
    # Sixteen bits move a product's 8-bit scales by a step here and there.
    assert np.corrcoef(near.log_probs.ravel(), later.log_probs.ravel())[0, 1] > 0.99


def test_a_draft_of_more_layers_is_refused(checkpoint, tmp_path):
    draft = World(checkpoint, tmp_path, {}).draft
    about = {name: getattr(draft.head, name) for name in draft.head.__dataclass_fields__}
    deeper = SimpleNamespace(**about, cache=draft.head.cache * 3)
    executor = CpuExecutor(checkpoint, replace(LIMITS, vocab=checkpoint.architecture.vocab))
    with pytest.raises(ModelError, match="runs drafts of one EAGLE layer, not of 3; use the torch"):
        CpuEagleModel(executor, checkpoint, SimpleNamespace(head=deeper, path="deeper"))
    executor.shutdown()


def test_a_token_map_keeps_some_rows_of_an_eagle_1_head(checkpoint, tmp_path):
    world = World(checkpoint, tmp_path, {"algorithm": "eagle1", "fc_bias": True})
    kept = np.arange(1, world.limits.vocab, 3, dtype=np.int32)
    mapped = CpuEagleModel(world.executor, checkpoint, world.draft.limited(kept))
    tokens = np.arange(3, 10, dtype=np.int32)
    given = np.random.default_rng(0).normal(size=(len(tokens) - 1, checkpoint.architecture.hidden))
    found = []
    for model in (world.device, mapped):
        extension = extension_of(plan_of(tokens[:-1]), tokens, model.traits.vocab)
        found.append(model.extend(extension, KeptFeatures(given.astype(np.float16))))
    every, some = found
    dense = np.empty(world.limits.vocab)
    dense[every.ids[0]] = every.log_probs[0]
    wanted = dense[kept] - np.logaddexp.reduce(dense[kept])
    np.testing.assert_allclose(some.log_probs[0], wanted[some.ids[0]], atol=1e-3)
    assert mapped.traits.target_ids.tolist() == kept.tolist()
    world.executor.shutdown()


def test_a_head_with_its_own_vocabulary_takes_no_token_map(checkpoint, tmp_path):
    world = World(checkpoint, tmp_path, {})
    with pytest.raises(ModelError, match="its own draft vocabulary"):
        world.draft.limited(np.arange(5, dtype=np.int32))
    world.executor.shutdown()
