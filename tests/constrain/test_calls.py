"""Grammars of answers with tool calls: what a model may say, and that the reader understands it."""

import asyncio
import json
import re

import pytest

from forerun.constrain.grammar import Grammar
from forerun.constrain.grammar.calls import Calling, Rules, Signature, tool_rules
from forerun.constrain.grammar.grammar import Start
from forerun.constrain.grammar.tags import Tag, tag_rules
from forerun.constrain.isolation.compile import Compiler
from forerun.constrain.matcher.matcher import Matcher
from forerun.errors import RequestError
from forerun.text.pieces import Pieces
from forerun.text.tokenizer import AddedToken, TextEnds, Tokenizer
from forerun.text.tools import FORMATS, HERMES, ToolReader
from tests.constrain.tools import allowed, compiler, fits
from tests.counted import lines

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", "Rome"]}},
}
NOTE = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "mood": {"type": "string", "enum": ["glad", "sad"]},
        "at": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["text", "mood"],
    "description": "A note ::= text",
}
TOOLS = [
    Signature("weather", Grammar.json_schema(WEATHER, field="tools[0].function.parameters")),
    Signature("note", Grammar.json_schema(NOTE, field="tools[1].function.parameters")),
]
SCHEMAS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "note", "parameters": NOTE}},
]
ROME = '{"city": "Rome", "days": 3}'
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>',
    "llama3": f'{{"name": "weather", "parameters": {ROME}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ROME}}}]',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{ROME}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek-v3.1": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ROME}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    f"```json\n{ROME}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {ROME}}}]',
    "phi4": f'<|tool_call|>{{"name": "weather", "arguments": {ROME}}}<|/tool_call|>',
    "gigachat3.1": f'<|function_call|>{{"name": "weather", "arguments": {ROME}}}',
    "nemotron": f'<TOOLCALL>[{{"name": "weather", "arguments": {ROME}}}]</TOOLCALL>',
    "apriel": f'<tool_calls>[{{"name": "weather", "arguments": {ROME}}}]</tool_calls>',
    "mistral-args": f"[TOOL_CALLS]weather[ARGS]{ROME}",
    "glm": "<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>a < b</arg_value>\n"
    "<arg_key>mood</arg_key>\n<arg_value>sad</arg_value>\n"
    "<arg_key>at</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>",
    "qwen3-coder": "<tool_call>\n<function=note>\n<parameter=text>\na < b\n</parameter>\n"
    "<parameter=mood>\nsad\n</parameter>\n<parameter=at>\n[1, 2]\n</parameter>\n"
    "</function>\n</tool_call>",
}
WRITTEN["lfm2"] = (
    "<|tool_call_start|>[note(text='a < b', mood=\"sad\", at=[1, 2])]<|tool_call_end|>"
)
WRITTEN["olmo3"] = "<function_calls>note(text='a < b', mood=\"sad\", at=[1, 2])</function_calls>"
WRITTEN["seed-oss"] = WRITTEN["qwen3-coder"].replace("tool_call", "seed:tool_call")
TAGGED = ("glm", "qwen3-coder", "seed-oss")
WRITTEN["minimax-m2"] = (
    '<minimax:tool_call>\n<invoke name="note">\n<parameter name="text">a < b</parameter>\n'
    '<parameter name="mood">sad</parameter>\n<parameter name="at">[1, 2]</parameter>\n</invoke>\n'
    "</minimax:tool_call>"
)
DSML = "\uff5cDSML\uff5c"
WRITTEN["deepseek-v3.2"] = (
    f'<{DSML}function_calls>\n<{DSML}invoke name="note">\n'
    f'<{DSML}parameter name="text" string="true">a < b</{DSML}parameter>\n'
    f'<{DSML}parameter name="mood" string="true">sad</{DSML}parameter>\n'
    f'<{DSML}parameter name="at" string="false">[1, 2]</{DSML}parameter>\n</{DSML}invoke>\n'
    f"</{DSML}function_calls>"
)
WRITTEN["deepseek-v4"] = WRITTEN["deepseek-v3.2"].replace("function_calls", "tool_calls")
WRITTEN["gigachat3.5"] = WRITTEN["deepseek-v4"].replace("DSML", "GCML")
TOGETHER = ("minimax-m2", "deepseek-v3.2", "deepseek-v4", "gigachat3.5")
WRITTEN["gemma4"] = (
    '<|tool_call>call:note{text:<|"|>a < b<|"|>,mood:<|"|>sad<|"|>,at:[1, 2]}<tool_call|>'
)
WRITTEN["functiongemma"] = (
    "<start_function_call>call:note{text:<escape>a < b<escape>,mood:<escape>sad<escape>,at:[1, 2]}"
    "<end_function_call>"
)
WRITTEN["minicpm5"] = (
    '<function name="note"><param name="text">a < b</param><param name="mood">sad</param>'
    '<param name="at">[1, 2]</param></function>'
)
NOTED = (*TAGGED, *TOGETHER, "lfm2", "olmo3", "gemma4", "functiongemma", "minicpm5")
CALLED = {name: [("weather", json.loads(ROME))] for name in WRITTEN} | {
    name: [("note", {"text": "a < b", "mood": "sad", "at": [1, 2]})] for name in NOTED
}
MORE = {
    "hermes": WRITTEN["hermes"] + "\n" + WRITTEN["hermes"],
    "llama3": WRITTEN["llama3"] + "; " + WRITTEN["llama3"],
    "mistral": WRITTEN["mistral"][:-1]
    + ", "
    + WRITTEN["mistral"].partition("[{")[2].join("{ ")[:-1],
    "mistral-args": 2 * WRITTEN["mistral-args"],
    "phi4": 2 * WRITTEN["phi4"],
    "gigachat3.1": 2 * WRITTEN["gigachat3.1"],
    "kimi": WRITTEN["kimi"].replace(
        "<|tool_calls_section_end|>",
        WRITTEN["kimi"].removeprefix("<|tool_calls_section_begin|>").replace(":0", ":1"),
    ),
    **{
        name: WRITTEN[name].replace(
            "<｜tool▁calls▁end｜>",
            between + WRITTEN[name].removeprefix("<｜tool▁calls▁begin｜>"),
        )
        for name, between in (("deepseek-v3.1", ""), ("deepseek-v3", "\n"))
    },
    **{
        name: WRITTEN[name].partition("]")[0] + ", " + WRITTEN[name].partition("[")[2]
        for name in ("nemotron", "apriel")
    },
    "granite": WRITTEN["granite"][:-1] + ", " + WRITTEN["granite"][len("<|tool_call|>[") :],
    **{name: WRITTEN[name] + "\n" + WRITTEN[name] for name in (*TAGGED, "minicpm5")},
}
MORE["functiongemma"] = 2 * WRITTEN["functiongemma"].replace("<escape>sad<escape>", '"glad"')
MORE["gemma4"] = 2 * WRITTEN["gemma4"].replace('<|"|>sad<|"|>', '"glad"')
MORE["lfm2"] = WRITTEN["lfm2"].replace(
    ")]", '), weather(city="Oslo"), note(text="\\"\\u00e9", mood=\'glad\')]'
)
MORE["olmo3"] = WRITTEN["olmo3"].replace(
    "</", '\nweather(city="Oslo")\nnote(text="\\"\\u00e9", mood=\'glad\')\n</'
)
MORE["mistral"] = WRITTEN["mistral"][:-1] + ", " + WRITTEN["mistral"][len("[TOOL_CALLS] [") :]
for _name in TOGETHER:
    _opener, _, _rest = WRITTEN[_name].partition("\n")
    _call, _, _closer = _rest.rpartition("\n")
    MORE[_name] = "\n".join([_opener, _call, _call.replace("sad", "glad"), _closer])
BROKEN = {
    name: text.replace("Rome", "Bonn").replace("sad", "odd") for name, text in WRITTEN.items()
}


def rules(name: str, required: bool, several: bool = True, answer=None) -> Grammar:
    return tool_rules(FORMATS[name], TOOLS, Calling(required, several), answer).grammar


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize("name", WRITTEN)
def test_required_calls(name, kind):
    assert fits(rules(name, True), WRITTEN[name], kind)
    assert fits(rules(name, True), MORE[name], kind)
    assert not fits(rules(name, True, several=False), MORE[name], kind)
    for text in ("", "Hello", BROKEN[name], WRITTEN[name][:-1], "x" + WRITTEN[name]):
        assert not fits(rules(name, True), text, kind), text


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_in_free_text(name):
    grammar = rules(name, False)
    for text in ("", "Hello\n<tool_", "< [TOOL", WRITTEN[name], MORE[name]):
        assert fits(grammar, text), text
    assert not fits(grammar, BROKEN[name])
    # Behind Llama 3's only call everything is text.
    assert fits(rules(name, False, several=False), MORE[name]) == (name == "llama3")
    assert fits(grammar, "Let me see. " + WRITTEN[name])
    if name != "llama3":
        assert not fits(grammar, "Let me see. " + BROKEN[name])


BARE = '{"name": "weather", "arguments": {"city": "Oslo"}}'
WRONG = BARE.replace("Oslo", "Bonn")
UNMARKED = [
    (BARE, True),
    (WRONG, False),
    (f"```json\n{BARE}\n```", True),
    (f"```json\n{WRONG}\n```", False),
    (f"Sure:\n```\n{BARE}\n```\nDone.", True),
    (f"Sure:\n```\n{WRONG}\n```\nDone.", False),
    ('``` json\n{\n  "name": "weather",\n  "arguments": {"city": "Oslo"}\n}\n```', True),
    ('{"type": "function", "name": "note", "parameters": {"text": "", "mood": "sad"}}', True),
    ('```json\n{"name": "weather"}\n```', False),
    (f"{{{BARE}}}", True),
    # What no function is called is no call.
    ('{"a": 1}', True),
    ('{"name": "weathers", "arguments": {"city": "Bonn"}}', True),
    ('```json\n{"name": "Ada"}\n``` and ```json\n{"name": "Bo"}\n```', True),
    (f'```json\n{{"name": "Ada"}}\n``` and ```json\n{WRONG}\n```', False),
    (f"So: {WRONG}", True),
    (f"{BARE}\nThen {WRONG}", True),
    (f'{BARE}\n{{"a": 1}}', True),
]
ONE_MORE = [
    (f"{BARE}\n{BARE}", True),
    (f"{BARE}, {WRONG}", False),
    (f"[{BARE}, {BARE}]", True),
    (f"{BARE}\n```\n```json\n{BARE}\n```", True),
    (f"{BARE}\n```\n```json\n{WRONG}\n```", False),
]


@pytest.mark.parametrize("control", [(), (257,)])
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("name", ["hermes", "llama3"])
def test_calls_without_marks_follow_their_schema(name, several, control):
    """The reader takes an object that begins with a function's name for a call of it."""
    calling = Calling(False, several, {}, control)
    grammar = tool_rules(FORMATS[name], TOOLS, calling).grammar
    for text, valid in UNMARKED:
        assert fits(grammar, text) == valid, text
    for text, valid in ONE_MORE:  # What follows the only call is text.
        assert fits(grammar, text) == (valid or not several), text
    for text, valid in UNMARKED + ONE_MORE:
        reader = ToolReader(FORMATS[name], SCHEMAS, several)
        pieces = [*reader.push(text).calls, *reader.finish().calls]
        named = [piece.name for piece in pieces if piece.name]
        if valid or (not several and len(named) < 2 and (text, valid) in ONE_MORE):
            arguments = "".join(piece.arguments for piece in pieces)
            assert bool(named) == bool(arguments) and "Bonn" not in arguments, text
        else:
            assert named, text
    if name == "hermes":
        assert fits(grammar, f"{WRITTEN[name]}\n{BARE}")
        assert fits(grammar, f"{BARE}\n{WRITTEN[name]}") == several
        assert fits(grammar, f"{WRITTEN[name]}\n{WRONG}") != several
        assert not fits(grammar, f"```json\n{WRONG}\n```\n{WRITTEN[name]}")


@pytest.mark.parametrize("control", [(), (257,)])
@pytest.mark.parametrize("marked", ["as text", "as a control token"])
@pytest.mark.parametrize("name", ["qwen3-coder", "seed-oss"])
def test_functions_without_an_opener_follow_their_schema(name, marked, control):
    """The reader takes a function's tag for a call wherever it stands."""
    opener, closer = FORMATS[name].opener, FORMATS[name].closer
    special = {opener: 256} if marked == "as a control token" else {}
    several, one = (
        tool_rules(FORMATS[name], TOOLS, Calling(False, many, special, control)).grammar
        for many in (True, False)
    )
    bare = WRITTEN[name].removeprefix(f"{opener}\n").removesuffix(f"\n{closer}")
    for text in (bare, f"{bare}\n{closer}", f"Hi. {bare}\nBye", "a < b <func", ""):
        assert fits(several, text) and fits(one, text), text
    assert fits(several, f"{bare}\n{bare}") and not fits(one, f"{bare}\n{bare}")
    wrong = bare.replace("sad", "odd")
    for text in (wrong, f"Hi. {wrong}\n{closer}", f"{bare}\n{wrong}", "a <function=x>"):
        assert not fits(several, text), text
        assert ToolReader(FORMATS[name], SCHEMAS).push(text).calls
    if not special:
        for text in (f"{WRITTEN[name]}\n{bare}", f"{bare}\n{WRITTEN[name]}"):
            assert fits(several, text) and not fits(one, text), text


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_or_a_schema(name):
    grammar = rules(name, False, answer=Grammar.json_schema({"type": "array"}))
    assert fits(grammar, "[1]") and fits(grammar, WRITTEN[name])
    assert not fits(grammar, "Hello")


@pytest.mark.parametrize("name", WRITTEN)
def test_the_reader_understands_what_the_grammar_allows(name):
    reader = ToolReader(FORMATS[name], SCHEMAS)
    pieces = [*reader.push(WRITTEN[name]).calls, *reader.finish().calls]
    text = "".join(piece.arguments for piece in pieces)
    assert [(pieces[0].name, json.loads(text))] == CALLED[name]


ONE_STRING = {
    "glm": "<tool_call>note\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "qwen3-coder": "<tool_call>\n<function=note>\n<parameter=a>\n{}\n</parameter>\n</function>\n"
    "</tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="note">\n<parameter name="a">{}</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
}


@pytest.mark.parametrize("name", ONE_STRING)
def test_an_escaped_slash_in_a_raw_string_is_two_characters(name):
    schema = {"type": "object", "required": ["a"], "additionalProperties": False}
    schema["properties"] = {"a": {"type": "string", "maxLength": 2}}
    tools = [Signature("note", Grammar.json_schema(schema))]
    grammar = tool_rules(FORMATS[name], tools, Calling(True, False)).grammar
    for text, fit in (("ab", True), ("\\/", True), ("x\\/", False), ("abc", False)):
        assert fits(grammar, ONE_STRING[name].format(text)) == fit, text


def test_other_grammars_do_not_mix_with_tools():
    with pytest.raises(RequestError, match="together with tools") as error:
        rules("hermes", False, answer=Grammar.regex("a", "structured_outputs.regex"))
    assert error.value.field == "structured_outputs.regex"


def test_an_error_names_the_tool():
    bad = {"type": "object", "properties": {"a": {"not": {"minimum": 3}}}}
    field = "tools[1].function.parameters"
    tools = [TOOLS[0], Signature("bad", Grammar.json_schema(bad, field=field))]
    made = tool_rules(HERMES, tools, Calling(True, True))

    async def compiled(grammar):
        return compiler("bytes").compile(grammar)

    with pytest.raises(RequestError, match=r"tools\[1\].*properties\.a\.not") as error:
        asyncio.run(made.compiled(compiled))
    assert error.value.field == field


TAGS = [
    Tag("<f=a>", Grammar.json_schema({"type": "integer"}), "</f>"),
    Tag("<f=b>", Grammar.json_schema({"type": "null"}), "</f>"),
    Tag("[[", Grammar.json_schema({"type": "boolean"}), "]]"),
]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_structural_tags(kind):
    grammar = tag_rules(TAGS, ["<f=", "[["], "structured_outputs.structural_tag").grammar
    for text in ("", "a <f b", "x<f=a>12</f> y [[true]][z<f=b>null</f>"):
        assert fits(grammar, text, kind), text
    for text in ("x<f=a>null</f>", "<f=c>", "[[1]]", "<f=a>1", "[[true]][["):
        assert not fits(grammar, text, kind), text


def test_a_tag_without_its_trigger():
    with pytest.raises(RequestError, match="none of the triggers"):
        tag_rules(TAGS, ["<f="], "f")
    assert isinstance(tag_rules(TAGS, ["<f=", "["], "f"), Rules)


def with_control_tokens(*texts):
    """Bytes, control tokens of these texts from 7000 on, and the end of text behind them."""
    names = *texts, "<end>"
    pieces = (*(bytes([value]) for value in range(256)), *[b"x"] * 6744, *map(str.encode, names))
    added = [AddedToken(7000 + place, text, True) for place, text in enumerate(names)]
    end = 7000 + len(texts)
    return Tokenizer(
        lambda text, first: list(text.encode()), Pieces(pieces, 0), added, TextEnds((end,))
    )


def takes(tokenizer, grammar):
    """Whether tokens, and then the end of text, are taken."""
    made = Compiler(tokenizer)
    compiled = made.compile(grammar)
    made.close()

    def taken(tokens):
        matcher = Matcher(compiled)
        end = max(tokenizer.eos_ids)
        return all(map(matcher.advance, tokens)) and allowed(matcher.mask(), end)

    return taken


def test_the_trigger_of_a_tag_is_found_at_once():
    """4,000 tags of 4,000 triggers took 2.6 s, 50,000 of a body's size minutes."""

    def work(many):
        triggers = [f"{index:x}," for index in range(many)]
        tags = [Tag(trigger, Grammar.json_schema({}), "") for trigger in triggers]
        return lines(lambda: tag_rules(tags, triggers, "tags"))

    assert work(400) < 2.5 * work(200)
    many = [Tag("b", Grammar.json_schema({}), "")] * 65_536
    with pytest.raises(RequestError, match="characters"):
        tag_rules(many, [f"{index:x}" for index in range(65_536)], "tags")


def test_of_two_triggers_the_shorter_begins_a_tag():
    tags = [Tag("<ab>", Grammar.json_schema({"type": "integer"}), ";")]
    for triggers in (["<", "<ab"], ["<ab", "<"]):
        made = tag_rules(tags, triggers, "tags").grammar
        assert fits(made, "x<ab>1;") and not fits(made, "x<ab>y;") and not fits(made, "x<y")


def test_control_tokens_beside_tags():
    """Of a family's own, such as channels, in free text; never in a tag, and never the end."""
    tokenizer = with_control_tokens("<think>", "[[", "]]")
    rules = tag_rules(TAGS, ["<f=", "[["], "f").with_control(tokenizer.control_within)
    thought, opener, closer = 7000, 7001, 7002
    taken = takes(tokenizer, rules.grammar)
    tag = [*b"<f=a>12</f>"]
    for text in (
        [thought],
        [*b"a", thought, *b"b", thought, thought, *tag, *b"c", thought],
        [*tag, *tag, thought, *tag],
        [opener, *b"true", closer],
        [*b"a ", opener, *b"true", closer, thought, *b" b"],
    ):
        assert taken(text), text
    for text in (
        [*b"<f=a>1", thought, *b"2</f>"],
        [*b"<f=", thought, *b"a>12</f>"],
        [thought, *b"<f=c>"],
        [opener, *b"1", closer],
        [*b"[[true", closer],
        [opener],
        [7003, 97],
    ):
        assert not taken(text), text
    with_start = rules.after(Start("</think>", True)).with_control(tokenizer.control_within)
    assert with_start.grammar.start is not None


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral-args"])
def test_an_opener_that_is_a_control_token(name, required):
    format, special, divider = FORMATS[name], 7000, 7001
    tokenizer = with_control_tokens("[T]", "[D]")
    marks = {format.opener: special} | ({format.divider: divider} if format.divider else {})
    grammar = tool_rules(format, TOOLS, Calling(required, True, marks)).grammar
    call = list(WRITTEN[name].removeprefix(format.opener).encode())
    if format.divider:
        head, _, rest = bytes(call).partition(format.divider.encode())
        assert rest
        call = [*head, divider, *rest]

    taken = takes(tokenizer, grammar)
    assert taken([special, *call])
    assert taken([*b"Sure. ", special, *call]) is not required
    assert taken(list(WRITTEN[name].encode())) is not required
    assert not taken([special, *b" x"])


@pytest.mark.parametrize("name", ["kimi", "deepseek-v3", "deepseek-v3.1"])
def test_marks_that_are_control_tokens(name):
    """All of several calls, from the first mark to the last; a mark in letters is none."""
    format = FORMATS[name]
    ids = {mark: 7000 + place for place, mark in enumerate(format.marks)}
    tokenizer = with_control_tokens(*(f"[{place}]" for place in ids.values()))
    written = MORE[name]
    marks = re.compile("|".join(map(re.escape, ids)))
    call, at = list[int](), 0
    for mark in marks.finditer(written):
        call += [*written[at : mark.start()].encode(), ids[mark[0]]]
        at = mark.end()
    grammar = tool_rules(format, TOOLS, Calling(True, True, ids)).grammar
    taken = takes(tokenizer, grammar)
    assert taken(call) and len(call) > 60
    assert not taken(list(written.encode())) and not taken(call[:-1])
    assert not taken([*call[:-1], *format.closer.encode()])


def test_strings_between_control_tokens():
    """Gemma 4's marks of strings are tokens of their own; JSON's will do, too."""
    format = FORMATS["gemma4"]
    tokenizer = with_control_tokens("[O]", "[C]", "[Q]")
    opener, closer, quote = 7000, 7001, 7002
    marks = {format.opener: opener, format.closer: closer, format.quote: quote}
    grammar = tool_rules(format, TOOLS, Calling(True, True, marks)).grammar

    def call(text, mood):
        return [opener, *b"call:note{text:", *text, *b",mood:", *mood, *b",at:[1, 2]}", closer]

    def taken(text, mood):
        return takes(tokenizer, grammar)(call(text, mood))

    words, sad = [quote, *b'a < "b"', quote], [quote, *b"sad", quote]
    assert taken(words, sad) and taken([quote, quote], b'"sad"') and taken(b'"\\n"', sad)
    assert not taken(words, [quote, *b"odd", quote]) and not taken(b"a", sad)
    assert not taken(list(b'<|"|>a<|"|>'), sad)


CHOICES = NOTE | {"required": ["text"]}
OPTIONAL = {
    "hermes": (', "mood": "sad"', ', "at": [1, 2]'),
    "glm": (
        "<arg_key>mood</arg_key>\n<arg_value>sad</arg_value>\n",
        "<arg_key>at</arg_key>\n<arg_value>[1, 2]</arg_value>\n",
    ),
    "qwen3-coder": (
        "<parameter=mood>\nsad\n</parameter>\n",
        "<parameter=at>\n[1, 2]\n</parameter>\n",
    ),
    "lfm2": (', mood="sad"', ", at=[1, 2]"),
    "minimax-m2": (
        '<parameter name="mood">sad</parameter>\n',
        '<parameter name="at">[1, 2]</parameter>\n',
    ),
    "gemma4": (',mood:<|"|>sad<|"|>', ",at:[1, 2]"),
    "minicpm5": ('<param name="mood">sad</param>', '<param name="at">[1, 2]</param>'),
}
"""What two optional arguments are, one behind the other."""


@pytest.mark.parametrize("further", [{}, {"additionalProperties": False}], ids=["open", "closed"])
@pytest.mark.parametrize("name", OPTIONAL)
def test_optional_arguments_come_in_any_order_unless_the_tool_is_strict(name, further):
    """None is lost, and none becomes another key (xgrammar #831)."""
    mood, at = OPTIONAL[name]
    written = WRITTEN[name]
    if name == "hermes":
        written = (
            f'<tool_call>\n{{"name": "note", "arguments": {{"text": "a"{mood}{at}}}}}\n</tool_call>'
        )
    assert mood + at in written
    turned = written.replace(mood + at, at + mood)
    for lenient in (True, False):
        tool = Signature("note", Grammar.json_schema(CHOICES | further, lenient))
        grammar = tool_rules(FORMATS[name], [tool], Calling(True, False)).grammar
        for given in (written, written.replace(mood, ""), written.replace(at, "")):
            assert fits(grammar, given), given
        free = lenient or (name == "hermes" and not further)
        assert fits(grammar, turned) == free
        for wrong in (turned.replace("sad", "bad"), turned.replace("[1, 2]", '["x"]')):
            assert not fits(grammar, wrong), wrong
    reader = ToolReader(FORMATS[name], SCHEMAS)
    pieces = [*reader.push(turned).calls, *reader.finish().calls]
    read = json.loads("".join(piece.arguments for piece in pieces))
    assert (read["at"], read["mood"]) == ([1, 2], "sad")
