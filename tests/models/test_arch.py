from dataclasses import replace

import pytest

from forerun.errors import ModelError
from forerun.networks.arch import FAMILIES, Architecture, expected_tensors, plain_layers
from forerun.networks.config_json import architecture_from
from forerun.networks.layer_spec import AttentionSpec, Dense, Experts
from forerun.networks.rope import Rope
from tests.models import tiny

VARIANTS = [(family, {}) for family in FAMILIES]
VARIANTS += [(family, {"tie_word_embeddings": True}) for family in FAMILIES]
VARIANTS += [
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    ("qwen3", {"attention_bias": True}),
    ("mistral", {"head_dim": 32}),
    ("qwen3", {"head_dim": 24}),
    ("qwen2_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "qkv_bias": False}),
    ("qwen3_moe", {"mlp_only_layers": [1], "attention_bias": True}),
    ("gemma3_text", {"attention_bias": True}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_tensors_are_those_of_transformers(family, changes, tmp_path):
    hf = tiny.model(family, **changes)
    arch = architecture_from(hf.config.to_dict(), tmp_path)
    assert expected_tensors(arch) == {n: w.shape for n, w in tiny.weights(hf).items()}
    assert arch.parameters == sum(weight.size for weight in tiny.weights(hf).values())


GOOD = Architecture(
    family="llama",
    hidden=64,
    heads=4,
    kv_heads=2,
    head_size=16,
    vocab=320,
    context=256,
    norm_eps=1e-5,
    layer_specs=plain_layers(2, 16, 96, Rope(1e4)),
)
(SPEC,) = set(GOOD.layer_specs)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_specs": ()}, "layers"),
        ({"layer_specs": GOOD.layer_specs * 1000}, "layers"),
        ({"hidden": -64}, "hidden"),
        ({"vocab": 1 << 40}, "vocab"),
        ({"kv_heads": 3}, "key/value heads"),
        ({"head_size": 15}, "odd"),
        ({"norm_eps": 0.0}, "epsilon"),
        ({"norm_eps": float("nan")}, "epsilon"),
        ({"embedding_scale": 0.0}, "embedding scale"),
        ({"final_softcap": float("inf")}, "final logit softcap"),
        *(
            ({"layer_specs": (SPEC, replace(SPEC, **change))}, named)
            for change, named in (
                ({"rope": Rope(-1.0)}, "theta"),
                ({"attention": AttentionSpec(0.25, window=0)}, "sliding window"),
                ({"attention": AttentionSpec(0.0)}, "attention scale"),
                ({"attention": AttentionSpec(0.25, softcap=float("nan"))}, "attention softcap"),
                ({"feed_forward": Dense(0)}, "ffn"),
                ({"feed_forward": Experts(4, 5, 8)}, "experts per token"),
                ({"feed_forward": Experts(0, 1, 8)}, "number of experts"),
                ({"feed_forward": Experts(4, 1, 8, shared=-1)}, "shared expert"),
            )
        ),
    ],
)
def test_impossible_numbers_are_refused(change, named):
    with pytest.raises(ModelError, match=named):
        replace(GOOD, **change)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norms": "sandwich"}, "norms after attention"),
        ({"activation": "gelu_tanh"}, "GELU"),
        ({"activation": "gelu"}, "GELU"),
        ({"feed_forward": Experts(4, 2, 8)}, "mixture-of-experts"),
        ({"attention": AttentionSpec(0.25, softcap=50.0)}, "capped attention scores"),
        ({"attention": AttentionSpec(0.3)}, "scale of attention scores"),
        ({"rope": Rope(1e6)}, "a rope per layer"),
        ({"feed_forward": Dense(64)}, "layers that differ"),
        ({"qk_norm": True}, "layers that differ"),
    ],
)
def test_what_is_more_than_llamas_block_is_named(changes, named):
    assert not GOOD.beyond_llama()
    other = replace(GOOD, layer_specs=(SPEC, replace(SPEC, **changes)))
    assert any(named in what for what in other.beyond_llama())
    windowed = replace(SPEC, attention=AttentionSpec(0.25, window=9))
    assert not replace(GOOD, layer_specs=(SPEC, windowed)).beyond_llama()


def test_what_is_more_than_llama_in_the_whole_model_is_named():
    other = replace(GOOD, embedding_scale=8.0, norm_offset=1.0, final_softcap=30.0)
    assert len(other.beyond_llama()) == 3
