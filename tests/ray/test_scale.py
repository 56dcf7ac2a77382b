"""Options of replicas by name."""

from types import SimpleNamespace

import pytest

from forerun.errors import ConfigError
from forerun.ray.scale import QueueAndCache, Scale, read


def test_words_are_those_of_the_command_line():
    words = {"model": "toy", "max_sequences": 8, "replicas": "3", "gpus": "0.5", "port": 9}
    config, settings, scale = read(words)
    assert (config.model, config.max_sequences, settings.port) == ("toy", 8, 9)
    assert scale == Scale(replicas=3, gpus=0.5)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as raised:
        read({"replicas": "two", "max-sequences": "many", "colour": "red"})
    assert set(str(raised.value).splitlines()) == {
        "max-sequences takes a whole number, not 'many'.",
        "replicas takes a number, not 'two'.",
        "colour is not an option of replicas, serve or the engine.",
    }


@pytest.mark.parametrize(
    "words",
    [{"replicas": 0}, {"replicas": 3, "most": 2}, {"target": 0}, {"cache": 1.5}, {"cache": 0}],
)
def test_numbers_that_cannot_be_are_refused(words):
    with pytest.raises(ConfigError):
        read(words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({}, "device is cuda, but gpus is 0: .*; set gpus=1"),
        ({"gpus": 1, "tp-size": 2}, "device is cuda, but gpus is 1: .*; set gpus=2"),
    ],
)
def test_gpus_that_are_not_reserved(words, says):
    """Half a GPU is one that replicas share."""
    with pytest.raises(ConfigError, match=says):
        read({"model": "smollm2-135m", "device": "cuda"} | words)
    assert read({"model": "smollm2-135m", "device": "cuda", "gpus": 0.5})[2].gpus == 0.5


@pytest.mark.parametrize(
    ("requests", "cache", "wanted"),
    [
        (48, {"a": 0.1, "b": 0.1}, 3),  # By requests: 16 each.
        (4, {"a": 0.9, "b": 0.7}, 2),  # By pages: .8 each.
        (4, {"a": 1.0, "b": 1.0}, 2.5),  # Long texts: few requests, and no page is left.
        (0, {}, 0),
        (32, None, 2),  # No replica has said anything yet.
    ],
)
def test_as_many_as_requests_or_pages_ask_for(requests, cache, wanted):
    said = None if cache is None else {"cache": cache}
    context = SimpleNamespace(total_num_requests=requests, aggregated_metrics=said)
    assert QueueAndCache(16, 0.8)(context) == (pytest.approx(wanted), {})
