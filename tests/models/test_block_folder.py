"""Block drafters as their projects write them: read, or refused with what is wrong."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.build.drafting import with_shipped
from forerun.drafts.block_config import default_block_features, expected_block_tensors
from forerun.drafts.block_folder import holds_block, open_block
from forerun.drafts.gguf_block import holds_block_file, open_block_file
from forerun.drafts.gguf_prediction import holds_layers_alone
from forerun.errors import ModelError
from forerun.networks.arch import Architecture, Rope, plain_layers
from forerun.options.config import EngineConfig
from tests.parity.blocks import PAIRED, SELECTING, VARIANTS, block_head, in_gguf, random_block

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
    opened = open_block(made.path, TARGET)
    wanted = {"anchored": True, "vocab": 4, "own_head": True}
    assert opened.head == replace(made.head, **wanted) and opened.head.depth == 5
    assert opened.target_ids.tolist() == [5, 6, 8, 303]


REFUSED = {
    "another architecture": (lambda c: c.update(architectures=["DominoDraftModel"]), "Domino's"),
    "another re-ranker": (
        lambda c: c["dflash_config"].update(projector_type="lilicorr"), "lilicorr.*does not run"
    ),
    "a projector that is a list": (lambda c: c.update(projector_type=["x"]), "does not run here"),
    "no layers named": (lambda c: c["dflash_config"].pop("target_layer_ids"), "a list of layers"),
    "no mask": (lambda c: c["dflash_config"].pop("mask_token_id"), "mask_token_id is missing"),
    "a mask without a row": (lambda c: c["dflash_config"].update(mask_token_id=320), "no row"),
    "a window of no size": (
        lambda c: c.update(layer_types=["sliding_attention"] * 2), "sliding_window is missing"
    ),
    "a window within the block": (
        lambda c: c.update(layer_types=["sliding_attention"] * 2, sliding_window=4),
        "sliding_window is 4; it must be the block or more",
    ),
    "a layer of another kind": (lambda c: c.update(layer_types=["conv"] * 2), "full_attention or"),
    "windows of which it is unknown what they hide": (
        lambda c: (
            c["dflash_config"].pop("causal"),
            c.update(layer_types=["sliding_attention", "full_attention"], sliding_window=9),
        ),
        "is_causal is missing",
    ),
    "another depth": (lambda c: c.update(num_target_layers=7), "this target has 6"),
    "another vocabulary": (lambda c: c.update(vocab_size=321), "another tokenizer"),
    "a layer too many": (
        lambda c: c.update(num_hidden_layers=3, layer_types=["full_attention"] * 3),
        "missing layers.2",
    ),
    "kinds of other layers": (lambda c: c.update(num_hidden_layers=3), "must be a list of 3"),
    "a damaged number": (lambda c: c.update(num_hidden_layers=10**9), "at most 1024 layers"),
    "a key of meaning": (lambda c: c.update(logit_scale=2.0), "logit_scale = 2.0"),
    "scaled logits": (
        lambda c: c["dflash_config"].update(output_multiplier="half"), "output_multiplier is 'half'"
    ),
    "features beyond": (
        lambda c: c["dflash_config"].update(target_layer_ids=[1, 6]), "within the target's 6",
    ),
    "a block of one": (lambda c: c.update(block_size=1), "block_size is 1"),
    "a bias without tables": (
        lambda c: c.update(markov_rank=4, sample_from_anchor=True), "missing markov_head.markov_w1"
    ),
    "a bias whose first place is not said": (
        lambda c: c.update(markov_rank=4), "sample_from_anchor is missing"
    ),
    "a bias of another kind": (
        lambda c: c.update(markov_rank=4, markov_head_type="fir"), "vanilla, gated, rnn"
    ),
    "a confidence without a head": (
        lambda c: c.update(enable_confidence_head=True), "confidence_head.proj.weight is missing"
    ),
    "another rotation in LFM2's": (
        lambda c: c.update(architectures=["Lfm2DSparkDraftModel"]), "rope_is_neox_style is missing"
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


@pytest.mark.parametrize("variant", sorted(PAIRED.keys() - SELECTING))
def test_dspark_as_liquid_and_specforge_write_it(tmp_path, variant):
    head = block_head(TARGET, **PAIRED[variant])
    made = random_block(TARGET, tmp_path, **PAIRED[variant])
    assert holds_block(made.path) and made.head == head and not made.warnings
    assert made.head.algorithm == "dspark"
    assert made.parameters == block_head(TARGET, **{
        name: value for name, value in PAIRED[variant].items()
        if name not in ("pair", "rank", "confidence")
    }).parameters  # fmt: skip


@pytest.mark.parametrize("variant", SELECTING)
def test_dflash2_as_its_authors_write_it(tmp_path, variant):
    made = random_block(TARGET, tmp_path, **SELECTING[variant])
    assert holds_block(made.path) and made.head == block_head(TARGET, **SELECTING[variant])
    assert made.head.algorithm == "dflash2" and not made.warnings

    def silent(config):
        config.pop("is_causal")
        config.update(layer_types=["sliding_attention"] * 2)

    assert open_block(changed(made, silent), TARGET).head.causal, "as windows are without a word"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conv_kernel_size": 3}, "conv_kernel_size is 3; it must be 2"),
        ({"conv_group_size": 7}, "a divisor of hidden_size 64"),
        ({"selector_rank": None}, "selector_rank is missing"),
        ({"selector_top_k": 0}, "selector_top_k is 0"),
        ({"selector_rank": 8}, r"predecessor_codebook is \[320, 4\]"),
        ({"selector_vocab_size": 8}, "selector_vocab_size = 8"),
    ],
)
def test_broken_dflash2_files_are_refused(tmp_path, change, message):
    made = random_block(TARGET, tmp_path, **PAIRED["DFlash2"])
    folder = changed(made, lambda config: config["dflash_config"].update(change))
    with pytest.raises(ModelError, match=message):
        open_block(folder, TARGET)


def test_a_scaled_embedding_must_be_spoken_of(tmp_path):
    """Beside a target that scales its own, as Gemma does."""
    scaled = replace(TARGET, embedding_scale=8.0)
    made = random_block(TARGET, tmp_path, **PAIRED["DFlash2"])
    assert open_block(made.path, scaled).head.embedding_scale == 2.0
    folder = changed(made, lambda c: c["dflash_config"].pop("input_embedding_scale"))
    with pytest.raises(ModelError, match="input_embedding_scale says it"):
        open_block(folder, scaled)


def test_dspark_as_speculators_write_it(tmp_path):
    """Nested, with a place for the anchor unless it says otherwise; what would accept other tokens
    than the target's is not followed, and that is said.
    """
    made = random_block(TARGET, tmp_path, **PAIRED["DSpark"])
    flat = json.loads((made.path / "config.json").read_text())
    inner = flat.pop("dflash_config")
    kept = ("architectures", "block_size", "sample_from_anchor")
    method = {"proposal_type": "greedy", "verifier_accept_k": 3, "accept_tolerance": 0.5}
    config = {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_config": {"algorithm": "dspark", "proposal_methods": [method]},
        "transformer_layer_config": {n: v for n, v in flat.items() if n not in kept},
        "aux_hidden_state_layer_ids": list(made.head.features),
        "mask_token_id": 300,
        "block_size": 5,
        "draft_vocab_size": TARGET.vocab,
        **{n: inner[n] for n in inner if n.startswith(("markov", "enable_c", "confidence"))},
    }
    (made.path / "config.json").write_text(json.dumps(config))
    opened = open_block(made.path, TARGET)
    assert opened.head == made.head and opened.head.anchored
    warned = " ".join(opened.warnings)
    assert "verifier_accept_k 3 of its" in warned and "accept_tolerance 0.5 of its" in warned
    method.update(verifier_accept_k=1, accept_tolerance=0.0)
    (made.path / "config.json").write_text(json.dumps(config))
    assert not open_block(made.path, TARGET).warnings


def test_dspark_as_deepspec_writes_it(tmp_path):
    """All keys flat, with copies of the target's ends."""
    ends = {"own_embedding": True, "own_head": True, **PAIRED["DSpark"]}
    made = random_block(TARGET, tmp_path, **ends)

    def flat(config):
        config |= config.pop("dflash_config")
        config.pop("projector_type")
        config.update(architectures=["Qwen3DSparkModel"], confidence_temperatures=[1.5] * 5)
        config.pop("sample_from_anchor")

    opened = open_block(changed(made, flat), TARGET)
    assert opened.head == made.head
    assert opened.warnings == (
        "confidence_temperatures are not read: outcomes calibrate its confidence",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("markov_head.markov_w2.weight"), "missing markov_head.markov_w2.weight"),
        (lambda t: t.update({"markov_head.markov_w1.weight": torch.ones(320, 5)}), "markov_w1"),
        (lambda t: t.update({"markov_head.gate_proj.bias": torch.ones(4)}), "unexpected markov"),
        (lambda t: t.update({"confidence_head.proj.weight": torch.ones(1, 64)}), "asks for 68"),
        (lambda t: t["markov_head.markov_w2.weight"].fill_(np.inf), "NaN or infinity"),
    ],
)
def test_broken_dspark_files_are_refused(tmp_path, change, message):
    folder = changed(random_block(TARGET, tmp_path, **PAIRED["DSpark"]), tensors=change)
    with pytest.raises(ModelError, match=message):
        open_block(folder, TARGET)


def test_a_shorter_context_is_warned_of(made):
    folder = changed(made, lambda c: c.update(max_position_embeddings=128))
    assert "acceptance may fall" in " ".join(open_block(folder, TARGET).warnings)


# --- block drafters in gguf files ----------------------------------------------------------------


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
    opened = open_block_file(path, TARGET)
    assert opened.head == replace(folder.head, windows=windows)
    np.testing.assert_array_equal(opened.target_ids, folder.target_ids)
    for tensor in expected_block_tensors(opened.head):
        if tensor != "d2t":
            np.testing.assert_array_equal(opened.tensor(tensor), folder.tensor(tensor))
    config = EngineConfig(model="m", speculative_draft_model_path=str(path))
    assert with_shipped(config).speculative_algorithm == "AUTO"  # Not a whole model.


def test_a_file_of_dflash2_is_the_folder(tmp_path):
    folder = random_block(TARGET, tmp_path / "folder", **PAIRED["DFlash2"])
    windows = {"dflash.attention.sliding_window": 7}
    windows["dflash.attention.sliding_window_pattern"] = [True, True]
    opened = open_block_file(in_gguf(folder, tmp_path / "x.gguf", windows), TARGET)
    assert opened.head == folder.head and opened.head.algorithm == "dflash2"
    for tensor in expected_block_tensors(opened.head):
        np.testing.assert_array_equal(opened.tensor(tensor), folder.tensor(tensor))
    for name, value in (("conv_kernel_size", 3), ("conv_group_size", 7), ("selector_top_k", 0)):
        wrong = in_gguf(folder, tmp_path / "y.gguf", windows | {f"dflash.{name}": value})
        with pytest.raises(ModelError, match=name):
            open_block_file(wrong, TARGET)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"dflash.has_confidence_head": False}, "has_confidence_head"),
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
    folder = random_block(TARGET, tmp_path / "folder")
    extra = {"layers.0.attn_conv.weight": np.zeros((4, 4), np.float32)}
    with pytest.raises(ModelError, match=r"unexpected blk\.0\.attn_conv"):
        open_block_file(in_gguf(folder, tmp_path / "x.gguf", extra=extra), TARGET)
