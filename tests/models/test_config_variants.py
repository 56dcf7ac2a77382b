"""Readings of a draft's configuration: as text and back, and all that are plausible."""

from dataclasses import replace

import pytest

from forerun.errors import ConfigError
from forerun.models.config_variants import plausible, read_as, reading_of, turned
from forerun.models.draft_config import head_for
from tests.train.test_export import TARGET as ARCH

HEAD = replace(head_for(ARCH, 10), normed_feedback=True)


def test_a_reading_is_text_and_back():
    assert reading_of(HEAD) == "features=2/4/5,residual=raw,feedback=normed,theta=5000"
    other = replace(
        HEAD,
        features=(1, 3, 4),
        normed_residual=True,
        normed_feedback=False,
        rope=replace(HEAD.rope, theta=10_000.0),
    )
    assert read_as(HEAD, reading_of(other)) == other
    assert read_as(HEAD, "residual=normed") == replace(HEAD, normed_residual=True)


def test_every_plausible_reading_once_and_the_configured_first():
    heads = plausible(HEAD, ARCH)
    assert heads[0] == HEAD
    assert len({reading_of(head) for head in heads}) == len(heads) == 3 * 2 * 2
    assert {head.features for head in heads} == {(2, 4, 5), (1, 3, 4), (3, 5, 6)}


def test_other_rotary_bases():
    (eagles,) = turned(HEAD, ARCH)
    assert eagles == read_as(HEAD, "theta=10000") and eagles.rope.scaling == HEAD.rope.scaling
    odd = read_as(HEAD, "theta=700")
    assert [head.rope.theta for head in turned(odd, ARCH)] == [5000.0, 10_000.0]


def test_readings_stay_inside_the_target():
    last = replace(HEAD, features=(2, 4, ARCH.layers))
    assert {head.features for head in plausible(last, ARCH)} == {(2, 4, 8), (1, 3, 7)}


def test_an_eagle1_head_has_little_to_read():
    head = replace(HEAD, algorithm="eagle1", features=(ARCH.layers,), normed_feedback=False)
    assert [reading_of(h) for h in plausible(head, ARCH)] == ["theta=5000"]
    with pytest.raises(ConfigError, match="names residual"):
        read_as(head, "residual=raw")


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("residual=hot", "'residual=hot' is not of the form"),
        ("", "'' is not of the form"),
        ("features=1/2", "must be 3 layer numbers"),
        ("features=1/2/x", "must be 3 layer numbers"),
        ("theta=nan", "must be a number of at least 1"),
        ("theta=base", "must be a number of at least 1"),
    ],
)
def test_what_is_no_reading_is_refused(variant, message):
    with pytest.raises(ConfigError, match=message):
        read_as(HEAD, variant)
