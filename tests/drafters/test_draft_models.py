"""The draft model contract: a block proposer, a second decoder, the target itself. Every count is
exact, and texts are those of plain decoding.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forerun.build import drafting
from forerun.build.drafting import with_draft
from forerun.build.engine import open_target
from forerun.build.memory import Needs, plan_memory
from forerun.control.policy import Decision, FixedPolicy
from forerun.drafters import model_drafter
from forerun.executors.torch import TorchDecoderModel
from forerun.executors.torch.attention.kv import KvShape
from forerun.executors.torch.drafts.draft_cache import DraftCache
from forerun.interface.draft_model import BlockCandidates
from forerun.interface.plan import Budget
from forerun.models.cache_layer import CacheLayer
from forerun.models.folder import FolderCheckpoint
from forerun.models.whole_draft import WholeDraft, equal_vocabulary
from forerun.options.config import EngineConfig
from tests.drafters.draft_models import CPU, FeatureBlock, Told, index
from tests.drafters.served import SMALL, answered, asked
from tests.models import tiny

TOKENS, DEPTH = 19, 3
TEMPERATURES = [0.0, 0.8]


@pytest.fixture(autouse=True)
def all_candidates(monkeypatch):
    """Noise is looked at for every token: tiny models' distributions are flat."""
    monkeypatch.setattr(model_drafter, "CANDIDATES", tiny.VOCAB)


@pytest.fixture(scope="module")
def hf():
    return tiny.model("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def target(hf, tmp_path_factory):
    config = EngineConfig(
        model=str(tiny.save_folder(hf, tmp_path_factory.mktemp("target"))),
        executor="torch",
        dtype="float32",
        speculative_algorithm="OFF",
        **SMALL,
    )
    made = open_target(config)
    yield made
    made.close()


@pytest.fixture(scope="module")
def models(hf, target, tmp_path_factory):
    """The target itself, its first three layers, and a block drafter beside it."""
    folder = tmp_path_factory.mktemp("small")
    small = tiny.model("llama", num_hidden_layers=3)
    small.load_state_dict(hf.state_dict(), strict=False)
    tiny.save_folder(small, folder)
    executor = target.executor

    def whole(name, path):
        vocabulary = equal_vocabulary(tiny.VOCAB, tiny.VOCAB)
        return WholeDraft(name, FolderCheckpoint(Path(path)), vocabulary)

    return {
        "self": TorchDecoderModel(executor, whole("self", target.config.model)),
        "small": TorchDecoderModel(executor, whole("small", folder)),
        "block": FeatureBlock(executor, causal=True),
        "both ways": FeatureBlock(executor, causal=False, every=2),
    }


PROMPTS = [np.random.default_rng(n).integers(3, tiny.VOCAB, 9 + 13 * n) for n in range(6)]
PROMPTS += [PROMPTS[4], np.append(PROMPTS[4][:40], 7)]  # Whose pages are found again.


def served(target, model=None, temperature=0.0, at_once=None, tokens=TOKENS, **changes):
    """Completions of all prompts, some of which need several steps to be read."""
    naive = changes.pop("method", "EAGLE") == "NAIVE"
    method = "OFF" if model is None else "NAIVE" if naive else "EAGLE"
    depth = 1 if naive else DEPTH
    shape = {"nodes": depth, "depth": depth, "width": 1} | changes
    config = replace(
        target.config,
        speculative_algorithm=method,
        speculative_num_draft_tokens=shape["nodes"] + 1,
        speculative_num_steps=shape["depth"],
        speculative_eagle_topk=shape["width"],
    )
    requests = asked(PROMPTS, tokens, temperature)
    return answered(replace(target, draft_model=model), config, requests, at_once)


@pytest.fixture(scope="module")
def plain(target):
    return {t: [item.tokens for item in served(target, None, t)[0]] for t in TEMPERATURES}


def exact(done, expected):
    """Texts, and that every token is accounted for: accepted draft tokens, and one each step."""
    assert [item.tokens for item in done] == expected
    for item in done:
        stats = item.stats
        assert sum(stats.histogram) == stats.steps
        assert sum((a + 1) * steps for a, steps in enumerate(stats.histogram)) == TOKENS
        assert stats.accepted == TOKENS - stats.steps
    return [
        sum(getattr(item.stats, name) for item in done) for name in ("accepted", "draft_tokens")
    ]


def told(plain, temperature):
    texts = zip(PROMPTS, plain[temperature], strict=True)
    return [[*prompt, *tokens] for prompt, tokens in texts]


STEPS = 1 + -(-(TOKENS - 1) // (DEPTH + 1))
"""The prompt's, then DEPTH accepted and one more each; the last chain is cut to what is left."""


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("at_once", [None, 1])
def test_the_target_as_its_own_draft_accepts_everything(
    target, models, plain, temperature, at_once
):
    """Also with prompts in chunks, in a batch, and behind pages that another text has filled."""
    done, stats = served(target, models["self"], temperature, at_once)
    accepted, draft_tokens = exact(done, plain[temperature])
    assert accepted == draft_tokens > 0
    assert [item.stats.steps for item in done] == [STEPS] * len(done)
    assert (stats.cached_tokens > 0) or at_once is None


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", ["self", "small", "block"])
def test_what_was_told_is_accepted_and_what_is_wrong_never(
    target, models, plain, temperature, name
):
    """The same passes and caches, but the outcome of each draft token is known beforehand."""
    model, texts = models[name], told(plain, temperature)
    done, _ = served(target, Told(model, texts, off=0), temperature)
    accepted, draft_tokens = exact(done, plain[temperature])
    assert accepted == draft_tokens == (TOKENS - STEPS) * len(PROMPTS)
    done, _ = served(target, Told(model, texts, off=1), temperature)
    accepted, draft_tokens = exact(done, plain[temperature])
    # One step per token; the last ones have less than DEPTH to propose, the prompt's nothing.
    wanted = sum(min(DEPTH, TOKENS - 1 - step) for step in range(1, TOKENS))
    assert (accepted, draft_tokens) == (0, wanted * len(PROMPTS))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("off", [0, 1])
def test_naive_drafts_one_token_a_step(target, models, plain, temperature, off):
    """Two tokens of every step with the target's own choices, one with wrong ones."""
    model = Told(models["small"], told(plain, temperature), off)
    done, _ = served(target, model, temperature, method="NAIVE")
    accepted, draft_tokens = exact(done, plain[temperature])
    steps = TOKENS if off else 1 + (TOKENS - 1) // 2
    assert [item.stats.steps for item in done] == [steps] * len(done)
    assert accepted == (0 if off else draft_tokens)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", ["small", "block", "both ways"])
@pytest.mark.parametrize("shape", [(3, 3, 1), (7, 3, 4)])
def test_no_draft_model_changes_the_text(target, models, plain, name, shape, temperature):
    nodes, depth, width = shape
    done, _ = served(
        target, models[name], temperature,
        nodes=nodes, depth=depth, width=width,
    )  # fmt: skip
    accepted, draft_tokens = exact(done, plain[temperature])
    assert 0 < accepted < draft_tokens if name == "small" else draft_tokens > 0


def test_a_tree_of_the_small_decoder_accepts_more_than_its_chain(target, models, plain):
    chain = exact(served(target, models["small"])[0], plain[0.0])[0]
    shape = {"nodes": 16, "width": 4}
    tree = exact(served(target, models["small"], **shape)[0], plain[0.0])[0]
    assert tree > chain


class Resting(FixedPolicy):
    """Wants draft tokens in some steps only."""

    def __init__(self):
        super().__init__(DEPTH, DEPTH)
        self.steps = iter(range(10**6))

    def decide(self, slots, kv_len, constrained=False):
        if next(self.steps) % 9 in (3, 4, 5, 6):
            return Decision.same(Budget(0, 0, "not now"), len(slots))
        return super().decide(slots, kv_len)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_model_without_features_catches_up(target, models, plain, temperature, monkeypatch):
    monkeypatch.setattr(drafting, "FixedPolicy", lambda *_: Resting())
    done, _ = served(target, models["self"], temperature, at_once=1)
    accepted, draft_tokens = exact(done, plain[temperature])
    assert accepted == draft_tokens > 0
    assert sum(item.stats.steps for item in done) > len(PROMPTS) * STEPS


@pytest.mark.parametrize("name", ["block", "both ways"])
@pytest.mark.parametrize("at_once", [None, 1])
def test_a_block_is_what_a_dense_pass_says(target, hf, models, name, at_once, monkeypatch):
    """Every block that was proposed, from the target's hidden states in transformers, uncached."""
    model, asked = models[name], []
    block = FeatureBlock.block

    def noted(self, work):
        found = block(self, work)
        asked.append((work, found))
        return found

    monkeypatch.setattr(FeatureBlock, "block", noted)
    done, _ = served(target, model, at_once=at_once, tokens=12)
    texts = [np.append(p, item.tokens) for p, item in zip(PROMPTS, done, strict=True)]
    compared = 0
    for work, found in asked:
        for row, (length, root) in enumerate(zip(work.kv_len, work.roots, strict=True)):
            able = [t for t in texts if len(t) > length and t[length] == root]
            errors = [_error(model, hf, text, found, row, int(length)) for text in able]
            assert min(errors) < 1e-3
            compared += 1
    assert compared > 50


def _error(model, hf, text, found: BlockCandidates, row, length):
    """Greatest difference of a row's log-probabilities from those of a dense pass over `text`."""
    depth = found.ids.shape[1]
    with torch.no_grad():
        output = hf.model(index(text)[None, : length + 1], output_hidden_states=True)
        streams = torch.cat([output.hidden_states[layer][0, :length] for layer in model.AUX], -1)
        context, before = streams @ model.fuse.T, torch.arange(length)
        here = length + torch.arange(depth)
        tokens = torch.full((depth,), model.MASK)
        tokens[0] = int(text[length])
        x = hf.get_input_embeddings()(tokens)
        for q, k, v, o in model.layers:
            keys = torch.cat([model.heads(k, context, before), model.heads(k, x, here)])
            values = torch.cat([model.heads(v, context), model.heads(v, x)])
            scores = torch.einsum("qge,kge->gqk", model.heads(q, x, here), keys) * model.SIZE**-0.5
            if model.causal:
                hidden = torch.ones(depth, length + depth, dtype=torch.bool).triu(length + 1)
                scores = scores.masked_fill(hidden, -torch.inf)
            x = x + torch.einsum("gqk,kge->qge", scores.softmax(-1), values).flatten(1) @ o.T
        logits = hf.lm_head(hf.model.norm(x))[:, index(model.traits.target_ids)]
    dense = logits.log_softmax(-1).numpy()
    mine = np.empty_like(dense)
    np.put_along_axis(mine, found.ids[row].astype(np.int64), found.log_probs[row], -1)
    return np.abs(mine - dense).max()


def test_layers_of_any_number_and_shape_are_counted():
    """In the memory plan and in the cache, page by page."""
    layers = (CacheLayer(2, 16), CacheLayer(1, 8), CacheLayer(2, 16))
    config = EngineConfig(model="toy", page_size=8, max_sequences=2, chunked_prefill_size=16)
    needs = Needs(context=256, vocab=100, weights=1000, per_token=64, per_node=10)
    draft = SimpleNamespace(parameters=500, cache=layers, vocab=40, node_numbers=0)
    with_model = with_draft(needs, draft, 4)
    assert with_model.weights == 1000 + 4 * 500
    assert with_model.per_token == 64 + 4 * 2 * (2 * 16 + 8 + 2 * 16)
    plan = plan_memory(config, with_model, 10**8)
    assert plan.cache == plan.limits.pages * 8 * with_model.per_token
    cache = DraftCache(layers, plan.limits, CPU, torch.float32)
    shapes = [cache.layers[layer][0].shape for layer in range(3)]
    assert [(shape[0], shape[2]) for shape in shapes] == [(2, 16), (1, 8), (2, 16)]
    places = {cache.layers[layer][0].data_ptr() for layer in range(3)}
    assert len(places) == 3
    held = sum(2 * 4 * shape.numel() for shape in shapes)
    assert DraftCache.bytes(layers, plan.limits, torch.float32) == held
    assert KvShape(1, CacheLayer(2, 16)).bytes(plan.limits, torch.float32) < held
