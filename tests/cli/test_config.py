import argparse
from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.options.config import AskConfig, EngineConfig, ServeSettings
from forerun.options.flags import command_line, configured, flags_of

KINDS = [EngineConfig, ServeSettings, AskConfig]


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
        (EngineConfig, {"executor": "cpu", "dtype": "bfloat16"}, "dtype bfloat16"),
        (EngineConfig, {"executor": "jax", "dtype": "file"}, "dtype file"),
        (EngineConfig, {"model": "smollm2-135m", "executor": "toy"}, "toy"),
        (EngineConfig, {"temperature": 1}, None),
        (ServeSettings, {"port": 70000}, "port"),
        (ServeSettings, {"request_seconds": float("inf")}, "request-seconds"),
        (ServeSettings, {"max_choices": 129}, "between 1 and 128"),
        (ServeSettings, {"api_keys": ("\udcff",)}, "API key"),
        (AskConfig, {"stop": ("a", "")}, "stop text is empty"),
        (ServeSettings, {"api_keys": ("good", " ")}, "API key"),
        (AskConfig, {"temperature": -1.0}, "temperature"),
        (AskConfig, {"max_tokens": 0}, "max-tokens"),
    ],
)
def test_bad_values_are_refused_by_name(kind, values, named):
    with pytest.raises(TypeError if named is None else ConfigError, match=named):
        kind(**values)


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
        AskConfig(stop=("x", "\n"), ignore_eos=True, temperature=0.25),
    ):
        assert round_trip(config) == config


def test_help_names_every_default():
    parser = argparse.ArgumentParser()
    flags_of(EngineConfig, parser, "engine", max_sequences=3)
    text = " ".join(parser.format_help().split())
    assert "(default: 3)" in text
    assert "(default: smollm2-135m)" in text
    assert configured(EngineConfig, parser.parse_args([])).max_sequences == 3
