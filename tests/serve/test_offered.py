"""Tools of /v1/responses that are left out or stand for others, however a client writes them."""

import json

import pytest

from forerun.text.json_text import MOST_LEVELS

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "text"}}


def ask(client, tools, **more):
    body = {"input": "Hi", "max_output_tokens": 40, "tools": tools, **more}
    sent = json.dumps(body)  # With lone surrogates as escapes.
    return client.post("/v1/responses", content=sent, headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("web_search", {"format": "plain"}),
        ("web_search", {"format": ["lark"]}),
        ("web_search", {"filters": "\ud800"}),
        ("image_generation", {"output_format": "png"}),
    ],
)
def test_tools_beside_functions_are_left_out_and_their_fields_not_looked_at(client, kind, more):
    """unsloth #5141: every request of Codex is refused, for not all of its tools are functions."""
    answer = ask(client, [FUNCTION, {"type": kind, **more}])
    assert answer.status_code == 200 and answer.headers["x-forerun-ignored"] == f"tools.{kind}"


@pytest.mark.parametrize(
    "end", ["_20\r\nset-cookie: a=b", "_20\ud800", "_20x", "\n", "_2025_08_26 "]
)
def test_no_type_of_a_tool_stands_in_a_header_as_it_came(client, end):
    """It ended the header and began another, or no header could hold it: a 500."""
    answer = ask(client, [FUNCTION, {"type": f"web_search{end}"}])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools[1].type"
    assert "set-cookie" not in answer.headers
    dated = ask(client, [FUNCTION, {"type": "web_search_2025_08_26"}])
    assert dated.headers["x-forerun-ignored"] == "tools.web_search_2025_08_26"


@pytest.mark.parametrize(
    ("tool", "kind"),
    [(PATCH, "custom_tool_call"), ({"type": "local_shell"}, "local_shell_call")],
    ids=["custom", "shell"],
)
def test_free_tools_in_a_namespace_are_called_as_what_they_are(client, tool, kind):
    space = {"type": "namespace", "name": "own", "tools": [tool]}
    answer = ask(client, [space], tool_choice="required", temperature=0)
    (item,) = answer.json()["output"]
    assert item["type"] == kind and item.get("namespace", "own") == "own"
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    shown = ask(client, [{**space, "tools": [{**PATCH, "format": lark}]}])
    assert shown.headers["x-forerun-ignored"] == "tools.format.definition"


def test_what_the_newest_clients_say_of_tools(client):
    fields = {"async": False, "defer_loading": True, "allowed_callers": ["direct"]}
    assert ask(client, [FUNCTION | fields, PATCH | fields]).status_code == 200
    for tool in (FUNCTION, PATCH):
        refused = ask(client, [{**tool, "async": True}])
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools[0].async"


def test_empty_results_are_stored_as_they_came(client):
    """An item that refers to one was refused: its text was missing."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    free = {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "", "id": "own"}
    done = {"type": "function_call_output", "call_id": "c", "output": "", "id": "done"}
    first = ask(client, [FUNCTION], input=[call, done, free]).json()
    items = client.get(f"/v1/responses/{first['id']}/input_items?order=asc").json()["data"]
    assert [items[1]["output"], items[2]["input"]] == ["", ""]
    refers = [{"type": "item_reference", "id": id} for id in ("done", "own")]
    answer = ask(client, [FUNCTION], input=[call, *refers])
    assert answer.status_code == 200 and "x-forerun-ignored" not in answer.headers


@pytest.mark.parametrize("levels", [MOST_LEVELS - 8, *range(944, 976, 8)])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", '{"max_tokens": 1, "messages": [], "tools": [{"type": DEEP}]}'),
        ("/v1/responses", '{"input": [{"type": DEEP}]}'),
        ("/v1/responses", '{"input": "Hi", "max_output_tokens": 1, "metadata": {"a": DEEP}}'),
    ],
)
def test_what_is_read_is_not_too_deep_to_be_shown(client, path, body, levels):
    """Between what the reader took and what could be written lay some twenty levels."""
    sent = body.replace("DEEP", "[" * levels + "]" * levels)
    answer = client.post(path, content=sent, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400)
    assert ("nested too deeply" in answer.text) == (levels > MOST_LEVELS)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
def test_fields_of_the_newest_clients(client, path, body):
    fields = {"prompt_cache_options": {"ttl": "1h"}, "moderation": None}
    if path == "/v1/responses":
        fields |= {"access_programs": {}, "image": {"moderation": "auto"}}
    answer = client.post(path, json={**body, **fields})
    assert (
        answer.status_code == 200 and "prompt_cache_options" in answer.headers["x-forerun-ignored"]
    )
    refused = client.post(path, json={**body, "moderation": {"model": "m"}})
    assert "not supported: there is no moderation" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_behind_a_call_that_was_cut(client, stream):
    """Its arguments were stored as they were, and every later request was refused: no JSON."""
    names = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    tool = FUNCTION | {"parameters": names}
    options = {"tool_choice": "required", "temperature": 0, "stream": stream}
    cut = 0
    for most in range(44, 64, 4):
        first = ask(client, [tool], max_output_tokens=most, **options)
        *_, last = [first.text] if not stream else first.text.strip().split("data: ")
        answer = json.loads(last)
        answer = answer["response"] if stream else answer
        cut += any(one.get("arguments", "{}")[-1:] not in ("}", "") for one in answer["output"])
        after = ask(client, [tool], input="Go on.", previous_response_id=answer["id"])
        assert after.status_code == 200, (most, after.text)
    assert cut


def test_two_namespaces_may_have_functions_of_one_name(client):
    """Codex groups tools by server: two that have a `search` were refused as one that is twice."""
    groups = [{"type": "namespace", "name": name, "tools": [FUNCTION]} for name in "ab"]
    tools, options = [*groups, FUNCTION], {"temperature": 0, "tool_choice": "required"}
    answer = ask(client, tools, **options, seed=1).json()
    (call,) = answer["output"]
    assert call["name"] == "f" and call.get("namespace") in ("a", "b", None)
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    done = {"type": "function_call_output", "call_id": "c", "output": "Done"}
    counts = []
    for more in ({}, {"namespace": "a"}, {"namespace": "b"}, {"namespace": "other"}):
        body = {"input": [item | more, done], "tools": tools}
        counted = client.post("/v1/responses/input_tokens", json=body)
        counts.append(counted.json()["input_tokens"])
        assert ask(client, tools, input=body["input"]).headers.get("x-forerun-ignored") is None
    plain, first, second, unknown = counts
    assert first == second == plain + len("a__") and unknown == plain
    again = ask(client, tools, input="Go on.", previous_response_id=answer["id"])
    assert again.status_code == 200
    twice = ask(client, [groups[0], groups[0]])
    assert twice.status_code == 400 and "appears twice" in twice.text


@pytest.mark.parametrize("tool", [FUNCTION, PATCH], ids=["function", "custom"])
def test_a_call_says_its_own_name_and_namespace(client, tool):
    one, two = ({"type": "namespace", "name": name, "tools": [tool]} for name in ("one", "two"))
    own, other = tool["name"], {**tool, "name": "other"}
    for tools, known in (
        ([one, two], {(own, "one"), (own, "two")}),
        ([one, other], {(own, "one"), ("other", None)}),
        ([two, {**one, "tools": [other]}], {(own, "two"), ("other", "one")}),
    ):
        (call,) = ask(client, tools, temperature=0, tool_choice="required").json()["output"]
        assert (call["name"], call.get("namespace")) in known


def test_no_more_tools_are_read_than_may_be_offered(client):
    """All namespaces were read before their tools were counted: 60,000 took two seconds."""
    named = [{"type": "function", "name": f"f{at}"} for at in range(600)]
    groups = [{"type": "namespace", "name": f"n{at}", "tools": named} for at in range(9)]
    answer = ask(client, groups)
    assert answer.status_code == 400 and "tools has 1200 entries" in answer.text


def _chat_tools(*names):
    return [{"type": "function", "function": {"name": name}} for name in names]


@pytest.mark.parametrize("stream", [False, True])
def test_of_allowed_tools_only_these_are_called(client, stream):
    """OpenAI's allowed_tools keep the list of tools the same, for its prompt cache."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "stream": stream}
    body |= {"tools": _chat_tools("f", "g", "h"), "max_tokens": 60}
    allowed = {"mode": "required", "tools": _chat_tools("g")}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = client.post("/v1/chat/completions", json=body | {"tool_choice": choice})
    assert answer.status_code == 200 and '"name":"g"' in answer.text.replace(": ", ":")
    named = {"mode": "required", "tools": [{"type": "function", "name": "g"}]}
    tools = [FUNCTION, FUNCTION | {"name": "g"}]
    answer = ask(client, tools, tool_choice={"type": "allowed_tools", **named}, stream=stream)
    assert answer.status_code == 200
    *_, last = [answer.text] if not stream else answer.text.strip().split("data: ")
    answer = json.loads(last)
    (item,) = (answer["response"] if stream else answer)["output"]
    assert (item["type"], item["name"]) == ("function_call", "g")


@pytest.mark.parametrize(
    ("allowed", "place"),
    [
        ({"mode": "required", "tools": _chat_tools("other")}, "tool_choice"),
        ({"mode": "none", "tools": _chat_tools("f")}, "tool_choice.allowed_tools.mode"),
        ({"mode": "auto", "tools": []}, "tool_choice.allowed_tools.tools"),
        ({"mode": "auto"}, "tool_choice.allowed_tools.tools"),
    ],
)
def test_allowed_tools_that_cannot_be(client, allowed, place):
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": _chat_tools("f")}
    body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == place


def test_a_schema_without_a_wrapper(client):
    """llama.cpp takes it so, and Together's clients send it."""
    schema = {"enum": ["x"]}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}

    def answer(**format):
        response_format = {"type": "json_schema", **format}
        return client.post("/v1/chat/completions", json=body | {"response_format": response_format})

    assert answer(schema=schema).json()["choices"][0]["message"]["content"] == '"x"'
    for wrong in ({}, {"schema": schema, "json_schema": {"schema": schema}}):
        found = answer(**wrong).json()["error"]
        assert found["param"] == "response_format.json_schema"


def test_one_constraint_under_the_names_of_two_versions(client):
    """guidance sends structured_outputs for today's vLLM, and guided_grammar for older ones."""
    lark = 'start: "x"'
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    body |= {"structured_outputs": {"grammar": lark}, "guided_decoding_backend": "guidance"}
    answer = client.post("/v1/chat/completions", json=body | {"guided_grammar": lark})
    assert answer.json()["choices"][0]["message"]["content"] == "x"
    answer = client.post("/v1/chat/completions", json=body | {"guided_grammar": 'start: "y"'})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "guided_grammar"


def test_search_results_are_text(client):
    """They were refused as pictures are."""
    found = {"type": "search_result", "source": "s", "title": "t", "citations": {"enabled": False}}
    found["content"] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    def tokens(content):
        call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": content}
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": [call]}]
        body = {"messages": [*turns, {"role": "user", "content": [result]}]}
        answer = client.post("/v1/messages/count_tokens", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["input_tokens"]

    assert tokens([found]) == tokens([{"type": "text", "text": "t\n\ns\n\na\n\nb"}])


def test_a_prompt_of_one_token_has_its_log_probability(client):
    """It is null, as of every first token: the whole list was null, which no evaluator reads."""
    body = {"prompt": "a", "echo": True, "max_tokens": 0, "logprobs": 1}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["a"] and choice["logprobs"]["token_logprobs"] == [None]
