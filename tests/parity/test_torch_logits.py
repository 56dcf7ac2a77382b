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
    for family in ("llama", "mistral", "qwen2", "qwen3")
    for variant in VARIANTS
    if (family, variant) != ("qwen2", "wide heads")  # Its heads are H/A wide by definition.
]


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_every_family_equals_transformers(checkpoint, random, family, variant):
    found = checkpoint(family, **VARIANTS[variant])
    tokens = random.integers(0, tiny.VOCAB, 300)
    with torch.no_grad():
        expected = tiny.reference(found)(torch.from_numpy(tokens)[None]).logits[0]
    executor = TorchExecutor(found, limits(tiny.VOCAB))
    logits = forward(executor, tokens, [200, 100])
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
