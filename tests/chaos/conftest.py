"""What faults and networks are tried on."""

import pytest


@pytest.fixture(scope="module", params=[1, 2], ids=["one", "two"])
def models(request):
    """How many models the server has."""
    return request.param
