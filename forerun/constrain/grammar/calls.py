"""Builds grammars of answers with tool calls: free text up to a call, then only a call.

Written in llguidance's Lark: a rule with `suffix` ends at the first occurrence of that text,
`%json` matches the texts of a schema.
"""

import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from forerun.constrain.grammar.grammar import Grammar, Kind, Start, ThinkingBudget
from forerun.constrain.grammar.harmony import harmony_lines
from forerun.constrain.grammar.tagged import arguments, tags_of
from forerun.errors import BusyError, RequestError
from forerun.text.harmony import END, START
from forerun.text.tools import (
    CLOSE_FENCE,
    FORMATS,
    FUNCTION_GEMMA,
    GEMMA,
    GIGACHAT,
    GLM,
    HARMONY,
    HERMES,
    KIMI,
    LFM2,
    LLAMA3,
    MISTRAL_ARGS,
    OLMO3,
    OPEN_FENCE,
    PHI4,
    ToolFormat,
)

Compiled = TypeVar("Compiled")

SLASHES = "// x-forerun-slashes"
"""First line of a grammar in which every backslash is part of JSON, or in a place where any text is
allowed: a slash in its strings may be escaped (matcher/slashes.py).
"""

ANY_TEXT = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True)
class Signature:
    """A function that may be called. arguments: a grammar of kind JSON_SCHEMA."""

    name: str
    arguments: Grammar


@dataclass(frozen=True, slots=True)
class Calling:
    """The calls and the text that an answer with tools may have.

    required  calls and nothing else
    several   more than one call
    special   ids of those marks of the format that are control tokens of the model
    others    ids of control tokens that free text may have
    inside    the prompt ends within the text of a message (Harmony)
    """

    required: bool
    several: bool
    special: Mapping[str, int] = field(default_factory=dict)
    others: Collection[int] = ()
    inside: bool = False

    def mark(self, text: str) -> str:
        """Return a mark of the format as Lark: by its id if it is a control token, else as a
        literal.
        """
        return f"<[{self.special[text]}]>" if text in self.special else literal(text)

    def free(self, terminal: str) -> tuple[str, list[str]]:
        """Return (name, lines) of a rule of free text that consists of `terminal` and control
        tokens.
        """
        if not self.others:
            return terminal, []
        ids = ",".join(map(str, sorted(self.others)))
        return "free", [f"free: {terminal}? (other ANY?)*", f"other: <[{ids}]>", f"ANY: {ANY_TEXT}"]


@dataclass(frozen=True, slots=True)
class Rules:
    """A grammar and the parts it was built from, so that an error can name the part."""

    grammar: Grammar
    parts: tuple[Grammar, ...] = ()

    async def compiled(self, compile: Callable[[Grammar], Awaitable[Compiled]]) -> Compiled:
        """Compile the whole grammar with `compile`. If that is rejected, each part is compiled
        alone, so that the error names the faulty part. Raises RequestError of the part, else of the
        whole; BusyError if the compiler is busy.
        """
        try:
            return await compile(self.grammar)
        except BusyError:
            raise
        except RequestError:
            for part in self.parts:
                await compile(part)
            raise

    def on_one_line(self) -> "Rules":
        """Return a copy whose JSON has white space exactly as Python's json.dumps writes it. Raises
        RequestError if the grammar is not a schema.
        """
        return replace(self, grammar=self.grammar.on_one_line())

    def after(self, start: Start, budget: ThinkingBudget | None = None) -> "Rules":
        """Return a copy that constrains only the text after `start`; `budget` forces `start` in
        time.
        """
        return replace(self, grammar=self.grammar.after(start, budget))


def tool_rules(
    format: ToolFormat,
    tools: Sequence[Signature],
    calling: Calling,
    answer: Grammar | None = None,
) -> Rules:
    """Return the grammar of answers that may call `tools` in a model's format.

    tools    at least one; each one's arguments follow its schema
    calling  whether calls are required, and whether there may be several
    answer   a schema for answers without a call; None = free text

    Raises RequestError if `answer` is no JSON schema, or arguments in tags cannot enforce a strict
    one.
    """
    parts = [_alone(format, tool.arguments) for tool in tools] + ([answer] if answer else [])
    if format is HARMONY:
        lines = [SLASHES, *_in_channels(tools, calling, answer)]
        return Rules(Grammar.grammar("\n".join(lines), "tools"), tuple(parts))
    # Strings between tags are texts of their own: `\/` is two characters there.
    tags = tags_of(format)
    lines = [] if tags is not None and tags.never else [SLASHES]
    lines.append(f"call: {either('call', len(tools))}")
    for index, tool in enumerate(tools):
        lines += _call(format, calling, index, tool)
    lines += _around(format, calling, answer, [tool.name for tool in tools])
    return Rules(Grammar.grammar("\n".join(lines), "tools"), tuple(parts))


def _in_channels(tools: Sequence[Signature], calling: Calling, answer: Grammar | None) -> list[str]:
    ends = [mark for mark in (END, START) if mark not in calling.special]
    text = without(ends) if ends else ANY_TEXT
    return [
        *harmony_lines(
            [tool.name for tool in tools],
            calling.mark,
            literal,
            text,
            _content(answer) if answer is not None else None,
            calling.required,
            calling.inside,
        ),
        *(f"json_{index}: {json_texts(tool.arguments)}" for index, tool in enumerate(tools)),
    ]


def _around(
    format: ToolFormat, calling: Calling, answer: Grammar | None, names: Sequence[str]
) -> list[str]:
    """Return the rules from `start` down to the calls of functions with these names."""
    opener = calling.mark(format.begin)
    between = {
        LLAMA3: '"; "',
        **dict.fromkeys((MISTRAL_ARGS, PHI4, GEMMA, FUNCTION_GEMMA, GIGACHAT), opener),
    }
    again = '", "' if format.listed else between.get(format, f'"\\n" {opener}')
    apart = format.fenced or format is OLMO3
    again = '"\\n"' if apart else "" if format.together else again
    calls = f"call ({again} call)*" if calling.several else "call"
    if format.listed:
        calls = f'{opener} " "? "[" {calls} "]"'
        calls += f" {calling.mark(format.closer)}" if format.closer != "]" else ""
    elif format is OLMO3:
        calls = f'{opener} "\\n"? {calls} "\\n"? {calling.mark(format.closer)}'
    elif format.together:
        line = "" if format.each[0] else '"\\n"'
        calls = f"{opener} {line} {calls} {calling.mark(format.closer)}"
    elif format is not LLAMA3:
        calls = f"{opener} {calls}"
    lines = [f"calls: {calls}"]
    if calling.required:
        return [*lines, "start: calls"]
    if answer is not None:
        return [*lines, "start: answer | calls", f"answer: {_content(answer)}"]
    if format.alone:
        return _unmarked(format, calling, names)
    if format.bare and format.opener:
        return _opened_or_not(format, calling, names)
    return _in_text(format, calling, calls, opener)


def _in_text(format: ToolFormat, calling: Calling, calls: str, opener: str) -> list[str]:
    """Return the rules from `start` down to the calls, with free text allowed before them."""
    lines = [f"calls: {calls}"]
    free, rules = calling.free("TEXT")
    if format.begin in calling.special:
        return [*lines, *rules, f"start: {free} calls?", f"TEXT: {ANY_TEXT}"]
    many = "*" if calling.several else "?"
    # Some calls are opened once, others one by one, with text between them.
    whole = format.listed or format.together
    rest = calls.removeprefix(f"{opener} ") if whole else "call"
    head = f"head[suffix={opener}]: {ANY_TEXT}"
    tail = f"TAIL: {without([format.begin])}"
    if not calling.others:
        return [f"start: (head {rest}){many} TAIL", head, tail]
    rules = [line for line in rules if line.startswith("other")]
    if calling.several:
        return [f"start: (head {rest} | TAIL? other)* TAIL?", head, tail, *rules]
    return [f"start: plain (head {rest} plain)?", "plain: (TAIL? other)* TAIL?", head, tail, *rules]


def _opened_or_not(format: ToolFormat, calling: Calling, names: Sequence[str]) -> list[str]:
    """Return the rules from `start` down to the calls of a format whose functions the parser also
    recognises by their own tags, if a model omits the opener. Rules s and t as in `_unmarked`.
    """
    assert format.tags is not None
    special, opener = format.opener in calling.special, calling.mark(format.opener)
    behind = "s" if calling.several else "t"
    texts = [format.bare] if special else [format.bare, format.opener]
    end = literal(format.tags.function_end)
    lines = [
        "start: s",
        f"s: TEXT? | marked call {behind} | opened open {behind}",
        f"opened[suffix={literal(format.bare)}]: {ANY_TEXT}",
        f"marked: TEXT? {opener}" if special else f"marked[suffix={opener}]: {ANY_TEXT}",
        f"TEXT: {ANY_TEXT}",
        f"open: {either('open', len(names))}",
    ]
    if not calling.several:
        lines += ["t: LAST?" + " | LAST? other t" * bool(calling.others), f"LAST: {without(texts)}"]
    if calling.others:
        lines[1] += " | TEXT? other s"
        lines.append(f"other: <[{','.join(map(str, sorted(calling.others)))}]>")
    return [
        *lines,
        *(
            f"open_{index}: {literal(_head(format, name))} arguments_{index} {end}"
            for index, name in enumerate(names)
        ),
    ]


def _head(format: ToolFormat, name: str) -> str:
    """Return the opening tag of a function, without its common beginning."""
    assert format.tags is not None
    return f"{format.tags.function.format(name)}\n".removeprefix(format.bare)


_BETWEEN = r"[\s\x5B\x5D\x7D`,;]*"
_FENCED = r"```\s*(json)?[\s\x5B]*"
_LEAD = rf"{_BETWEEN}(json)?[\s\x5B]*"
_NAMED = r'\x7B\s*(\x7B\s*|"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"'
_ARGUED = r'"\s*,\s*"(arguments|parameters)"\s*:'
"""Regular expressions for calls without marks, as the parser reads them (text/tool_bodies.py,
BareHeads): what may come between two calls; before one within a text, and at its beginning; its
head up to the name, and after it.
"""


def _unmarked(format: ToolFormat, calling: Calling, names: Sequence[str]) -> list[str]:
    """Return the rules from `start` down to the calls of a format whose calls may have no opener.

    An object with a name, in a fence or at the beginning, is a call if a function has that name.

    s  what may follow at the beginning, or after a call if more may come
    n  after the head of an object, up to its name
    t  after the only call

    A lazy rule ends the text before it, so free text needs no exclusions, which take llguidance
    long.
    """
    special, opener = format.opener in calling.special, calling.mark(format.opener)
    known = f'/({"|".join(map(re.escape, names))})"/'
    unknown = f"{ANY_TEXT} & ~({known} {ANY_TEXT})"
    behind = "s" if calling.several else "t"
    lines = ["start: s"]
    for rule, text, prefix in (("s", "TEXT", ""), ("n", "REST", "re")):
        follows = [f"{text}?", f"{prefix}opened n"]
        follows += [f"{text}? other s"] if calling.others else []
        follows += [f"bare {behind}"] if rule == "n" else []
        if special:
            follows.append(f"{text}? {opener} call {behind}")
        elif opener:
            follows.append(f"{prefix}marked call {behind}")
            lines.append(f"{prefix}marked[suffix={opener}]: {unknown if prefix else ANY_TEXT}")
        lines.append(f"{rule}: {' | '.join(follows)}")
    if calling.others:
        lines.append(f"other: <[{','.join(map(str, sorted(calling.others)))}]>")
    if not calling.several:
        last = without([format.opener]) if opener and not special else ANY_TEXT
        more = " | LAST? other t" if calling.others else ""
        lines += [f"t: LAST?{more}", f"LAST: {last}"]
    return [
        *lines,
        f"TEXT: {ANY_TEXT}",
        f"REST: {unknown}",
        f"HEAD: /{_FENCED}{_NAMED}/",
        f"OPENED: ({ANY_TEXT} HEAD) | /{_LEAD}{_NAMED}/",
        f"REOPENED: ({ANY_TEXT} HEAD) & ~({known} {ANY_TEXT})",
        "opened[lazy]: OPENED",
        "reopened[lazy]: REOPENED",
        f"bare: {either('bare', len(names))}",
        *(
            f"bare_{index}: /{re.escape(name)}{_ARGUED}/ SPACE? json_{index} END"
            for index, name in enumerate(names)
        ),
        r"SPACE: /\s+/",
        r"END: /\s*\x7D/",
    ]


def _call(format: ToolFormat, calling: Calling, index: int, tool: Signature) -> list[str]:
    """Return the rules of one call, from the end of the opener to its closer."""
    if format in (LFM2, OLMO3):
        written = f"arguments_{index}: {_tag_texts(format, tool.arguments)}"
        return [f'call_{index}: {literal(f"{tool.name}(")} arguments_{index} ")"', written]
    if format.quote:
        quote = calling.mark(format.quote)
        written = f"arguments_{index}: {_tag_texts(format, tool.arguments, quote)}"
        head, end = literal(f"call:{tool.name}{{"), f'"}}" {calling.mark(format.closer)}'
        return [f"call_{index}: {head} arguments_{index} {end}", written]
    if format is GLM or format.tags is not None:
        head, end = f"{tool.name}\n", calling.mark(format.closer)
        if format.tags is not None and not format.opener:
            head = format.tags.function.format(tool.name).removeprefix(format.bare)
            end = literal(format.tags.function_end)
        elif format.tags is not None:
            head = f"{format.tags.function.format(tool.name)}\n"
            head, close = head if format.together else f"\n{head}", f"{format.tags.function_end}\n"
            end = literal(close) if format.together else f"{literal(close)} {end}"
        written = f"arguments_{index}: {_tag_texts(format, tool.arguments)}"
        return [f"call_{index}: {literal(head)} arguments_{index} {end}", written]
    # Chat templates write arguments on one line, so models do.
    written = f"json_{index}: {json_texts(tool.arguments.on_one_line())}"
    if format is MISTRAL_ARGS:
        divided = f"{literal(tool.name)} {calling.mark(format.divider)}"
        return [f"call_{index}: {divided} json_{index}", written]
    if format.each[0]:
        begin, divider, end = map(calling.mark, (format.each[0], format.divider, format.each[1]))
        head = f"{begin} {literal(tool.name)} {divider}"
        number = ["NUMBER: /[0-9]{1,6}/"] if format is KIMI and index == 0 else []
        if format is KIMI:
            head = f"{begin} {literal(f'functions.{tool.name}:')} NUMBER {divider}"
        elif format.fenced:
            head = f'{begin} "function" {divider} {literal(tool.name + OPEN_FENCE)}'
            end = f"{literal(CLOSE_FENCE)} {end}"
        return [f"call_{index}: {head} json_{index} {end}", written, *number]
    begin = f'{{"name": {json.dumps(tool.name)}, "{format.arguments}": '
    end = literal("}")
    if format is HERMES:
        begin, end = "\n" + begin, literal("}\n" + format.closer)
    elif format is PHI4:
        end = f"{end} {calling.mark(format.closer)}"
    return [f"call_{index}: {literal(begin)} json_{index} {end}", written]


def _content(answer: Grammar) -> str:
    if answer.kind is not Kind.JSON_SCHEMA:
        raise RequestError(
            f"{answer.field} together with tools must be a JSON schema; for another grammar set "
            "tool_choice to none or required.",
            answer.field,
        )
    return json_texts(answer)


def json_texts(grammar: Grammar) -> str:
    """Return the rule for texts of a schema, which the compiling process rewrites (see
    llguidance_worker.py).
    """
    options = [grammar.field, grammar.lenient, grammar.one_line]
    return f"%json {_plain({'x-forerun': options, 'schema': json.loads(grammar.source)})}"


def _tag_texts(format: ToolFormat, grammar: Grammar, quote: str = "") -> str:
    """Return the rule for arguments in tags. The compiling process expands it (`with_tags`), since
    the time for that grows faster than the schema.
    """
    options = [grammar.field, grammar.lenient, format.name, quote]
    return f"%tags {_plain({'x-forerun': options, 'schema': json.loads(grammar.source)})}"


def with_tags(source: str) -> tuple[str, list[str]]:
    """Expand the rules of arguments in tags in a grammar of calls. Returns the grammar, and the
    paths that are left out of their schemas. Raises RequestError if a strict schema has a keyword
    that this form cannot enforce.
    """
    out, left, at = "", list[str](), 0
    while match := _TAG_TEXTS.search(source, at):
        given, end = json.JSONDecoder().raw_decode(source, match.end())
        field, lenient, name, quote = given["x-forerun"]
        grammar = Grammar.json_schema(given["schema"], lenient, field)
        tags = tags_of(FORMATS[name])
        assert tags is not None
        arguments_grammar = arguments(int(match[1]), grammar, tags, literal, json_texts, quote)
        rule = source[at : match.end()].removesuffix("%tags ")
        out += "\n".join(
            [f"{rule}{arguments_grammar.pairs or chr(34) * 2}", *arguments_grammar.rules]
        )
        left += arguments_grammar.left
        at = end
    return out + source[at:], left


_TAG_TEXTS = re.compile(r'(?<=\narguments_)(\d{1,4}): %tags (?=\{"x-forerun":)')


def _alone(format: ToolFormat, arguments: Grammar) -> Grammar:
    """Return a grammar of only the arguments of one function, used to find the faulty one."""
    if tags_of(format) is None:
        return arguments
    source = f"start: arguments_0\narguments_0: {_tag_texts(format, arguments)}"
    return Grammar.grammar(source, arguments.field)


def literal(text: str) -> str:
    """Return a text as a Lark literal; "" for an empty text."""
    return _plain(text) if text else ""


def _plain(value: Any) -> str:
    """Return JSON of a value in a form that cannot be taken for GBNF."""
    return json.dumps(value, ensure_ascii=False).replace("::=", "::\\u003d")


def without(texts: Sequence[str]) -> str:
    """Return a Lark terminal that matches any text that contains none of `texts`."""
    return " & ".join([ANY_TEXT, *(f"~({ANY_TEXT} {literal(text)} {ANY_TEXT})" for text in texts)])


def either(name: str, count: int) -> str:
    """Return the rules name_0, name_1, ..., `count` of them, as Lark alternatives."""
    return " | ".join(f"{name}_{index}" for index in range(count))
