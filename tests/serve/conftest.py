"""The toy's application, as it is by itself."""

import pytest

from tests.cli.toys import toy_loaded
from tests.worlds.toy_app import toy_client


@pytest.fixture(scope="module")
def loaded():
    with toy_loaded() as loaded:
        yield loaded


@pytest.fixture(scope="module")
def client():
    with toy_client() as client:
        yield client
