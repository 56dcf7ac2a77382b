"""Every way in which models write tool calls, asked of the application itself."""

import pytest
from starlette.testclient import TestClient

from forerun.options.config import ServeSettings
from forerun.serve.app import create_app
from forerun.text.tools import FORMATS
from tests.cli.toys import toy_loaded
from tests.e2e.test_structured import ASKED, CHAT, DENSE, NOW, WEATHER, checked, gathered


class Asked(TestClient):
    """What test_structured asks a server, asked of an application."""

    def post(self, path, body):
        return super().post(path, json=body)


@pytest.fixture(scope="module", params=[*FORMATS])
def server(request):
    settings = ServeSettings(tool_parser=request.param)
    with toy_loaded() as loaded, Asked(create_app(loaded, settings)) as server:
        yield server


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}], ids=str)
def test_one_call_whole_and_streamed(server, sampling):
    body = {"tools": [WEATHER, NOW], "tool_choice": "required", "max_tokens": 250, **sampling}
    body |= {"logit_bias": {**DENSE, "34": 5}, "parallel_tool_calls": False}
    (whole,) = server.post(CHAT, {"messages": ASKED, **body}).json()["choices"]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] is None
    (called,) = map(checked, whole["message"]["tool_calls"])
    for speculative in ({}, {"enabled": False}):
        content, calls, finish = gathered(server, {**body, "speculative": speculative})
        assert (content, [*map(checked, calls)], finish) == ("", [called], "tool_calls")
