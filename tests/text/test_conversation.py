"""Conversations put into the form that a chat template takes: small templates, each with one habit
of a widely used family, and all official ones in a public package (slow).
"""

import pytest

from forerun.errors import RequestError
from forerun.text.conversation import TemplateTraits, adapted
from forerun.text.template import Template
from tests.worlds.llama_cpp import source

TOOLS = [{"type": "function", "function": {"name": "look_up"}}]
WORDS = ["SYS1", "U1", "look_up", "ARG1", "ARG2", "RES1", "RES2", "SYS2", "ANS", "U2", "U3"]


def call(id, value):
    function = {"name": "look_up", "arguments": {"x": value}}
    return {"id": id, "type": "function", "function": function}


def hard():
    """What agents send: two calls at once, results in another order, a late system message, a user
    that goes on before the model answers.
    """
    return [
        {"role": "system", "content": "SYS1"},
        {"role": "user", "content": "U1"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call("call_aaaaaaaaaaaa", "ARG1"), call("call_b", "ARG2")],
        },
        {"role": "tool", "tool_call_id": "call_b", "content": "RES2", "name": "look_up"},
        {"role": "tool", "tool_call_id": "call_aaaaaaaaaaaa", "content": "RES1", "name": "look_up"},
        {"role": "system", "content": "SYS2"},
        {"role": "assistant", "content": "ANS"},
        {"role": "user", "content": "U2"},
        {"role": "user", "content": "U3"},
    ]


def prompt(source, messages, tools=None):
    """The text of a conversation by a template, and what it was found to take."""
    template = Template(source)

    def render(messages, tools):
        names = {"messages": list(messages), "tools": tools, "add_generation_prompt": True}
        return template.render(names | {"bos_token": "<s>", "eos_token": "</s>"})

    traits = TemplateTraits(source, render)
    return render(*adapted(messages, tools, traits)), traits


LOOP = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}BODY{% endfor %}"
)
CALLS = "{% for c in m.tool_calls or [] %}CALL{% endfor %}"
PLAIN = "[{{ m.role }}]{{ m.content }}" + CALLS
JSON_CALL = "{{ c.function.name }}{{ c.function.arguments | tojson }}"
MISTRAL_GUARD = """{% set ns = namespace(i=0) %}
{% set begin = 1 if messages[0].role == "system" else 0 %}{% for m in messages[begin:] %}
{% if m.role == "user" or (m.role == "assistant" and not m.tool_calls) %}
{% if (m.role == "user") != (ns.i % 2 == 0) %}{{ raise_exception("must alternate") }}{% endif %}
{% set ns.i = ns.i + 1 %}{% elif m.role == "system" %}{{ raise_exception("system") }}{% endif %}
{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception("ids") }}{% endif %}
{% endfor %}{% endfor %}"""


def habit(body, call=JSON_CALL, before=""):
    return before + LOOP.replace("BODY", body).replace("CALL", call)


TEMPLATES = {
    "plain": habit(PLAIN),
    # Qwen3, gpt-oss, Bielik: a look into the content of a call.
    "looks into content": habit("{% if 'x' in m.content %}{% endif %}" + PLAIN),
    # QwQ, Ministral, Devstral.
    "splits content": habit("{{ m.role }}{{ m.content.split('</think>')[-1] }}" + CALLS),
    # Cohere: null becomes a word.
    "spells null": habit("[{{ m.role }}]{{ m.content | string }}" + CALLS),
    # DeepSeek's distilled models: only null says that there are calls; arguments are text.
    "calls only where null": habit(
        "[{{ m.role }}]{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
        "{{ c.function.name + c.function.arguments }}",
    ),
    # SmolLM3.
    "leaves calls out": habit("[{{ m.role }}]{{ m.content }}"),
    # Granite 3.3: it asks for calls of its own kind.
    "leaves Granite's calls out": habit(
        "[{{ m.role }}]{{ m.content }}",
        before="{% if tools %}Respond with <|tool_call|>.{% endif %}",
    ),
    # LFM2 and LFM2.5 of 350M to 1.2B: its calls are text of a message, results are not.
    "leaves its own calls out": habit(
        "[{{ m.role }}]{{ m.content }}", before="{% if tools %}List of tools: {% endif %}"
    ),
    # rwkv, Phi-3.5: neither tools nor their results.
    "knows no tools": "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    "{{ m.role + m.content }}{% endif %}{% endfor %}",
    # Llama 3.1 and later.
    "one call at once": habit(
        "{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('single') }}"
        "{% endif %}" + PLAIN
    ),
    # GigaChat, gpt-oss: no error, but the second call is gone.
    "first call only": habit(PLAIN.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")),
    "mistral": habit(PLAIN, before=MISTRAL_GUARD),
    # Gemma 2.
    "gemma": "{% if messages[0].role == 'system' %}{{ raise_exception('System role') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('must alternate') }}{% endif %}{{ m.role + m.content }}{% endfor %}",
    # DeepSeek R1: the last system message replaces the first.
    "one system message": "{% set ns = namespace(s='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.s = m.content %}{% endif %}{% endfor %}{{ ns.s }}"
    + habit("{% if m.role != 'system' %}" + PLAIN + "{% endif %}"),
    # ByteDance, Hermes, Apertus.
    "needs descriptions": "{% for t in tools or [] %}{{ 'x' + t.function.description }}"
    "{{ t.function.parameters.properties.items() | list }}{{ t.function.name }}{% endfor %}"
    + "{% for m in messages %}"
    + PLAIN.replace("CALL", JSON_CALL)
    + "{% endfor %}",
    # Kimi K2: a list that is changed in place.
    "appends and pops": "{% set q = namespace(ids=[]) %}"
    + habit(
        "{% if m.role == 'tool' %}{%- set i = q.ids.pop(0) -%}({{ i }}){% endif %}" + PLAIN,
        "{%- set i = c.function.name -%}{%- set _ = q.ids.append(i) -%}" + JSON_CALL,
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_part_of_an_agents_conversation_is_rendered(name):
    source, messages = TEMPLATES[name], hard()
    text, _ = prompt(source, messages, TOOLS)
    assert [word for word in WORDS if word not in text] == []
    assert text.index("U1") < text.index("ARG1") < text.index("RES1") < text.index("ANS")
    assert "None" not in text and "none" not in text and "null" not in text
    assert '{\\"' not in text, "JSON text within JSON text"
    assert messages == hard(), "the caller's messages are not changed"


def test_calls_that_a_template_leaves_out_are_written_as_it_asks_for_them():
    for kind, opener in (("Granite's ", "<|tool_call|>["), ("", "<tool_call>\n")):
        text, traits = prompt(TEMPLATES[f"leaves {kind}calls out"], hard(), TOOLS)
        assert traits.calls.written and opener + '{"name": "look_up", "arguments": {' in text


def test_each_call_stands_before_its_own_result():
    text, traits = prompt(TEMPLATES["one call at once"], hard(), TOOLS)
    assert not traits.parallel_calls
    assert [text.index(w) for w in ("ARG2", "RES2", "ARG1", "RES1")] == sorted(
        text.index(w) for w in WORDS if w[:3] in ("ARG", "RES")
    )


def test_templates_that_take_everything_get_it_unchanged():
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [call("call_1234567", "v")]},
        {"role": "tool", "tool_call_id": "call_1234567", "content": "r"},
    ]
    expected = [*messages[:2], {**messages[2], "content": None}, messages[3]]
    source = habit("[{{ m.role }}]{{ m.content or '' }}" + CALLS)
    traits = prompt(source, messages, TOOLS)[1]
    assert adapted(messages, TOOLS, traits) == (expected, TOOLS)


def test_ids_are_shortened_alike_for_call_and_result():
    traits = prompt(TEMPLATES["mistral"], hard(), TOOLS)[1]
    assert traits.calls.short_ids
    messages, _ = adapted(hard(), TOOLS, traits)
    made = {each["id"] for m in messages for each in m.get("tool_calls") or ()}
    assert {m["tool_call_id"] for m in messages if m["role"] == "tool"} == made
    assert all(len(id) == 9 and id.isalnum() for id in made)
    own = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "tool_calls": [call("D681PevKs", 1)]},
    ]
    assert adapted(own, TOOLS, traits)[0][1]["tool_calls"][0]["id"] == "D681PevKs"


@pytest.mark.parametrize("alone", [False, True])
def test_a_thought_stands_beside_the_text_of_a_call_where_the_template_takes_both(alone):
    """LFM2.5 does; gpt-oss takes one of them."""
    refusal = (
        "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    )
    thought = "{% for message in [m] %}<think>{{ message.thinking }}</think>{% endfor %}"
    source = habit((refusal if alone else "") + thought + "{{ m.content }}" + CALLS)
    said = {"content": "TEXT", "reasoning_content": "THOUGHT", "tool_calls": [call("c1", "v")]}
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", **said}]
    text = prompt(source, messages, TOOLS)[0]
    assert ("<think>THOUGHT\n\nTEXT</think>" if alone else "<think>THOUGHT</think>TEXT") in text


def test_tools_that_are_null_are_not_iterable():
    """Qwen3-Coder asks for the length of what it believes to be iterable."""
    shown = (
        "{% if tools is iterable and tools | length > 0 %}{{ tools[0].function.name }}{% endif %}"
    )
    source = shown + "{{ messages[0].content }}"
    assert prompt(source, [{"role": "user", "content": "u"}])[0] == "u"
    assert prompt(source, [{"role": "user", "content": "u"}], TOOLS)[0] == "look_upu"


def test_nothing_is_tried_that_a_conversation_does_not_need():
    trials = []

    def render(messages, tools):
        trials.append(messages)
        return ""

    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert adapted(messages, None, TemplateTraits("", render)) == (messages, None)
    assert trials == []


def test_a_template_that_refuses_everything_says_so_itself():
    with pytest.raises(RequestError, match="never"):
        prompt("{{ raise_exception('never') }}", hard(), TOOLS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_official_templates_render_an_agents_conversation():
    """The templates that llama.cpp ships, of some 70 models."""
    folder = source() / "models" / "templates"
    missing = {}
    sources = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.jinja")}
    # It renders nothing without a variable `functions`, which no server sets.
    del sources["fireworks-ai-llama-3-firefunction-v2"]
    assert len(sources) >= 69
    for name, template in sources.items():
        text, _ = prompt(template, hard(), TOOLS)
        if absent := [word for word in WORDS if word not in text]:
            missing[name] = absent
    assert missing == {}
