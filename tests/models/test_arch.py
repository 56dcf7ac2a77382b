from dataclasses import replace

import pytest

from forerun.errors import ModelError
from forerun.models.arch import FAMILIES, Architecture, expected_tensors
from forerun.models.config_json import architecture_from
from forerun.models.rope import Rope
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
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_tensors_are_those_of_transformers(family, changes, tmp_path):
    hf = tiny.model(family, **changes)
    arch = architecture_from(hf.config.to_dict(), tmp_path)
    assert expected_tensors(arch) == {n: w.shape for n, w in tiny.weights(hf).items()}
    assert arch.parameters == sum(weight.numel() for weight in hf.parameters())


GOOD = Architecture(
    family="llama",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_size=16,
    ffn=96,
    vocab=320,
    context=256,
    norm_eps=1e-5,
    rope=Rope(1e4),
)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers": 0}, "layers"),
        ({"layers": 10**9}, "layers"),
        ({"hidden": -64}, "hidden"),
        ({"vocab": 1 << 40}, "vocab"),
        ({"kv_heads": 3}, "key/value heads"),
        ({"head_size": 15}, "odd"),
        ({"norm_eps": 0.0}, "epsilon"),
        ({"norm_eps": float("nan")}, "epsilon"),
        ({"sliding_window": 100}, "sliding window"),
        ({"rope": Rope(-1.0)}, "theta"),
    ],
)
def test_impossible_numbers_are_refused(change, named):
    with pytest.raises(ModelError, match=named):
        replace(GOOD, **change)
