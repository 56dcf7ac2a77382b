"""Servers for clients that live in virtual environments of their own: `make test-clients`."""

import pytest

from tests.worlds.servers import serving


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The toy, whose answers are known."""
    with serving(tmp_path_factory.mktemp("clients")) as server:
        yield server
        assert "Traceback" not in server.logged()


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """The default model, for what needs a tokenizer of words."""
    with serving(tmp_path_factory.mktemp("real"), model="smollm2-135m") as server:
        yield server
        assert "Traceback" not in server.logged()


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A toy with a short context: a request for as many tokens as there are gets few."""
    config = {"context": 96, "kv_tokens": 4096}
    with serving(tmp_path_factory.mktemp("small"), config=config) as server:
        yield server
        assert server.idle()
        assert "Traceback" not in server.logged()
