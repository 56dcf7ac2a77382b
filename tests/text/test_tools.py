"""Tool calls and reasoning, read from text that is cut at every place."""

import json
from itertools import combinations, pairwise

import pytest

from forerun.text.python_calls import json_of_literal
from forerun.text.reasoning import Marks, ReasoningReader, Stage
from forerun.text.tool_prompt import WRITTEN, call_in_text, result_in_text, with_tools_in_text
from forerun.text.tools import (
    DEEPSEEK3,
    DEEPSEEK31,
    DSML,
    DSML4,
    FORMATS,
    FUNCTION_GEMMA,
    GCML,
    GEMMA,
    GIGACHAT,
    GLM,
    GRANITE,
    HERMES,
    KIMI,
    LFM2,
    LLAMA3,
    MINICPM,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    NEMOTRON,
    OLMO3,
    PHI4,
    QWEN,
    SEED,
    ToolReader,
    format_of,
)
from tests.counted import lines

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
OSLO = '{"city": "Os\\"lo} </tool_call", "days": [1, {"a": "]"}]}'


def pieces(text, cuts):
    edges = [0, *cuts, len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def listened(reader, parts):
    """Content and calls, put together as a client does."""
    content, calls = "", []
    for output_tokens in [*map(reader.push, parts), reader.finish()]:
        content += output_tokens.content
        for piece in output_tokens.calls:
            if piece.name is not None:
                assert piece.index == len(calls), "a call begins with its name, in order"
                calls.append([piece.name, ""])
            assert piece.index == len(calls) - 1
            calls[piece.index][1] += piece.arguments
    return content, calls


QWENS_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
PYTHON = "<|tool_call_start|>[{}]<|tool_call_end|>"
"""LFM2's, as its models write it: quotes of both kinds, escaped and not, words of Python and JSON,
and a text behind.
"""
VECTORS = [
    (
        LFM2,
        "Hm " + PYTHON.format("weather(city='Os\\'lo', days=3), now()") + "I look.",
        "HmI look.",
        [["weather", '{"city": "Os\'lo", "days": 3}'], ["now", "{}"]],
    ),
    (
        LFM2,
        PYTHON.format("a.f-1(x=\"a\\n\\u00e9\", y=[True, 'it's', None], z={'k': -1.5e2, 3: ()})"),
        "",
        [["a.f-1", '{"x": "a\\né", "y": [true, "it\'s", null], "z": {"k": -150.0, "3": []}}']],
    ),
    (
        LFM2,
        PYTHON.format("weather(city='x', a=1, 'red', city='') or ('y')', days=null)"),
        "",
        [["weather", '{"city": "x\', a=1, \'red", "city": "\') or (\'y\')", "days": null}']],
    ),
    (
        LFM2,
        "<|tool_call_start|>weather(city=Oslo, days=1+2)\nnow( )<|tool_call_end|>",
        "",
        [["weather", '{"city": "Oslo", "days": "1+2"}'], ["now", "{}"]],
    ),
    (
        LFM2,
        PYTHON.format('{"name": "now", "arguments": {"a": "]"}}') + PYTHON.format("now()"),
        "",
        [["now", '{"a": "]"}'], ["now", "{}"]],
    ),
    (LFM2, PYTHON.format("none, "), PYTHON.format("none, "), []),
    (
        GEMMA,
        'So <|tool_call>call:weather{city:<|"|>Os"lo, {x}<|"|>,days:3,'
        'o:{on:true,a:[<|"|>b<|"|>,null]}}'
        "<tool_call|><|tool_call>call:now{}<tool_call|>",
        "So",
        [
            ["weather", '{"city": "Os\\"lo, {x}", "days": 3, "o": {"on": true, "a": ["b", null]}}'],
            ["now", "{}"],
        ],
    ),
    (
        GEMMA,
        '<|tool_call> call:f{"a b":"x, \\"y\\"",c:Oslo, d : -1.5e2}Then.',
        "Then.",
        [["f", '{"a b": "x, \\"y\\"", "c": "Oslo", "d": -1.5e2}']],
    ),
    (GEMMA, "a <|tool_call>none<tool_call|>", "a <|tool_call>none<tool_call|>", []),
    (GEMMA, '<|tool_call>call:now{a:<|"|>x', "", [["now", '{"a": "x']]),
    (LFM2, "a <|tool_call_start|>[wea", "a <|tool_call_start|>[wea", []),
    (LFM2, "<|tool_call_start|>[now(a='", "", [["now", ""]]),
    (
        QWEN,
        f"Hm\n{QWENS_CALL}\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Hm",
        [["weather", '{"city": "12", "days": 3}'], ["now", "{}"]],
    ),
    (
        SEED,
        QWENS_CALL.replace("tool_call", "seed:tool_call"),
        "",
        [["weather", '{"city": "12", "days": 3}']],
    ),
    (QWEN, "So. <function=now>\n</function> Done.", "So. Done.", [["now", "{}"]]),
    (
        QWEN,
        "<tool_call>\n<function=f>\n<parameter=a>\n\n x </parameter> <b>\n\n</parameter>\n"
        "<parameter=b>\nTrue\n</parameter>\n<parameter=c>[1,\n2]</parameter></function>"
        "<function=now></function></tool_call>",
        "",
        [["f", '{"a": "\\n x </parameter> <b>\\n", "b": true, "c": [1,\n2]}'], ["now", "{}"]],
    ),
    (QWEN, "<tool_call>none</tool_call>", "<tool_call>none</tool_call>", []),
    (QWEN, "a <tool_call> <funct", "a <tool_call> <funct", []),
    (QWEN, "<function=f>\n<parameter=a>\nx\n</parameter>\n</tool_call>", "", [["f", '{"a": "x"}']]),
    (HERMES, "no call", "no call", []),
    (HERMES, "a < b <tool_cal", "a < b <tool_cal", []),
    (
        HERMES,
        f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {OSLO} }}\n</tool_call>',
        "Let me see.",
        [["weather", OSLO]],
    ),
    (
        HERMES,
        '<tool_call>[{"name":"now","arguments":{}},\n{"name": "now", "arguments": {}}]'
        "</tool_call>\n"
        '<tool_call>{"arguments": {"a": 1}, "name": "x"}</tool_call>\nDone. ',
        "\nDone.",
        [["now", "{}"], ["now", "{}"], ["x", '{"a": 1}']],
    ),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a', "", [["now", '{"a']]),
    (HERMES, "x <tool_call>nonsense</tool_call> y", "x <tool_call>nonsense</tool_call> y", []),
    (HERMES, '<tool_call>{"nam', '<tool_call>{"nam', []),
    (
        HERMES,
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [["now", '{"a": 1}']],
    ),
    (LLAMA3, f'\n {{"name": "weather", "parameters": {OSLO}}}', "", [["weather", OSLO]]),
    (
        LLAMA3,
        '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {"a": []}}',
        "",
        [["now", "{}"], ["now", '{"a": []}']],
    ),
    (
        LLAMA3,
        'It is {"name": "now", "parameters": {}}',
        'It is {"name": "now", "parameters": {}}',
        [],
    ),
    (LLAMA3, '{"colour": "red"} is JSON', '{"colour": "red"} is JSON', []),
    (LLAMA3, '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    (
        LLAMA3,
        '{"type": "function", "name": "now", "parameters": {"a": 1}}',
        "",
        [["now", '{"a": 1}']],
    ),
    (
        HERMES,
        f'```json\n{{\n  "name": "weather",\n  "arguments": {OSLO}\n}}\n```',
        "",
        [["weather", OSLO]],
    ),
    (HERMES, f'{{"name": "weather", "arguments": {OSLO}}}', "", [["weather", OSLO]]),
    (HERMES, f'{{{{"name": "weather", "arguments": {OSLO}}}}}', "", [["weather", OSLO]]),
    (
        HERMES,
        f'I look:\n\n```\n{{"name": "weather", "arguments": {OSLO}}}\n```\n```json\n'
        '{"name": "now", "arguments": {}}\n```\nThat is it.',
        "I look:That is it.",
        [["weather", OSLO], ["now", "{}"]],
    ),
    (
        HERMES,
        f'{{"name": "weather", "arguments": {OSLO}}}\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "",
        [["weather", OSLO], ["now", "{}"]],
    ),
    (
        HERMES,
        '```json\n[{"name": "now", "arguments": {}}, '
        '{"name": "now", "arguments": {"a": [1]}}]\n```',
        "",
        [["now", "{}"], ["now", '{"a": [1]}']],
    ),
    (HERMES, '{{"name": "now"}}', "", [["now", "{}"]]),
    (
        HERMES,
        '<tool_call>{"name": "now", "arguments": null}\n{"name": "now", "arguments": ""}\n'
        '{"name": "now", "arguments": [1, "a"]}</tool_call>',
        "",
        [["now", "{}"], ["now", "{}"], ["now", '[1, "a"]']],
    ),
    (MISTRAL, '[TOOL_CALLS] [{"name": "now"}]', "", [["now", "{}"]]),
    (
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
        "<|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|>",
        "",
        [["now", "{}"]],
    ),
    (HERMES, '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    (
        HERMES,
        'As JSON:\n```json\n{"name": "Ada"}\n```\nand `code` ```x``` {"name": "me"}',
        'As JSON:\n```json\n{"name": "Ada"}\n```\nand `code` ```x``` {"name": "me"}',
        [],
    ),
    (HERMES, '```json\n{"name": "no', '```json\n{"name": "no', []),
    (
        HERMES,
        '<tool_call>{"name": "now"}</tool_call>\nThen {"name": "now"}',
        '\nThen {"name": "now"}',
        [["now", "{}"]],
    ),
    (HERMES, '{"name": "now"}\n\nThen {"name": "now"}', 'Then {"name": "now"}', [["now", "{}"]]),
    (HERMES, '``````json\n{"name": "now"}', "```", [["now", "{}"]]),
    (
        MISTRAL,
        f'Sure. [TOOL_CALLS] [{{"name": "weather", "arguments": {OSLO}}}, '
        '{"name": "now", "arguments": {}}]',
        "Sure.",
        [["weather", OSLO], ["now", "{}"]],
    ),
    (
        MISTRAL_ARGS,
        f"Sure. [TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]now[CALL_ID]ab12cd34e[ARGS]{{}} ",
        "Sure.",
        [["weather", OSLO], ["now", "{}"]],
    ),
    (MISTRAL_ARGS, '[TOOL_CALLS]now{"a": "\\\\"}', "", [["now", '{"a": "\\\\"}']]),
    (MISTRAL_ARGS, '[TOOL_CALLS]now[ARGS]{"a": [', "", [["now", '{"a": [']]),
    (MISTRAL_ARGS, "a [TOOL_CALLS]now[ARGS", "a [TOOL_CALLS]now[ARGS", []),
    (MISTRAL_ARGS, "[TOOL_CALLS]not so {x} y", "[TOOL_CALLS]not so {x} y", []),
    (
        KIMI,
        "Sure. <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{OSLO}<|tool_call_end|><|tool_call_begin|>functions.now:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "Sure.",
        [["weather", OSLO], ["now", "{}"]],
    ),
    (
        DEEPSEEK31,
        f"Sure. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{OSLO}"
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>a:1<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "Sure.",
        [["weather", OSLO], ["a:1", "{}"]],
    ),
    (
        DEEPSEEK3,
        "Sure.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{OSLO}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
        '```json\n{"a": "```"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "Sure.",
        [["weather", OSLO], ["now", '{"a": "```"}']],
    ),
    (
        DEEPSEEK3,
        "<｜tool▁calls▁begin｜>but no <｜tool▁call▁begin｜>function",
        "<｜tool▁calls▁begin｜>but no <｜tool▁call▁begin｜>function",
        [],
    ),
    (
        KIMI,
        "<|tool_calls_section_begin|>but no <|tool_call_begin|>",
        "<|tool_calls_section_begin|>but no <|tool_call_begin|>",
        [],
    ),
    (
        GRANITE,
        f'Sure. <|tool_call|>[{{"name": "weather", "arguments": {OSLO}}}, '
        '{"name": "now", "arguments": {}}]',
        "Sure.",
        [["weather", OSLO], ["now", "{}"]],
    ),
    (
        FUNCTION_GEMMA,
        '<start_function_call>call:weather{city:<escape>Os, "lo"<escape>,days:3}'
        "<end_function_call><start_function_call>call:now{}<end_function_call>",
        "",
        [["weather", '{"city": "Os, \\"lo\\"", "days": 3}'], ["now", "{}"]],
    ),
    (
        OLMO3,
        "Hm.\n<function_calls>\nweather(city=\"Os, 'lo'\", days=3)\nnow()\n</function_calls>",
        "Hm.",
        [["weather", '{"city": "Os, \'lo\'", "days": 3}'], ["now", "{}"]],
    ),
    (
        NEMOTRON,
        f'Hm. <TOOLCALL>[{{"name": "weather", "arguments": {OSLO}}}, '
        '{"name": "now", "arguments": {}}]</TOOLCALL>\n',
        "Hm.",
        [["weather", OSLO], ["now", "{}"]],
    ),
    (
        GIGACHAT,
        f'Sure. <|function_call|>{{"name": "weather", "arguments": {OSLO}}}',
        "Sure.",
        [["weather", OSLO]],
    ),
    (
        PHI4,
        f'<|tool_call|>{{"name": "weather", "arguments": {OSLO}}}<|/tool_call|>'
        '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>',
        "",
        [["weather", OSLO], ["now", "{}"]],
    ),
    (
        GLM,
        "Hm\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n"
        "<arg_key>days</arg_key><arg_value> 3 </arg_value>\n</tool_call>\n"
        "<tool_call>now</tool_call>",
        "Hm",
        [["weather", '{"city": "12", "days": 3}'], ["now", "{}"]],
    ),
    (
        MINIMAX,
        'Hm.\n<minimax:tool_call>\n<invoke name="weather">\n'
        '<parameter name="city">Os</parameter>"lo\n'
        '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n'
        "</invoke>\n</minimax:tool_call>\n",
        "Hm.",
        [["weather", '{"city": "Os</parameter>\\"lo\\n", "days": 3}'], ["now", "{}"]],
    ),
    (  # Without an opener each object is a call of an offered function, or none.
        HERMES,
        '{"name": "now", "arguments": {}}\n{"name": "z", "arguments": {"v": 0}}',
        '{"name": "z", "arguments": {"v": 0}}',
        [["now", "{}"]],
    ),
    (
        HERMES,
        '{{"name": "now", "arguments": {}}}\n{{"name": "weather", "arguments": {"city": {}}}}',
        "",
        [["now", "{}"], ["weather", '{"city": {}}']],
    ),
    (MINIMAX, "<minimax:tool_call>none</", "<minimax:tool_call>none</", []),
    (
        DSML,
        "So.\n\n<|DSML|function_calls>\n"
        '<|DSML|invoke name="weather">\n'
        '<|DSML|parameter name="city" string="true">12</|DSML|parameter>\n'
        '<|DSML|parameter name="days" string="false">[1, "a"]</|DSML|parameter>\n</|DSML|invoke>\n'
        '<|DSML|invoke name="x">\n<|DSML|parameter name="a" string="true">3</|DSML|parameter>\n'
        '<|DSML|parameter name="b" string="false">3</|DSML|parameter>\n</|DSML|invoke>\n'
        "</|DSML|function_calls>".replace("|", "\uff5c"),
        "So.",
        [["weather", '{"city": "12", "days": [1, "a"]}'], ["x", '{"a": "3", "b": 3}']],
    ),
    (
        GLM,
        '<tool_call>x\n<arg_key>a</arg_key>\n<arg_value>b "c"\n<</arg_value>\n</tool_call>',
        "",
        [["x", '{"a": "b \\"c\\"\\n<"}']],
    ),
]


@pytest.mark.parametrize(("format", "text", "content", "calls"), VECTORS)
def test_any_cut_gives_the_same_calls(format, text, content, calls):
    cuts = [(), range(1, len(text)), *((i,) for i in range(1, len(text)))]
    cuts += list(combinations(range(1, len(text), 3), 2))[::4][:200]
    for cut in cuts:
        events = listened(ToolReader(format, TOOLS), pieces(text, cut))
        assert events == (content, calls), cut


def test_names_of_many_functions_are_read_when_an_answer_may_begin_with_one():
    """One of 50,000 names: before a head is there, they are not even sorted."""
    offered = ({"type": "function", "function": {"name": f"f{place}"}} for place in range(50_000))
    many = [*offered]
    reader = ToolReader(HERMES, many)
    assert reader.push("Just a text with ```js``` in it.").content
    assert "_names" not in vars(reader._heads)
    events = listened(ToolReader(HERMES, many), ['{"name": "f4', '9999", "arguments": {}}'])
    assert events == ("", [["f49999", "{}"]])
    assert listened(ToolReader(HERMES, many), ['{"name": "f50000"}'])[1] == []


def test_without_parallel_calls_only_the_first_object_is_one():
    text = '{"name": "now", "arguments": {}}\n{"name": "now"}'
    for cut in range(len(text)):
        events = listened(ToolReader(HERMES, TOOLS, several=False), pieces(text, [cut]))
        assert events == ('{"name": "now"}', [["now", "{}"]])


def test_white_space_without_end_is_not_held_back():
    reader = ToolReader(HERMES, TOOLS)
    written = sum(len(reader.push(" ").content) for _ in range(5000))
    assert written >= 5000 - 2048
    assert listened(reader, ["end"]) == (" " * (5000 - written) + "end", [])


def test_arguments_come_while_they_are_written():
    reader = ToolReader(HERMES, TOOLS)
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 3}}</tool_call>'
    output_tokens = [reader.push(character) for character in text]
    telling = [index for index, one in enumerate(output_tokens) if one.calls]
    assert len(telling) > 20, "in pieces, not at the end"
    first = output_tokens[telling[0]].calls[0]
    assert (first.name, first.arguments) == ("weather", "")
    assert text[: telling[0]].endswith('"weather"')


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("hermes",)])
def test_the_template_shows_the_format(name):
    shown = {
        "glm": "{% for tool in tools %}<tool_call>{name}<arg_key>",
        "qwen3-coder": "<tool_call>\n<function=example_function_name>\n<parameter=a>",
        "seed-oss": "<seed:tool_call>\n<function={{ name }}>\n<parameter=a>",
        "minimax-m2": "{%- set toolcall_begin_token   = '<minimax:tool_call>' -%}",
        "deepseek-v3.2": "{%- set dsml_token = '\uff5cDSML\uff5c' -%}",
        "deepseek-v3": "{% for tool in tools %}{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + "
        "c.type + '<｜tool▁sep｜>' + c.function.name + '\\n' + '```json' + '\\n' }}{% endfor %}",
        "deepseek-v3.1": "{% for tool in tools %}{{ '<｜tool▁calls▁begin｜>' }}"
        "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' }}{% endfor %}",
        "deepseek-v4": "{%- set dsml = '\uff5cDSML\uff5c' -%}{{- '<' + dsml + 'tool_calls>\\n' -}}",
        "functiongemma": "{{- '<start_function_call>call:' + function['name'] + '{' -}}",
        "olmo3": "Output any function calls within <function_calls></function_calls> XML tags.",
        "nemotron": "{{- '<TOOLCALL>[' -}}{%- for call in message.tool_calls -%}",
        "apriel": 'within <tool_call></tool_call> XML tags.\n<tool_calls>[{"name": <name-1>}]',
        "gigachat3.1": "{{- '<|function_call|>' + call | tojson -}}",
        "gigachat3.5": "{{- '<\uff5cGCML\uff5ctool_calls>\\n' -}}",
        "minicpm5": """{{- '<function name="' ~ tool_call.name ~ '">' }}""",
        "mistral": "{{ '[TOOL_CALLS]' }}",
        "mistral-args": "{{ '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments | tojson }}",
        "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}",
        "granite": "{{ '<|tool_call|>' + calls | tojson }}",
        "gemma4": "{{ '<|tool_call>call:' + f.name + '{' }}<|tool_call|>",
        "lfm2": "{%- if tools -%}{{ 'List of tools: [' + tools | join(', ') + ']' }}",
        "phi4": "{{ '<|tool_call|>' + call | tojson + '<|/tool_call|>' }}",
        "harmony": "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>",
        "llama3": "{% if tools %} Environment: ipython ... dictionary of parameters",
    }
    assert format_of(shown[name]).name == name
    assert format_of("{% if tools %}<tool_call>") == HERMES == format_of("plain")
    # As DeepSeek publishes it, without tools: they are offered as text, and so called.
    assert format_of("{% for tool in m.tool_calls %}<｜tool▁calls▁begin｜>```json") == HERMES


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("007", 7), ("1_000", 1000), (".5", 0.5), ("-2.", -2.0), ("1e999", "1e999"), ("NaN", "NaN"),
        ("'\\ud83d\\ude00'", "\U0001f600"), ("'\\ud83d'", "\ufffd"), ('"\\/\\q"', "/\\q"),
        ("\"\"\"a\n'b'\"\"\"", "a\n'b'"), ("''", ""), ("'", "'"), ("[1, 2,]", [1, 2]),
        ("[1 2]", "[1 2]"), ("{'a'}", "{'a'}"), ("{[1]: 2}", "{[1]: 2}"), ("f(1)", "f(1)"),
        ("[" * 70 + "]" * 70, "[" * 70 + "]" * 70), ("[" * 60 + "]" * 60, None), ("x=1", "x=1"),
    ],
)  # fmt: skip
def test_literals_of_python_become_json(written, read):
    parsed = json.loads(json_of_literal(written))
    assert parsed == (read if read is not None else json.loads(written))
    assert json.loads(json_of_literal(written, "string")) == (
        read if written[0] in "'\"" else written
    )


NAMES = ["content-type", "k k", 'x"y', "it's", "b/c", "a=b", "a", "d\\e", "\u00e9(", " led", ""]


def is_a_call(format, tools, text, wanted):
    """Assert that a text is a call of f with these arguments, wherever it is cut."""
    for cut in range(len(text)):
        content, calls = listened(ToolReader(format, tools), pieces(text, [cut]))
        assert (content, [name for name, _ in calls]) == ("", ["f"]), cut
        assert json.loads(calls[0][1]) == wanted, cut


def test_values_in_cdata_may_contain_the_closing_tag():
    text = '<function name="f"><param name="a"><![CDATA[<b></param>]]></param></function>'
    parameters = {"properties": {"a": {"type": "string"}}}
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    is_a_call(MINICPM, tools, text, {"a": "<b></param>"})
    assert MINICPM.seen == ("<function", "</function>", "<param", "</param>")


@pytest.mark.parametrize("value", ["'it, k k is'", '"a)"', "[1, 'a']", "12"])
@pytest.mark.parametrize("quote", ["'", '"'])
def test_arguments_have_the_names_that_tools_declare(quote, value):
    """Python has no such arguments, but grammars write every property's name as it is."""
    parameters = {"type": "object", "properties": {name: {} for name in NAMES}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    value = value.replace('"', quote)
    text = "<|tool_call_start|>[f(" + ", ".join(f"{name}={value}" for name in NAMES) + ")]"
    text += "<|tool_call_end|>"
    wanted = dict.fromkeys(NAMES, json.loads(json_of_literal(value)))
    is_a_call(LFM2, tools, text, wanted)


def in_tags(format, names):
    """A call of f whose arguments are all "v"."""
    line = "\n" * format.tags.on_lines
    heads = [format.tags.parameter.format(name, string="true") for name in names]
    written = [f"{head}{line}v{line}{format.tags.parameter_end}\n" for head in heads]
    body = [format.tags.function.format("f"), "\n", *written, format.tags.function_end]
    return f"{format.opener}\n{''.join(body)}\n{format.closer}"


@pytest.mark.parametrize(
    "format", [QWEN, MINIMAX, DSML, DSML4, GCML], ids=lambda format: format.name
)
def test_parameters_in_tags_have_the_names_that_tools_declare(format):
    names = ["a>b", "a", "", " led", "two\nlines", 'x"y', "{0}"]
    parameters = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = in_tags(format, names)
    is_a_call(format, tools, text, dict.fromkeys(names, "v"))


@pytest.mark.parametrize("value", ['<|"|>b:c}<|"|>', '"a:1}"', '{"a:b":[1]}', "12"])
def test_keys_are_those_that_tools_declare(value):
    """Gemma's have no marks: a colon, a brace or nothing may be a name that a grammar wrote."""
    names = ["a", "a:b", "", "{0}", "}", " led", ",", '"q', "<|", "k k", "é\n"]
    parameters = {"type": "object", "properties": {name: {} for name in names}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    written = ",".join(f"{name}:{value}" for name in names)
    text = f"<|tool_call>call:f{{{written}}}<tool_call|>"
    wanted = dict.fromkeys(names, json.loads(value.replace('<|"|>', '"')))
    is_a_call(GEMMA, tools, text, wanted)


@pytest.mark.parametrize("length", [255, 257, 20_000])
def test_declared_names_may_be_long(length):
    name = "n" * length
    parameters = {"type": "object", "properties": {name: {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    call = {"function": {"name": "f", "arguments": {name: "v"}}}
    message = {"role": "assistant", "tool_calls": [call]}
    texts = {format: call_in_text(message, format)["content"] for format in WRITTEN}
    texts |= {format: in_tags(format, [name]) for format in (QWEN, MINIMAX, DSML, DSML4, GCML)}
    texts[GEMMA] = f'<|tool_call>call:f{{{name}:<|"|>v<|"|>}}<tool_call|>'
    texts[GLM] = f"<tool_call>f\n<arg_key>{name}</arg_key>\n<arg_value>v</arg_value>\n</tool_call>"
    for format, text in texts.items():
        events = listened(ToolReader(format, tools), pieces(text, range(0, len(text), 97)))[1]
        assert [json.loads(arguments) for _, arguments in events] == [{name: "v"}], format.name


@pytest.mark.parametrize("format", [LFM2, QWEN, GEMMA], ids=lambda format: format.name)
def test_reading_takes_no_longer_where_a_tool_declares_many_arguments(format):
    """A tool of 256 KiB has room for 20,000; a pattern of so many alternatives took seconds."""
    text = {
        LFM2: "<|tool_call_start|>[f(name7='a, b', name8=1)]<|tool_call_end|>",
        QWEN: in_tags(QWEN, ["name7", "name8"]),
        GEMMA: '<|tool_call>call:f{name7:<|"|>a<|"|>,name8:1}<tool_call|>',
    }[format]
    place = text.index("name7")

    def work(many):
        declared = {f"name{number}": {"type": "string"} for number in range(many)}
        function = {"name": "f", "parameters": {"type": "object", "properties": declared}}
        reader = ToolReader(format, [{"type": "function", "function": function}])
        calls = [*reader.push(text[:place]).calls]
        assert [call.name for call in calls if call.name] == ["f"]
        count = lines(lambda: [calls.extend(reader.push(sign).calls) for sign in text[place:]])
        assert {*json.loads("".join(call.arguments for call in calls))} == {"name7", "name8"}
        return count

    assert work(5_000) < 1.2 * work(50)


def test_an_argument_without_a_name_may_be_the_only_one():
    parameters = {"type": "object", "properties": {"": {}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for format, text in (
        (LFM2, "<|tool_call_start|>[f(=1)]<|tool_call_end|>"),
        (GEMMA, "<|tool_call>call:f{:1}<tool_call|>"),
    ):
        assert listened(ToolReader(format, tools), [text]) == ("", [["f", '{"": 1}']])


def test_a_number_of_json_stays_as_it_is():
    for number in ("9" * 600, "-1." + "3" * 500, "1e99", "0.10", "-0", "2E+07"):
        assert json_of_literal(number) == number
        assert json_of_literal(number, "string") == json.dumps(number)
    assert json_of_literal("-2e999", "number") == "-2e999" and json_of_literal("2e999") == '"2e999"'
    assert json_of_literal("007") == "7" and json_of_literal("1_000") == "1000"


def test_a_long_argument_is_read_once():
    """Not from its beginning for every token of it."""

    def work(many):
        reader = ToolReader(LFM2, TOOLS)
        parts = ["<|tool_call_start|>[weather(city='", *["it's ("] * many, "')]"]
        return lines(lambda: [reader.push(part) for part in parts])

    assert work(800) < 2.5 * work(400)


def test_tools_calls_and_results_as_text():
    messages = [{"role": "user", "content": "Hi"}]
    offered = with_tools_in_text(messages, TOOLS)
    assert offered[0]["role"] == "system" and json.dumps(TOOLS[0]) in offered[0]["content"]
    system = [{"role": "system", "content": "Be brief."}, *messages]
    assert with_tools_in_text(system, TOOLS)[0]["content"].startswith("Be brief.\n\nYou can call")
    call = {"function": {"name": "now", "arguments": {"a": 1}}}
    written = call_in_text({"role": "assistant", "content": None, "tool_calls": [call]})
    assert set(written) == {"role", "content"}
    reader = ToolReader(HERMES, TOOLS)
    assert listened(reader, [written["content"]]) == ("", [["now", '{"a": 1}']])
    arguments = {"a": 'it\'s "é"\n', "b": None, "c": [True, {"d": 1.5}], "e": False}
    calls = [call, {"function": {"name": "f", "arguments": arguments}}]
    message = {"role": "assistant", "content": "Hm", "tool_calls": calls}
    for format in WRITTEN:
        content, events = listened(
            ToolReader(format, TOOLS), [call_in_text(message, format)["content"]]
        )
        assert content == "Hm"
        assert [json.loads(text) for _, text in events] == [{"a": 1}, arguments]
    result = {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"}
    assert result_in_text({"role": "tool", "content": "noon"}) == result


THINK = Marks.of("</think>")
ALOUD = [
    (Stage.UNDECIDED, "<think>\nHm. <b> </thin\n</think>\n\nYes.\n", "Hm. <b> </thin", "Yes.\n"),
    (Stage.UNDECIDED, "\n<think></think>Yes", "", "Yes"),
    (Stage.UNDECIDED, "<th> Yes", "", "<th> Yes"),
    (Stage.UNDECIDED, "<thin", "", "<thin"),
    (Stage.THINKING, "\nHm.</think>{}", "Hm.", "{}"),
    (Stage.THINKING, "Hm, it </", "Hm, it </", ""),
    (Stage.THINKING, "Hm. \n", "Hm.", ""),
    (Stage.ANSWERING, "\nYes", "", "Yes"),
    (Stage.ANSWERING, "a </think> b", "", "a </think> b"),
    (Stage.THINKING, "Hm.</think>\n\n</think>\nYes </think>", "Hm.", "Yes </think>"),
    (Stage.THINKING, "Hm.</think></thin", "Hm.", "</thin"),
]


@pytest.mark.parametrize(("stage", "text", "reasoning", "answer"), ALOUD)
def test_any_cut_gives_the_same_reasoning(stage, text, reasoning, answer):
    cuts = [(), range(1, len(text)), *combinations(range(1, len(text)), 2)]
    for cut in cuts:
        reader = ReasoningReader(THINK, stage)
        output_tokens = [*map(reader.push, pieces(text, cut)), reader.finish(cut=True)]
        assert tuple(map("".join, zip(*output_tokens, strict=True))) == (reasoning, answer), cut


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>A</think><response>B</response>", "B"),
        ("<think>A</think>\n<response>B </response> C</response>\n", "B </response> C"),
        ("<think>A</think><response>B</resp", "B</resp"),
        ("<think>A</think><res B</response>", "<res B</response>"),
    ],
)
def test_granites_answers_stand_in_a_shell(text, answer):
    marks = Marks.found_in("between <think></think> and write between <response></response>")
    for cut in [(), range(1, len(text)), *combinations(range(1, len(text)), 2)]:
        reader = ReasoningReader(marks, Stage.UNDECIDED)
        events = [*map(reader.push, pieces(text, cut)), reader.finish()]
        assert ["".join(part) for part in zip(*events, strict=True)] == ["A", answer], cut


def test_a_call_ends_a_thought_that_is_not_closed():
    text, results = "Hm. <tool_call>\nx", set()
    for cut in [(), range(1, len(text)), *combinations(range(1, len(text)), 2)]:
        reader = ReasoningReader(THINK, Stage.THINKING, ends=("<tool_call>",))
        parts = [*map(reader.push, pieces(text, cut)), reader.finish()]
        results.add(tuple(map("".join, zip(*parts, strict=True))))
    assert results == {("Hm.", "<tool_call>\nx")}
    assert QWEN.ends_thoughts == ("<tool_call>",) and HERMES.ends_thoughts == ()
    whole = (KIMI, DEEPSEEK3, DEEPSEEK31, MINIMAX, DSML, DSML4, GCML)
    assert all(each.ends_thoughts == (each.opener,) for each in whole)


def test_the_declared_types_say_what_is_text():
    """Where several types are declared, a text is one unless it is of another of them."""
    kinds = {"a": ["string", "null"], "b": ["integer", "string"], "c": "boolean"}
    parameters = {"properties": {name: {"type": kind} for name, kind in kinds.items()}}
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    for given, read in (
        (("12", "12", "False"), {"a": "12", "b": 12, "c": False}),
        (("null", "x", "true"), {"a": None, "b": "x", "c": True}),
        (('"q"', "1.5", "maybe"), {"a": "q", "b": "1.5", "c": "maybe"}),
    ):
        pairs = zip(kinds, given, strict=True)
        inside = (f"<parameter={key}>{value}</parameter>" for key, value in pairs)
        _, calls = listened(ToolReader(QWEN, tools), [f"<function=f>{''.join(inside)}</function>"])
        assert json.loads(calls[0][1]) == read


def test_marks_and_stages_are_found():
    assert Marks.found_in("... '</think>' in content ...") == THINK
    assert Marks.found_in("no thoughts") is None and Marks.found_in(None) is None
    assert Marks.found_in("[/THINK]").opener == "[THINK]"
    assert THINK.stage("assistant\n<think>\n") == Stage.THINKING
    assert THINK.stage("<think>\n\n</think>\n\n") == Stage.ANSWERING
    assert THINK.stage("assistant\n") == Stage.UNDECIDED


@pytest.mark.parametrize(
    ("stage", "text", "reasoning", "answer"),
    [
        (Stage.UNDECIDED, "<|channel>thought\nA <b>\n<channel|>C", "A <b>", "C"),
        (Stage.UNDECIDED, "<|channel>thoughts run<channel|>C", "s run", "C"),
        (Stage.UNDECIDED, "<|channel>Why<channel|>\n C", "Why", "C"),
        (Stage.THINKING, "thought\n\n<channel|>C", "", "C"),
        (Stage.THINKING, "A<channel|><channel|>C", "A", "C"),
        (Stage.ANSWERING, "thought", "", "thought"),
        (Stage.UNDECIDED, "<|channel>thought\n<channel|>C<channel|>", "", "C"),
        (Stage.UNDECIDED, "<|channel>thought\n<channel|>C<|channel>thought\n<channel|>", "", "C"),
        (Stage.UNDECIDED, "<|channel><|channel>thought\n<channel|>C", "", "C"),
        (Stage.ANSWERING, "C <|channel>thought\nA<channel|><channel|>D<|chan", "A", "C D<|chan"),
        (Stage.ANSWERING, "C<|channel>thought\nA", "A", "C"),
    ],
)
def test_the_word_behind_gemmas_opener_is_no_reasoning(stage, text, reasoning, answer):
    marks = Marks.found_in("{{ '<|channel>thought\n' + t + '<channel|>' }}")
    for cut in [(), range(1, len(text)), *((i,) for i in range(1, len(text)))]:
        reader = ReasoningReader(marks, stage)
        events = [*map(reader.push, pieces(text, cut)), reader.finish()]
        assert ["".join(part) for part in zip(*events, strict=True)] == [reasoning, answer], cut
    assert marks.stage("<|turn>model\n<|channel>thought\n") == Stage.THINKING
    assert marks.stage("<|channel>thought\n<channel|>") == Stage.ANSWERING
    assert marks.going_on("x", "\nA") == "x<|channel>thought\nA"
    begun = {"content": "<|channel>thought\nA"}
    assert marks.begun(begun) == "\nA"
