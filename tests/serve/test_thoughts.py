"""Thoughts that a client began, that never close, and how many tokens they have."""

import json

import pytest
from starlette.testclient import TestClient

from forerun.options.config import ServeSettings
from forerun.serve.app import create_app
from forerun.serve.bodies.dialogue import dialogue
from forerun.serve.bodies.fields import read
from forerun.serve.bodies.schema import ChatBody
from forerun.text.reasoning import Marks, ReasoningReader, Stage

USER = {"role": "user", "content": "Which city?"}
MARKS = Marks.of("</think>")
SETTINGS = ServeSettings(reasoning_end="</think>")
HEAD = "<|im_start|>user\nWhich city?<|im_end|>\n<|im_start|>assistant\n"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}


@pytest.fixture(scope="module")
def thinking(loaded):
    with TestClient(create_app(loaded, SETTINGS)) as client:
        yield client


def goes_on(**message):
    return {"messages": [USER, {"role": "assistant", **message}], "continue_final_message": True,
            "max_tokens": 12, "temperature": 0}  # fmt: skip


def prompt_of(loaded, **body):
    generation = dialogue(read(ChatBody, body), loaded, SETTINGS)
    return generation, loaded.tokenizer.decode(generation.prompt.tolist(), skip_special=False)


BEGUN = [
    ({"content": "<think>I see "}, "<think>I see "),
    ({"content": "\n<think>\nI see "}, "<think>\nI see "),
    ({"content": "", "reasoning_content": "I see "}, "<think>\nI see "),
    ({"content": None, "reasoning": "I see "}, "<think>\nI see "),
    ({"content": "<think>"}, "<think>"),
    ({"content": "<think>I see <|im_end|>"}, "<think>I see <|im_end|>"),
]


@pytest.mark.parametrize(("message", "text"), BEGUN)
def test_a_thought_that_the_client_began_is_reasoning(thinking, loaded, message, text):
    body = goes_on(**message)
    assert prompt_of(loaded, **body)[1] == HEAD + text
    answer = thinking.post("/v1/chat/completions", json=body).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""
    assert len(choice["message"]["reasoning_content"]) > 8
    lines = thinking.post("/v1/chat/completions", json={**body, "stream": True}).text.split("\n\n")
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if "choices" in line]
    streamed = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert streamed == choice["message"]["reasoning_content"]
    assert not any(delta.get("content") for delta in deltas)
    raw = {"prompt": HEAD + text, "max_tokens": 12, "temperature": 0}
    if "<|im_end|>" not in text:
        whole = thinking.post("/v1/completions", json=raw).json()["choices"][0]["text"]
        assert streamed.strip() == whole.strip()


def test_a_template_that_opens_thoughts_opens_one():
    assert MARKS.going_on("a<think>\n", "\nI see ") == "a<think>\nI see "
    assert MARKS.going_on("a<think>", "I see ") == "a<think>I see "
    assert MARKS.going_on("a\n", "I see ") == "a\n<think>I see "


def test_a_begun_answer_is_no_thought(thinking, loaded):
    for content in ("One, two ", "<think>Hm</think>One, ", "Not <think> at all"):
        body = goes_on(content=content)
        message = thinking.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert message["content"] and "reasoning_content" not in message
        generation, text = prompt_of(loaded, **body, response_format=SCHEMA)
        assert text == HEAD + content and not text.endswith("<think>")
        assert generation.rules.grammar.start is None


def test_a_constraint_begins_behind_a_begun_thought(loaded):
    generation, text = prompt_of(loaded, **goes_on(content="<think>I see "), response_format=SCHEMA)
    assert text == HEAD + "<think>I see " and generation.rules.grammar.start.text == "</think>"


def test_other_dialects_go_on_with_a_thought(thinking):
    block = {"type": "thinking", "thinking": "I see "}
    body = {"max_tokens": 12, "messages": [USER, {"role": "assistant", "content": [block]}]}
    assert [one["type"] for one in thinking.post("/v1/messages", json=body).json()["content"]] == [
        "thinking"
    ]
    last = {"role": "assistant", "content": "", "thinking": "I see "}
    body = {"messages": [USER, last], "stream": False, "options": {"num_predict": 12}}
    message = thinking.post("/api/chat", json=body).json()["message"]
    assert message["thinking"] and not message["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_that_never_closes_is_the_answer(thinking, stream):
    body = goes_on(content="<think>")
    whole = thinking.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    stop = whole["reasoning_content"][5:7]
    body |= {"stop": [stop], "stream": stream}
    answer = thinking.post("/v1/chat/completions", json=body)
    if stream:
        lines = [line for line in answer.text.split("\n\n") if "choices" in line]
        choices = [json.loads(line[6:])["choices"][0] for line in lines]
        deltas = [choice["delta"] for choice in choices]
        finish = choices[-1]["finish_reason"]
        message = {name: "".join(delta.get(name) or "" for delta in deltas)
                 for name in ("content", "reasoning_content")}  # fmt: skip
    else:
        (choice,) = answer.json()["choices"]
        message, finish = choice["message"], choice["finish_reason"]
    expected = whole["reasoning_content"].partition(stop)[0]
    assert finish == "stop" and message["content"] == message["reasoning_content"] == expected


def read_all(reader, text, size, cut):
    pieces = [reader.push(text[at : at + size]) for at in range(0, len(text), size)]
    ends = [*pieces, reader.finish(cut)]
    return "".join(a for a, _ in ends), "".join(b for _, b in ends)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_readers_in_the_middle_of_a_text(size):
    def parsed(text, stage, bare, cut=False):
        return read_all(ReasoningReader(MARKS, stage, bare), text, size, cut)

    assert parsed(" that. ", Stage.THINKING, False, cut=True) == (" that.", "")
    assert parsed(" that. ", Stage.THINKING, False) == (" that.", "that.")
    assert parsed(" a </think> b", Stage.THINKING, False) == (" a", "b")
    assert parsed(" three", Stage.ANSWERING, False) == ("", " three")
    assert parsed("\n\nthree", Stage.ANSWERING, True) == ("", "three")
    assert parsed("<think> a", Stage.UNDECIDED, True) == ("a", "a")
    assert parsed("<think> a", Stage.UNDECIDED, True, cut=True) == ("a", "")


def test_no_more_tokens_of_reasoning_than_of_the_answer(thinking, monkeypatch):
    for module in ("openai.render", "responses.responses"):
        name = f"forerun.serve.dialects.{module}.reasoning_tokens"
        monkeypatch.setattr(name, lambda text, tokenizer: 1000 * len(text))
    usage = thinking.post("/v1/chat/completions", json=goes_on(content="<think>")).json()["usage"]
    assert (
        usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"] == 12
    )
