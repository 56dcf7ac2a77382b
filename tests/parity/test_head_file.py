"""EAGLE-3 heads in GGUF files, as llama.cpp's converter writes them, against their folders."""

import gguf
import numpy as np
import pytest

from forerun.build.draft_file import holds_draft_file, names_gguf_model
from forerun.build.target import open_target
from forerun.drafts.eagle_config import expected_draft_tensors
from forerun.drafts.gguf_eagle import holds_head_file, open_head_file
from forerun.errors import ModelError
from forerun.networks.rope import Divided
from tests.models import tiny
from tests.parity.heads import RandomHead, opened_config, serve

STORED = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    **{f"layers.0.self_attn.{x}_proj.weight": f"blk.0.attn_{x}.weight" for x in "qkv"},
    "layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    **{f"layers.0.mlp.{x}_proj.weight": f"blk.0.ffn_{x}.weight" for x in ("gate", "up", "down")},
}


def neighbours(array, heads):
    """Rows as llama.cpp has those of queries and keys: of each head the halves, one by one."""
    halves = array.reshape(heads, 2, len(array) // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(array.shape)


def in_gguf(draft, path, metadata=None, extra=None, packed=()):
    """A head's file.

    metadata  keys to set or, with None, to leave out; extra  more tensors, or in place of others
    packed    tensors that are stored as Q8_0
    """
    head, writer = draft.head, gguf.GGUFWriter(path, "eagle3")
    known = {
        "block_count": 1,
        "context_length": head.context,
        "embedding_length": head.hidden,
        "feed_forward_length": head.ffn,
        "vocab_size": head.target_vocab,
        "attention.head_count": head.heads,
        "attention.head_count_kv": head.kv_heads,
        "attention.key_length": head.head_size,
        "attention.value_length": head.head_size,
        "attention.layer_norm_rms_epsilon": head.norm_eps,
        "rope.dimension_count": head.head_size,
        "rope.freq_base": head.rope.theta,
        "target_layers": list(head.features),
        "target_hidden_size": head.target_hidden,
        "norm_before_residual": head.normed_residual,
        "norm_before_fc": False,
    }
    for key, value in (known | (metadata or {})).items():
        if value is not None:
            kind = gguf.GGUFValueType.get_type(value)
            writer.add_key_value(f"eagle3.{key}", value, kind)
    names = [*expected_draft_tensors(head), *(n for n in STORED if n in draft.files)]
    arrays = {STORED[name]: draft.tensor(name) for name in names if name != "d2t"}
    for name, heads in (("q", head.heads), ("k", head.kv_heads)):
        arrays[f"blk.0.attn_{name}.weight"] = neighbours(arrays[f"blk.0.attn_{name}.weight"], heads)
    if head.vocab != head.target_vocab:
        arrays["d2t"] = draft.target_ids.astype(np.int64)
    for name, array in (arrays | (extra or {})).items():
        if name in packed:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        elif array is not None:
            writer.add_tensor(name, array)
    return tiny.written(writer, path)


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, range(0, tiny.VOCAB, 2)),
        ({"normed_residual": True}, range(tiny.VOCAB)),
        ({"hidden": 48, "trained_head": True}, range(1, tiny.VOCAB, 3)),
    ],
    ids=str,
)
def test_a_head_is_that_of_its_folder(dense, tmp_path, changes, ids):
    draft = RandomHead(dense, tmp_path / "head", changes, ids).draft
    path = in_gguf(draft, tmp_path / "head.gguf")
    assert holds_head_file(path) and holds_draft_file(path) and not names_gguf_model(str(path))
    opened = open_head_file(path, dense.arch)
    assert opened.head == draft.head
    np.testing.assert_array_equal(opened.target_ids, draft.target_ids)
    for name in draft.files.keys() - {"d2t"}:
        np.testing.assert_array_equal(opened.tensor(name), draft.tensor(name), name)
    older = in_gguf(
        draft,
        tmp_path / "older.gguf",
        {"target_layers": None, "extract_layers": list(draft.head.features)},
    )
    assert open_head_file(older, dense.arch).head == draft.head


def test_rows_in_few_bits_and_divisors(dense, tmp_path):
    draft = RandomHead(dense, tmp_path / "head", {}).draft
    divisors = np.linspace(1, 2, draft.head.head_size // 2, dtype=np.float32)
    packed = ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "fc.weight")
    path = in_gguf(draft, tmp_path / "x.gguf", extra={"rope_freqs.weight": divisors}, packed=packed)
    opened = open_head_file(path, dense.arch)
    assert isinstance(opened.head.rope.scaling, Divided)
    for name in expected_draft_tensors(draft.head).keys() - {"d2t"}:
        most = 0.01 * np.abs(draft.tensor(name)).max()
        np.testing.assert_allclose(opened.tensor(name), draft.tensor(name), atol=most)


@pytest.mark.parametrize(
    ("metadata", "extra", "words"),
    [
        ({"target_layers": None}, {}, "eagle3.extract_layers is missing"),
        ({"target_layers": ["2"]}, {}, "eagle3.target_layers"),
        ({"target_layers": [2, 3, 99]}, {}, "lie beyond"),
        ({"target_layers": [2, 3]}, {}, "fc.weight is"),
        ({"block_count": 2}, {}, "eagle3.block_count is 2"),
        ({"norm_before_fc": True}, {}, "eagle3.norm_before_fc"),
        ({"rope.dimension_count": 4}, {}, "eagle3.rope.dimension_count"),
        ({"attention.sliding_window": 16}, {}, "eagle3.attention.sliding_window"),
        ({"target_hidden_size": 32}, {}, "reads features of width 32"),
        ({"vocab_size": 99}, {}, "vocabulary of 99"),
        ({"attention.head_count": 3}, {}, "q_proj.weight is"),
        ({}, {"d2t": np.zeros(tiny.VOCAB // 2, np.int64)}, "two draft ids"),
        ({}, {"d2t": np.arange(tiny.VOCAB // 2, dtype=np.int64) + 99999}, "leads to target id"),
        ({}, {"fc.weight": None}, "missing fc.weight"),
        ({}, {"blk.0.attn_q.bias": np.zeros(4, np.float32)}, "unexpected blk.0.attn_q.bias"),
        ({}, {"blk.1.attn_norm.weight": np.zeros(4, np.float32)}, "unexpected blk.1.attn_norm"),
    ],
)
def test_what_does_not_run_is_named(dense, tmp_path, metadata, extra, words):
    draft = RandomHead(dense, tmp_path / "head", {}).draft
    path = in_gguf(draft, tmp_path / "x.gguf", metadata, extra)
    with pytest.raises(ModelError, match=words) as raised:
        open_head_file(path, dense.arch)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("speculation", ["EAGLE3", "AUTO"])
def test_it_drafts_what_its_folder_drafts(dense, folder, tmp_path, speculation):
    dense_head = RandomHead(dense, tmp_path / "head", {})
    path = in_gguf(dense_head.draft, tmp_path / "head.gguf")
    texts = []
    for place in (dense_head.folder, path):
        dense_head.folder = place
        config = opened_config(folder, dense_head, speculative_algorithm=speculation)
        target = open_target(config)
        try:
            done = serve(target, [[5, 6, 7], [9, 8, 9]], target.config.speculative_algorithm)
        finally:
            target.close()
        texts.append([(one.tokens, one.stats) for one in done])
    assert texts[0] == texts[1]
    assert all(stats.draft_tokens > 0 for _, stats in texts[0])
