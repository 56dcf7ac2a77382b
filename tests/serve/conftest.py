"""The toy's application, as it is by itself."""

import pytest

from tests.worlds.toy_app import toy_client


@pytest.fixture(scope="module")
def client():
    with toy_client() as client:
        yield client
