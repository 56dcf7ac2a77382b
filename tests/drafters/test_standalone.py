"""STANDALONE on both executors, as a server opens it: exact counts where the outcome is known."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
import torch

from forerun.build.drafting import open_drafts
from forerun.build.engine import load, open_target
from forerun.drafters import model_drafter
from forerun.errors import ConfigError, ModelError
from forerun.executors import cpu
from forerun.hub.catalog import open_model
from forerun.options.config import EngineConfig
from tests.drafters.draft_models import Told
from tests.drafters.served import SMALL, answered, asked
from tests.models import tiny

TOKENS, DEPTH = 31, 3
STEPS = 1 + -(-(TOKENS - 1) // (DEPTH + 1))
"""The prompt's, then DEPTH accepted and one more each; the last chain is cut to what is left."""
PROMPTS = [np.random.default_rng(n).integers(3, 300, 9 + 13 * n).astype(np.int32) for n in range(5)]
PROMPTS += [PROMPTS[4], np.append(PROMPTS[4][:40], np.int32(7))]  # Whose pages are found again.

NATIVE = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, as a folder and as the file that drafts for it; its first layers; itself under
    another numbering of the same tokens, and with a vocabulary that lacks some.
    """
    root = tmp_path_factory.mktemp("models")
    hf = tiny.model("llama", num_hidden_layers=4)
    small = tiny.model("llama", num_hidden_layers=3)
    small.load_state_dict(hf.state_dict(), strict=False)
    turned = np.roll(np.arange(tiny.VOCAB), 3)  # The token at i is the target's turned[i].
    return {
        "target": str(tiny.save_folder(hf, root / "target")),
        "gguf": str(tiny.write_gguf(hf, root / "self.gguf")),
        "small": str(tiny.save_folder(small, root / "small")),
        "renumbered": str(other_vocabulary(hf, root / "renumbered", turned)),
        "poorer": str(other_vocabulary(hf, root / "poorer", turned[turned < 290])),
    }


def other_vocabulary(hf, folder, ids):
    """The same network over the target's tokens `ids`, in this order."""
    layers = hf.config.num_hidden_layers
    other = tiny.model("llama", num_hidden_layers=layers, vocab_size=len(ids), eos_token_id=None)
    state = dict(hf.state_dict())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][torch.from_numpy(ids)]
    other.load_state_dict(state)
    tiny.save_folder(other, folder)
    spec = json.loads((folder / "tokenizer.json").read_text())
    place = {int(id): position for position, id in enumerate(ids)}
    vocab = {text: place[id] for text, id in spec["model"]["vocab"].items() if id in place}
    spec["model"]["vocab"] = vocab
    spec["model"]["merges"] = [
        pair for pair in spec["model"]["merges"] if {*pair, "".join(pair)} <= vocab.keys()
    ]
    spec["added_tokens"] = [
        token | {"id": place[token["id"]]} for token in spec["added_tokens"] if token["id"] in place
    ]
    tokenizers.Tokenizer.from_str(json.dumps(spec))
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


def settings(folders, executor, draft=None, **changes):
    chosen = {
        "model": folders["target"],
        "executor": executor,
        # Drafts beside the core are 8 bits, and a target that is its own draft must be too.
        "dtype": "float32" if executor == "torch" else "q8_0",
        **SMALL,
        "threads": 1,
        "draft_on_error": "stop",
    }
    if draft is None:
        return EngineConfig(**chosen | changes | {"speculative_algorithm": "OFF"})
    chosen |= {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": folders.get(draft, draft),
        "speculative_num_steps": DEPTH,
    }
    return EngineConfig(**chosen | changes)


def served(target, temperature, at_once=None):
    """What became of all prompts, some of which need several steps to be read."""
    return answered(target, target.config, asked(PROMPTS, TOKENS, temperature), at_once)[0]


@pytest.fixture(scope="module")
def plain(folders):
    """Texts without speculation, by executor and temperature."""
    found = {}

    def texts(executor, temperature):
        if (executor, temperature) not in found:
            target = open_target(settings(folders, executor))
            try:
                done = served(target, temperature)
            finally:
                target.close()
            found[executor, temperature] = [item.tokens for item in done]
        return found[executor, temperature]

    return texts


def counts(done, expected):
    """Accepted and drafted tokens, of texts that are equal and steps that account for them."""
    assert [item.tokens for item in done] == expected
    for item in done:
        assert item.stats.accepted == TOKENS - item.stats.steps
    return tuple(
        sum(getattr(item.stats, name) for item in done) for name in ("accepted", "draft_tokens")
    )


@pytest.mark.parametrize(
    ("executor", "draft"),
    [*(pytest.param("cpu", draft, marks=NATIVE) for draft in ("target", "gguf", "renumbered")),
     ("torch", "renumbered")],
)  # fmt: skip
def test_the_target_as_its_own_draft_accepts_everything(
    folders, plain, executor, draft, monkeypatch
):
    """Also under other ids, in a batch and alone, behind pages that another text has filled; and
    when sampling, as far as noise is looked at: here, at all tokens of flat distributions.
    """
    monkeypatch.setattr(model_drafter, "CANDIDATES", tiny.VOCAB)
    target = open_target(settings(folders, executor, draft))
    ways = [(0.8, None)] if executor == "torch" else [(0.0, None), (0.0, 1), (0.8, None)]
    try:
        for temperature, at_once in ways:
            done = served(target, temperature, at_once)
            accepted, drafted = counts(done, plain(executor, temperature))
            assert accepted == drafted == (TOKENS - STEPS) * len(done)
            assert [item.stats.steps for item in done] == [STEPS] * len(done)
    finally:
        target.close()


@NATIVE
def test_an_adversary_is_never_accepted_and_changes_nothing(folders, plain):
    """Torch's is told in test_draft_models."""
    executor = "cpu"
    target = open_target(settings(folders, executor, "target"))
    try:
        texts = [[*p, *t] for p, t in zip(PROMPTS, plain(executor, 0.0), strict=True)]
        for off, accepted in ((0, (TOKENS - STEPS) * len(PROMPTS)), (1, 0)):
            told = replace(target, draft_model=Told(target.draft_model, texts, off))
            assert counts(served(told, 0.0), plain(executor, 0.0))[0] == accepted
    finally:
        target.close()


@pytest.mark.parametrize(
    ("executor", "draft", "page_size"),
    [
        pytest.param("cpu", "small", 1, marks=NATIVE),
        pytest.param("cpu", "poorer", 16, marks=NATIVE),
        ("torch", "poorer", 16),
    ],
)
def test_a_tree_accepts_more_than_a_chain_and_both_change_nothing(
    folders, plain, executor, draft, page_size
):
    found = {}
    temperatures = (0.8,) if executor == "torch" else (0.0, 0.8)
    for topk, steps, nodes in ((1, 3, 4), (4, 3, 24)):
        shape = {
            "speculative_eagle_topk": topk,
            "speculative_num_steps": steps,
            "speculative_num_draft_tokens": nodes,
        }
        target = open_target(settings(folders, executor, draft, page_size=page_size, **shape))
        try:
            for temperature in temperatures:
                done = served(target, temperature)
                found[topk, temperature] = counts(done, plain(executor, temperature))
        finally:
            target.close()
    for temperature in temperatures:
        chain, tree = found[1, temperature], found[4, temperature]
        assert 0 < chain[0] < chain[1] and chain[0] < tree[0] < tree[1]


@NATIVE
def test_sixty_four_tokens(folders, plain):
    executor = "cpu"
    shape = {"speculative_eagle_topk": 10, "speculative_num_draft_tokens": 64}
    big = settings(folders, executor, "small", chunked_prefill_size=256, **shape)
    target = open_target(replace(big, speculative_num_steps=6))
    try:
        accepted, drafted = counts(served(target, 0.0), plain(executor, 0.0))
        assert accepted > 0 and drafted > 32 * len(PROMPTS)
    finally:
        target.close()


@NATIVE
def test_a_token_map_limits_what_a_model_proposes(folders, plain, tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps([id for id in range(tiny.VOCAB) if id % 3]))
    target = open_target(settings(folders, "cpu", "poorer", speculative_token_map=str(path)))
    try:
        ids = target.draft_model.traits.target_ids
        assert ids.tolist() == [id for id in range(290) if id % 3]
        accepted, drafted = counts(served(target, 0.0), plain("cpu", 0.0))
        assert 0 < accepted < drafted
    finally:
        target.close()


def test_only_shared_tokens_are_proposed_and_the_others_are_read(folders):
    config = settings(folders, "torch", "poorer")
    model = open_model(config.model)
    vocabulary = open_drafts(config, model).model.vocabulary
    theirs, own = model.tokenizer, open_model(folders["poorer"]).tokenizer
    assert vocabulary.shared == 290 == len(vocabulary.target_ids)
    for mine, id in zip(vocabulary.own_ids, vocabulary.target_ids, strict=True):
        assert own.token_bytes(int(mine)) == theirs.token_bytes(int(id))
    for id in range(290, tiny.VOCAB):
        read = own.token_bytes(int(vocabulary.inputs[id]))
        assert theirs.token_bytes(id).endswith(read) and read


def test_every_layer_of_the_draft_is_planned_for(folders):
    """Weights, keys and values under the target's page ids."""
    for executor, item in (("torch", 4), ("cpu", 2)):
        loaded = load(settings(folders, executor, "small"))
        alone = load(settings(folders, executor))
        try:
            added = loaded.info["memory"]["cache"] - alone.info["memory"]["cache"]
            assert added == 1024 * item * 3 * 2 * 2 * 16
            assert loaded.info["memory"]["weights"] > alone.info["memory"]["weights"]
            about = loaded.engine.describe()["drafter"]
            assert about["model"] == "small" and about["layers"] == 3
            assert about["shared_tokens"] == tiny.VOCAB
        finally:
            loaded.close()
            alone.close()


def test_a_draft_must_be_named_and_be_a_model(folders, tmp_path):
    with pytest.raises(ConfigError, match="STANDALONE, but no draft is named"):
        open_target(settings(folders, "torch", "small", speculative_draft_model_path=None))
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_target(settings(folders, "torch", str(tmp_path)))
    fallen = settings(folders, "torch", str(tmp_path), draft_on_error="disable")
    with pytest.warns(UserWarning, match="speculation is off"):
        target = open_target(fallen)
    assert target.config.speculative_algorithm == "OFF" and "config.json" in target.fault
    target.close()
