import math

import numpy as np
import pytest
import torch

from forerun.build.shapes import SHAPES, RandomCheckpoint
from forerun.errors import ModelError
from forerun.networks.arch import expected_tensors
from forerun.networks.config_json import architecture_from
from forerun.networks.rope import Divided, LinearScaling, Llama3, LongRope, Rope, Yarn
from tests.models import tiny

SCALINGS = {
    "plain": {},
    "linear": tiny.LINEAR,
    "llama3": tiny.LLAMA3,
    "llama 3.1": tiny.LLAMA3
    | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192, "high_freq_factor": 4},
    "yarn": tiny.YARN,
    "yarn, qwen": tiny.YARN | {"rope_theta": 1e6, "original_max_position_embeddings": 32768},
    "yarn, fractions": tiny.YARN | {"truncate": False, "beta_fast": 16, "beta_slow": 2},
    "yarn, given": tiny.YARN | {"attention_factor": 1.25},
    "yarn, deepseek": tiny.YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, one turn": tiny.YARN | {"beta_fast": 1, "beta_slow": 1, "truncate": False},
}


@pytest.mark.parametrize("rope", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("head_size", [16, 64, 96, 128])
def test_frequencies_equal_transformers(rope, head_size, tmp_path):
    config = tiny.config("llama", rope, head_dim=head_size, max_position_embeddings=1 << 17)
    rotary = tiny.model("llama", rope=rope, head_dim=head_size, max_position_embeddings=1 << 17)
    arch = architecture_from(config.to_dict(), tmp_path)
    expected = rotary.model.rotary_emb
    ours = arch.rope.frequencies(head_size)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected.inv_freq.numpy(), rtol=4e-7, atol=0)
    assert arch.rope.attention_factor == pytest.approx(expected.attention_scaling, rel=1e-12)


def test_longrope_equals_transformers_for_short_texts_and_for_long_ones(tmp_path):
    hf = tiny.model("phi3", rope=tiny.longrope(8))
    arch = architecture_from(hf.config.to_dict(), tmp_path)
    rotary = hf.model.rotary_emb
    for context, length in ((None, 64), (64, 64), (65, 65), (256, 200)):
        served = arch.for_context(context)
        rotary(torch.zeros(1), torch.arange(length)[None])
        frequencies = served.rope.frequencies(16)
        np.testing.assert_allclose(frequencies, rotary.inv_freq.numpy(), rtol=4e-7, atol=0)
        assert served.rope.attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-12)
        assert served.context == (64 if length == 64 else 256)
        assert (served.unstretched is None) == (length > 64)


def test_divisors_divide():
    plain = Rope(1e4).frequencies(8)
    divided = Rope(1e4, Divided((1.0, 2.0, 4.0, 8.0))).frequencies(8)
    np.testing.assert_allclose(divided, plain / [1, 2, 4, 8], rtol=1e-7)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(0.0),
        Rope(math.nan),
        Rope(math.inf),
        Rope(1e4, LinearScaling(0.0)),
        Rope(1e4, LinearScaling(1e300)),
        Rope(1e4, Llama3(8.0, 4.0, 4.0, 64)),
        Rope(1e4, Llama3(8.0, 0.0, 4.0, 64)),
        Rope(1.0, Yarn(4.0, 64, 1.0)),
        Rope(1e4, Yarn(4.0, 0, 1.0)),
        Rope(1e4, Yarn(4.0, 64, math.nan)),
        Rope(1e4, Divided((1.0,))),
        Rope(1e4, Divided((1.0, 1.0, 0.0, 1.0))),
        Rope(1e4, LongRope((1.0,), (1.0,) * 4, 64, 1.0)),
        Rope(1e4, LongRope((1.0,) * 4, (1.0, 1.0, -1.0, 1.0), 64, 1.0)),
        Rope(1e4, LongRope((1.0,) * 4, (1.0,) * 4, 64, math.nan)),
        Rope(1e4, LongRope((1.0, math.nan, 1.0, 1.0), (1.0,) * 4, 64, 1.0)),
        Rope(1e4, Divided((1.0, math.nan, 1.0, 1.0))),
    ],
)
def test_meaningless_numbers_are_refused(rope):
    with pytest.raises(ModelError):
        rope.check(8)


# --- the shapes are those of the models they are named after -------------------------------------


PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_parameters_are_the_published_number(name):
    assert SHAPES[name].parameters == PUBLISHED[name]


def test_random_tensors_are_whole_and_repeatable():
    arch = SHAPES["tiny"]
    first, second = RandomCheckpoint(arch), RandomCheckpoint(arch)
    assert first.names() == tuple(expected_tensors(arch))
    for name in first.names():
        tensor = first.tensor(name)
        assert tensor.dtype == np.float32
        assert tensor.shape == first.shape(name) == expected_tensors(arch)[name]
        assert np.array_equal(tensor, second.tensor(name))
    assert first.tensor("model.norm.weight").tolist() == [1.0] * arch.hidden
    assert first.tensor("lm_head.weight").std() == pytest.approx(0.02, rel=0.05)
    assert first.packed("lm_head.weight") is None
