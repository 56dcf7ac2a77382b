"""A stop string that comes inside a call of a tool: the answer did not end with that call."""

import json

import pytest

from forerun.engine.request import Finish
from forerun.serve.dialects.ollama.answers import Calls
from forerun.serve.dialects.responses.free_tools import free_input, shell_action
from forerun.text.tool_bodies import CallPiece
from tests.dialects.asked import ASKED, PLACE, SAMPLED, chat, with_two

TOOL = {"type": "function", "function": {"name": "travel", "parameters": PLACE}}
FORCED = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 300, **SAMPLED}
INSIDE, WHOLE = '"city', "}"  # The arguments end with the first brace that closes.


def events(answer):
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@with_two()
@pytest.mark.parametrize("kept", [False, True])
def test_in_openais_words(server, kept):
    asked = {**FORCED, "stop": [INSIDE], "include_stop_str_in_output": kept}
    whole, _ = chat(server, **asked)
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", INSIDE)
    answer = server.post("/v1/chat/completions", {**asked, "messages": ASKED, "stream": True})
    assert events(answer)[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_call_that_is_whole_counts(server):
    whole, _ = chat(server, **FORCED, stop=[WHOLE], include_stop_str_in_output=True)
    assert (whole["finish_reason"], whole["stop_reason"]) == ("tool_calls", WHOLE)
    json.loads(whole["message"]["tool_calls"][0]["function"]["arguments"])


@with_two()
def test_in_anthropics_words(server):
    tool = {"name": "travel", "input_schema": PLACE}
    asked = {"messages": ASKED, "max_tokens": 300, "tools": [tool], "tool_choice": {"type": "any"}}
    asked |= {**SAMPLED, "stop_sequences": [INSIDE]}
    whole = server.post("/v1/messages", asked).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", INSIDE)
    assert whole["content"] == []
    ended = events(server.post("/v1/messages", {**asked, "stream": True}))[-2]
    assert ended["delta"]["stop_reason"] == "stop_sequence"


@pytest.mark.parametrize("stream", [False, True])
def test_in_ollamas_words(calling, stream):
    """With this seed the toy begins with the brace of a call; nobody can demand one here."""
    options = {"temperature": 2.0, "top_k": 60, "seed": 21, "num_predict": 300}
    for stop, count in ((INSIDE, 0), ("no such text", 1)):
        body = {"messages": ASKED, "tools": [TOOL], "options": {**options, "stop": [stop]}}
        lines = calling.post("/api/chat", {**body, "stream": stream}).text.splitlines()
        answers = [json.loads(line) for line in lines]
        calls = [call for one in answers for call in one["message"].get("tool_calls", ())]
        assert (len(calls), answers[-1]["done_reason"]) == (count, "stop")


def test_arguments_nested_too_deeply_are_as_if_cut():
    """Python's reader gives up; a model that repeats itself writes such."""
    deep = "[" * 5000
    (call,) = Calls().push([CallPiece(0, "f", deep)], Finish.STOP, cut=False)
    assert call["function"]["arguments"] == {}
    assert free_input(deep) == "" and shell_action(deep)["command"] == []
    assert shell_action("5")["command"] == []
