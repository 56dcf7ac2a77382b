"""The shapes are those of the models they are named after."""

import numpy as np
import pytest

from forerun.build.shapes import SHAPES, RandomCheckpoint, shape_named
from forerun.errors import ConfigError
from forerun.networks.arch import expected_tensors

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


def test_an_unknown_shape_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"the shape 'gpt-9' is unknown.*qwen3-32b"):
        shape_named("gpt-9")


def test_random_tensors_are_whole_and_repeatable():
    arch = shape_named("tiny")
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
