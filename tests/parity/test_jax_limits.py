"""What the jax executor cannot run is refused by name, in one sentence."""

import pytest

from forerun.errors import ModelError
from forerun.executors.jax import JaxExecutor
from tests.models import tiny
from tests.parity.driver import limits


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("gpt_oss", "attention sinks"),
        ("olmo2", "norms over all heads at once"),
        ("granite", "scaled residuals"),
    ],
)
def test_what_is_beyond_it_is_named(checkpoint, family, named):
    with pytest.raises(ModelError, match=f"jax executor cannot run this {family} .*{named}.*torch"):
        JaxExecutor(checkpoint(family), limits(tiny.VOCAB))
