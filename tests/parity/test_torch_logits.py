"""The torch executor's logits are those of transformers on the same weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.build.shapes import SHAPES, RandomCheckpoint
from forerun.executors.torch import TorchExecutor
from forerun.executors.torch.attention.attention import apart
from forerun.executors.torch.decoder.decoder import Decoder
from tests.covering import every, some_of, thinned, values
from tests.models import tiny
from tests.parity.driver import Driver, Row, limits, logits_in_chunks, paths_of_a_tree
from tests.worlds.checkpoints import expected_logits

VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope": tiny.LLAMA3},
    "yarn": {"rope": tiny.YARN},
    "linear": {"rope": tiny.LINEAR},
    "wide heads": {"head_dim": 32},
    "one key head": {"num_key_value_heads": 1},
    "no sharing": {"num_key_value_heads": 4},
}


EXPERTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "yarn": {"rope": tiny.YARN},
    "wide heads": {"head_dim": 32},
    "one expert each": {"num_experts_per_tok": 1},
    "all experts": {"num_experts": 3, "num_experts_per_tok": 3},
    "normalised": {"norm_topk_prob": True},
    "not normalised": {"norm_topk_prob": False},
    "every second layer": {"num_hidden_layers": 4, "decoder_sparse_step": 2},
    "some layers dense": {"num_hidden_layers": 3, "mlp_only_layers": [0, 2]},
    "no experts at all": {"num_experts": 0},
}
QWEN2_EXPERTS = {
    "a wide shared expert": {"shared_expert_intermediate_size": 80},
    "no biases": {"qkv_bias": False},
    "windows": {"sliding_window": 20, "use_sliding_window": True}
    | {"layer_types": ["sliding_attention", "full_attention"]},
}
QWEN3_EXPERTS = {
    "biases": {"attention_bias": True},
    "windows": {"sliding_window": 20, "use_sliding_window": True},
}
GEMMAS = {
    "plain": {},
    "own head": {"tie_word_embeddings": False},
    "linear": {"rope": tiny.LINEAR},
    "narrow heads": {"head_dim": 8},
    "one key head": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True},
    "window of one": {"sliding_window": 1},
    "window of a block": {"sliding_window": 128},
    "window over several blocks": {"sliding_window": 150},
    "window longer than the text": {"sliding_window": 400},
    "capped logits": {"final_logit_softcapping": 3.0},
    "logits without a cap": {"final_logit_softcapping": None},
    "GELU by erf": {"hidden_activation": "gelu"},
}
ONLY = {
    "gemma2": {"scores without a cap": {"attn_logit_softcapping": None}},
    "gemma3_text": {
        "every third layer sees all": {
            **{"layer_types": None, "sliding_window_pattern": 3},
            "num_hidden_layers": 4,
        }
    },
}


GEMMA_31B = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA_31B |= {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
FURTHER = {
    "mixtral": {
        "plain": {},
        "window": {"sliding_window": 20},
        "tied": {"tie_word_embeddings": True},
    },
    "glm4_moe": {
        "plain": {},
        "no norms, no biases": {"use_qk_norm": False, "attention_bias": False},
        "one group": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        "three shared, all sparse": {"n_shared_experts": 3, "first_k_dense_replace": 0},
        "all dense": {"first_k_dense_replace": 3},
    },
    "deepseek_v3": {
        "plain": {},
        "queries by one product": {"q_lora_rank": None},
        "biases": {"attention_bias": True},
        "yarn": {"rope": tiny.YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
        "halves": {"rope_interleave": False},
        "one group": {"n_group": 1, "topk_group": 1},
    },
    "deepseek_v2": {
        "plain": {},
        "lite": {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
        | {"rope": tiny.YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
        "greedy in spite of groups": {"topk_method": "greedy", "first_k_dense_replace": 0},
    },
    "gpt_oss": {
        "plain": {},
        "yarn": {"rope": tiny.YARN | {"truncate": False}},
        "no biases of attention": {"attention_bias": False},
        "all see all": {"layer_types": ["full_attention"] * 2},
        "window over several blocks": {"sliding_window": 150},
    },
    "phi3": {"plain": {}, "window": {"sliding_window": 20}, "half of a head": {"partial": 0.5}},
    "smollm3": {
        "plain": {},
        "chosen layers": {"no_rope_layers": [0, 1], "attention_bias": True, "mlp_bias": True},
        "windows": {"sliding_window": 20, "use_sliding_window": True}
        | {"layer_types": ["full_attention", "sliding_attention"]},
    },
    "granite": {"plain": {}, "biases": {"attention_bias": True, "mlp_bias": True}},
    "granitemoehybrid": {
        "plain": {},
        "no positions": {"position_embedding_type": None, "attention_bias": True},
    },
    "olmo2": {
        "plain": {},
        "biases": {"attention_bias": True},
        "one key head": {"num_key_value_heads": 1},
    },
    "qwen3_next": {
        "plain": {},
        "attention first": {
            **{
                "layer_types": ["full_attention", "linear_attention"] * 2,
                "tie_word_embeddings": True,
            },
            **{"attention_bias": True, "mlp_only_layers": [0], "norm_topk_prob": False},
        },
        "odd heads": {"linear_key_head_dim": 7, "linear_value_head_dim": 5}
        | {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 2},
    },
    "qwen3_5_text": {
        "plain": {},
        "attention first": {
            "layer_types": ["full_attention", "linear_attention"] * 2,
            **{"attention_bias": True, "num_key_value_heads": 1},
        },
    },
    "qwen3_5_moe_text": {"plain": {}},
    "seed_oss": {
        "plain": {},
        "other biases": {"attention_bias": False, "attention_out_bias": True},
    },
    "olmo3": {"plain": {}, "yarn where all is seen": {"rope": tiny.YARN, "num_hidden_layers": 4}},
    "exaone4": {
        "plain": {},
        "no windows": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    },
    "glm4_moe_lite": {
        "plain": {},
        "all sparse": {"mlp_layer_types": ["sparse"] * 3, "norm_topk_prob": False}
        | {"first_k_dense_replace": 0},
    },
    "ministral3": {"plain": {}},
    "gemma4_text": {
        "plain": {},
        "values of keys": GEMMA_31B,
        "experts beside": GEMMA_31B
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2}
        | {"moe_intermediate_size": 32, "num_key_value_heads": 4, "num_hidden_layers": 2}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        "its vectors alone": {"num_kv_shared_layers": 0, "use_double_wide_mlp": False},
        "biases": {"attention_bias": True, "tie_word_embeddings": True},
    },
    "minimax_m2": {"plain": {}, "one key head": {"num_key_value_heads": 1}},
    "hunyuan_v1_dense": {
        "plain": {"rope": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
        "biases, its alpha not given": {"attention_bias": True, "tie_word_embeddings": True},
    },
    "lfm2": {
        "plain": {},
        "attention first, biases": {
            "layer_types": ["full_attention", "conv", "conv", "full_attention"],
            **{"conv_bias": True, "conv_L_cache": 5, "tie_word_embeddings": False},
            **{"block_auto_adjust_ff_dim": False, "num_key_value_heads": 1},
        },
    },
    "lfm2_moe": {
        "plain": {},
        "all sparse": {"num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False},
    },
}
"""Of the other families, what their configurations choose."""

SAME = {
    "mistral": set(VARIANTS) - {"plain"},
    "qwen2": set(VARIANTS) - {"plain", "one key head"} | {1, 16, 128, 256},
    "qwen3": set(VARIANTS) - {"plain", "wide heads", "one key head"} | {1, 16, 100, 256},
    "qwen3_moe": set(EXPERTS) - {"plain", "normalised", "not normalised", "some layers dense"},
    "gemma3_text": {
        *("narrow heads", "one key head", "window of one", "window of a block"),
        *("window longer than the text", "capped logits", "logits without a cap"),
    },
}
"""By family, variants and windows that are computed as in another one, whose case runs."""


def own(cases):
    """Cases (family, variant, ...) but for those of SAME."""
    return [case for case in cases if case[1] not in SAME.get(case[0], ())]


def windowed(family, size):
    """What a configuration of Llama's block says to have a window in some of its layers."""
    if family == "mistral":
        return {"sliding_window": size}
    kinds = ["full_attention", "sliding_attention"]
    return {"sliding_window": size, "use_sliding_window": True, "layer_types": kinds}


CASES = [
    *(
        (family, variant, changes)
        for family in tiny.LLAMAS
        for variant, changes in VARIANTS.items()
        if (family, variant) != ("qwen2", "wide heads")  # Its heads are H/A wide by definition.
    ),
    ("llama", "biases", {"attention_bias": True, "mlp_bias": True}),
]
SELDOM = [
    (family, name, changes)
    for family, variants in (
        ("qwen2_moe", EXPERTS | QWEN2_EXPERTS),
        ("qwen3_moe", EXPERTS | QWEN3_EXPERTS),
        ("gemma2", GEMMAS | ONLY["gemma2"]),
        ("gemma3_text", GEMMAS | ONLY["gemma3_text"]),
        *FURTHER.items(),
    )
    for name, changes in variants.items()
]
WINDOWS = [(family, n, windowed(family, n)) for family in tiny.LLAMAS[1:]
           for n in (1, 16, 100, 128, 256)]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "name", "changes"),
    own(CASES)
    + some_of(own(SELDOM), lambda cell: values(cell[:2]))
    + some_of(own(WINDOWS), lambda cell: values(cell[:2])),
)
def test_logits_are_those_of_transformers(checkpoint, random, family, name, changes):
    """The logits of a text, in chunks and then token by token, are the oracle's."""
    source = checkpoint(family, **changes)
    windows = {spec.attention.window for spec in source.architecture.layer_specs}
    assert changes.get("sliding_window", min(windows, key=str)) in windows
    tokens = random.integers(0, tiny.VOCAB, 290)
    expected = expected_logits(source, tokens)
    executor = TorchExecutor(source, limits(tiny.VOCAB))
    assert executor.describe()["batch_invariant"]
    logits = logits_in_chunks(executor, tokens, [170, 10, 106, *[1] * 4])
    assert expected.std() > 0.5
    assert (logits - expected).abs().max() < 1e-4


BRANCHING = ["gemma2", "gemma3_text", "qwen2_moe", "qwen3_moe", *FURTHER]


@pytest.mark.parametrize(("family", "page_size"), thinned(every(BRANCHING, [1, 16]), values))
def test_every_node_of_a_tree_is_a_token_of_its_path(checkpoint, random, family, page_size):
    """Branches longer than the window, from a prefix longer than it, over shuffled pages."""
    changes = {"sliding_window": 5} if family.startswith(("gemma", "gpt")) else {}
    source = checkpoint(family, **changes)
    executor = TorchExecutor(source, limits(tiny.VOCAB, page_size=page_size, pages=400))
    for text, logits in paths_of_a_tree(executor, random):
        assert (logits - expected_logits(source, text)[40:]).abs().max() < 1e-4


def test_norms_after_attention_and_feed_forward_alone():
    """The order that no family here has: by hand, on one layer of random weights."""
    arch = SHAPES["tiny"]
    (spec,) = set(arch.layer_specs)
    arch = replace(arch, layer_specs=(replace(spec, norms="post"),))
    source = RandomCheckpoint(arch)
    decoder = Decoder(source, torch.device("cpu"), torch.float32)
    tokens, positions = torch.arange(5, 9), torch.zeros(4, dtype=torch.int64)
    logits, _ = decoder.forward(
        tokens, decoder.rotary(positions), apart(lambda layer, q, k, v, sinks: v.repeat(1, 2, 1))
    )

    def weight(name):
        return torch.from_numpy(source.tensor(f"model.layers.0.{name}.weight"))

    def normed(y, name):
        return torch.nn.functional.rms_norm(y, (arch.hidden,), weight(name), arch.norm_eps)

    x = torch.from_numpy(source.tensor("model.embed_tokens.weight"))[tokens]
    values = (x @ weight("self_attn.v_proj").T).view(4, 2, 16).repeat(1, 2, 1).flatten(1)
    x = x + normed(values @ weight("self_attn.o_proj").T, "post_attention_layernorm")
    opened, up = (x @ weight(f"mlp.{part}_proj").T for part in ("gate", "up"))
    fed = (torch.nn.functional.silu(opened) * up) @ weight("mlp.down_proj").T
    x = x + normed(fed, "post_feedforward_layernorm")
    torch.testing.assert_close(logits, x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_embeddings_are_scaled_in_the_activations_dtype(checkpoint, random, family):
    source = checkpoint(family, hidden_size=96)  # sqrt(96) is no bfloat16.
    decoder = Decoder(source, torch.device("cpu"), torch.bfloat16)
    tokens = torch.from_numpy(random.integers(0, tiny.VOCAB, 20))
    positions = torch.arange(20)
    _, (entering,) = decoder.forward(
        tokens, decoder.rotary(positions), apart(lambda layer, q, k, v, sinks: q), (0,)
    )
    expected = tiny.reference(source).bfloat16().model.embed_tokens(tokens)
    assert torch.equal(entering, expected)


def test_features_are_the_hidden_states_of_transformers(checkpoint, random):
    source = checkpoint("qwen3")
    tokens = random.integers(0, tiny.VOCAB, 50)
    with torch.no_grad():
        output = tiny.reference(source).model(
            torch.from_numpy(tokens)[None], output_hidden_states=True
        )
    executor = TorchExecutor(source, limits(tiny.VOCAB))
    executor.request_aux_hidden_states((1, 0))
    with Driver(executor) as driver:
        driver.open(0, tokens)
        driver.step([Row(0, known=30)])
        features = driver.step([Row(0)]).outcome.features
        second, first = features.tensor().split(64, -1)
    for ours, theirs in ((first, 0), (second, 1)):
        assert ours.shape == (20, 64)
        assert (ours - output.hidden_states[theirs][0, 30:]).abs().max() < 1e-5


@pytest.mark.slow  # By default the core runs it (tests/cpu/test_logits.py).
@pytest.mark.model
def test_the_default_model_equals_transformers(default_model, default_executor):
    """As near to the exact logits as transformers itself: how far float32 may be off depends on
    the machine's kernels, so their own error is the yardstick.
    """
    tokens = default_model.tokenizer.encode(TEXT)[:48].astype(np.int64)
    with torch.no_grad():
        reference = tiny.reference(default_model.checkpoint)
        theirs = reference(torch.from_numpy(tokens)[None]).logits[0]
        exact = reference.double()(torch.from_numpy(tokens)[None]).logits[0]
    logits = logits_in_chunks(default_executor, tokens, [30, 18])
    assert len(tokens) == 48
    assert (logits.argmax(-1) == theirs.argmax(-1)).all()
    assert (theirs - exact).abs().max() < 1e-3
    assert (logits - exact).abs().max() < 2 * (theirs - exact).abs().max()


TEXT = (
    "The river had been rising for three days when the old ferryman finally untied his boat. "
    "Nobody in the village expected him to cross, least of all his daughter, who had packed "
    "1,024 jars of honey into the hold and written a careful list of everything she owed. "
) * 4
