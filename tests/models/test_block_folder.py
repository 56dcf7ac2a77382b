"""Block drafters as their projects write them: read, or refused with what is wrong."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.drafts.block_config import default_block_features
from forerun.drafts.block_folder import holds_block, open_block
from forerun.errors import ModelError
from forerun.networks.arch import Architecture, Rope, plain_layers
from tests.parity.blocks import block_head, random_block

TARGET = Architecture("llama", 64, 4, 2, 16, 320, 512, 1e-5, plain_layers(6, 16, 96, Rope(1e4)))


@pytest.fixture
def made(tmp_path):
    return random_block(TARGET, tmp_path)


def changed(draft, config=lambda _: None, tensors=lambda _: None):
    """The folder after changes to both its files."""
    path = draft.path / "config.json"
    values = json.loads(path.read_text())
    config(values)
    path.write_text(json.dumps(values))
    stored = load_file(draft.path / "model.safetensors")
    tensors(stored)
    save_file(stored, draft.path / "model.safetensors")
    return draft.path


def test_what_is_written_is_read(made):
    assert holds_block(made.path)
    assert made.head == block_head(TARGET) and not made.warnings
    assert made.head.depth == 4 and len(made.head.cache) == 2
    assert made.target_ids.tolist() == list(range(320))


def test_default_layers_are_the_authors():
    """Their published files: 36 layers read after 1, 9, 17, 25, 33; we count what enters."""
    assert default_block_features(36, 5) == (2, 10, 18, 26, 34)
    assert default_block_features(30, 5) == (2, 9, 15, 21, 28)
    assert default_block_features(30, 2) == (2, 28)
    assert default_block_features(30, 1) == (16,)


@pytest.mark.parametrize("spelling", ["causal_head", "causal", "is_causal"])
def test_three_spellings_of_a_causal_block(made, spelling):
    def config(values):
        values["dflash_config"].pop("causal")
        place = values if spelling == "is_causal" else values["dflash_config"]
        place[spelling] = True

    assert open_block(changed(made, config), TARGET).head.causal


def test_spellings_that_contradict_each_other(made):
    folder = changed(made, lambda values: values.update(is_causal=True))
    with pytest.raises(ModelError, match="must all be true or all be false"):
        open_block(folder, TARGET)


def test_speculators_nested_keys_and_layers(made):
    """Its ids mean what enters a layer; the block may begin at the root; a map has offsets."""
    layer = json.loads((made.path / "config.json").read_text())
    kept = ("block_size", "num_target_layers", "dflash_config", "architectures")
    nested = {name: value for name, value in layer.items() if name not in kept}
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "speculators_config": {"algorithm": "dflash"},
        "transformer_layer_config": nested,
        "aux_hidden_state_layer_ids": list(made.head.features),
        "block_size": 5,
        "mask_token_id": 300,
        "draft_vocab_size": 4,
        "sample_from_anchor": True,
        "target_hidden_size": None,
    }
    tensors = load_file(made.path / "model.safetensors")
    tensors |= {"lm_head.weight": torch.ones(4, 64), "d2t": torch.tensor([5, 5, 6, 300])}
    save_file(tensors, made.path / "model.safetensors")
    (made.path / "config.json").write_text(json.dumps(config))
    found = open_block(made.path, TARGET)
    wanted = {"anchored": True, "vocab": 4, "own_head": True}
    assert found.head == replace(made.head, **wanted) and found.head.depth == 5
    assert found.target_ids.tolist() == [5, 6, 8, 303]


REFUSED = {
    "another architecture": (lambda c: c.update(architectures=["DFlash2DraftModel"]), "DFlash2"),
    "no layers named": (lambda c: c["dflash_config"].pop("target_layer_ids"), "a list of layers"),
    "no mask": (lambda c: c["dflash_config"].pop("mask_token_id"), "mask_token_id is missing"),
    "a mask without a row": (lambda c: c["dflash_config"].update(mask_token_id=320), "no row"),
    "a window": (lambda c: c.update(layer_types=["sliding_attention"] * 2), "windows are not"),
    "another depth": (lambda c: c.update(num_target_layers=7), "this target has 6"),
    "another vocabulary": (lambda c: c.update(vocab_size=321), "another tokenizer"),
    "a layer too many": (lambda c: c.update(num_hidden_layers=3), "missing layers.2"),
    "a key of meaning": (lambda c: c.update(logit_scale=2.0), "logit_scale = 2.0"),
    "scaled logits": (lambda c: c["dflash_config"].update(output_multiplier=0.5), "output_mult"),
    "features beyond": (
        lambda c: c["dflash_config"].update(target_layer_ids=[1, 6]), "within the target's 6",
    ),
    "a block of one": (lambda c: c.update(block_size=1), "block_size is 1"),
    "a recurrent head": (
        lambda c: c.update(markov_rank=4, markov_head_type="rnn"),
        "the previous token is not supported",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_configurations_that_are_refused(made, fault):
    change, message = REFUSED[fault]
    folder = changed(made, change)
    with pytest.raises(ModelError, match=message):
        open_block(folder, TARGET)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "missing fc.weight"),
        (lambda t: t.update(extra=torch.ones(2)), "unexpected extra"),
        (lambda t: t.update({"norm.weight": torch.ones(63)}), r"norm.weight is \[63\]"),
        (lambda t: t["norm.weight"].fill_(np.nan), "NaN or infinity"),
    ],
)
def test_tensors_that_are_refused(made, change, message):
    folder = changed(made, tensors=change)
    with pytest.raises(ModelError, match=message):
        open_block(folder, TARGET)


def test_a_shorter_context_is_warned_of(made):
    folder = changed(made, lambda c: c.update(max_position_embeddings=128))
    assert "acceptance may fall" in " ".join(open_block(folder, TARGET).warnings)
