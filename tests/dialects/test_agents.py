"""What coding agents send beside a conversation, with their own client libraries."""

import json

import pytest

from forerun.serve.bodies.fields import read
from forerun.serve.dialects.anthropic.schema import MessagesBody
from forerun.serve.dialects.responses.free_tools import free_input, shell_action
from tests.dialects.requests import GREEDY, MESSAGES, PLACE, with_two
from tests.lazy import LazyModule

anthropic = LazyModule("anthropic")
openai = LazyModule("openai")


TOOL = {"name": "travel", "description": "Plan a journey.", "input_schema": PLACE}
FUNCTION = {"type": "function", "name": "travel", "parameters": PLACE, "strict": True}
BUDGET = {"type": "tokens", "total": 20_000}
EDITS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


@pytest.fixture(scope="module")
def claude(server):
    url = server.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def codex(server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_claude_codes_fields(claude):
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    turns = (("system", "Be brief."), ("assistant", "Well."), ("user", "Go on."))
    messages = [*MESSAGES, *({"role": role, "content": text} for role, text in turns)]
    sent = {"model": "claude-sonnet", "max_tokens": 8, "messages": messages,
            "system": [{"type": "text", "text": "Plan.", "cache_control": {"type": "ephemeral"}}],
            "tools": [search, {**TOOL, "defer_loading": True}], "metadata": {"user_id": "me"},
            "extra_body": {"context_management": EDITS, "speed": "fast",
                           "output_config": {"task_budget": BUDGET}}}  # fmt: skip
    answer = claude.messages.with_raw_response.create(**sent)
    assert answer.parse().usage.output_tokens == 8
    ignored = answer.headers["x-forerun-ignored"].split(", ")
    fields = {"context_management", "metadata", "speed", "output_config.task_budget"}
    assert fields <= set(ignored)
    with claude.messages.stream(**sent) as stream:
        assert stream.get_final_message().usage.output_tokens == 8
    counted = {name: sent[name] for name in ("model", "messages", "system", "tools")}
    assert claude.messages.count_tokens(**counted).input_tokens > 0


def test_functions_in_a_namespace(codex):
    space = {"type": "namespace", "name": "journeys", "description": "Of all kinds.",
             "tools": [FUNCTION]}  # fmt: skip
    sent = {"model": "toy", "tools": [space], "tool_choice": "required", "temperature": 0}
    answer = codex.responses.create(input="Where?", **sent)
    (call,) = answer.output
    assert (call.name, call.namespace) == ("travel", "journeys")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Done"}
    turn = [{"role": "user", "content": "Where?"}, call.to_dict(), output]
    assert codex.responses.create(input=turn, **sent).output


def test_codexs_fields_and_a_loop_of_answers(codex):
    sent = {"model": "gpt-5-codex", "instructions": "You plan.", "temperature": 0,
            "tools": [FUNCTION, {"type": "web_search"}], "tool_choice": "required",
            "parallel_tool_calls": False, "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "medium", "summary": "auto"}, "prompt_cache_key": "thread",
            "extra_body": {"client_metadata": {"x-id": "a"}, "seed": 0}}  # fmt: skip
    answer = codex.responses.with_raw_response.create(input="Where?", **sent)
    assert "tools.web_search" in answer.headers["x-forerun-ignored"]
    parsed = answer.parse()
    for turn in range(3):
        (call,) = [item for item in parsed.output if item.type == "function_call"]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": f"Turn {turn}"}
        before, parsed = (
            parsed,
            codex.responses.create(input=[output], previous_response_id=parsed.id, **sent),
        )
        assert parsed.previous_response_id == before.id
        assert parsed.usage.input_tokens > before.usage.input_tokens
        assert json.loads(call.arguments).keys() == {"city", "days"}
    counted = codex.responses.input_tokens.count(input="Where?", model="toy")
    assert counted.input_tokens > 0
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]\.type"):
        codex.responses.create(input="Where?", model="toy", tools=[{"type": "web_search"}])


@with_two()
@pytest.mark.parametrize("most", (1, 3, 12, 30))
def test_a_forced_call_that_is_cut_says_so(server, claude, most):
    request = {"model": "toy", "max_tokens": most, "messages": MESSAGES, "tools": [TOOL],
             "tool_choice": {"type": "any"}, "extra_body": {"temperature": 0}}  # fmt: skip
    whole = claude.messages.create(**request)
    assert whole.stop_reason == "max_tokens" and whole.content == []
    with claude.messages.stream(**request) as stream:
        assert "<tool" not in "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason == "max_tokens"
    tool = {"type": "function", "function": {"name": "travel", "parameters": PLACE}}
    body = {"messages": MESSAGES, "max_tokens": most, "tools": [tool], "tool_choice": "required"}
    choice = server.post("/v1/chat/completions", {**body, **GREEDY}).json()["choices"][0]
    assert choice["finish_reason"] == "length" and not choice["message"]["content"]


PATCH = {"type": "custom", "name": "patch", "description": "Edits a file."}
HELD = {"type": "grammar", "syntax": "regex", "definition": "[a-c]{3}"}
SHOWN = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}


@pytest.mark.parametrize("format", [{"type": "text"}, HELD, SHOWN], ids=str)
def test_a_custom_tool_takes_a_text(codex, format):
    tool = {**PATCH, "format": format}
    sent = {"model": "toy", "tools": [tool], "tool_choice": "required", "temperature": 1.2}
    sent |= {"parallel_tool_calls": False, "extra_body": {"seed": 4}, "max_output_tokens": 200}
    raw = codex.responses.with_raw_response.create(input="Edit.", **sent)
    named = raw.headers.get("x-forerun-ignored", "")
    assert ("tools.format.definition" in named) == (format is SHOWN), "no grammar for nothing"
    answer = raw.parse()
    (call,) = answer.output
    assert (call.type, call.name) == ("custom_tool_call", "patch")
    if format is HELD:
        assert len(call.input) == 3 and set(call.input) <= set("abc")
    off = {**sent, "extra_body": {"seed": 4, "speculative": {"enabled": False}}}
    (plain,) = codex.responses.create(input="Edit.", **off).output
    assert plain.input == call.input
    with codex.responses.stream(input="Edit.", **sent) as stream:
        events = list(stream)
    kind = "response.custom_tool_call_input"
    pieces = [one.delta for one in events if one.type == f"{kind}.delta"]
    (done,) = [one for one in events if one.type == f"{kind}.done"]
    assert "".join(pieces) == done.input == call.input
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done"}
    again = codex.responses.create(input=[output], previous_response_id=answer.id, **sent)
    turn = [{"role": "user", "content": "Edit."}, call.to_dict(), output]
    assert codex.responses.create(input=turn, **sent).output[0].input == again.output[0].input


def test_a_shell_of_the_clients_is_a_call_with_a_command(codex):
    sent = {"model": "toy", "tools": [{"type": "local_shell"}], "tool_choice": "required"}
    sent |= {"temperature": 0, "parallel_tool_calls": False, "max_output_tokens": 200}
    answer = codex.responses.create(input="List.", **sent)
    (call,) = answer.output
    assert call.type == "local_shell_call" and call.action.type == "exec"
    assert answer.status == "incomplete" or call.action.command
    output = {"type": "local_shell_call_output", "id": call.id, "output": "a.txt"}
    turn = [{"role": "user", "content": "List."}, call.to_dict(), output]
    assert codex.responses.create(input=turn, **sent).output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "a.txt"}
    assert codex.responses.create(input=[output], previous_response_id=answer.id, **sent).output
    chosen = codex.responses.create(
        input="List.", **sent | {"tool_choice": {"type": "local_shell"}}
    )
    assert [one.type for one in chosen.output] == ["local_shell_call"]


@pytest.mark.parametrize(
    ("tool", "place"),
    [
        ({**PATCH, "format": {"type": "grammar", "syntax": "bnf", "definition": "x"}}, "syntax"),
        ({**PATCH, "format": {**HELD, "definition": "[a"}}, "definition"),
        ({**PATCH, "name": ""}, "name"),
        ({"type": "local_shell", "name": "x"}, "name"),
    ],
)
def test_what_is_no_free_tool_is_refused_with_its_place(codex, tool, place):
    with pytest.raises(openai.BadRequestError, match=place):
        codex.responses.create(input="Hi", model="toy", tools=[tool])


def test_what_a_call_said_before_it_was_cut():
    assert free_input('{"input": "a\\nb"}') == "a\nb"
    assert free_input('{"input": "a\\nb') == "a\nb"
    assert free_input('{"input": "a\\u00e') == "a" and free_input('{"inp') == ""
    assert shell_action('{"command": ["ls"') == {"type": "exec", "command": [], "env": {}}


def test_a_thread_is_refused_so_that_clients_go_on_without_one(server):
    sent = {"model": "toy", "max_tokens": 4, "messages": MESSAGES, "thread": {"type": "create"}}
    for path, body in (
        ("/v1/messages", sent),
        ("/v1/messages/count_tokens", {**sent, "max_tokens": None}),
    ):
        answer = server.post(path, body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error"
        assert error["details"]["error_code"] == "thread_unsupported_request"
        assert error["details"]["unsupported"] == ["thread"]
    other = server.post("/v1/messages", {**sent, "thread": None, "container": "c"})
    assert "details" not in other.json()["error"]


@with_two()
def test_documents_of_plain_text_are_text(server):
    source = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    document = {"type": "document", "source": source, "title": "Weather", "context": "Of today."}
    question = {"type": "text", "text": "Which city?"}
    written = {"type": "text", "text": "Weather\n\nOf today.\n\nIt rains."}
    result = {"type": "tool_result", "tool_use_id": "a"}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    for wrap in (
        lambda block: [{"role": "user", "content": [block, question]}],
        lambda block: [
            *MESSAGES,
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{**result, "content": [block]}]},
        ],
    ):
        answers = [
            server.post(
                "/v1/messages", {"max_tokens": 8, "temperature": 0, "messages": wrap(block)}
            )
            for block in ({**document, "citations": {"enabled": False}}, written)
        ]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        assert answers[0].json()["content"] == answers[1].json()["content"]
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "AA=="}
    for wrong in ({"source": pdf}, {"source": source, "citations": {"enabled": True}}):
        block = {"type": "document", **wrong}
        sent = {"max_tokens": 8, "messages": [{"role": "user", "content": [block]}]}
        assert server.post("/v1/messages", sent).status_code == 400


ALL = set(
    "command restart path view_range file_text old_str new_str insert_line insert_text".split()  # noqa: SIM905
)


@with_two(seldom=True)
@pytest.mark.parametrize(
    ("kind", "name", "wanted"),
    [
        ("bash_20250124", "bash", {"command", "restart"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command", "path"}),
    ],
)
def test_tools_that_clients_run_are_offered_as_functions(server, kind, name, wanted):
    tool = {"type": kind, "name": name, "cache_control": {"type": "ephemeral"}}
    sent = {"max_tokens": 800, "messages": MESSAGES, "tools": [tool]}
    sent["tool_choice"] = {"type": "any"}
    (offered,) = read(MessagesBody, sent).tools
    assert offered.signature.name == name
    assert offered.plain["function"]["parameters"]["properties"].keys() >= wanted
    answer = server.post("/v1/messages", {**sent, "temperature": 1.0, "seed": 3})
    assert answer.status_code == 200, answer.text
    calls = [one for one in answer.json()["content"] if one["type"] == "tool_use"]
    assert all(call["name"] == name and call["input"].keys() <= ALL for call in calls)
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    assert server.post("/v1/messages", {**sent, "tools": [hosted]}).status_code == 400
    both = {**sent, "tools": [hosted, tool], "temperature": 1.0, "seed": 3}
    beside = server.post("/v1/messages", both)
    assert beside.status_code == 200, beside.text
    assert "tools.web_search_20250305" in beside.headers["x-forerun-ignored"].split(", ")
    counted = {name: both[name] for name in ("messages", "tools")}
    alone = {**counted, "tools": [tool]}
    counts = [server.post("/v1/messages/count_tokens", one) for one in (counted, alone)]
    assert counts[0].json() == counts[1].json()
