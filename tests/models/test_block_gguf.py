"""Block drafters in GGUF files: those of folders, or refused with what is wrong."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.build.drafting import with_shipped
from forerun.drafts.block_config import expected_block_tensors
from forerun.drafts.gguf_block import holds_block_file, open_block_file
from forerun.drafts.gguf_prediction import holds_layers_alone
from forerun.errors import ModelError
from forerun.options.config import EngineConfig
from tests.models.test_block_folder import TARGET
from tests.parity.blocks import PAIRED, VARIANTS, in_gguf, random_block

READ = {name: VARIANTS[name] for name in VARIANTS if name != "own mask"}
READ |= {"DSpark": PAIRED["DSpark"], "windows": {"windows": (9, None), "causal": True}}
"""Of an embedding for masks, and of DSpark's other rules, no name in such files is known."""


@pytest.mark.parametrize("name", READ)
def test_a_file_is_the_folder(tmp_path, name):
    changes = dict(READ[name])
    windows = changes.pop("windows", ())
    folder = random_block(TARGET, tmp_path / "folder", **changes)
    metadata = {
        "dflash.attention.sliding_window": 9,
        "dflash.attention.sliding_window_pattern": [each is not None for each in windows],
    }
    path = in_gguf(folder, tmp_path / "x.gguf", metadata if windows else None)
    assert holds_block_file(path) and not holds_layers_alone(path)
    found = open_block_file(path, TARGET)
    assert found.head == replace(folder.head, windows=windows)
    np.testing.assert_array_equal(found.target_ids, folder.target_ids)
    for tensor in expected_block_tensors(found.head):
        if tensor != "d2t":
            np.testing.assert_array_equal(found.tensor(tensor), folder.tensor(tensor))
    asked = EngineConfig(model="m", speculative_draft_model_path=str(path))
    assert with_shipped(asked).speculative_algorithm == "AUTO"  # Not a whole model.


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"tokenizer.ggml.mask_token_id": None}, "mask_token_id"),
        ({"dflash.target_layers": None}, "target_layers"),
        ({"dflash.target_layers": [1, 7]}, "within the target's 6 layers"),
        ({"dflash.sample_from_anchor": None}, "sample_from_anchor is missing"),
        ({"dflash.block_size": 1}, "block_size"),
        ({"dflash.block_count": 10**9}, "at most 1024 layers"),
        ({"dflash.context_length": 0}, "context_length"),
        ({"dflash.attention.sliding_window": 9}, "sliding_window_pattern"),
        ({"dflash.attention.sliding_window_pattern": [True, False]}, "sliding_window"),
        ({"dflash.selector_rank": 4}, "selector_rank"),
        ({"dflash.vocab_size": 300}, "vocabulary"),
        ({"dflash.feed_forward_length": 32}, r"layers\.0\.mlp"),
    ],
)
def test_metadata_that_cannot_be_is_named(tmp_path, metadata, named):
    folder = random_block(TARGET, tmp_path / "folder", **PAIRED["DSpark"])
    path = in_gguf(folder, tmp_path / "x.gguf", metadata)
    with pytest.raises(ModelError, match=named):
        open_block_file(path, TARGET)


def test_tensors_of_other_kinds_are_named(tmp_path):
    """DFlash2's convolutions."""
    folder = random_block(TARGET, tmp_path / "folder")
    extra = {"layers.0.attn_conv.weight": np.zeros((4, 4), np.float32)}
    with pytest.raises(ModelError, match=r"unexpected blk\.0\.attn_conv"):
        open_block_file(in_gguf(folder, tmp_path / "x.gguf", extra=extra), TARGET)
