import argparse
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.options.config import EngineConfig, SamplingConfig, ServeSettings
from forerun.options.flags import command_line, configured, flags_of
from forerun.train.presets import TrainConfig

KINDS = [EngineConfig, ServeSettings, SamplingConfig]


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (EngineConfig, {"page_size": 0}, "page-size"),
        (EngineConfig, {"page_size": 257}, "between 1 and 256"),
        (EngineConfig, {"kv_tokens": 1}, "kv-tokens"),
        (EngineConfig, {"executor": "gpu"}, "auto, cpu, torch, jax, toy"),
        (EngineConfig, {"device": "xpu"}, "cuda"),
        (EngineConfig, {"device": "cuda", "executor": "cpu"}, "torch executor"),
        (EngineConfig, {"model": "toy", "executor": "torch"}, "toy"),
        (EngineConfig, {"model": "toy", "device": "cuda"}, "toy model runs on the CPU"),
        (EngineConfig, {"executor": "cpu", "dtype": "bfloat16"}, "dtype is bfloat16, but the cpu"),
        (EngineConfig, {"executor": "jax", "dtype": "file"}, "dtype is file, but the jax"),
        (EngineConfig, {"model": "smollm2-135m", "executor": "toy"}, "toy"),
        (EngineConfig, {"temperature": 1}, None),
        (ServeSettings, {"port": 70000}, "port"),
        (ServeSettings, {"request_seconds": float("inf")}, "request-seconds"),
        (ServeSettings, {"max_choices": 129}, "between 1 and 128"),
        (ServeSettings, {"api_keys": ("\udcff",)}, "API key"),
        (SamplingConfig, {"stop": ("a", "")}, "stop text is empty"),
        (ServeSettings, {"api_keys": ("good", " ")}, "API key"),
        (SamplingConfig, {"temperature": -1.0}, "temperature"),
        (SamplingConfig, {"max_tokens": 0}, "max-tokens"),
        (EngineConfig, {"mem_fraction_static": "0.9.1"}, "mem-fraction-static takes a number"),
        (EngineConfig, {"mem_fraction_static": "1.6"}, "mem-fraction-static is 1.6"),
        (EngineConfig, {"page_size": None, "tp_size": [1]}, r"tp-size is.*\npage-size is None"),
        (EngineConfig, {"threads": 1.5}, "threads is 1.5: expected `int"),
        (EngineConfig, {"dtype": b"file"}, "dtype is b'file'"),
        (SamplingConfig, {"ignore_eos": "perhaps"}, "ignore-eos is on or off"),
        (TrainConfig, {"epochs": "many"}, "epochs takes a number"),
    ],
)
def test_bad_values_are_refused_by_name(kind, values, named):
    with pytest.raises(TypeError if named is None else ConfigError, match=named):
        kind(**values)


@pytest.mark.parametrize("kind", [*KINDS, TrainConfig])
def test_a_field_holds_only_values_of_its_type(kind):
    """Given as a text, every field has the value that the command line reads; given something of
    no option's type, it is refused by name."""
    for item in fields(kind):
        with pytest.raises(ConfigError, match=item.name.replace("_", "-")):
            kind(**{item.name: object()})
        if isinstance(item.default, bool | int | float):
            assert getattr(kind(**{item.name: str(item.default)}), item.name) == item.default


def test_numbers_of_numpy_and_paths_are_taken(tmp_path):
    config = EngineConfig(
        model=tmp_path,
        mem_fraction_static=np.float32(0.5),
        kv_tokens=np.int64(64),
        overlap=np.bool_(True),
        threads="2",
        context="8K",
    )
    assert config == EngineConfig(
        model=str(tmp_path),
        mem_fraction_static=0.5,
        kv_tokens=64,
        overlap=True,
        threads=2,
        context=8192,
    )
    assert type(config.kv_tokens) is int
    assert ServeSettings(api_keys="key", served_name=["a", "b"]).served_name == ("a", "b")


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_valid_frozen_and_explained(kind):
    config = kind()
    with pytest.raises(FrozenInstanceError):
        setattr(config, fields(kind)[0].name, None)
    assert all(len(item.metadata["help"]) > 10 for item in fields(kind))


def round_trip(config):
    parser = argparse.ArgumentParser()
    flags_of(type(config), parser, "options")
    return configured(type(config), parser.parse_args(command_line(config)))


@given(
    st.builds(
        EngineConfig,
        model=st.sampled_from(["smollm2-135m", "some/model", "a b.gguf"]),
        threads=st.none() | st.integers(1, 64),
        kv_tokens=st.none() | st.integers(16, 10**6),
        page_size=st.integers(1, 256),
        speculative_algorithm=st.sampled_from(["NGRAM", "OFF"]),
        policy=st.sampled_from(["auto", "fixed", "adaptive"]),
    )
)
def test_flags_describe_a_configuration_exactly(config):
    assert round_trip(config) == config


def test_flags_of_other_kinds():
    for config in (
        ServeSettings(api_keys=("a", "b c"), port=0, drain_seconds=1.5),
        SamplingConfig(stop=("x", "\n"), ignore_eos=True, temperature=0.25),
    ):
        assert round_trip(config) == config
