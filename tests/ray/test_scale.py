"""Options of replicas by name."""

import pytest

from forerun.errors import ConfigError
from forerun.ray.scale import Scale, read


def test_words_are_those_of_the_command_line():
    words = {"model": "toy", "max_sequences": 8, "replicas": "3", "gpus": "0.5", "port": 9}
    config, settings, scale = read(words)
    assert (config.model, config.max_sequences, settings.port) == ("toy", 8, 9)
    assert scale == Scale(replicas=3, gpus=0.5)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as told:
        read({"replicas": "two", "max-sequences": "many", "colour": "red"})
    assert set(str(told.value).splitlines()) == {
        "max-sequences takes a whole number, not 'many'.",
        "replicas takes a number, not 'two'.",
        "colour is no option of replicas, serve or the engine.",
    }


@pytest.mark.parametrize("words", [{"replicas": 0}, {"replicas": 3, "most": 2}, {"target": 0}])
def test_numbers_that_cannot_be_are_refused(words):
    with pytest.raises(ConfigError):
        read(words)
