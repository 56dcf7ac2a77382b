"""Block drafters of torch and, in floats, of the core against passes over the whole text without a
cache; in 8 bits the core is held to the contract in tests/drafters/test_contract.py.
"""

from functools import partial

import numpy as np
import pytest
import torch

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.errors import ModelError
from forerun.executors import cpu
from forerun.executors.cpu import CpuBlockModel, CpuExecutor
from forerun.executors.torch import TorchBlockModel, TorchExecutor
from forerun.executors.torch.features import TorchFeatures
from forerun.interface.draft_model import DraftBlock, DraftExtension
from forerun.interface.executor import ExecutorLimits
from forerun.interface.features import HostFeatures
from tests.models import tiny
from tests.parity.blocks import (
    PAIRED,
    VARIANTS,
    dense_block,
    dense_pairs,
    random_block,
    streams,
)

NO_CORE = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
NO_ROWS = np.zeros(0, np.int32)
LENGTHS = 23, 9


@pytest.fixture(scope="module")
def hf():
    return tiny.model("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def texts(hf):
    """Texts and their residual streams."""
    random = np.random.default_rng(5)
    whole = [random.integers(3, tiny.VOCAB, length).tolist() for length in LENGTHS]
    return [(text, streams(hf, text)) for text in whole]


@pytest.fixture(scope="module")
def target(hf, tmp_path_factory):
    """(executor, page size) -> a maker of draft models beside a target, by their file."""
    checkpoint = FolderCheckpoint(tiny.save_folder(hf, tmp_path_factory.mktemp("target")))
    made = {}

    def of(name, page_size=16):
        sizes = ExecutorLimits(
            page_size=page_size,
            pages=128 // page_size,
            slots=2,
            max_nodes=16,
            context=64,
            vocab=tiny.VOCAB,
        )
        if (name, page_size) not in made:
            on_core = name == "cpu"
            made[name, page_size] = (
                CpuExecutor(checkpoint, sizes, 2) if on_core else TorchExecutor(checkpoint, sizes)
            )
        executor = made[name, page_size]
        if name == "cpu":
            return checkpoint, partial(CpuBlockModel, executor, checkpoint, dtype="float32")
        return checkpoint, partial(TorchBlockModel, executor.draft_target, checkpoint)

    yield of
    for executor in made.values():
        executor.shutdown()


def extended(model, draft, texts, pages):
    """Keep all but each text's last token, both texts in each pass, in pieces."""
    features = [
        np.concatenate([states[index].numpy() for index in draft.head.features], -1)
        for _, states in texts
    ]
    done = np.zeros(len(texts), np.int32)
    ends = np.array([len(text) - 1 for text, _ in texts], np.int32)
    while (done < ends).any():
        rows = np.flatnonzero(done < ends)
        upto = np.minimum(done + 7, ends)
        spans = [slice(done[row], upto[row]) for row in rows]
        counts = [span.stop - span.start for span in spans]
        given = np.concatenate([features[r][s] for r, s in zip(rows, spans, strict=True)])
        model.extend(
            DraftExtension(
                tokens=np.concatenate(
                    [texts[r][0][s] for r, s in zip(rows, spans, strict=True)]
                ).astype(np.int32),
                next_tokens=np.concatenate(
                    [
                        texts[r][0][s.start + 1 : s.stop + 1]
                        for r, s in zip(rows, spans, strict=True)
                    ]
                ).astype(np.int32),
                start=np.cumsum([0, *counts]).astype(np.int32),
                kv_len=done[rows],
                slots=rows.astype(np.int32),
                pages=pages[rows],
                scored=NO_ROWS,
                candidates=1,
            ),
            HostFeatures(given) if isinstance(model, CpuBlockModel) else on_torch(given),
        )
        done = upto


def on_torch(values):
    return TorchFeatures(torch.from_numpy(values), np.arange(len(values)))


def proposed(model, texts, pages, depth, candidates=tiny.VOCAB):
    return model.block(
        DraftBlock(
            roots=np.array([text[-1] for text, _ in texts], np.int32),
            kv_len=np.array([len(text) - 1 for text, _ in texts], np.int32),
            slots=np.arange(len(texts), dtype=np.int32),
            pages=pages,
            depth=depth,
            candidates=candidates,
        )
    )


def bias_of(draft, above, ids):
    """float32[k], what the token above adds to the logits of draft ids."""
    w1, w2 = (draft.tensor(f"markov_head.markov_w{n}.weight") for n in (1, 2))
    return w2[ids] @ w1[above]


def spread(proposals, vocab):
    """float32[R,depth,Vd] by draft id."""
    dense = np.empty((*proposals.ids.shape[:2], vocab), np.float32)
    np.put_along_axis(dense, proposals.ids.astype(np.int64), proposals.log_probs, -1)
    return dense


ON = pytest.mark.parametrize("name", [pytest.param("cpu", marks=NO_CORE), "torch"])


@pytest.mark.parametrize(
    ("name", "page_size"), [pytest.param("cpu", 1, marks=NO_CORE), ("torch", 16)]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_are_those_without_a_cache(hf, target, texts, tmp_path, variant, name, page_size):
    """Of two rows at once, behind features that came in pieces, at every depth."""
    checkpoint, make = target(name, page_size)
    draft = random_block(checkpoint.architecture, tmp_path, **VARIANTS[variant])
    model, width = make(draft), 32 // page_size
    pages = np.random.default_rng(0).permutation(128 // page_size)[: 2 * width]
    pages = pages.reshape(2, width).astype(np.int32)
    extended(model, draft, texts, pages)
    wanted = [dense_block(draft, hf, *each).numpy() for each in texts]
    for depth in {1, draft.head.depth}:
        actual = spread(proposed(model, texts, pages, depth), draft.head.vocab)
        for row, dense in enumerate(wanted):
            assert np.abs(actual[row] - dense[:depth]).max() < 1e-4


PAGES = np.array([[5, 2], [7, 0]], np.int32)


@ON
@pytest.mark.parametrize("variant", PAIRED)
def test_branches_are_those_of_whole_products(hf, target, texts, tmp_path, variant, name):
    """Each branch has candidates of its own, and the place below it a confidence."""
    checkpoint, make = target(name)
    draft = random_block(checkpoint.architecture, tmp_path, **PAIRED[variant])
    model = make(draft)
    extended(model, draft, texts, PAGES)
    pairs, vocab = proposed(model, texts, PAGES, draft.head.depth).pairs, draft.head.vocab
    for row, (text, states) in enumerate(texts):
        for path in ((5, 7, 8), (5, 9, 8)):
            wanted, sure = dense_pairs(draft, hf, text, path, states)
            for level in range(len(path) + 1):
                actual = pairs.below(row, path[:level])
                dense = np.full(vocab, -np.inf, np.float32)
                dense[actual.ids] = actual.log_probs
                assert np.allclose(dense, wanted[level].numpy(), rtol=0, atol=1e-4)
                assert (np.diff(actual.log_probs) <= 0).all()
                said = [] if actual.confidence is None else [actual.confidence]
                assert said == pytest.approx(sure[level : level + 1], abs=1e-5)


def test_fewer_candidates_keep_their_share(hf, target, texts, tmp_path):
    """Of 64 candidates the sum of all others' probability is as without what stands above."""
    checkpoint, make = target("torch")
    draft = random_block(checkpoint.architecture, tmp_path, **PAIRED["DSpark"])
    model = make(draft)
    extended(model, draft, texts, PAGES)
    proposals = proposed(model, texts, PAGES, 2, candidates=1)
    assert proposals.ids.shape == (2, 2, 64)
    after = proposals.pairs.below(0, ())
    whole = dense_pairs(draft, hf, texts[0][0], (), texts[0][1])[0][0].numpy()[after.ids]
    assert np.ptp(after.log_probs - whole) < 1e-4
    before = np.exp(proposals.log_probs[0, 0]).sum()
    unraised = np.exp(after.log_probs - bias_of(draft, texts[0][0][-1], after.ids)).sum()
    outside = 1 - np.exp(after.log_probs).sum()
    assert (1 - before) / before == pytest.approx(outside / unraised, 1e-3)


@NO_CORE
def test_what_the_core_cannot_run_is_refused(target, tmp_path):
    checkpoint, make = target("cpu")
    draft = random_block(checkpoint.architecture, tmp_path, head_size=4)
    with pytest.raises(ModelError, match=r"multiple of 8 numbers.*use the torch executor"):
        make(draft)


@ON
def test_a_block_larger_than_a_step_is_refused(target, tmp_path, name):
    checkpoint, make = target(name)
    draft = random_block(checkpoint.architecture, tmp_path, places=17)
    with pytest.raises(ModelError, match="does not fit into a step of 16 nodes"):
        make(draft)
