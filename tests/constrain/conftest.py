"""The contract's tests run over every library that fulfils it."""

import pytest

from forerun import sandbox
from forerun.constrain import grammar_draft, jump_forward, tree_mask
from tests.constrain import tools


@pytest.fixture(params=tools.LIBRARIES)
def library(request):
    """The library that `tools.compiled` uses during this test."""
    if request.param == "xgrammar":
        pytest.importorskip("xgrammar")
    tools.chosen.library = request.param
    yield request.param
    tools.chosen.library = "llguidance"


@pytest.fixture(scope="session", autouse=True)
def patient():
    """Processes that work are not given up, matchers do not leave the engine's thread, and no less
    is drafted because a machine is slow or busy: the tests of these limits set them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "SILENCE", 1000.0)
        patch.setattr(tree_mask, "SLOW", 1000.0)
        patch.setattr(jump_forward, "PATIENCE", 1000.0)
        patch.setattr(grammar_draft, "PATIENCE", 1000.0)
        yield
