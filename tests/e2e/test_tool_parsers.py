"""Every way in which models write tool calls, over HTTP."""

import pytest

from forerun.text.tools import FORMATS
from tests.e2e.processes import serving
from tests.e2e.test_structured import ASKED, CHAT, DENSE, NOW, WEATHER, checked, gathered


@pytest.fixture(scope="module", params=[*FORMATS])
def server(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    with serving(path, settings={"tool_parser": request.param}) as server:
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
