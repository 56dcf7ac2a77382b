"""The built-in model, as fetched: what the executors will be given."""

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from forerun.checkpoints.gguf.header import read_header
from forerun.hub.catalog import open_model
from forerun.networks.arch import Architecture, expected_tensors, plain_layers
from forerun.networks.rope import Rope

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def model():
    return open_model("smollm2-135m")


def test_architecture(model):
    assert model.architecture == Architecture(
        family="llama",
        hidden=576,
        heads=9,
        kv_heads=3,
        head_size=64,
        vocab=49152,
        context=8192,
        norm_eps=1e-5,
        layer_specs=plain_layers(30, 64, 1536, Rope(100000.0)),
        tied_head=True,
    )
    assert model.architecture.parameters == 134_515_008
    assert model.name == "smollm2-135m"


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_tensors_are_whole_finite_and_of_a_trained_size(model, step):
    """Seven is no divisor of the tensors of a layer: of every kind some are read."""
    checkpoint = model.checkpoint
    assert set(checkpoint.names()) == set(expected_tensors(model.architecture))
    for name in list(checkpoint.names())[::step]:
        values = checkpoint.tensor(name)
        assert values.dtype == np.float32
        assert 0.01 < np.sqrt(np.square(values).mean()) < 10, name


def test_embedding_equals_the_packages_dequantisation(model):
    raw = read_header(model.path).rows("token_embd.weight")
    ours = model.checkpoint.tensor("model.embed_tokens.weight")
    rows = [0, 1, 2, 31, 2047, 2048, 49151]
    expected = dequantize(raw[rows], gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(ours[rows], expected)
    assert model.checkpoint.packed("model.embed_tokens.weight").kind == "Q8_0"
    assert model.checkpoint.packed("model.layers.7.mlp.up_proj.weight").kind == "Q4_1"


def test_query_rows_are_the_files_rows_in_half_split_order(model):
    """Row (half, i) of a head lies at (i, half) in the file."""
    file = read_header(model.path)
    for ours, stored, heads in (("q_proj", "attn_q", 9), ("k_proj", "attn_k", 3)):
        packed = model.checkpoint.packed(f"model.layers.3.self_attn.{ours}.weight")
        raw = file.rows(f"blk.3.{stored}.weight")
        for head in range(heads):
            for half in range(2):
                for i in (0, 1, 31):
                    row, source = 64 * head + 32 * half + i, 64 * head + 2 * i + half
                    np.testing.assert_array_equal(packed.rows[row], raw[source])


def test_tokenizer_and_template_fit(model):
    assert model.tokenizer.vocab_size <= model.architecture.vocab
    assert 2 in model.tokenizer.eos_ids
    assert "<|im_start|>" in model.chat_template
