import re
from contextlib import nullcontext
from functools import partial

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.gguf import header
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.checkpoints.gguf.header import read_header
from forerun.checkpoints.mapped import release, release_files
from forerun.errors import ModelError
from forerun.networks.rope import Divided, LinearScaling, Yarn
from tests.covering import every, spread
from tests.models import tiny
from tests.worlds.checkpoints import IDS, holds, logits_are_those_of


@pytest.mark.parametrize("family", tiny.LLAMAS)
@pytest.mark.parametrize(
    "rope", [{}, tiny.LINEAR, tiny.LLAMA3, tiny.YARN], ids=lambda r: str(r)[:24]
)
def test_weights_and_logits_are_those_of_transformers(family, rope, tmp_path):
    hf = tiny.model(family, rope=rope, tie_word_embeddings=bool(rope))
    checkpoint: Checkpoint = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf"))
    holds(checkpoint, hf)
    assert checkpoint.architecture.norm_eps == 1e-5
    kinds = {"linear": LinearScaling, "llama3": Divided, "yarn": Yarn, None: type(None)}
    assert isinstance(checkpoint.architecture.rope.scaling, kinds[rope.get("rope_type")])
    difference = (tiny.reference(checkpoint)(IDS).logits - hf(IDS).logits).abs().max()
    assert difference < 1e-4


@pytest.mark.parametrize(
    ("family", "kind"),
    [*every(["llama", "qwen3"], tiny.QUANTS), *every(["glm4_moe"], ["F16", "Q8_0", "Q4_1"])],
)
def test_quantised_rows_come_back_in_canonical_order(family, kind, tmp_path):
    """An expert's are its part of the stored ones."""
    hf = tiny.model(family)
    checkpoint = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf", kind))
    quant = gguf.GGMLQuantizationType[kind]
    for name, weight in tiny.weights(hf).items():
        packed = checkpoint.packed(name)
        if weight.ndim == 1 or name.endswith("mlp.gate.weight"):
            np.testing.assert_array_equal(checkpoint.tensor(name), weight)
            assert packed is None or weight.ndim > 1
            continue
        raw = quantize(weight, quant)
        np.testing.assert_array_equal(checkpoint.tensor(name), dequantize(raw, quant))
        assert (packed.kind, packed.columns) == (kind, weight.shape[1])
        np.testing.assert_array_equal(packed.rows, raw.view(np.uint8))


def test_vocabulary_is_read_again_from_a_file_that_is_deleted(tmp_path):
    checkpoint = GgufCheckpoint(tiny.write_gguf(tiny.model("llama"), tmp_path / "x.gguf"))
    known = dict(checkpoint.metadata)
    checkpoint.drop_vocabulary()
    (tmp_path / "x.gguf").unlink()
    assert checkpoint.metadata.keys() < known.keys()
    assert checkpoint.reread_metadata() == known


def test_a_file_that_was_not_fetched_whole_says_so(tmp_path):
    path = tiny.write_gguf(tiny.model("llama"), tmp_path / "x.gguf")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ModelError, match="it is cut off, fetch or copy it again"):
        GgufCheckpoint(path)


def test_long_vocabularies_stay_in_the_file(tmp_path, monkeypatch):
    path = tiny.write_gguf(tiny.model("llama"), tmp_path / "x.gguf")
    expected = GgufCheckpoint(path).metadata["tokenizer.ggml.tokens"]
    monkeypatch.setattr(header, "_LONG", 8)
    tokens = GgufCheckpoint(path).metadata["tokenizer.ggml.tokens"]
    assert isinstance(expected, list) and isinstance(tokens, header.StoredStrings)
    assert [*tokens] == expected and tokens[3:9:2] == expected[3:9:2] and tokens[-1] == expected[-1]
    with pytest.raises(IndexError):
        tokens[len(expected)]
    data = bytearray(path.read_bytes())
    data[data.index(expected[5].encode(), data.index(b"tokenizer.ggml.tokens"))] = 0xFF
    path.write_bytes(data)
    with pytest.raises(ModelError, match="damaged GGUF header"):
        GgufCheckpoint(path)


def test_rows_that_were_given_back_are_read_again(tmp_path):
    checkpoint = GgufCheckpoint(tiny.write_gguf(tiny.model("llama"), tmp_path / "x.gguf", "Q8_0"))
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        rows = checkpoint.packed(name).rows
        before = rows.copy()
        for give_back in (partial(release, rows), release_files):
            give_back()
            np.testing.assert_array_equal(rows, before)


def test_biases_of_a_llama_are_put_back_too(tmp_path):
    hf = tiny.model("llama", attention_bias=True, mlp_bias=True)
    checkpoint = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf"))
    holds(checkpoint, hf)
    assert torch.equal(tiny.reference(checkpoint)(IDS).logits, hf(IDS).logits)


READABLE = [
    kind
    for kind in gguf.GGMLQuantizationType
    if kind in gguf.quants._type_traits or kind.name in ("F32", "F16")
]


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_every_type_that_the_gguf_package_dequantises(kind, tmp_path):
    """Random blocks: the reader must find the same bytes and shape as the package."""
    hidden = 256
    hf = tiny.model("qwen2", hidden_size=hidden, intermediate_size=hidden, head_dim=hidden // 4)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (hidden, hidden // block * size), np.uint8)
    name = "model.layers.1.mlp.down_proj.weight"
    path = tmp_path / "x.gguf"
    tiny.write_gguf(hf, path, stored={name: (raw, kind)})
    checkpoint = GgufCheckpoint(path)
    with np.errstate(all="ignore"):
        expected = dequantize(raw, kind)
    np.testing.assert_array_equal(checkpoint.tensor(name), expected)
    np.testing.assert_array_equal(checkpoint.packed(name).rows, raw)
    assert checkpoint.packed(name).kind == kind.name


def test_types_that_cannot_be_dequantised_are_refused_by_name(tmp_path):
    kind = gguf.GGMLQuantizationType.I32
    raw = np.zeros((64, 96 * 4), np.uint8)
    name = "model.layers.1.mlp.down_proj.weight"
    path = tiny.write_gguf(tiny.model("llama"), tmp_path / "x.gguf", stored={name: (raw, kind)})
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_down\.weight.*I32"):
        GgufCheckpoint(path)


def test_window_and_yarn_factors(tmp_path):
    metadata = {
        "llama.attention.sliding_window": 100,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.attn_factor": 0.5,
        "llama.rope.scaling.original_context_length": 64,
    }
    path = tiny.write_gguf(tiny.model("llama"), tmp_path / "x.gguf", metadata=metadata)
    arch = GgufCheckpoint(path).architecture
    assert arch.context == 256
    assert {spec.attention.window for spec in arch.layer_specs} == {100}
    assert arch.rope.scaling == Yarn(4.0, 64, 0.5 * (0.1 * np.log(4.0) + 1))


GEMMA = {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 16}
"""As llama.cpp has it: every sixth layer sees all, the others turn by a base of 10,000."""


def gemma(**changes):
    local = {"rope_type": "default", "rope_theta": 1e4}
    whole = {"rope_theta": 1e6} | changes.pop("rope", {"rope_type": "default"})
    ropes = {"full_attention": whole, "sliding_attention": local}
    return tiny.model("gemma3_text", **GEMMA | {"rope_parameters": ropes} | changes)


@pytest.mark.parametrize(
    "changes",
    [{}, {"rope": tiny.LINEAR}, {"final_logit_softcapping": 4.0, "tie_word_embeddings": False}],
    ids=lambda changes: str(changes)[:24],
)
def test_gemma_3_is_that_of_transformers(changes, tmp_path):
    hf = gemma(**changes)
    checkpoint = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf"))
    holds(checkpoint, hf, lambda name, weight: weight + ("norm" in name))
    arch = checkpoint.architecture
    assert [spec.attention.window for spec in arch.layer_specs] == [24] * 5 + [None, 24]
    logits_are_those_of(hf, checkpoint)


def gemma_2(**changes):
    return tiny.model("gemma2", tie_word_embeddings=True, query_pre_attn_scalar=16, **changes)


@pytest.mark.parametrize("unsaid", [False, True])
def test_gemma_2_is_that_of_transformers(unsaid, tmp_path):
    """What llama.cpp takes where a file does not say it is what transformers takes, but for the
    window's length, which no text here reaches then.
    """
    names = ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window")
    left_out = {f"gemma2.{name}": None for name in (*names, "rope.freq_base")}
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    hf = gemma_2(**caps | {"sliding_window": 4096}) if unsaid else gemma_2(num_hidden_layers=3)
    metadata = left_out if unsaid else {}
    checkpoint = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf", metadata=metadata))
    holds(checkpoint, hf, lambda name, weight: weight + ("norm" in name))
    windows = [spec.attention.window for spec in checkpoint.architecture.layer_specs]
    assert windows == ([4096, None] if unsaid else [24, None, 24])
    logits_are_those_of(hf, checkpoint)


@pytest.mark.parametrize(
    ("make", "changes", "scale"),
    [
        (gemma_2, {}, 16**-0.5),
        (gemma_2, {"num_hidden_layers": 46, "head_dim": 8}, (64 // 4) ** -0.5),
        (gemma, {"num_hidden_layers": 62, "hidden_size": 32}, (32 // 4) ** -0.5),
    ],
)
def test_scores_of_deep_gemmas_are_scaled_by_the_hidden_size(make, changes, scale, tmp_path):
    hf = make(**changes | ({"intermediate_size": 8} if changes else {}))
    arch = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf")).architecture
    assert {spec.attention.scale for spec in arch.layer_specs} == {scale}


def test_a_gemma_3_without_windows(tmp_path):
    metadata = {"gemma3.attention.sliding_window": None}
    arch = GgufCheckpoint(
        tiny.write_gguf(gemma(), tmp_path / "x.gguf", metadata=metadata)
    ).architecture
    assert {(spec.attention.window, spec.rope.theta) for spec in arch.layer_specs} == {(None, 1e6)}


def test_a_window_that_names_no_layers_limits_the_context(tmp_path):
    """A Qwen's file does not say which layers have it."""
    metadata = {"qwen2.attention.sliding_window": 100}
    path = tiny.write_gguf(tiny.model("qwen2"), tmp_path / "x.gguf", metadata=metadata)
    arch = GgufCheckpoint(path).architecture
    assert arch.context == 100


BLOCKS = {
    "smollm3": {"num_hidden_layers": 6, "no_rope_layer_interval": 4, "attention_bias": True},
    "granite": {"mlp_bias": True},
    "olmo2": {"num_key_value_heads": 1},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {"rope": tiny.YARN | {"truncate": False}, "num_hidden_layers": 3},
    "glm4_moe": {"n_shared_experts": 2, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v3": {"rope": tiny.YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek_v2": {"rope": tiny.YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    "phi3": {"sliding_window": 20, "partial": 0.5},
    "seed_oss": {},
    "olmo3": {
        "rope": tiny.YARN | {"attention_factor": 1.3},
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
    },
    "minimax_m2": {"num_hidden_layers": 3},
    "hunyuan_v1_dense": {},
    "granitemoehybrid": {},
    "lfm2": {},
    "lfm2_moe": {"norm_topk_prob": True, "routed_scaling_factor": 1.0},
    "gemma4_text": {},
    "ministral3": {},
    "exaone4": {},
}


@pytest.mark.parametrize("family", spread(BLOCKS, 9))
def test_other_blocks_are_those_of_transformers(family, tmp_path):
    hf = tiny.model(family, **BLOCKS[family])
    checkpoint = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf"))
    holds(checkpoint, hf)
    logits_are_those_of(hf, checkpoint)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("legacy", [False, True])
def test_qwen3_next_is_that_of_transformers(kind, legacy, tmp_path):
    """Norms come with their 1, and what decays as it is used; in files of 2025 all of a net's
    queries, keys, values and gates are one matrix, key head by key head.
    """
    hf = tiny.model("qwen3_next", **NEXT)
    with pytest.MonkeyPatch.context() as patch:
        if legacy:
            patch.setattr(tiny, "of_qwen3_next", joined)
        path = tiny.write_gguf(hf, tmp_path / "x.gguf", kind)
    checkpoint = GgufCheckpoint(path)
    weights, quant = tiny.weights(hf), gguf.GGMLQuantizationType[kind]
    assert set(checkpoint.names()) == set(weights) and checkpoint.architecture.norm_offset == 0
    for name, weight in weights.items():
        tensor, expected = checkpoint.tensor(name), weight
        assert checkpoint.shape(name) == weight.shape == tensor.shape
        if "A_log" in name:
            np.testing.assert_allclose(tensor, weight, atol=1e-6)
            continue
        if "norm" in name and "linear_attn" not in name:
            expected = weight + 1
        elif weight.ndim == 2 and not name.endswith(tiny.AS_FLOATS):
            expected = dequantize(quantize(weight, quant), quant)
        np.testing.assert_array_equal(tensor, expected)
    if kind != "F32":
        packed = checkpoint.packed("model.layers.0.linear_attn.k_proj.weight")
        assert (packed.kind, len(packed.rows)) == (kind, 16)
        return
    logits_are_those_of(hf, checkpoint)


NEXT = {"linear_key_head_dim": 8, "linear_value_head_dim": 16, "moe_intermediate_size": 32}
NEXT |= {"shared_expert_intermediate_size": 64}


def joined(hf, arrays, plain=tiny.of_qwen3_next):
    tensors = plain(hf, arrays)
    for name, tensor in hf.state_dict().items():
        if "in_proj_qkvz" in name:
            del tensors[name.replace("qkvz", "qkv")], tensors[name.replace("qkvz", "z")]
            tensors[name] = tensor.numpy()
    return tensors


def test_the_layers_with_states_may_be_listed(tmp_path):
    hf, listed = tiny.model("qwen3_next", **NEXT), [True, True, True, False]
    metadata = {
        "qwen3next.full_attention_interval": None,
        "qwen3next.attention.recurrent_layers": listed,
    }
    predicted = {  # Converters list prediction layers too.
        "qwen3next.attention.recurrent_layers": [*listed, False],
        "qwen3next.nextn_predict_layers": 1,
        "qwen3next.block_count": 5,
    }
    for keys in (metadata, metadata | predicted):
        path = tiny.write_gguf(hf, tmp_path / "x.gguf", metadata=keys)
        specs = GgufCheckpoint(path).architecture.layer_specs
        assert [spec.recurrent is not None for spec in specs] == listed


def test_a_granite_without_positions(tmp_path):
    hf = tiny.model("granitemoehybrid", position_embedding_type="nope")
    keys = {"granite.rope.scaling.finetuned": False}
    logits_are_those_of(hf, GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf", metadata=keys)))


def test_a_rope_of_their_own_in_layers_with_windows(tmp_path):
    hf, keys = tiny.model("olmo3", **BLOCKS["olmo3"]), {"olmo2.rope.freq_base_swa": 3000.0}
    checkpoint = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf", metadata=keys))
    thetas = [spec.rope.theta for spec in checkpoint.architecture.layer_specs]
    assert thetas == [1e4, *[3000.0] * 3]


def test_files_of_ministral_without_growing_queries_are_mistrals(tmp_path):
    """Converters of 2026 call all of Mistral's multimodal models mistral3."""
    hf = tiny.model("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.GGUF_NAMES, "llama", "mistral3")
        path = tiny.write_gguf(hf, tmp_path / "x.gguf")
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.architecture.family == "llama"
    holds(checkpoint, hf)


def test_a_decay_that_grows_is_refused(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "of_qwen3_next", grown)
        path = tiny.write_gguf(tiny.model("qwen3_next", **NEXT), tmp_path / "x.gguf")
    with pytest.raises(ModelError, match=r"blk\.1\.ssm_a must be negative"):
        GgufCheckpoint(path).tensor("model.layers.1.linear_attn.A_log")


def grown(hf, arrays, plain=tiny.of_qwen3_next):
    tensors = plain(hf, arrays)
    tensors["model.layers.1.linear_attn.A_log"] *= -1
    return tensors


def test_experts_one_by_one_as_the_first_files_had_them(tmp_path):
    hf = tiny.model("mixtral")
    path = tmp_path / "x.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "stacked", lambda arrays, settings: arrays)
        plain = tiny.gguf_name
        patch.setattr(tiny, "gguf_name", lambda name, arch: first_name(name) or plain(name, arch))
        tiny.write_gguf(hf, path)
    checkpoint = GgufCheckpoint(path)
    holds(checkpoint, hf)


def first_name(name):
    """llama.cpp's of an expert's matrix, before experts were stacked."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.weight", name)
    return match and f"blk.{match[1]}.ffn_{match[3]}.{match[2]}.weight"


def test_prediction_layers_are_left_aside(tmp_path):
    hf = tiny.model("glm4_moe")
    more = {"glm4moe.nextn_predict_layers": 1, "glm4moe.block_count": 4}
    extra = {"blk.3.nextn.eh_proj.weight": np.ones((64, 128), "f4")}
    path = tiny.write_gguf(hf, tmp_path / "x.gguf", metadata=more, extra=extra)
    assert GgufCheckpoint(path).architecture.layers == 3


@pytest.mark.parametrize(
    ("family", "key", "value", "named"),
    [
        ("llama", "expert_count", 8, r"llama\.expert_used_count is missing"),
        ("llama", "attention.causal", False, "causal"),
        ("llama", "attention.causal", True, None),
        ("llama", "attention.key_length", 32, "embedding|q_proj|value_length"),
        ("llama", "attention.value_length", 32, "value_length"),
        ("llama", "rope.dimension_count", 8, "dimension_count"),
        ("llama", "rope.scaling.type", "longrope", "longrope"),
        ("llama", "rope.scaling.type", "none", None),
        ("llama", "rope.scaling.attn_factor", 2.0, "attn_factor"),
        ("llama", "rope.scaling.yarn_log_multiplier", 0.1, "yarn_log_multiplier"),
        ("llama", "logit_scale", 0.5, "logit_scale"),
        ("llama", "logit_scale", 0.0, None),
        ("llama", "vocab_size", 321, "vocab_size"),
        ("llama", "block_count", 3, r"missing blk\.2"),
        ("llama", "block_count", 1, r"unexpected blk\.1"),
        ("llama", "block_count", 10**9, "layers"),
        ("llama", "block_count", "two", "block_count"),
        ("llama", "attention.head_count", 5, "heads"),
        ("llama", "attention.head_count_kv", [2, 2], None),
        ("llama", "feed_forward_length", [96, 96], None),
        ("llama", "attention.head_count_kv", [2, 1], "head_count_kv"),
        ("llama", "attention.head_count_kv", [2.0, 2.0], "head_count_kv"),
        ("llama", "attention.layer_norm_rms_epsilon", float("nan"), "epsilon"),
        ("llama", "rope.freq_base", 0.0, "theta"),
        ("llama", "rope.freq_base", float("inf"), "freq_base"),
        ("llama", "embedding_length", None, "embedding_length is missing"),
        ("llama", "context_length", None, "context_length is missing"),
        ("llama", "some.new.key", "new", r"llama\.some\.new\.key"),
        ("llama", "general.architecture", "gemma3n", "gemma3n"),
        ("llama", "general.architecture", "eagle3", "beside its model"),
        ("llama", "general.architecture", None, "architecture None"),
        ("llama", "general.type", "adapter", "adapter"),
        ("llama", "split.count", 3, "llama-gguf-split"),
        ("llama", "general.alignment", 48, "alignment"),
        ("gemma3_text", "attention.sliding_window_pattern", 5, "sliding_window_pattern"),
        ("gemma3_text", "attention.sliding_window_pattern", 6, None),
        ("gemma3_text", "rope.freq_base", None, "freq_base is missing"),
        ("gemma3_text", "attn_logit_softcapping", 50.0, "attn_logit_softcapping"),
        ("gemma3_text", "expert_count", 4, "expert_count"),
        ("qwen3_next", "ssm.inner_size", 65, r"ssm\.inner_size"),
        ("qwen3_next", "ssm.time_step_rank", 0, r"ssm\.inner_size"),
        ("qwen3_next", "ssm.group_count", None, r"ssm\.group_count is missing"),
        ("qwen3_next", "ssm.group_count", 3, "key heads"),
        ("qwen3_next", "ssm.state_size", 16, r"blk\.0\.(attn_qkv|ssm)"),
        ("qwen3_next", "ssm.conv_kernel", 5, r"ssm_conv1d"),
        ("qwen3_next", "ssm.dt_b_c_rms", True, r"ssm\.dt_b_c_rms"),
        ("qwen3_next", "full_attention_interval", 0, "full_attention_interval"),
        ("qwen3_next", "full_attention_interval", 2, r"missing blk\.1\.attn"),
        ("qwen3_next", "attention.recurrent_layers", [True, True], "recurrent_layers"),
        ("qwen3_next", "rope.dimension_count", 3, "rotat"),
        ("qwen3_moe", "expert_gating_func", 4, r"qwen3moe\.expert_gating_func is 4.*softmax"),
        ("qwen3_moe", "expert_gating_func", 3, None),
        ("qwen3_moe", "expert_gating_func", 1, None),
        ("qwen3_moe", "expert_count", 7, r"blk\.0\.ffn_gate_exps\.weight is \[6, 32, 64\]"),
        ("qwen3_moe", "expert_count", None, r"qwen3moe\.expert_count is missing"),
        ("qwen3_moe", "expert_used_count", 7, "experts per token is 7"),
        ("qwen3_moe", "expert_used_count", None, r"expert_used_count is missing"),
        ("qwen3_moe", "expert_feed_forward_length", 40, r"ffn_down_exps\.weight is \[6, 64, 32\]"),
        ("qwen3_moe", "expert_weights_scale", -1.0, "experts' scale"),
        ("qwen3_moe", "leading_dense_block_count", 1, "ffn is 0|missing blk"),
        ("qwen2_moe", "expert_shared_feed_forward_length", 40, r"ffn_gate_shexp\.weight"),
        ("glm4_moe", "expert_group_count", 3, "groups"),
        ("glm4_moe", "expert_group_used_count", 5, "kept groups"),
        ("glm4_moe", "expert_shared_count", 0, r"unexpected blk\.1\.ffn_gate_shexp"),
        ("glm4_moe", "rope.dimension_count", 7, "rotated in pairs"),
        ("glm4_moe", "leading_dense_block_count", 2, r"missing blk\.1\.ffn_gate\.weight"),
        ("glm4_moe", "expert_chunk_feed_forward_length", 5, "expert_chunk_feed_forward_length"),
        ("deepseek_v3", "attention.key_length_mla", None, "before April 2025"),
        ("deepseek_v3", "attention.value_length_mla", 20, r"attn_v_b\.weight is \[4, 12, 32\]"),
        ("deepseek_v3", "attention.kv_lora_rank", 24, r"attention\.key_length is 40"),
        ("deepseek_v3", "attention.q_lora_rank", None, r"missing blk\.0\.attn_q\.weight"),
        ("deepseek_v3", "attention.head_count_kv", 4, r"deepseek2\.attention\.head_count_kv is 4"),
        ("deepseek_v3", "rope.dimension_count", 24, r"attention\.key_length is 40"),
        ("deepseek_v3", "expert_gating_func", 1, r"unexpected blk\.1\.exp_probs_b\.bias"),
        ("deepseek_v2", "expert_gating_func", None, None),
        ("mixtral", "expert_used_count", 9, "experts per token is 9"),
        ("gpt_oss", "expert_count", 4, r"ffn_gate_exps\.bias is \[5, 96\]"),
        ("gpt_oss", "attention.sliding_window", None, None),
        ("granite", "logit_scale", -2.0, "scale of logits"),
        ("granite", "attention.scale", 0.0, None),
        ("granite", "residual_scale", None, None),
        ("olmo2", "embedding_scale", 3.0, r"olmo2\.embedding_scale"),
        ("smollm3", "attention.sliding_window", 20, r"smollm3\.attention\.sliding_window"),
        ("exaone4", "attention.sliding_window_pattern", [True], "sliding_window_pattern"),
        ("ministral3", "rope.scaling.original_context_length", 1024, None),
    ],
)
def test_metadata_is_honoured_or_refused_by_name(family, key, value, named, tmp_path):
    made = {"gemma3_text": gemma, "qwen3_next": partial(tiny.model, "qwen3_next", **NEXT)}
    name = tiny.GGUF_NAMES.get(family, family)
    key = key if key.startswith(("general.", "split.")) else f"{name}.{key}"
    hf = made.get(family, partial(tiny.model, family))()
    path = tiny.write_gguf(hf, tmp_path / "x.gguf", metadata={key: value})
    with nullcontext() if named is None else pytest.raises(ModelError, match=named):
        GgufCheckpoint(path)


def test_experts_that_are_missing_are_named(tmp_path, monkeypatch):
    plain = tiny.stacked

    def without(arrays, settings):
        tensors = plain(arrays, settings)
        del tensors["model.layers.1.mlp.experts.up_proj.weight"]
        return tensors

    monkeypatch.setattr(tiny, "stacked", without)
    path = tiny.write_gguf(tiny.model("qwen3_moe"), tmp_path / "x.gguf")
    with pytest.raises(ModelError, match=r"missing blk\.1\.ffn_up_exps\.weight"):
        GgufCheckpoint(path)


def test_unknown_tensors_are_named(tmp_path):
    path = tmp_path / "x.gguf"
    tiny.write_gguf(tiny.model("llama"), path, extra={"blk.0.mystery.weight": np.ones(3, "f4")})
    with pytest.raises(ModelError, match=r"blk\.0\.mystery\.weight"):
        GgufCheckpoint(path)


def test_metadata_equals_the_packages(tmp_path):
    path = tiny.write_gguf(tiny.model("qwen3"), tmp_path / "x.gguf")
    theirs = gguf.GGUFReader(path)
    ours = read_header(path)
    names = [name for name in theirs.fields if not name.startswith("GGUF.")]
    assert list(ours.metadata) == names
    for name in names:
        assert ours.metadata[name] == pytest.approx(theirs.fields[name].contents())
    for tensor in theirs.tensors:
        stored = ours.tensors[tensor.name]
        assert (stored.start, stored.size) == (tensor.data_offset, tensor.n_bytes)


def test_a_family_that_lacks_something_is_refused_with_what(tmp_path):
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama4")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="model does not run here: it needs chunked attention"):
        GgufCheckpoint(path)
