"""Block drafters, cached and in pages, against one pass over the whole text without a cache: in
torch, in NumPy and beside the compiled core. Counts are exact, texts those of plain decoding.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.build.engine import load, open_target
from forerun.client.completion import complete, make_request
from forerun.errors import ConfigError, EngineError
from forerun.executors.torch import TorchBlockModel
from forerun.executors.torch.features import on_device
from forerun.interface.draft_model import DraftBlock, Extension
from forerun.models.folder import FolderCheckpoint
from forerun.options.config import EngineConfig
from tests.drafters.draft_models import Told
from tests.drafters.served import SMALL, answered, asked
from tests.models import tiny
from tests.parity.blocks import VARIANTS, dense_block, random_block, streams
from tests.twins.host_block import BorrowedRows, HostBlockModel

TOKENS = 16
PROMPTS = [np.random.default_rng(n).integers(3, tiny.VOCAB, 9 + 13 * n) for n in range(4)]
PROMPTS += [np.append(PROMPTS[3][:40], 7)]  # Whose pages are found again.


@pytest.fixture(scope="module")
def hf():
    return tiny.model("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def folder(hf, tmp_path_factory):
    return tiny.save_folder(hf, tmp_path_factory.mktemp("target"))


def configured(folder, **changes):
    config = EngineConfig(
        model=str(folder),
        executor="torch",
        dtype="float32",
        speculative_algorithm="OFF",
        **SMALL,
    )
    return replace(config, **changes)


@pytest.fixture(scope="module")
def target(folder):
    made = open_target(configured(folder))
    yield made
    made.close()


class Partly(Told):
    """Is right for as many tokens of each block as its turn says: none, some, all."""

    def block(self, block):
        found = super().block(block)
        self.blocks = getattr(self, "blocks", 0) + 1
        right = self.blocks % (block.depth + 1)
        found.ids[:, right:] = (found.ids[:, right:] + 1) % self.traits.vocab
        return found


class Beside:
    """A model and its slow twin, asked the same; what they answer is kept."""

    def __init__(self, model, twin):
        self.traits, self._pair, self.asked = model.traits, (model, twin), []

    def extend(self, extension, features):
        found, _ = (model.extend(extension, features) for model in self._pair)
        return found

    def block(self, block):
        block = replace(block, candidates=self.traits.vocab)
        found = [model.block(block) for model in self._pair]
        self.asked.append((block, found))
        return found[0]

    def describe(self):
        return self._pair[0].describe()


def served(target, model, temperature=0.0, prompts=PROMPTS, tokens=TOKENS, **changes):
    """Completions of the prompts, and the engine's statistics; model None: plain decoding."""
    config = replace(
        target.config, speculative_algorithm="OFF" if model is None else "DFLASH", **changes
    )
    requests = asked(prompts, tokens, temperature)
    return answered(replace(target, draft_model=model), config, requests)


@pytest.fixture(scope="module")
def plain(target):
    return {t: [item.tokens for item in served(target, None, t)[0]] for t in (0.0, 0.8)}


def checkpoint_of(target):
    return FolderCheckpoint(Path(target.config.model))


def texts_of(plain, temperature):
    pairs = zip(PROMPTS, plain[temperature], strict=True)
    return [[*map(int, prompt), *map(int, tokens)] for prompt, tokens in pairs]


def by_id(found, row):
    """float32[depth,Vd] in the order of draft ids."""
    dense = np.empty(found.ids.shape[1:], np.float32)
    np.put_along_axis(dense, found.ids[row].astype(np.int64), found.log_probs[row], -1)
    return dense


def beside(target, hf, draft):
    """The drafter in torch and in NumPy."""
    rows = (hf.get_input_embeddings().weight, hf.get_output_embeddings().weight)
    twin = HostBlockModel(
        target.executor.limits,
        draft,
        BorrowedRows(*(row.detach().numpy() for row in rows)),
        lambda features: on_device(features, torch.device("cpu"), torch.float32).numpy(),
    )
    return Beside(TorchBlockModel(target.executor, checkpoint_of(target), draft), twin)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_block_is_what_a_pass_without_cache_says(hf, target, plain, tmp_path, variant):
    """After none, some and all of the block before were accepted, in a batch, in reused pages."""
    draft = random_block(target.executor.decoder.arch, tmp_path, **VARIANTS[variant])
    both, texts, depth = beside(target, hf, draft), texts_of(plain, 0.0), draft.head.depth
    whole = draft.head.vocab == tiny.VOCAB
    model = Partly(both, texts, 0) if whole else both
    shape = {"speculative_num_steps": depth, "speculative_num_draft_tokens": depth + 1}
    done, _ = served(target, model, **shape)
    assert [item.tokens for item in done] == plain[0.0]
    if whole:
        seen = {len(item.stats.histogram) for item in done}
        assert max(seen) == depth + 1 and sum(i.stats.accepted for i in done) > 9
    hidden = [streams(hf, text) for text in texts]
    compared = 0
    for block, answers in both.asked:
        for row, (length, root) in enumerate(zip(block.kv_len, block.roots, strict=True)):
            dense = [
                dense_block(draft, hf, text[: length + 1], states)[: block.depth].numpy()
                for text, states in zip(texts, hidden, strict=True)
                if len(text) > length and text[length] == root
            ]
            for found in answers:
                assert min(np.abs(by_id(found, row) - each).max() for each in dense) < 2e-3
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("off", [0, 1])
def test_the_right_tokens_are_all_accepted_and_wrong_ones_never(
    target, plain, tmp_path, temperature, off
):
    draft = random_block(target.executor.decoder.arch, tmp_path)
    depth = draft.head.depth
    model = Told(
        TorchBlockModel(target.executor, checkpoint_of(target), draft),
        texts_of(plain, temperature),
        off,
    )
    shape = {"speculative_num_steps": depth, "speculative_num_draft_tokens": depth + 1}
    done, _ = served(target, model, temperature, **shape)
    assert [item.tokens for item in done] == plain[temperature]
    accepted = sum(item.stats.accepted for item in done)
    steps = [item.stats.steps for item in done]
    if off:
        assert (accepted, steps) == (0, [TOKENS] * len(done))
    else:
        assert steps == [1 + -(-(TOKENS - 1) // (depth + 1))] * len(done)
        assert accepted == sum(item.stats.draft_tokens for item in done)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", [(4, 17, 3), (2, 33, 8)])
def test_no_block_drafter_changes_the_text(target, plain, tmp_path, shape, temperature):
    steps, tokens, topk = shape
    draft = random_block(target.executor.decoder.arch, tmp_path, causal=steps == 2)
    done, _ = served(
        target, TorchBlockModel(target.executor, checkpoint_of(target), draft), temperature,
        speculative_num_steps=steps, speculative_num_draft_tokens=tokens,
        speculative_eagle_topk=topk,
    )  # fmt: skip
    assert [item.tokens for item in done] == plain[temperature]
    assert sum(item.stats.draft_tokens for item in done) > 0


def test_bad_passes_are_refused(target, tmp_path):
    draft = random_block(target.executor.decoder.arch, tmp_path)
    model = TorchBlockModel(target.executor, checkpoint_of(target), draft)
    one, pages = np.ones(1, np.int32), np.zeros((1, 4), np.int32)
    good = DraftBlock(one, one, one, pages, depth=2, candidates=1)
    assert model.block(good).ids.shape == (1, 2, 1)
    for name, value in {"roots": one * tiny.VOCAB, "kv_len": one * 99, "slots": one * 4,
                        "depth": 5}.items():  # fmt: skip
        with pytest.raises(EngineError, match=f"refused: {name}"):
            model.block(replace(good, **{name: value}))
    nobody = np.zeros(0, np.int32)
    extension = Extension(one, one, np.array([0, 1], np.int32), one, one, pages, nobody, 1)
    with pytest.raises(EngineError, match="without the target's features"):
        model.extend(extension, None)
    with pytest.raises(EngineError, match="not level by level"):
        model.expand(None)


# --- composed ------------------------------------------------------------------------------


def opened(folder, draft, **changes):
    return load(configured(folder, speculative_draft_model_path=str(draft.path), **changes))


@pytest.mark.parametrize("algorithm", ["DFLASH", "AUTO"])
def test_a_folder_is_served(folder, target, tmp_path, algorithm):
    """By its name and by AUTO."""
    draft = random_block(target.executor.decoder.arch, tmp_path)
    loaded = opened(folder, draft, speculative_algorithm=algorithm)
    try:
        config = loaded.config
        assert (config.speculative_algorithm, config.speculative_num_steps) == ("DFLASH", 4)
        assert loaded.engine.describe()["drafter"]["block_size"] == 5
        requests = [make_request(PROMPTS[1].astype(np.int32), max_tokens=8, ignore_eos=True)]
        (item,) = complete(loaded.engine, requests)[0]
        assert item.stats.draft_tokens > 0 and loaded.engine.fault is None
        assert loaded.target.memory.weights > target.memory.weights
    finally:
        loaded.close()


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "EAGLE+NGRAM"])
def test_another_method_says_which(folder, target, tmp_path, algorithm):
    draft = random_block(target.executor.decoder.arch, tmp_path)
    with pytest.raises(ConfigError, match="holds a block drafter; use DFLASH"):
        opened(folder, draft, speculative_algorithm=algorithm)
    with pytest.raises(ConfigError, match="leaves nothing open"):
        opened(folder, draft, speculative_algorithm="DFLASH", draft_reading="theta=10000")
