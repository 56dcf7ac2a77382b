"""The core's block drafter in floats, against passes over the whole text without a cache; in 8 bits
it is held to the contract in tests/drafters/test_contract.py.
"""

import numpy as np
import pytest

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.errors import EngineError, ModelError
from forerun.executors.cpu import CpuBlockModel, CpuExecutor
from forerun.interface.draft_model import DraftBlock, DraftExtension
from forerun.interface.executor import ExecutorLimits
from forerun.interface.features import HostFeatures
from tests.models import tiny
from tests.parity.blocks import VARIANTS, dense_block, random_block, streams

NOBODY = np.zeros(0, np.int32)
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
    checkpoint = FolderCheckpoint(tiny.save_folder(hf, tmp_path_factory.mktemp("target")))
    made = {}

    def of(page_size):
        if page_size not in made:
            made[page_size] = CpuExecutor(
                checkpoint,
                ExecutorLimits(
                    page_size=page_size,
                    pages=128 // page_size,
                    slots=2,
                    max_nodes=16,
                    context=64,
                    vocab=tiny.VOCAB,
                ),
                threads=2,
            )
        return made[page_size], checkpoint

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
                scored=NOBODY,
                candidates=1,
            ),
            HostFeatures(
                np.concatenate([features[r][s] for r, s in zip(rows, spans, strict=True)])
            ),
        )
        done = upto


def proposed(model, texts, pages, depth):
    return model.block(
        DraftBlock(
            roots=np.array([text[-1] for text, _ in texts], np.int32),
            kv_len=np.array([len(text) - 1 for text, _ in texts], np.int32),
            slots=np.arange(len(texts), dtype=np.int32),
            pages=pages,
            depth=depth,
            candidates=model.traits.vocab,
        )
    )


def spread(found, vocab):
    """float32[R,depth,Vd] by draft id."""
    dense = np.empty((*found.ids.shape[:2], vocab), np.float32)
    np.put_along_axis(dense, found.ids.astype(np.int64), found.log_probs, -1)
    return dense


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_in_floats_blocks_are_those_without_a_cache(
    hf, target, texts, tmp_path, variant, page_size
):
    """Of two rows at once, behind features that came in pieces, at every depth."""
    executor, checkpoint = target(page_size)
    draft = random_block(checkpoint.architecture, tmp_path, **VARIANTS[variant])
    model = CpuBlockModel(executor, checkpoint, draft, dtype="float32")
    width = 32 // page_size
    pages = np.random.default_rng(0).permutation(128 // page_size)[: 2 * width]
    pages = pages.reshape(2, width).astype(np.int32)
    extended(model, draft, texts, pages)
    wanted = [dense_block(draft, hf, *each).numpy() for each in texts]
    for depth in {1, draft.head.depth}:
        found = spread(proposed(model, texts, pages, depth), draft.head.vocab)
        for row, dense in enumerate(wanted):
            assert np.abs(found[row] - dense[:depth]).max() < 1e-4


def test_heads_that_the_core_cannot_run_are_refused(target, tmp_path):
    executor, checkpoint = target(16)
    draft = random_block(checkpoint.architecture, tmp_path, head_size=4)
    with pytest.raises(ModelError, match=r"multiple of 8 numbers.*use the torch executor"):
        CpuBlockModel(executor, checkpoint, draft)


def test_a_block_larger_than_a_step_is_refused(target, tmp_path):
    executor, checkpoint = target(16)
    draft = random_block(checkpoint.architecture, tmp_path, places=17)
    with pytest.raises(EngineError, match="does not fit into a step of 16 nodes"):
        CpuBlockModel(executor, checkpoint, draft)
