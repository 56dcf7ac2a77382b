import pytest

from forerun.errors import ModelError
from forerun.models.arch import FAMILIES
from forerun.models.config_json import architecture_from, read_json
from forerun.models.rope import Linear, Yarn
from tests.models import tiny


def read(family, tmp_path, without=(), **changes):
    config = tiny.config(family).to_dict() | changes
    for name in without:
        del config[name]
    return architecture_from(config, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers(family, tmp_path):
    arch = read(family, tmp_path)
    sizes = (arch.layers, arch.hidden, arch.heads, arch.kv_heads, arch.head_size, arch.ffn)
    assert (arch.family, *sizes, arch.vocab, arch.context) == (
        *(family, 2, 64, 4, 2, 16, 96),
        *(320, 256),
    )
    assert (arch.norm_eps, arch.rope.theta, arch.sliding_window) == (1e-5, 1e4, None)
    assert (arch.qkv_bias, arch.qk_norm) == (family == "qwen2", family == "qwen3")


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"model_type": "gemma3"}, "gemma3"),
        ("llama", {"model_type": ["llama"]}, "llama"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "Classification"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"auto_map": {"AutoModel": "evil.Model"}}, "auto_map"),
        ("llama", {"sliding_window": 128}, "sliding_window"),
        ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("llama", {"residual_multiplier": 0.22}, "residual_multiplier"),
        ("llama", {"num_local_experts": 8}, "num_local_experts"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias"),
        ("qwen2", {"head_dim": 32}, "head_dim"),
        ("qwen3", {"layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        ("llama", {"vocab_size": "320"}, "vocab_size"),
        ("llama", {"vocab_size": True}, "vocab_size"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"hidden_size": 10**400}, "hidden_size"),
        ("llama", {"num_attention_heads": 0}, "heads"),
        ("llama", {"rms_norm_eps": float("nan")}, "epsilon"),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ("llama", {"rope_parameters": [1]}, "rope_scaling"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
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


def test_absent_keys_mean_what_transformers_means(tmp_path):
    llama = read("llama", tmp_path, without=["head_dim", "num_key_value_heads", "rms_norm_eps"])
    assert (llama.head_size, llama.kv_heads, llama.norm_eps) == (16, 4, 1e-6)
    assert read("qwen3", tmp_path, without=["head_dim"]).head_size == 128
    mistral = read("mistral", tmp_path, ["sliding_window"], max_position_embeddings=32768)
    assert mistral.context == mistral.sliding_window == 4096


def test_old_spelling_of_rope(tmp_path):
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 3}}
    arch = read("llama", tmp_path, without=["rope_parameters"], **old)
    assert (arch.rope.theta, arch.rope.scaling) == (5e5, Linear(3.0))
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    scaling = read("qwen2", tmp_path, rope_scaling=yarn | {"finetuned": True}).rope.scaling
    assert isinstance(scaling, Yarn)
    assert (scaling.factor, scaling.original_context) == (2.0, 128)


@pytest.mark.parametrize(
    ("family", "changes", "context", "window"),
    [
        ("mistral", {"sliding_window": 100}, 100, 100),
        ("mistral", {"sliding_window": 1000}, 256, 1000),
        ("mistral", {"sliding_window": None}, 256, None),
        ("qwen2", {"sliding_window": 100}, 256, None),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": True}, 256, None),
        (
            "qwen2",
            {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 1}
            | {"layer_types": None},
            100,
            100,
        ),
        (
            "qwen3",
            {"sliding_window": 100, "use_sliding_window": True}
            | {"layer_types": ["full_attention", "sliding_attention"]},
            100,
            100,
        ),
    ],
)
def test_context_ends_where_a_window_would_begin_to_matter(
    family, changes, context, window, tmp_path
):
    arch = read(family, tmp_path, **changes)
    assert (arch.context, arch.sliding_window) == (context, window)


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
    with pytest.raises(ModelError, match="larger"):
        read_json(path)
