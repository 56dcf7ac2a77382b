"""The contract's tests run over every library that fulfils it."""

import pytest

from tests.constrain import tools


@pytest.fixture(params=tools.LIBRARIES)
def library(request):
    """The library that `tools.compiled` uses during this test."""
    if request.param == "xgrammar":
        pytest.importorskip("xgrammar")
    tools.chosen.library = request.param
    yield request.param
    tools.chosen.library = "llguidance"
