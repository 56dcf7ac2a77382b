"""The toy's application, as it is by itself."""

import pytest
from starlette.testclient import TestClient

from forerun.options.config import ServeSettings
from forerun.serve.app import create_app
from tests.cli.toys import toy_loaded


@pytest.fixture(scope="module")
def client():
    with toy_loaded() as loaded, TestClient(create_app(loaded, ServeSettings())) as client:
        yield client
