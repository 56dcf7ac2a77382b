"""One toy server, as it is by itself, for all tests here that leave it as they found it."""

import pytest

from tests.worlds.servers import sound


@pytest.fixture(scope="session")
def toy_server(request, tmp_path_factory):
    """A server of one model, or of two (see tests.dialects.requests.with_two)."""
    models = getattr(request, "param", None)
    with sound(tmp_path_factory.mktemp("toy"), models=models) as server:
        yield server
