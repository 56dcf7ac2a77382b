"""The torch executor's logits are those of transformers on the same weights."""

import numpy as np
import pytest
import torch

from forerun.executors.torch import TorchExecutor
from tests.models import tiny
from tests.parity.driver import Driver, Row, limits

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
}
ONLY = {
    "gemma2": {"scores without a cap": {"attn_logit_softcapping": None}},
    "gemma3_text": {
        "every third layer sees all": {
            **{"layer_types": None, "sliding_window_pattern": 3},
            "num_hidden_layers": 4,
        },
    },
}


def forward(executor, tokens, chunks):
    """float32[T,V] of a text run in chunks of the given lengths."""
    found = []
    with Driver(executor) as driver:
        driver.open(0, tokens)
        for chunk in chunks:
            found.append(driver.step([Row(0, known=chunk)]).scores.logits)
    return torch.cat(found)


CASES = [
    (family, variant)
    for family in tiny.LLAMAS
    for variant in VARIANTS
    if (family, variant) != ("qwen2", "wide heads")  # Its heads are H/A wide by definition.
]


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_every_family_equals_transformers(checkpoint, random, family, variant):
    equals_transformers(checkpoint(family, **VARIANTS[variant]), random)


NEW_CASES = [
    (family, name, changes)
    for family, variants in (
        ("qwen2_moe", EXPERTS | QWEN2_EXPERTS),
        ("qwen3_moe", EXPERTS | QWEN3_EXPERTS),
        ("gemma2", GEMMAS | ONLY["gemma2"]),
        ("gemma3_text", GEMMAS | ONLY["gemma3_text"]),
    )
    for name, changes in variants.items()
]


@pytest.mark.parametrize(("family", "name", "changes"), NEW_CASES)
def test_experts_and_gemma_equal_transformers(checkpoint, random, family, name, changes):
    equals_transformers(checkpoint(family, **changes), random)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("window", [1, 16, 100, 128, 256])
def test_contexts_longer_than_the_window(checkpoint, random, family, window):
    changes = {"sliding_window": window}
    if family != "mistral":
        kinds = ["full_attention", "sliding_attention"]
        changes |= {"use_sliding_window": True, "layer_types": kinds}
    found = checkpoint(family, **changes)
    assert found.architecture.windowless_context == window
    equals_transformers(found, random)


def equals_transformers(found, random, count=300):
    """The logits of a text, in chunks and then token by token, are the oracle's."""
    tokens = random.integers(0, tiny.VOCAB, count)
    with torch.no_grad():
        expected = tiny.reference(found)(torch.from_numpy(tokens)[None]).logits[0]
    executor = TorchExecutor(found, limits(tiny.VOCAB))
    assert executor.describe()["batch_invariant"]
    logits = forward(executor, tokens, [170, 10, 100, *[1] * (count - 280)])
    assert expected.std() > 0.5
    assert (logits - expected).abs().max() < 1e-4


def test_biases_everywhere(checkpoint, random):
    found = checkpoint("llama", attention_bias=True, mlp_bias=True)
    tokens = random.integers(0, tiny.VOCAB, 40)
    with torch.no_grad():
        expected = tiny.reference(found)(torch.from_numpy(tokens)[None]).logits[0]
    logits = forward(TorchExecutor(found, limits(tiny.VOCAB)), tokens, [40])
    assert (logits - expected).abs().max() < 1e-4


def test_features_are_the_hidden_states_of_transformers(checkpoint, random):
    found = checkpoint("qwen3")
    tokens = random.integers(0, tiny.VOCAB, 50)
    with torch.no_grad():
        output = tiny.reference(found).model(
            torch.from_numpy(tokens)[None], output_hidden_states=True
        )
    executor = TorchExecutor(found, limits(tiny.VOCAB))
    executor.request_aux_hidden_states((1, 0))
    with Driver(executor) as driver:
        driver.open(0, tokens)
        driver.step([Row(0, known=30)])
        features = driver.step([Row(0)]).outcome.features
        second, first = features.tensor().split(64, -1)
    for ours, theirs in ((first, 0), (second, 1)):
        assert ours.shape == (20, 64)
        assert (ours - output.hidden_states[theirs][0, 30:]).abs().max() < 1e-5


@pytest.mark.model
def test_the_default_model_equals_transformers(default_model, default_executor):
    """As near to the exact logits as transformers itself: how far float32 may be off depends on
    the machine's kernels, so their own error is the yardstick.
    """
    tokens = default_model.tokenizer.encode(TEXT)[:160].astype(np.int64)
    with torch.no_grad():
        reference = tiny.reference(default_model.checkpoint)
        theirs = reference(torch.from_numpy(tokens)[None]).logits[0]
        exact = reference.double()(torch.from_numpy(tokens)[None]).logits[0]
    logits = forward(default_executor, tokens, [100, 60])
    assert len(tokens) == 160
    assert (logits.argmax(-1) == theirs.argmax(-1)).all()
    assert (theirs - exact).abs().max() < 1e-3
    assert (logits - exact).abs().max() < 2 * (theirs - exact).abs().max()


TEXT = (
    "The river had been rising for three days when the old ferryman finally untied his boat. "
    "Nobody in the village expected him to cross, least of all his daughter, who had packed "
    "1,024 jars of honey into the hold and written a careful list of everything she owed. "
) * 4
