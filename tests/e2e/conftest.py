"""One toy server, as it is by itself, for all tests here that leave it as they found it."""

import pytest

from tests.e2e.processes import serving


@pytest.fixture(scope="session")
def toy_server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("toy")) as server:
        yield server
        assert server.idle()
        assert "Traceback" not in server.logged()
