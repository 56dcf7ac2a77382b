"""Logits of whole forwards: against the reference's same arithmetic, and against fp32."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from forerun.build import shapes
from forerun.build.shapes import RandomCheckpoint
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.executors.cpu import CpuExecutor
from tests.cpu.reference import forward
from tests.cpu.test_products import K_QUANTS, matrix_of
from tests.models import tiny
from tests.parity.driver import limits, logits_in_chunks
from tests.shape.tree import ROOT
from tests.worlds.checkpoints import expected_logits

SAME, CLOSE = 0.012, 0.07
"""Models this small are noisy: one activation that rounds the other way is felt everywhere."""

KINDS = ("Q8_0", "Q4_0", "Q4_1", "F16", "BF16", "F32", "Q5_0", "Q5_1", None)


def logits_of(executor, tokens, chunks=(None,)):
    """float32[T,V] of one sequence."""
    return logits_in_chunks(executor, tokens, chunks).numpy()


def fp32(checkpoint, tokens):
    return expected_logits(checkpoint, tokens).numpy()


def farthest(logits, checkpoint, tokens):
    """The largest difference to the reference's logits in float32 or, if it is above 1e-4, to those
    in float64: the reference's own sums are off by up to 8e-5, by more on one processor than on
    another.
    """
    off = np.abs(logits - fp32(checkpoint, tokens)).max()
    if off < 1e-4:
        return off
    model = tiny.reference(checkpoint).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # The others' products take no float64.
    with torch.no_grad():
        exact = model(torch.tensor(tokens).long()[None]).logits[0].numpy()
    return np.abs(logits - exact).max()


def distance(logits, expected):
    """Root mean square difference over the spread of the expected logits."""
    return float(np.sqrt(np.mean((logits - expected) ** 2)) / expected.std())


SHAPES = {
    "tied": {"tie_word_embeddings": True},
    "one head for all": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8},
    "a head each": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 24},
    "large heads": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
    "three share 64": {
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "odd widths": {"hidden_size": 72, "intermediate_size": 100, "vocab_size": 331},
    "all biases": {"attention_bias": True, "mlp_bias": True},
}
CUT = {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8}
"""24 keys: 16 channels and half as many."""
CASES = [
    *(("llama", kind, {}) for kind in KINDS),
    *((family, kind, {}) for family in tiny.LLAMAS[1:] for kind in ("Q4_1", None)),
    *(("llama", "Q8_0", {"rope": rope}) for rope in (tiny.LLAMA3, tiny.YARN, tiny.LINEAR)),
    *(("llama", None, shape) for shape in SHAPES.values()),
    *(("qwen2", kind, CUT) for kind in ("Q8_0", "F32")),
]


@pytest.mark.parametrize(("family", "kind", "changes"), CASES)
def test_families_formats_and_shapes(executor, checkpoint, random, family, kind, changes):
    source = checkpoint(family, kind, **changes)
    tokens = random.integers(0, tiny.VOCAB, 120 if "rope" in changes else 60)
    logits = logits_of(executor(source), tokens)
    assert distance(logits, forward(source, tokens)) < SAME
    assert distance(logits, fp32(source, tokens)) < CLOSE


def test_scores_that_are_hundreds_apart(executor, random, tmp_path):
    """Beyond what e^x is limited to: the largest of all positions is taken off, wherever it is."""
    hf = tiny.model("qwen3")
    with torch.no_grad():
        for layer in hf.model.layers:
            layer.self_attn.q_norm.weight.mul_(40)
    source = FolderCheckpoint(tiny.save_folder(hf, tmp_path / "sharp"))
    tokens = random.integers(0, tiny.VOCAB, 40)
    logits, expected = logits_of(executor(source), tokens), forward(source, tokens)
    assert distance(logits, expected) < 1e-3


@pytest.mark.parametrize("kind", [*K_QUANTS, "MXFP4"])
def test_embeddings_in_few_bits(executor, random, tmp_path, kind):
    """As files of today have them; the output head is another matrix."""
    hf = tiny.model("llama", hidden_size=256, num_hidden_layers=1, intermediate_size=64)
    raw = matrix_of(random, kind, tiny.VOCAB, 256)
    stored = {"model.embed_tokens.weight": (raw, GGMLQuantizationType[kind])}
    source = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf", "Q8_0", stored=stored))
    tokens = random.integers(0, tiny.VOCAB, 30)
    assert distance(logits_of(executor(source), tokens), forward(source, tokens)) < SAME


@pytest.mark.parametrize("broken", ["model.norm", "layers.1.self_attn.k_proj"])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("dtype", ["q8_0", "file"])
def test_weights_that_are_not_numbers_show(broken, cap, dtype):
    """Neither limits nor caps nor halves make numbers of them."""
    arch = shapes.SHAPES["tiny"]
    specs = [replace(s, attention=replace(s.attention, softcap=cap)) for s in arch.layer_specs]
    arch = replace(arch, final_softcap=cap, layer_specs=tuple(specs))
    for where, number in ((broken, False), ("none", True)):
        made = CpuExecutor(Broken(arch, where), limits(arch.vocab), dtype=dtype)
        assert np.all(np.isfinite(logits_of(made, np.arange(9))) == number)
        made.shutdown()


class Broken(RandomCheckpoint):
    def __init__(self, arch, where):
        super().__init__(arch)
        self.where = where

    def tensor(self, name):
        weight = super().tensor(name)
        return weight * np.nan if self.where in name else weight


@pytest.mark.parametrize("family", ["granite", "gemma2"])
def test_logits_of_a_large_vocabulary_are_scaled_and_softened(executor, checkpoint, random, family):
    """In pieces of 4,096 numbers (csrc/logits.cpp)."""
    source = checkpoint(family, None, vocab_size=9000, num_hidden_layers=1)
    tokens = random.integers(0, tiny.VOCAB, 5)
    logits = logits_of(executor(source, 2), tokens)
    assert np.abs(logits - fp32(source, tokens)).max() < 1e-4


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_agrees_with_fp32(executor, default_model):
    """4,175 tokens of other text gave a perplexity 0.22 % (+- 0.14 %) above that of fp32."""
    text = (ROOT / "LICENSE").read_text()
    tokens = np.array(default_model.tokenizer.encode(text), np.int32)[:200]
    logits = logits_of(executor(default_model.checkpoint, 2, max_nodes=200), tokens)
    expected = fp32(default_model.checkpoint, tokens)
    assert distance(logits, expected) < 0.05
    assert np.mean(logits.argmax(-1) == expected.argmax(-1)) > 0.95
    assert perplexity(logits, tokens) == pytest.approx(perplexity(expected, tokens), rel=0.01)


def perplexity(logits, tokens):
    logits = logits[:-1].astype(np.float64)
    log_sum = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return float(np.exp(np.mean(log_sum - logits[np.arange(len(logits)), tokens[1:]])))
