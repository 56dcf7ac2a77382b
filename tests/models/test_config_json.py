import pytest

from forerun.errors import ModelError
from forerun.networks.arch import FAMILIES
from forerun.networks.config_json import architecture_from, read_json
from forerun.networks.layer_spec import AttentionSpec, Dense, Experts, Router
from forerun.networks.rope import LinearScaling, Rope, Yarn
from tests.models import tiny


def read(family, tmp_path, without=(), **changes):
    config = tiny.config(family).to_dict() | changes
    for name in without:
        del config[name]
    return architecture_from(config, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers(family, tmp_path):
    arch = read(family, tmp_path)
    sizes = (arch.hidden, arch.heads, arch.kv_heads, arch.head_size, arch.vocab, arch.context)
    heads = (1, 40) if family in tiny.DEEPSEEKS else (2, 16)  # What is kept: 32 + 8 numbers.
    assert (arch.family, *sizes) == (family, 64, 4, *heads, 320, 256)
    assert (arch.norm_eps, arch.rope.theta) == (1e-5, 1e4)
    if family in tiny.LLAMAS:
        (spec,) = set(arch.layer_specs)
        assert (arch.layers, arch.ffn, spec.feed_forward) == (2, 96, Dense(96))
        assert spec.attention == AttentionSpec(16**-0.5)
        assert (spec.qkv_bias, spec.qk_norm) == (family == "qwen2", family == "qwen3")
        assert not arch.beyond_llama()


def test_experts_are_data(tmp_path):
    changes = {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    arch = read("qwen2_moe", tmp_path, ["layer_types"], **changes)
    experts = Experts(6, 2, 32, shared=48, shared_gate=True)
    assert [spec.feed_forward for spec in arch.layer_specs] == [
        *(Dense(96), experts, Dense(96), Dense(96), Dense(96))
    ]
    assert arch.ffn == 2 * 32 + 48
    assert read("qwen3_moe", tmp_path).layer_specs[0].feed_forward == Experts(
        6, 2, 32, Router(normalised=True)
    )


def test_gemma_3_is_data(tmp_path):
    arch = read("gemma3_text", tmp_path, final_logit_softcapping=20.0)
    slides, whole, again = arch.layer_specs
    assert slides == again
    assert (slides.attention.window, whole.attention.window) == (24, None)
    assert (slides.rope, whole.rope) == (Rope(3000.0), Rope(1e4))
    assert whole.attention.scale == slides.attention.scale == 24**-0.5
    assert (whole.norms, whole.activation, whole.qk_norm) == ("sandwich", "gelu_tanh", True)
    exact = read("gemma3_text", tmp_path, hidden_activation="gelu", hidden_act="gelu")
    assert {spec.activation for spec in exact.layer_specs} == {"gelu"}
    assert (arch.embedding_scale, arch.norm_offset, arch.final_softcap) == (8.0, 1.0, 20.0)
    assert (arch.rope, arch.context) == (Rope(1e4), 256)
    assert arch.layer_specs[0].attention.window == 24


def test_the_configuration_that_gemma_3_came_with(tmp_path):
    """As published for the 1B model: two bases, a pattern, no layer_types."""
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        **{"attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None},
        **{"bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106]},
        **{"final_logit_softcapping": None, "head_dim": 256, "hidden_size": 1152},
        **{"hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02},
        **{"intermediate_size": 6912, "max_position_embeddings": 32768, "pad_token_id": 0},
        **{"model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26},
        **{"num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06},
        **{"rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000},
        **{"sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16"},
        **{"transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144},
    }
    arch = architecture_from(config, tmp_path)
    assert arch.parameters == 999_885_952
    assert arch.tied_head
    whole = [layer for layer, spec in enumerate(arch.layer_specs) if not spec.attention.window]
    assert whole == [5, 11, 17, 23]
    assert {spec.rope.theta for spec in arch.layer_specs} == {1e4, 1e6}


def test_ministral_ends_where_its_queries_would_grow(tmp_path):
    """In its wrapper, as published; a Mistral may be in there, too."""
    text = tiny.config("ministral3", max_position_embeddings=4096).to_dict()
    whole = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"]}
    whole |= {"text_config": text, "vision_config": {}, "image_token_index": 10}
    whole |= {"projector_hidden_act": "gelu", "vision_feature_layer": -1, "spatial_merge_size": 2}
    arch = architecture_from(whole, tmp_path)
    assert (arch.family, arch.context, arch.rope.attention_factor) == ("ministral3", 512, 1.0)
    still = text | {"rope_parameters": text["rope_parameters"] | {"llama_4_scaling_beta": 0.0}}
    assert architecture_from(whole | {"text_config": still}, tmp_path).context == 4096
    older = whole | {"text_config": tiny.config("mistral").to_dict()}
    arch = architecture_from(older, tmp_path)
    assert arch.family == "mistral" and arch.tied_head  # The wrapper's default, not Mistral's own.
    assert not architecture_from(older | {"tie_word_embeddings": False}, tmp_path).tied_head


def test_older_spellings_are_the_same_models(tmp_path):
    """As published: OLMo 3's scaling is of the layers that see all, MiniMax has its rotated numbers
    in one key, EXAONE 4's layers are letters.
    """
    olmo = tiny.config("olmo3", num_hidden_layers=4, rope=tiny.YARN).to_dict()
    ropes = olmo.pop("rope_parameters")
    scaling = {"rope_type": "yarn", **tiny.YARN}
    older = olmo | {"rope_theta": 1e4, "rope_scaling": scaling}
    newer = olmo | {"rope_parameters": ropes}
    assert architecture_from(older, tmp_path) == architecture_from(newer, tmp_path)
    minimax = tiny.config("minimax_m2").to_dict()
    plain = minimax | {"rope_parameters": {"rope_theta": 1e4}, "rotary_dim": 8}
    assert architecture_from(plain, tmp_path) == architecture_from(minimax, tmp_path)
    letters = tiny.config("exaone4", num_hidden_layers=6).to_dict() | {"layer_types": None}
    arch = architecture_from(letters | {"sliding_window_pattern": "LLG"}, tmp_path)
    assert [bool(spec.attention.window) for spec in arch.layer_specs] == [True, True, False] * 2
    assert [spec.rope.rotated for spec in arch.layer_specs] == [None, None, 0] * 2


def test_a_hunyuan_as_published_calls_a_larger_base_dynamic(tmp_path):
    of_yarn = {"beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    plain = tiny.config("hunyuan_v1_dense").to_dict()
    config = plain | {
        **{"add_classification_head": False, "attention_head_dim": 16, "cla_share_factor": 2},
        **{"class_num": 0, "dense_list": [4096, 0], "eod_token_id": 3, "im_end_id": 5},
        **{"im_newline_id": 11, "im_start_id": 4, "mask_init_id": 12, "mlp_bias": False},
        **{"norm_type": "rms", "num_experts": 1, "org_vocab_size": 160, "pad_id": 9},
        **{"pool_type": "last", "position_embedding_xdrope": False, "text_end_id": 7},
        **{"rope_parameters": None, "rope_scaling": of_yarn | {"alpha": 50.0, "type": "dynamic"}},
        **{"rope_theta": 1e4, "skip_cls_token": False, "text_start_id": 6, "use_cla": False},
        **{"use_qk_norm": True, "use_rotary_pos_emb": True},
    }
    arch = architecture_from(config, tmp_path)
    assert arch.rope.theta == pytest.approx(1e4 * 50 ** (16 / 14))
    (spec,) = {*arch.layer_specs}
    assert spec.qk_norm and spec.late_qk_norm and "behind their rotation" in arch.beyond_llama()[0]


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla"),
        ("hunyuan_v1_dense", {"num_experts": 16}, "num_experts"),
        ("hunyuan_v1_dense", {"norm_type": "layer"}, "norm_type"),
        ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic"}}, "alpha is missing"),
        (
            "hunyuan_v1_dense",
            {"rope_parameters": {"rope_type": "dynamic", "alpha": 2.0, "factor": 4.0}},
            "factor",
        ),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"model_type": "gemma3"}, "gemma3"),
        ("llama", {"model_type": ["llama"]}, "llama"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "Classification"),
        ("llama", {"quantisation_config": {"bits": 4}}, "quantisation_config"),
        ("llama", {"sliding_window": 128}, "sliding_window"),
        ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("llama", {"residual_multiplier": 0.22}, "residual_multiplier"),
        ("llama", {"num_local_experts": 8}, "num_local_experts"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias"),
        ("qwen2", {"head_dim": 32}, "head_dim"),
        ("qwen3", {"layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("qwen2_moe", {"num_experts": 0.5}, "num_experts"),
        ("qwen2_moe", {"num_experts": None}, "num_experts is missing"),
        ("qwen2_moe", {"num_experts_per_tok": 7}, "experts per token"),
        ("qwen2_moe", {"num_experts": 1 << 40}, "number of experts"),
        ("qwen2_moe", {"moe_intermediate_size": 0}, "experts' width"),
        ("qwen2_moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen2_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ("qwen2_moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
        ("qwen2_moe", {"use_sliding_window": True, "layer_types": None}, "layer_types"),
        ("qwen3_moe", {"num_experts": 5}, "num_local_experts"),
        ("qwen3_moe", {"n_group": 8}, "n_group"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 48}, "shared_expert_intermediate"),
        ("qwen3_moe", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation"),
        ("gemma3_text", {"hidden_activation": ["gelu"]}, "hidden_activation"),
        ("gemma3_text", {"hidden_activation": "gelu_new"}, "hidden_activation"),
        ("gemma2", {"hidden_act": "gelu"}, "hidden_act"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma3_text", {"sliding_window": 0}, "sliding window"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("gemma3_text", {"final_logit_softcapping": -3.0}, "softcap"),
        ("gemma3_text", {"rope_theta": 1e6}, "rope_theta"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}, "rope_theta"),
        ("gemma3_text", {"rope_parameters": {"full_attention": [1]}}, "full_attention"),
        ("gemma2", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping"),
        ("gemma2", {"rope_local_base_freq": 1e4}, "rope_local_base_freq"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        ("olmo3", {"rope_parameters": tiny.YARN | {"rope_theta": 5e5}}, "rope_parameters"),
        ("exaone4", {"sliding_window_pattern": "LX"}, "sliding_window_pattern"),
        ("exaone4", {"sliding_window": None}, "use_sliding_window"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
        ("glm4_moe_lite", {"v_head_dim": None}, "v_head_dim is missing"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func"),
        ("minimax_m2", {"layernorm_mlp_alpha": 3.5}, "layernorm_mlp_alpha"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod"),
        ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list"),
        ("llama", {"vocab_size": "320"}, "vocab_size"),
        ("llama", {"vocab_size": True}, "vocab_size"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"hidden_size": 10**400}, "hidden_size"),
        ("llama", {"num_attention_heads": 0}, "heads"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ("lfm2", {"block_ffn_dim_multiplier": float("nan")}, "block_ffn_dim_multiplier"),
        ("gemma4_text", {"per_layer_config": {"9" * 5000: {}}}, "per_layer_config"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [10**400] * 8}},
            "short_factor",
        ),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters"),
        ("llama", {"rope_scaling": [1]}, "rope_scaling"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "short_factor"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ("llama", {"rope_scaling": tiny.YARN | {"mystery": 3}}, "mystery"),
        ("llama", {"rope_parameters": {"mrope_section": [1, 2]}}, "mrope_section"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
    ],
)
def test_what_would_change_the_model_is_refused_by_name(family, changes, named, tmp_path):
    with pytest.raises(ModelError, match=named):
        read(family, tmp_path, **changes)


def test_a_name_of_any_length_is_shown_in_part(tmp_path):
    """Found by the fuzzer guided by coverage."""
    with pytest.raises(ModelError, match=r"A{60} = 1") as refused:
        read("llama", tmp_path, **{"A" * 5000: 1, "B" * 5000: 1})
    assert len(str(refused.value)) < 1000


def test_harmless_keys_are_accepted(tmp_path):
    extra = {
        "torch_dtype": "bfloat16",
        "_name_or_path": "somewhere",
        "unsloth_fixed": True,
        "rope_interleaved": False,
        "is_llama_config": True,
        "transformers.js_config": {"dtype": "q4"},
        "pretraining_tp": 1,
        "pruned_heads": {},
        "id2label": {"0": "LABEL_0"},
        "some_new_flag": False,
        "some_new_thing": None,
    }
    assert read("llama", tmp_path, **extra) == read("llama", tmp_path)


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),
        (
            "qwen3_moe",
            {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0},
        ),
        ("minimax_m2", {"layernorm_mlp_beta": 1.0, "layernorm_full_attention_beta": 1.0}),
    ],
)
def test_keys_of_published_models_that_no_code_reads(family, extra, tmp_path):
    """Of Phi-4-mini, Qwen3-Coder and MiniMax M2."""
    assert read(family, tmp_path, **extra) == read(family, tmp_path)


def test_absent_keys_mean_what_transformers_means(tmp_path):
    llama = read("llama", tmp_path, without=["head_dim", "num_key_value_heads", "rms_norm_eps"])
    assert (llama.head_size, llama.kv_heads, llama.norm_eps) == (16, 4, 1e-6)
    assert read("qwen3", tmp_path, without=["head_dim"]).head_size == 128
    mistral = read("mistral", tmp_path, ["sliding_window"], max_position_embeddings=32768)
    assert windows(mistral) == [4096, 4096]
    assert (mistral.layer_specs[0].attention.window, mistral.context) == (4096, 32768)
    gemma = read("gemma2", tmp_path, ["attn_logit_softcapping", "final_logit_softcapping"])
    assert (gemma.layer_specs[0].attention.softcap, gemma.final_softcap) == (50.0, 30.0)
    assert windows(read("gemma3_text", tmp_path, ["layer_types"])) == [24, 24, 24]


def windows(arch):
    return [spec.attention.window for spec in arch.layer_specs]


def test_old_spelling_of_rope(tmp_path):
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 3}}
    arch = read("llama", tmp_path, without=["rope_parameters"], **old)
    assert (arch.rope.theta, arch.rope.scaling) == (5e5, LinearScaling(3.0))
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    scaling = read("qwen2", tmp_path, rope_scaling=yarn | {"finetuned": True}).rope.scaling
    assert isinstance(scaling, Yarn)
    assert (scaling.factor, scaling.original_context) == (2.0, 128)


ON = {"sliding_window": 100, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("mistral", {"sliding_window": 100}, [100, 100]),
        ("mistral", {"sliding_window": 1000}, [1000, 1000]),
        ("mistral", {"sliding_window": None}, [None, None]),
        ("qwen2", {"sliding_window": 100}, [None, None]),
        ("qwen2", ON, [None, None]),
        ("qwen2", ON | {"max_window_layers": 1, "layer_types": None}, [None, 100]),
        ("qwen2", ON | {"max_window_layers": 0, "layer_types": None}, [100, 100]),
        ("qwen3", ON | {"layer_types": ["full_attention", "sliding_attention"]}, [None, 100]),
        ("qwen3", {"use_sliding_window": True, "sliding_window": None}, [None, None]),
        ("qwen2_moe", ON | {"layer_types": ["sliding_attention"] * 2}, [100, 100]),
        ("qwen3_moe", ON, [100, 100]),
        ("gemma2", {"layer_types": None}, [24, None]),
    ],
)
def test_each_layer_has_its_window(family, changes, expected, tmp_path):
    arch = read(family, tmp_path, **changes)
    assert windows(arch) == expected
    assert arch.context == 256


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", "[" * 100_000, '{"a": 1' + "0" * 5000 + "}", "\ud800"]
)
def test_files_that_are_not_json_objects(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ModelError, match=r"config\.json"):
        read_json(path)


def test_a_huge_file_is_not_read(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match="larger than 4 MiB"):
        read_json(path)


GRANITE_4 = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0, "attention_multiplier": 0.015625, "bos_token_id": 100257,
    "dtype": "bfloat16", "embedding_multiplier": 12, "eos_token_id": 100257, "hidden_act": "silu",
    "hidden_size": 2560, "init_method": "mup", "initializer_range": 0.1,
    "intermediate_size": 8192, "layer_types": ["attention"] * 40, "logits_scaling": 10,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 40,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128,
    "mamba_proj_bias": False, "max_position_embeddings": 131072, "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm", "num_attention_heads": 40, "num_experts_per_tok": 0,
    "num_hidden_layers": 40, "num_key_value_heads": 8, "num_local_experts": 0,
    "output_router_logits": False, "pad_token_id": 100256, "position_embedding_type": "rope",
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000000, "router_aux_loss_coef": 0.01, "shared_intermediate_size": 8192,
    "tie_word_embeddings": True, "use_cache": True, "vocab_size": 100352,
}  # fmt: skip


def test_a_granite_4_without_mamba_is_granite(tmp_path):
    arch = architecture_from(GRANITE_4, tmp_path)
    (spec,) = {*arch.layer_specs}
    assert (spec.residual, spec.rope.theta, spec.rope.rotated) == (0.22, 1e7, None)
    assert (arch.embedding_scale, arch.logit_scale, arch.head_size) == (12.0, 0.1, 64)
    assert 3.3e9 < arch.parameters < 3.5e9
    still = architecture_from(GRANITE_4 | {"position_embedding_type": "nope"}, tmp_path)
    assert still.rope.rotated == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["mamba"] * 36 + ["attention"] * 4}, "Mamba does not run here"),
        ({"layer_types": ["attention"]}, "layer_types"),
        ({"num_local_experts": 64}, "num_local_experts"),
        ({"num_local_experts": None}, "num_local_experts"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type"),
        ({"normalization_function": "layernorm"}, "normalization_function"),
    ],
)
def test_other_granites_are_refused_by_name(changes, named, tmp_path):
    with pytest.raises(ModelError, match=named):
        architecture_from(GRANITE_4 | changes, tmp_path)
