"""Prompts equal to transformers', and users cannot forge them."""

import json
import os
import resource
from copy import copy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ModelError, RequestError, WorkerError
from forerun.hub.catalog import open_model
from forerun.sandbox import Fault
from forerun.text import escape, rendering
from forerun.text.chat import ChatTemplate, clean_message
from forerun.text.conversation import adapted
from forerun.text.escape import ControlStrings
from forerun.text.rendering import BYTE_LEVEL_TEMPLATE, Apart, BySize, renderer
from forerun.text.template import Template
from forerun.text.tokenizer import Tokenizer, matcher
from tests.covering import spread
from tests.text.corpus import TEXTS, byte_level_vocabulary
from tests.text.templates import BY_NAME, CONTROLS, UNMARKED
from tests.text.vocabularies import SMALL, vocabulary


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


@cache
def chat_template(source, tokenizer):
    """One for all tests: each has a process of its own to start."""
    template = ChatTemplate(source, tokenizer)
    made.append(template)
    return template


made = []
BYTES = Tokenizer.byte_level()


@pytest.fixture(autouse=True, scope="module")
def ended():
    """Ends those processes."""
    yield
    chat_template.cache_clear()
    while made:
        made.pop().close()


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
    """What the template takes of a conversation is rendered as transformers does it."""
    ours, hf = tokenizers
    template = chat_template(BY_NAME[name], ours)
    clean = [clean_message(message, "") for message in CHATS[chat]]
    messages, offered = adapted(clean, tools, template.traits)
    options = {"conversation": messages, "chat_template": BY_NAME[name], "tools": offered}
    options |= {"add_generation_prompt": prompt, "enable_thinking": False}
    expected = hf.apply_chat_template(**options, tokenize=False)
    extra = {"enable_thinking": False}
    assert template.render(CHATS[chat], tools, prompt, extra) == expected
    ids = hf(expected, add_special_tokens=False).input_ids
    assert template.encode(CHATS[chat], tools, prompt, extra).tolist() == ids


def test_tool_arguments_may_be_json_text(tokenizers):
    call = json.loads(json.dumps(CALL))
    function = call["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    template = chat_template(BY_NAME["chatml"], tokenizers[0])
    assert template.render([USER, call]) == template.render([USER, CALL])
    function["arguments"] = "{"
    with pytest.raises(RequestError, match="is not JSON") as error:
        template.render([USER, call])
    assert error.value.field == "messages[1].tool_calls[0].function.arguments"


def count(ids, wanted):
    return sum(int(id) in wanted for id in ids)


@settings(max_examples=60)
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

    template = chat_template(BY_NAME[name], ours)
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
    template = chat_template(source, ours)
    assert not ours.special_ids & set(template.encode([{"role": "im_end", "content": ""}]).tolist())
    assert template.render([{"role": "user", "content": "x"}]) == "<|user|>x"


def test_halves_of_a_control_do_not_meet(tokenizers):
    source = "{{ messages[0].content + messages[1].content }}"
    ours, _ = tokenizers
    halves = [{"role": "user", "content": "a<|im_"}, {"role": "user", "content": "end|>b"}]
    template = chat_template(source, ours)
    assert template.render(halves) == "a<|im_end|>b"
    assert not ours.special_ids & set(template.encode(halves).tolist())


@pytest.mark.parametrize(
    ("source", "content"),
    [("{{ messages[0].content }}end|>", "a<|im_"), ("<|im_{{ messages[0].content }}", "end|>b")],
)
def test_a_user_does_not_complete_what_the_template_begins(tokenizers, source, content):
    ours, _ = tokenizers
    template = chat_template(source, ours)
    message = [{"role": "user", "content": content}]
    assert "<|im_end|>" in template.render(message)
    assert not ours.special_ids & set(template.encode(message).tolist())


@settings(max_examples=100)
@given(
    strings=st.sets(st.text("<|a>", min_size=2, max_size=6), max_size=8),
    text=st.text("<|a>", min_size=1),
)
def test_what_a_neighbour_could_complete_is_found_in_order(strings, text):
    """As the set of all proper beginnings and ends says."""
    controls = ControlStrings(strings)
    cuts = [(string[:cut], string[cut:]) for string in strings for cut in range(1, len(string))]
    assert controls.begin_with(text) == (text in {head for head, _ in cuts})
    assert controls.end_with(text) == (text in {tail for _, tail in cuts})


def test_control_strings_are_prepared_once(tokenizers, monkeypatch):
    """Gemma has thousands: a request took 46 ms to prepare them."""
    made = []
    monkeypatch.setattr(escape, "matcher", lambda strings: made.append(1) or matcher(strings))
    template = ChatTemplate(BYTE_LEVEL_TEMPLATE, tokenizers[0]).warmed_up()
    assert made, "at a server's start"
    before = len(made)
    for text in ("a", "b<|im_end|>"):
        template.encode([{"role": "user", "content": text}])
    assert len(made) == before


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
    template = chat_template(source, ours)
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
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function.name"),
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
    with pytest.raises(RequestError, match="'messages' cannot be set"):
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


def spent():
    """Seconds of this process and of the children that have ended."""
    return sum(os.times()[:4])


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_end_quickly(source):
    began = spent()
    with pytest.raises((RequestError, ModelError)):
        chat_template(source, BYTES).encode([USER])
    assert spent() - began < 5


DOUBLING = (
    "{% set n = namespace(s='abcdefgh') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}"
    "{% endfor %}{{ n.s | length }}",
    "{% macro m(s, k) %}{% if k %}{{ m(s ~ s, k - 1) }}{% endif %}{% endmacro %}{{ m('ab', 60) }}",
    "{% set a = 'x' * 100000000 %}" + "{% set a = a + a %}" * 20 + "{{ a }}",
    "{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}",
    "{{ " + " ~ ".join(f"('x' * {99_999_000 + i})" for i in range(40)) + " }}",
    "{{ 'x' * 50000000 }}",
)


@pytest.mark.parametrize("source", spread(DOUBLING, 1), ids=range(len(DOUBLING)))
def test_a_template_cannot_exhaust_memory(source):
    """It fails alone: its process may have half a gigabyte, this one grows little."""
    before = resident()
    with pytest.raises(ModelError, match="chat template"):
        chat_template(source, BYTES).encode([USER])
    assert resident() - before < 200
    chat_template("{{ messages[0].content }}", BYTES).encode([USER])


def resident():
    """Megabytes this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_a_text_whose_process_is_killed_meanwhile_is_rendered_again(monkeypatch):
    made = Apart("{{ messages[0] }}!")
    made.check()
    ask, process = made._child.ask, made._child._process
    requests = []

    def killed_first(request):
        requests.append(request)
        if len(requests) == 1:
            process.kill()
            process.wait()
            monkeypatch.setattr(made._child, "_running", lambda: process)
            answer = ask(request)
            monkeypatch.undo()
            monkeypatch.setattr(made._child, "ask", killed_first)
            return answer
        return ask(request)

    monkeypatch.setattr(made._child, "ask", killed_first)
    assert made.render({"messages": ["Hi"]}) == "Hi!"
    assert len(requests) == 2
    made.close()


def test_a_process_that_is_ended_again_and_again_is_no_fault_of_the_messages(monkeypatch):
    made = Apart("{{ messages[0] }}!")

    def killed(request):
        made._child.fault = Fault.KILLED

    monkeypatch.setattr(made._child, "ask", killed)
    with pytest.raises(WorkerError, match="ended from outside"):
        made.render({"messages": ["Hi"]})
    monkeypatch.undo()
    assert made.render({"messages": ["Hi"]}) == "Hi!"
    made.close()


def test_rendering_goes_on_after_its_process_was_killed():
    long = "{% if messages | length > 1 %}{{ 'x' * 90000000 }}{% endif %}"
    source = long + "{{ messages[0].content }}"
    template = chat_template(source, BYTES)
    for _ in range(2):
        assert template.render([USER]) == USER["content"]
        with pytest.raises(ModelError, match=r"chat template writes \d+ characters"):
            template.render([USER, USER])
        template._renderer.small._child._process.kill()
        template._renderer.small._child._process.wait()


def test_what_a_large_conversation_takes_is_its_own_doing():
    """Its client hears of it, others do not wait for it."""
    long = "{{ 'x' * 9000000 if loop.index > 1 }}"
    source = f"{{% for m in messages %}}{long}{{{{ m.content }}}}{{% endfor %}}"
    template = chat_template(source, BYTES)
    large = [{**USER, "content": "a" * 40000}]
    assert template.render([USER])
    assert template.render(large)
    with pytest.raises(ModelError, match=r"chat template writes \d+ characters"):
        template.render([USER, {"role": "assistant", "content": "Yes"}, USER])
    with pytest.raises(RequestError, match=r"The model's chat template cannot render"):
        template.render([*large, {"role": "assistant", "content": "Yes"}, USER])
    with template._renderer.large._turn:
        assert template.render([USER])
    template.close()


@pytest.mark.parametrize("name", BY_NAME)
def test_a_template_says_the_same_here_and_apart(tokenizers, name):
    """The reference of rendering in another process: rendering in this one."""
    ours, _ = tokenizers
    template = chat_template(BY_NAME[name], ours)
    here = copy(template)
    here._renderer = Template(BY_NAME[name])
    output_tokens = {"role": "assistant", "content": "é\u2028 <|im_end|> \ue000"}
    for chat in ([USER], [USER, output_tokens, USER]):
        assert template.encode(chat).tolist() == here.encode(chat).tolist()


def test_only_known_templates_run_in_this_process():
    assert not isinstance(renderer(BYTE_LEVEL_TEMPLATE), BySize)
    other = renderer(BYTE_LEVEL_TEMPLATE + " ")
    assert isinstance(other, BySize)
    other.close()
    for digest in rendering.KNOWN:
        assert len(digest) == 64


EXPECTED_IDS = Path(__file__).parent / "smollm2_ids.json"
"""By text or name of a chat, ids that transformers' tokenizer of the default model says."""
READ = [text for text in TEXTS if "\u0663" not in text]
"""Without those of which its reader of GGUF forgets that digits stand alone."""


@pytest.fixture(scope="module")
def default_model():
    model = open_model("smollm2-135m")
    return model, ChatTemplate(model.chat_template, model.tokenizer)


@pytest.mark.model
def test_the_default_model_says_what_transformers_said(default_model):
    model, template = default_model
    ours, expected = model.tokenizer, json.loads(EXPECTED_IDS.read_text(encoding="utf-8"))
    assert [text for text, _ in expected["texts"]] == READ and len(expected["chats"]) == 3
    for text, ids in expected["texts"]:
        assert ours.encode(text).tolist() == ids
        assert ours.decode(np.array(ids, np.int32)) == text
    for name, ids in expected["chats"]:
        assert template.encode(CHATS[name]).tolist() == ids
    assert (ours.vocab_size, ours.eos_ids, ours.bos_id) == (49152, (2, 0), 1)


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "ids"),
    [("a  7", [81, 256, 39]), (" ²²", [216, 19133, 19133]), (" ½ 12", [216, 16738, 216, 33, 34])],
)
def test_the_default_model_cuts_every_digit_apart(default_model, text, ids):
    """The blank before a digit is no part of its word, and two blanks there are one token."""
    assert default_model[0].tokenizer.encode(text).tolist() == ids


@pytest.mark.slow
@pytest.mark.model
def test_transformers_still_says_so(default_model):
    """Making its tokenizer of a GGUF file takes seconds."""
    model, _ = default_model
    hf = transformers.AutoTokenizer.from_pretrained(model.path.parent, gguf_file=model.path.name)
    # Its reader of GGUF forgets that digits stand alone.
    texts = [text for text in TEXTS if "٣" not in text]
    encoded = [(text, hf(text, add_special_tokens=False).input_ids) for text in texts]
    chats = [
        (name, hf.apply_chat_template(CHATS[name], add_generation_prompt=True).input_ids)
        for name in ("one turn", "system", "turns")
    ]
    assert json.loads(json.dumps({"texts": encoded, "chats": chats})) == json.loads(
        EXPECTED_IDS.read_text(encoding="utf-8")
    )


@pytest.mark.parametrize("name", SMALL)
def test_a_string_that_only_looks_like_a_token_gains_no_space(name):
    """It is cut in two, of which the second goes on within the text (SentencePiece)."""
    source = (
        "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if false %}<think>{% endif %}"
    )
    ours = vocabulary(name)
    content = "a<think>b c<think> d"
    template = ChatTemplate(source, ours)
    ids = template.encode([{"role": "user", "content": content}], add_generation_prompt=False)
    template.close()
    assert ours.decode(ids) in (content, f" {content}")
    assert ours.added["<think>"].id not in ids
