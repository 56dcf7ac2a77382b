"""/v1/responses through the official openai client, against a real server process."""

import gc
import json
import tracemalloc

import pytest

from forerun.serve.dialects.responses.store import ResponseStore
from forerun.serve.dialects.responses.truncation import with_items
from forerun.serve.http.errors import ApiError
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

openai = LazyModule("openai")


QUESTION = MESSAGES[0]["content"]
TOOL = {"type": "function", "name": "travel", "description": "Plan a journey.", "strict": True,
        "parameters": PLACE}  # fmt: skip


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def options(sampling=GREEDY, **more):
    extra = {name: value for name, value in sampling.items() if name != "temperature"}
    base = {"model": "toy", "input": QUESTION, "max_output_tokens": 40}
    given = {"temperature": sampling.get("temperature"), "extra_body": extra}
    return {**base, **given, **more}


def ask(client, sampling=GREEDY, **more):
    return client.responses.create(**options(sampling, **more))


@with_two()
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_that_of_the_other_route(server, client, sampling):
    choice, usage = chat(server, **sampling)
    answer = ask(client, sampling)
    assert answer.output_text == choice["message"]["content"]
    assert (answer.object, answer.model, answer.status) == ("response", "toy", "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.input_tokens == usage["prompt_tokens"]
    assert answer.usage.output_tokens == usage["completion_tokens"] == 40
    assert answer.usage.total_tokens == usage["total_tokens"]
    assert answer.temperature == sampling["temperature"]
    off = ask(client, {**sampling, "speculative": {"enabled": False, "stats": True}})
    assert off.output_text == answer.output_text
    assert off.metrics["speculative_decoding"]["num_draft_tokens"] == 0
    spelled = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    assert ask(client, sampling, input=spelled).output_text == answer.output_text


@with_two()
def test_stream_is_the_answer_in_numbered_events(client):
    _, whole = ask(client, SAMPLED), ask(client, SAMPLED)  # The prompt is cached for the second.
    events = list(client.responses.create(stream=True, **options(SAMPLED)))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    pieces = "".join(event.delta for event in events[4:-4])
    assert pieces == whole.output_text == events[-1].response.output_text == events[-4].text
    assert events[-1].response.usage == whole.usage


def test_an_answer_that_ends_by_itself_is_completed(client):
    format = {"type": "json_schema", "name": "place", "schema": PLACE, "strict": True}
    answer = ask(client, SAMPLED, text={"format": format}, max_output_tokens=400)
    assert (answer.status, answer.incomplete_details) == ("completed", None)
    assert is_place(json.loads(answer.output_text))
    assert answer.text.format.name == "place"
    given = options(SAMPLED, text={"format": format}, max_output_tokens=400)
    *_, last = client.responses.create(stream=True, **given)
    assert (last.type, last.response.output_text) == ("response.completed", answer.output_text)
    with client.responses.stream(**given) as stream:
        assert stream.get_final_response().output_text == answer.output_text


def test_instructions_are_a_system_message(server, client):
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    text = text_of(server, messages, **GREEDY)
    assert ask(client, instructions="Be brief.").output_text == text
    developer = [{"role": "developer", "content": "Be brief."}, *MESSAGES]
    assert ask(client, input=developer).output_text == text


@with_two()
def test_a_conversation_goes_on_and_can_be_forgotten(server, client):
    first = ask(client, instructions="Be brief.")
    second = ask(client, input="And then?", previous_response_id=first.id)
    messages = [*MESSAGES, {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And then?"}]  # fmt: skip
    assert second.output_text == text_of(server, messages, **GREEDY)
    third = ask(client, input="And now?", previous_response_id=second.id)
    messages += [{"role": "assistant", "content": second.output_text},
             {"role": "user", "content": "And now?"}]  # fmt: skip
    assert third.output_text == text_of(server, messages, **GREEDY)
    # The same without the server's memory: items in, items out.
    items = [*MESSAGES, *first.to_dict()["output"], {"role": "user", "content": "And then?"}]
    assert ask(client, input=items, store=False).output_text == second.output_text
    assert client.responses.retrieve(second.id).output_text == second.output_text
    (item,) = client.responses.input_items.list(second.id).data
    assert item.content[0].text == "And then?"
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, previous_response_id=second.id)
    assert caught.value.code == "previous_response_not_found"
    # The third carries what it needs.
    assert ask(client, input="?", previous_response_id=third.id).output_text
    unsaved = ask(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unsaved.id)


@with_two()
@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_called_and_answered(server, client, stream):
    choice = {"type": "function", "name": "travel"}
    given = options(SAMPLED, tools=[TOOL], tool_choice=choice, max_output_tokens=300)
    if stream:
        events = list(client.responses.create(stream=True, **given))
        answer = events[-1].response
        deltas = [event.delta for event in events if event.type.endswith("arguments.delta")]
        assert "".join(deltas) == answer.output[0].arguments
    else:
        answer = client.responses.create(**given)
    (call,) = answer.output
    # A format is for messages, of which there is none here.
    both = ask(client, **{**given, "text": {"format": {"type": "json_object"}}})
    assert both.output[0].arguments == call.arguments
    assert (call.type, call.name, call.status) == ("function_call", "travel", "completed")
    assert is_place(json.loads(call.arguments))
    function = {name: TOOL[name] for name in ("name", "description", "strict", "parameters")}
    offered = {"tools": [{"type": "function", "function": function}]}
    named = {"type": "function", "function": {"name": "travel"}}
    other, _ = chat(server, **offered, tool_choice=named, **SAMPLED, max_tokens=300)
    assert other["message"]["tool_calls"][0]["function"]["arguments"] == call.arguments
    brought = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    after = ask(client, input=[brought], previous_response_id=answer.id)
    plain = {"id": call.call_id, "type": "function",
             "function": {"name": "travel", "arguments": call.arguments}}  # fmt: skip
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [plain]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "Sunny."}]  # fmt: skip
    assert after.output_text == text_of(server, messages, **GREEDY)
    items = [*MESSAGES, *answer.to_dict()["output"], brought]
    assert ask(client, input=items).output_text == after.output_text


def test_reasoning_is_an_item_of_its_own(thinking):
    with openai.OpenAI(base_url=thinking.url, api_key="none", max_retries=0) as client:
        question = thoughtful()
        message = chat(thinking, [{"role": "user", "content": question}], **GREEDY)[0]["message"]
        answer = ask(client, input=question)
        thought, reply = answer.output
        assert (thought.type, thought.content[0].text) == (
            "reasoning",
            message["reasoning_content"],
        )
        assert (reply.type, reply.content[0].text) == ("message", message["content"])
        assert answer.usage.output_tokens_details.reasoning_tokens == len(thought.content[0].text)
        events = list(client.responses.create(stream=True, **options(input=question)))
        parts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(parts) == message["reasoning_content"]
        assert events[-1].response.output_text == message["content"]
        items = [{"role": "user", "content": question}, *answer.to_dict()["output"], *MESSAGES]
        assert ask(client, input=items).output


def test_logprobs_are_those_of_the_other_route(server, client):
    choice, _ = chat(server, **SAMPLED, logprobs=True, top_logprobs=2)
    theirs = choice["logprobs"]["content"]
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = ask(client, SAMPLED, **include)
    logprobs = answer.to_dict()["output"][0]["content"][0]["logprobs"]
    assert logprobs == theirs
    events = list(client.responses.create(stream=True, **options(SAMPLED, **include)))
    pieces = [entry.to_dict() for event in events if event.type == "response.output_text.delta"
              for entry in event.logprobs]  # fmt: skip
    assert pieces == theirs


def test_what_changes_nothing_is_named(client):
    given = options(
        metadata={"a": "b"},
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        prompt_cache_retention="24h",
    )
    answer = client.responses.with_raw_response.create(**given)
    assert set(answer.headers["x-forerun-ignored"].split(", ")) == {
        "prompt_cache_retention", "text.verbosity", "reasoning.summary", "reasoning.effort",
        "include.reasoning.encrypted_content",
    }  # fmt: skip
    assert answer.parse().metadata == {"a": "b"}
    assert answer.parse().output_text == ask(client).output_text


BAD = [
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"tempratur": 1}, "tempratur"),
    ({"input": []}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"type": "what"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].id"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input[0].content[0].type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"include": ["x"]}, "include[0]"),
    ({"background": True}, "background"),
    ({"truncation": "most"}, "truncation"),
    ({"conversation": "c"}, "conversation"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"text": {"format": {"type": "json_schema", "strict": True, "schema": {"type": "what"}}}},
     "text.format.schema"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"speculative": {"trace": True}}, "speculative.trace"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
]  # fmt: skip


@with_two()
@pytest.mark.parametrize(("wrong", "named"), BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_said(server, wrong, named):
    answer = server.post("/v1/responses", {"input": "Hi", **wrong})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == named
    assert named.split(".")[0].split("[")[0] in answer.json()["error"]["message"]


def test_the_store_holds_what_it_counts():
    """As Python objects an answer of many small items takes several times its bytes of JSON."""
    store, items = ResponseStore(max_bytes=200_000), [{"a": n, "b": [n, n]} for n in range(500)]
    tracemalloc.start()
    try:
        for index in range(40):
            store.put({"id": str(index)}, items, ({"role": "user", "content": "Hi"},))
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 150_000 < held < 250_000
    kept = store.get("39")
    assert kept.input == items and kept.messages == ({"role": "user", "content": "Hi"},)


def test_the_store_forgets_the_oldest():
    store = ResponseStore(max_bytes=3000, max_answers=4)
    for index in range(6):
        store.put({"id": str(index)}, [], ({"role": "user", "content": "a" * 100},))
    assert [store.get(str(index)) is not None for index in range(6)] == [False] * 2 + [True] * 4
    store.put({"id": "large"}, [], ({"role": "user", "content": "a" * 2700},))
    assert store.get("large") is not None and len(store) < 4
    store.put({"id": "too large"}, [], ({"role": "user", "content": "a" * 5000},))
    assert len(store) == 0 and not store.drop("large")
    store.put({"id": "again"}, [], ())
    assert store.drop("again") and len(store) == 0


@with_two()
def test_a_stored_item_stands_for_itself(server):
    first = server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 8}).json()
    path = f"/v1/responses/{first['id']}/input_items"
    items = server.http.get(path, params={"order": "asc"}).json()["data"]
    again = {"role": "user", "content": "And then?"}
    refers = [{"type": "item_reference", "id": one["id"]} for one in (*items, *first["output"])]
    options = {"max_output_tokens": 8, "temperature": 0, "store": False}
    whole = [{"role": "user", "content": "Hi"}, *first["output"], again]
    bodies = ({"input": [*refers, again]}, {"input": whole},
              {"input": [again], "previous_response_id": first["id"]})  # fmt: skip
    answers = [server.post("/v1/responses", {**options, **body}).json() for body in bodies]
    assert len({answer["output"][0]["content"][0]["text"] for answer in answers}) == 1
    assert len({answer["usage"]["input_tokens"] for answer in answers}) == 1
    counted = server.post("/v1/responses/input_tokens", bodies[0]).json()["input_tokens"]
    assert counted == answers[0]["usage"]["input_tokens"]
    server.http.delete(f"/v1/responses/{first['id']}")
    assert server.post("/v1/responses", bodies[0]).status_code == 400


@pytest.mark.parametrize("turns", [0, 1, 4, 9, 40])
def test_a_conversation_is_truncated_to_what_there_is_room_for(server, turns):
    """Whole turns go, as few as suffice; the instructions stay."""
    context = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    past = [
        message
        for turn in range(turns)
        for message in (
            {"role": "user", "content": f"{turn}" + "x" * (context // 8)},
            {"role": "assistant", "content": f"{turn}" + "y" * 20},
        )
    ]
    last = {"role": "user", "content": "And then?"}
    body = {"instructions": "Be brief.", "max_output_tokens": 8, "temperature": 0}
    answer = server.post("/v1/responses", {**body, "input": [*past, last], "truncation": "auto"})
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    assert reply["truncation"] == "auto"
    left = int((answer.headers.get("x-forerun-ignored") or "input (0").split("(")[1].split()[0])
    assert left % 2 == 0 and (left > 0) == (turns > 7)
    same = server.post("/v1/responses", {**body, "input": [*past[left:], last]})
    assert same.json()["output"][0]["content"] == reply["output"][0]["content"]
    assert same.json()["usage"]["input_tokens"] == reply["usage"]["input_tokens"]
    if left:
        more = server.post("/v1/responses", {**body, "input": [*past[left - 2 :], last]})
        assert more.status_code == 400
    whole = {**body, "input": [{"role": "user", "content": "x" * 2 * context}]}
    refused = server.post("/v1/responses", {**whole, "truncation": "auto"})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_references_read_each_answer_once_and_give_each_item_once(monkeypatch):
    """400 references in 16 kB read a stored answer of 4 MB 400 times, on the event loop."""
    store, read = ResponseStore(), []
    items = [{"id": f"i{n}", "role": "user", "content": "x"} for n in range(50)]
    store.put({"id": "r", "output": []}, items, ())
    get = store.get
    monkeypatch.setattr(store, "get", lambda id: read.append(id) or get(id))
    every = [{"type": "item_reference", "id": one["id"]} for one in items]
    assert with_items({"input": every}, store) == {"input": items} and read == ["r"]
    for again in (
        [*every, every[0]],
        [{"type": "item_reference", "id": "no"}],
        [{**every[0], "id": 1}],
    ):
        with pytest.raises(ApiError, match="there is no item with this id"):
            with_items({"input": again}, store)
