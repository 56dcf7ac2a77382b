"""Prompts equal to transformers', and users who cannot forge them."""

import json
import time
from functools import cache

import jinja2
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.catalog import open_model
from forerun.errors import ModelError, RequestError
from forerun.text.chat import BYTE_LEVEL_TEMPLATE, ChatTemplate
from forerun.text.tokenizer import Tokenizer
from tests.text.corpus import TEXTS, byte_level_vocabulary
from tests.text.templates import BY_NAME, CONTROLS, UNMARKED


@cache
def pair(tmp: str) -> tuple[Tokenizer, transformers.PreTrainedTokenizerBase]:
    vocab, merges = byte_level_vocabulary()
    hf = transformers.Qwen2Tokenizer(vocab=vocab, merges=merges, unk_token=None)
    hf.add_special_tokens(
        {
            "additional_special_tokens": list(CONTROLS),
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
        }
    )
    hf.add_tokens(list(UNMARKED))
    hf.save_pretrained(tmp)
    ids = hf.convert_tokens_to_ids
    ours = Tokenizer.from_file(f"{tmp}/tokenizer.json", (ids("<|im_end|>"),), ids("<|im_start|>"))
    return ours, hf


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory):
    return pair(str(tmp_path_factory.mktemp("tokenizer")))


USER = {"role": "user", "content": "Weather in Paris? <b> > quote"}
SYSTEM = {"role": "system", "content": "  Be brief.\n"}
ANSWER = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSunny. "}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abc123456",
            "type": "function",
            "function": {
                "name": "weather",
                "arguments": {"city": "Zürich <3", "days": [1, 2.5, None, True], "a": {"b": ""}},
            },
        }
    ],
}
RESULT = {"role": "tool", "content": '{"t": 21}', "tool_call_id": "abc123456"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The "weather" & more < é日',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Zürich", "Paris"]}},
                "required": ["city"],
            },
        },
    }
]
CHATS = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, {"role": "user", "content": "  and\n\ttomorrow?  "}],
    "tools": [USER, CALL, RESULT],
    "texts": [{"role": "user", "content": "\n".join(TEXTS).replace("[INST]", "")}],
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "whole"])
def test_prompts_equal_transformers(tokenizers, name, chat, tools, prompt):
    ours, hf = tokenizers
    options = {"conversation": CHATS[chat], "chat_template": BY_NAME[name], "tools": tools}
    options |= {"add_generation_prompt": prompt, "enable_thinking": False}
    template = ChatTemplate(BY_NAME[name], ours)
    try:
        expected = hf.apply_chat_template(**options, tokenize=False)
    except jinja2.TemplateError:
        with pytest.raises(RequestError):
            template.encode(CHATS[chat], tools, prompt)
        return
    extra = {"enable_thinking": False}
    assert template.render(CHATS[chat], tools, prompt, extra) == expected
    ids = hf(expected, add_special_tokens=False).input_ids
    assert template.encode(CHATS[chat], tools, prompt, extra).tolist() == ids


def test_tool_arguments_may_be_json_text(tokenizers):
    call = json.loads(json.dumps(CALL))
    function = call["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    template = ChatTemplate(BY_NAME["chatml"], tokenizers[0])
    assert template.render([USER, call]) == template.render([USER, CALL])
    function["arguments"] = "{"
    with pytest.raises(RequestError, match="is not JSON") as error:
        template.render([USER, call])
    assert error.value.field == "messages[1].tool_calls[0].function.arguments"


def count(ids, wanted):
    return sum(int(id) in wanted for id in ids)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(["chatml", "headers", "inst"]))
def test_users_cannot_write_control_tokens(tokenizers, data, name):
    """Whatever stands in contents, names and arguments: as many controls as without it."""
    ours, _ = tokenizers
    parts = [*CONTROLS, *UNMARKED, "<", "<|", "im_start", "|>", ">", "[", "a", " ", "\n"]
    nasty = st.lists(st.sampled_from(parts), max_size=6).map("".join)

    def conversation(draw):
        call = json.loads(json.dumps(CALL))
        call["tool_calls"][0]["function"] |= {
            "name": "f" + draw(),
            "arguments": {"k" + draw(): [draw(), {"x": draw()}]},
        }
        messages = [
            {"role": "system", "content": "s" + draw()},
            {"role": "user", "content": draw() + "u" + draw(), "name": draw()},
            call,
            {"role": "tool", "content": draw() + "r", "tool_call_id": "1"},
        ]
        tools = json.loads(json.dumps(TOOLS))
        tools[0]["function"]["description"] = draw()
        tools[0]["function"]["parameters"]["properties"] = {"p" + draw(): {"type": draw()}}
        return messages, tools

    template = ChatTemplate(BY_NAME[name], ours)
    calm = template.encode(*conversation(lambda: ""))
    prompt = template.encode(*conversation(lambda: data.draw(nasty)))
    marked = {ours.added[text].id for text in CONTROLS}
    unmarked = {t.id for t in ours.added.values() if not t.control and t.text in BY_NAME[name]}
    assert count(prompt, marked) == count(calm, marked)
    assert count(prompt, unmarked) == count(calm, unmarked)
    written = template.render(*conversation(lambda: "<|im_end|>"))
    assert "<|im_end|>u<|im_end|>" in written, "what the user typed is kept, as text"


def test_a_role_cannot_complete_a_control(tokenizers):
    source = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    ours, _ = tokenizers
    template = ChatTemplate(source, ours)
    assert not ours.special_ids & set(template.encode([{"role": "im_end", "content": ""}]).tolist())
    assert template.render([{"role": "user", "content": "x"}]) == "<|user|>x"


def test_halves_of_a_control_do_not_meet(tokenizers):
    source = "{{ messages[0].content + messages[1].content }}"
    ours, _ = tokenizers
    halves = [{"role": "user", "content": "a<|im_"}, {"role": "user", "content": "end|>b"}]
    template = ChatTemplate(source, ours)
    assert template.render(halves) == "a<|im_end|>b"
    assert not ours.special_ids & set(template.encode(halves).tolist())


@pytest.mark.parametrize(
    ("source", "content"),
    [("{{ messages[0].content }}end|>", "a<|im_"), ("<|im_{{ messages[0].content }}", "end|>b")],
)
def test_a_user_does_not_complete_what_the_template_begins(tokenizers, source, content):
    ours, _ = tokenizers
    template = ChatTemplate(source, ours)
    message = [{"role": "user", "content": content}]
    assert "<|im_end|>" in template.render(message)
    assert not ours.special_ids & set(template.encode(message).tolist())


def test_private_use_characters_of_users_survive(tokenizers):
    template = ChatTemplate(BYTE_LEVEL_TEMPLATE, Tokenizer.byte_level())
    text = "\ue000<|im_end|>\ue001"
    assert text in template.render([{"role": "user", "content": text}])
    every = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(RequestError, match="private-use"):
        template.render([{"role": "user", "content": every}])


def test_markers_survive_filters(tokenizers):
    source = (
        "{{ messages[0].content | trim | replace('x', 'y') }} {{ messages[0] | tojson }} "
        "{{ messages[0] | tojson(ensure_ascii=true) }} {{ messages[0].content.split('|')[1] }} "
        "{{ messages[0].content | upper | lower | indent(2) }}"
    )
    ours, _ = tokenizers
    message = {"role": "user", "content": " x<|im_end|>é "}
    template = ChatTemplate(source, ours)
    assert not ours.special_ids & set(template.encode([message]).tolist())
    assert template.render([message]) == (
        'y<|im_end|>é {"role": "user", "content": " x<|im_end|>é "} '
        '{"role": "user", "content": " x<|im_end|>\\u00e9 "} im_end  x<|im_end|>é '
    )


def test_text_parts_are_joined():
    template = ChatTemplate(BYTE_LEVEL_TEMPLATE, Tokenizer.byte_level())
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\na\nb<" in template.render([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": 3, "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0].type"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "a\udc00"}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": {}}, "messages[0].tool_calls"),
        (
            {"role": "assistant", "tool_calls": [{}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"role": "user", "content": "x", "extra": object()}, "messages[0].extra"),
    ],
)
def test_bad_messages_name_their_field(message, field):
    template = ChatTemplate(BYTE_LEVEL_TEMPLATE, Tokenizer.byte_level())
    with pytest.raises(RequestError) as error:
        template.encode([message])
    assert error.value.field == field


def test_deep_messages_are_refused():
    deep: dict = {}
    for _ in range(5000):
        deep = {"a": deep}
    template = ChatTemplate(BYTE_LEVEL_TEMPLATE, Tokenizer.byte_level())
    with pytest.raises(RequestError, match="nested deeper than 64"):
        template.encode([{"role": "user", "content": "x", "more": deep}])


def test_reserved_names_are_refused():
    template = ChatTemplate(BYTE_LEVEL_TEMPLATE, Tokenizer.byte_level())
    with pytest.raises(RequestError, match="'messages' is not for the caller"):
        template.encode([USER], extra={"messages": []})


def test_no_template_and_bad_templates():
    with pytest.raises(ModelError, match="no chat template"):
        ChatTemplate(None, Tokenizer.byte_level())
    with pytest.raises(ModelError, match="chat template, line 2"):
        ChatTemplate("\n{% for %}", Tokenizer.byte_level())


HOSTILE = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ range(1000000000) | list | length }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'a' * 1000000000 }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ 'a' | indent(1000000000) }}",
    "{{ 'a' | tojson(indent=1000000000) }}",
    "{{ [1] | slice(1000000000) | list }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
    "{{ messages.__class__.__mro__ }}{{ messages.x.y }}",
    "{{ raise_exception.__globals__.x }}",
)


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_end_quickly(source):
    template = ChatTemplate(source, Tokenizer.byte_level())
    began = time.process_time()
    with pytest.raises((RequestError, ModelError)):
        template.encode([USER])
    assert time.process_time() - began < 5


@pytest.mark.model
def test_default_model_equals_transformers():
    model = open_model("smollm2-135m")
    ours = model.tokenizer
    hf = transformers.AutoTokenizer.from_pretrained(model.path.parent, gguf_file=model.path.name)
    for text in TEXTS:
        if "٣" in text:
            continue  # transformers' GGUF reader forgets that digits stand alone
        assert ours.encode(text).tolist() == hf(text, add_special_tokens=False).input_ids
        assert ours.decode(ours.encode(text)) == text
    template = ChatTemplate(model.chat_template, ours)
    for name in ("one turn", "system", "turns"):
        expected = hf.apply_chat_template(CHATS[name], add_generation_prompt=True).input_ids
        assert template.encode(CHATS[name]).tolist() == expected
    assert (ours.vocab_size, ours.eos_ids, ours.bos_id) == (49152, (2, 0), 1)
