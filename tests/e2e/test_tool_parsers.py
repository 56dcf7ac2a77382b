"""Every way in which models write tool calls, sent to the application itself."""

import pytest
from starlette.testclient import TestClient

from forerun.options.config import ServeSettings
from forerun.serve.app import create_app
from forerun.text.tools import FORMATS
from tests.cli.toys import toy_loaded
from tests.e2e.test_structured import one_call


class AppClient(TestClient):
    """A client of the application with the methods that test_structured has of a server."""

    def post(self, path, body):
        return super().post(path, json=body)


# In Harmony the toy thinks for ever (tests/serve/test_harmony.py), and a plain text between tags of
# Qwen3-Coder it never ends (tests/text/test_tools.py).
ENDLESS = ("harmony", "qwen3-coder")


@pytest.fixture(scope="module", params=[name for name in FORMATS if name not in ENDLESS])
def server(request):
    settings = ServeSettings(tool_parser=request.param)
    with toy_loaded() as loaded, AppClient(create_app(loaded, settings)) as server:
        yield server


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, pytest.param({"temperature": 1.0, "seed": 3}, marks=pytest.mark.slow)],
    ids=str,
)
def test_one_call_whole_and_streamed(server, sampling):
    assert one_call(server, "required", sampling) in ("weather", "now")
