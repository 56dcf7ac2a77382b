"""The official anthropic client against a real server process."""

import json

import pytest

from tests.dialects.requests import (
    GREEDY,
    MESSAGES,
    PLACE,
    SAMPLED,
    chat,
    is_place,
    text_of,
    with_two,
)
from tests.dialects.thoughts import thoughtful
from tests.lazy import LazyModule

anthropic = LazyModule("anthropic")


TOOL = {"name": "travel", "description": "Plan a journey.", "input_schema": PLACE}


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.root, api_key="none", max_retries=0) as client:
        yield client


def ask(client, sampling=GREEDY, **options):
    base = {"model": "toy", "messages": MESSAGES, "max_tokens": 40, "extra_body": sampling}
    return client.messages.create(**{**base, **options})


@with_two()
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_that_of_the_other_route(server, client, sampling):
    choice, usage = chat(server, **sampling)
    answer = ask(client, sampling)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == choice["message"]["content"]
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "toy")
    assert answer.id.startswith("msg_")
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    counts = answer.usage
    assert counts.input_tokens + counts.cache_read_input_tokens == usage["prompt_tokens"]
    assert counts.output_tokens == usage["completion_tokens"] == 40
    off = ask(client, {**sampling, "speculative": {"enabled": False, "stats": True}})
    assert off.content == answer.content
    assert off.metrics["speculative_decoding"]["num_draft_tokens"] == 0


@with_two()
def test_stream_is_the_answer_in_events(server, client):
    whole = ask(client, SAMPLED)
    with client.messages.stream(
        model="toy", messages=MESSAGES, max_tokens=40, extra_body=SAMPLED
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert events[:2] == ["message_start", "content_block_start"]
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert (final.content[0].text, final.stop_reason) == (whole.content[0].text, "max_tokens")
    assert final.usage.output_tokens == 40
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == (
        whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    )


def test_system_and_stop_sequences(server, client):
    system = [{"type": "text", "text": "Be brief."}]
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    text = text_of(server, messages, **GREEDY)
    assert ask(client, system=system).content[0].text == text
    assert ask(client, system="Be brief.").content[0].text == text
    stop = text[10:13]
    cut = ask(client, system=system, stop_sequences=["nowhere", stop])
    assert cut.content[0].text == text[: text.index(stop)]
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


def test_the_answer_goes_on_with_what_was_begun(server, client):
    begun = {"role": "assistant", "content": "The city"}
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    text = text_of(server, [*MESSAGES, begun], **GREEDY, **fields)
    assert ask(client, messages=[*MESSAGES, begun]).content[0].text == text


@with_two()
@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_answered(server, client, stream):
    options = {"model": "toy", "tools": [TOOL], "max_tokens": 300, "extra_body": SAMPLED}
    choice = {"type": "tool", "name": "travel"}
    if stream:
        with client.messages.stream(messages=MESSAGES, tool_choice=choice, **options) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(messages=MESSAGES, tool_choice=choice, **options)
    (used,) = answer.content
    assert (used.type, used.name, answer.stop_reason) == ("tool_use", "travel", "tool_use")
    assert is_place(used.input) and used.id.startswith("toolu_")
    function = {"name": "travel", "description": TOOL["description"], "parameters": PLACE}
    offered = [{"type": "function", "function": function}]
    named = {"type": "function", "function": {"name": "travel"}}
    other, _ = chat(server, tools=offered, tool_choice=named, **SAMPLED, max_tokens=300)
    arguments = other["message"]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == used.input
    # What the tool brought is heard, and comes before what the user adds.
    content = [
        {"type": "text", "text": "And now?"},
        {"type": "tool_result", "tool_use_id": used.id, "content": "Sunny."},
    ]
    turns = [*MESSAGES, {"role": "assistant", "content": answer.content},
             {"role": "user", "content": content}]  # fmt: skip
    call = {"id": used.id, "type": "function",
            "function": {"name": "travel", "arguments": arguments}}  # fmt: skip
    theirs = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": used.id, "content": "Sunny."},
        {"role": "user", "content": "And now?"},
    ]
    text = text_of(server, theirs, **GREEDY)
    assert ask(client, messages=turns).content[0].text == text


def test_thinking_is_a_block_of_its_own(thinking):
    with anthropic.Anthropic(base_url=thinking.root, api_key="none", max_retries=0) as client:
        question = [{"role": "user", "content": thoughtful()}]
        message = chat(thinking, question, **GREEDY)[0]["message"]
        options = {"model": "toy", "messages": question, "max_tokens": 40, "extra_body": GREEDY}
        enabled = {"type": "enabled", "budget_tokens": 1024}
        answer = client.messages.with_raw_response.create(thinking=enabled, **options)
        thought, text = answer.parse().content
        assert answer.headers["x-forerun-ignored"] == "thinking.budget_tokens, thinking"
        assert (thought.type, thought.thinking) == ("thinking", message["reasoning_content"])
        assert (text.type, text.text) == ("text", message["content"])
        with client.messages.stream(**options) as stream:
            one, other = stream.get_final_message().content
            assert (one.thinking, other.text) == (thought.thinking, text.text)
        hidden = {"type": "adaptive", "display": "omitted"}
        empty, same = client.messages.create(thinking=hidden, **options).content
        assert (empty.thinking, same) == ("", text)
        # It comes back as it was said, and the thought of it reaches the template.
        turns = [*question, {"role": "assistant", "content": [thought, text]}, *MESSAGES]
        assert client.messages.create(**{**options, "messages": turns}).content


@with_two()
@pytest.mark.parametrize("spelled", ["output_config", "output_format"])
def test_structured_output(client, spelled):
    format = {"type": "json_schema", "schema": PLACE}
    extra = {**SAMPLED, spelled: {"format": format} if spelled == "output_config" else format}
    answer = ask(client, extra, max_tokens=400)
    assert is_place(json.loads(answer.content[0].text))


@with_two()
def test_tokens_are_counted_as_they_will_be(client):
    body = {"model": "toy", "messages": MESSAGES, "system": "Be brief.", "tools": [TOOL]}
    counted = client.messages.count_tokens(**body)
    usage = client.messages.create(max_tokens=1, **body).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_models(client):
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").max_input_tokens == 4096


BAD = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"tempratur": 1}, "tempratur"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "what"}]}]}, "content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]},
     "a user message has no thinking"),
    ({"messages": [{"role": "assistant", "content": " "}]}, "messages[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [TOOL]}, "tool_choice.name"),
    ({"mcp_servers": [{"name": "a"}]}, "mcp_servers"),
    ({"speculative": {"trace": True}}, "speculative.trace"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "what"}}}},
     "output_config.format.schema"),
    ({"system": "a" * 5000}, "4096"),
]  # fmt: skip


@with_two()
@pytest.mark.parametrize(("wrong", "named"), BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_said_in_anthropics_shape(client, wrong, named):
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, wrong)
    error = caught.value.body
    assert error.keys() == {"type", "error"} and error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert named in error["error"]["message"]
    assert caught.value.request_id
    assert ask(client).content


def test_other_errors(client, guarded):
    assert ask(client, model="claude").content, "with one model any name is its name"
    strict = anthropic.Anthropic(base_url=guarded.root, api_key="sesame", max_retries=0)
    with strict, pytest.raises(anthropic.NotFoundError) as caught:
        ask(strict, model="claude")
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.get("/v1/messages", cast_to=object)
    assert caught.value.status_code == 405
    with anthropic.Anthropic(base_url=guarded.root, api_key="wrong", max_retries=0) as other:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            ask(other)
        assert refused.value.body["error"]["type"] == "authentication_error"
        assert ask(other.copy(api_key="sesame")).content
