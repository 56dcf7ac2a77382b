"""Grammars of a call's arguments that are not a JSON object: keys and values in tags (GLM, Qwen,
MiniMax and DeepSeek), or Python's keyword arguments (LFM2). Strings in tags have no quotes, so a
schema's limits on them are written as terminals; every other value is JSON.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forerun.constrain.grammar.grammar import Grammar
from forerun.constrain.schema.logic import TYPES, types, values_of
from forerun.constrain.schema.origins import UnenforcedKeyword
from forerun.constrain.schema.patterns import MAX_STEPS, matching
from forerun.constrain.schema.rewrite import rewritten
from forerun.constrain.schema.strings import RAW_FORMATS, other_than
from forerun.errors import RequestError
from forerun.text.gemma_calls import QUOTES
from forerun.text.tools import GLM, LFM2, OLMO3, ToolFormat

_ANY = r"/(.|\n)*/"
_STRING = frozenset(
    {"type", "const", "enum", "pattern", "format", "minLength", "maxLength", "allOf"}
)
_OBJECT = frozenset(
    {"type", "properties", "required", "additionalProperties", "patternProperties", "$defs"}
)


@dataclass(frozen=True, slots=True)
class Tags:
    """The text around a value.

    begin    before it, `{}` for its key, `{string}` for true or false
    closer   after it
    never    what no string may contain, because a parser would find the end there; "" = strings
             are JSON
    between  between two arguments; "" = closer and `behind` separate them
    behind   after the closer
    """

    begin: str
    closer: str
    never: str
    between: str = ""
    behind: str = "\n"


GLM_TAGS = Tags("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>", "</arg_value>")
PYTHON_TAGS = Tags("{}=", "", "", ", ")
GEMMA_TAGS = Tags("{}:", "", "", ",")


def tags_of(format: ToolFormat) -> Tags | None:
    """Return the text around arguments that are not a JSON object; None if they are one."""
    if format.tags is not None:
        line, end = "\n" * format.tags.on_lines, format.tags.parameter_end
        behind = "\n" if format.opener else ""
        return Tags(f"{format.tags.parameter}{line}", f"{line}{end}", end, behind=behind)
    if format.quote:
        return GEMMA_TAGS
    return {GLM: GLM_TAGS, LFM2: PYTHON_TAGS, OLMO3: PYTHON_TAGS}.get(format)


@dataclass(slots=True)
class Arguments:
    """The rules of one function's arguments.

    pairs  the body of a rule: its keys and values in order
    rules  the rules that `pairs` refers to
    left   paths that are left out of a schema that is not strict
    """

    pairs: str = ""
    rules: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def arguments(
    index: int,
    grammar: Grammar,
    tags: Tags,
    literal: Callable[[str], str],
    content: Callable[[Grammar], str],
    quote: str = "",
) -> Arguments:
    """Return the rules of a function's arguments: tags of keys and values, strings without quotes.

    index    number of the function, for the names of rules
    grammar  a schema of its arguments
    literal  text -> Lark literal
    content  schema -> Lark expression of its texts
    quote    a Lark expression for other quotes than JSON's around a string; "" = none

    Raises RequestError if a strict schema has a keyword that this form cannot enforce; of a lenient
    one such keywords are left out and listed.
    """
    raw = json.loads(grammar.source)
    try:
        return _Writer(grammar, tags, raw, literal, content, quote).arguments(index)
    except RecursionError:
        message = f"{grammar.field} has levels or names that are too long for calls of this form"
        raise RequestError(message, grammar.field) from None


class _Writer:
    def __init__(
        self,
        grammar: Grammar,
        tags: Tags,
        raw: dict[str, Any],
        literal: Callable[[str], str],
        content: Callable[[Grammar], str],
        quote: str,
    ) -> None:
        self._grammar, self._literal, self._content = grammar, literal, content
        self._quote = quote
        self._tags = tags
        schema = rewritten(raw, plain=not grammar.lenient, free="never")
        root = schema.schema if isinstance(schema.schema, dict) else {}
        self._defined: dict[str, Any] = root.get("$defs", {})
        self._root = self._resolved(root)
        # The reader of the call knows only types that are in the schema itself.
        declared = raw.get("properties")
        self._declared: dict[str, Any] = declared if isinstance(declared, dict) else {}
        self._out = Arguments()
        for fault in schema.unenforced:
            self._fault(fault)

    def arguments(self, index: int) -> Arguments:
        for key in self._root.keys() - _OBJECT:
            self._fault(UnenforcedKeyword(key, "not supported in calls of this form"))
        properties, required = self._root.get("properties") or {}, {*self._root.get("required", ())}
        for name in self._root.get("required", ()):
            if properties.get(name, False) is False:
                self._fault(UnenforcedKeyword("required", f"{name!r} is not among the properties"))
        patterns = [*(self._root.get("patternProperties") or ())]
        if patterns and patterns != [other_than(properties)]:  # Written by `rewritten`.
            names, max_length = [*properties], MAX_STEPS // len(patterns)
            apart = sum(map(len, names)) <= max_length and all(
                matching(pattern, names, max_length) == [False] * len(names) for pattern in patterns
            )
            if not apart:
                self._fault(UnenforcedKeyword("patternProperties", "it adds to a listed property"))
        pairs: list[tuple[str, bool]] = []
        for place, (key, value) in enumerate(properties.items()):
            if value is False:
                continue
            name = f"value_{index}_{place}"
            self._value(name, key, value)
            string = "true" if self._is_raw(key) else "false"
            begin = self._literal(self._tags.begin.format(key, string=string))
            pairs.append((f"{begin} {name}", key in required))
        ordered = len(pairs)
        while self._grammar.lenient and ordered and not pairs[ordered - 1][1]:
            ordered -= 1
        late = " | ".join(pair for pair, _ in pairs[ordered:])
        if self._tags.between:
            self._out.pairs = self._listed(index, pairs[:ordered], late)
            return self._out
        end = self._literal(self._tags.behind)
        parts = [f"({pair} {end}){'' if must else '?'}" for pair, must in pairs[:ordered]]
        self._out.pairs = " ".join([*parts, *([f"(({late}) {end})*"] if late else [])])
        return self._out

    def _listed(self, index: int, pairs: list[tuple[str, bool]], late: str) -> str:
        """Write the rules of arguments with a separator between each two; return the first rule's
        name.

        late        an expression of the optional arguments behind `pairs`, which come in any order
        first_0_3   the arguments from the fourth on, if none comes before them
        behind_0_3  the same if one does
        """
        count, between = len(pairs), self._literal(self._tags.between)
        more = f"({between} ({late}))*" if late else '""'
        self._out.rules.append(f"behind_{index}_{count}: {more}")
        first = f"(({late}) {more})?" if late else '""'
        self._out.rules.append(f"first_{index}_{count}: {first}")
        for place, (pair, must) in enumerate(pairs):
            rest, mark = f"behind_{index}_{place + 1}", "" if must else "?"
            skipped = "" if must else f" | first_{index}_{place + 1}"
            self._out.rules.append(f"first_{index}_{place}: {pair} {rest}{skipped}")
            self._out.rules.append(f"behind_{index}_{place}: ({between} {pair}){mark} {rest}")
        return f"first_{index}_0"

    def _kind(self, key: str) -> Any:
        declared = self._declared.get(key)
        return declared.get("type") if isinstance(declared, dict) else None

    def _is_raw(self, key: str) -> bool:
        """Return whether an argument's value is a string without quotes."""
        return self._kind(key) == "string" and bool(self._tags.never)

    def _value(self, name: str, key: str, value: Any) -> None:
        """Write a rule for one value and its closing tag."""
        if self._is_raw(key):
            self._string(name, key, self._resolved(value))
            return
        kind = self._kind(key)
        refers = isinstance(value, dict) and '"$ref"' in json.dumps(value)
        schema = {**value, "$defs": self._defined} if refers else value
        part = Grammar.json_schema(schema, self._grammar.lenient, self._grammar.field)
        also = [] if self._tags.never else self._python(kind, self._resolved(value))
        if self._quote and kind == "string":
            also = self._quoted(name, self._resolved(value))
        either = " | ".join([f"{name}_json", *also])
        self._out.rules.append(f"{name}: ({either}) {self._literal(self._tags.closer)}")
        self._out.rules.append(f"{name}_json: {self._content(part)}")

    def _python(self, kind: Any, schema: dict[str, Any]) -> list[str]:
        """Return the alternatives to JSON for a value: Python's words, and strings in single quotes
        that need no escapes.
        """
        if self._quote:
            return []
        if kind == "boolean" and schema.keys() <= {"type"}:
            return ['"True"', '"False"']
        if kind != "string" or schema.keys() - {"type", "enum", "const"}:
            return []
        words = values_of(schema)
        if words is None:
            return [r"/'[^'\\\n]*'/"]
        apart = (word for word in words if isinstance(word, str) and not {*word} & {*"'\\\n"})
        return [self._literal(f"'{word}'") for word in apart]

    def _quoted(self, name: str, schema: dict[str, Any]) -> list[str]:
        """Return the alternatives to JSON for a string: raw between two quotes of the format."""
        if schema.keys() - {"type", "enum", "const"}:
            return []
        words = values_of(schema)
        mark = self._quote
        if words is not None:
            apart = (word for word in words if isinstance(word, str) and word)
            apart = (word for word in apart if not any(quote in word for quote in QUOTES))
            return [f"{mark} {self._literal(word)} {mark}" for word in apart]
        if mark.startswith("<["):  # A control token is no text.
            self._out.rules.append(f"{name}_raw: {name.upper()}_RAW?")
            self._out.rules.append(f"{name.upper()}_RAW: {_ANY}")
            return [f"{mark} {name}_raw {mark}"]
        self._out.rules.append(f"{name}_raw[suffix={mark}]: {_ANY}")
        return [f"{mark} {name}_raw"]

    def _string(self, name: str, key: str, schema: dict[str, Any]) -> None:
        closer = self._literal(self._tags.closer)
        values = values_of(schema)
        terms = self._terms(f"properties.{key}", schema)
        if values is not None:
            never = self._tags.never
            words = [word for word in values if isinstance(word, str) and never not in word]
            either = " | ".join(self._literal(word) if word else '""' for word in words)
            if not words:
                raise RequestError(f"{self._grammar.field}: no text satisfies properties.{key}")
            if len(terms) <= 1:
                self._out.rules.append(f"{name}: ({either}) {closer}")
                return
            terms.append(f"({either})")
        if len(terms) == 1 and self._tags.never == self._tags.closer:
            self._out.rules.append(f"{name}[suffix={closer}]: {_ANY}")
            return
        terminal = name.upper()
        self._out.rules.append(f"{name}: {terminal}")
        both = " & ".join([_ANY, *terms])  # Of one negation alone the closer would be a part.
        self._out.rules.append(f"{terminal}: ({both}) {closer}")

    def _terms(self, path: str, schema: dict[str, Any]) -> list[str]:
        """Return the terminals that a raw string must match, all of them; the first excludes the
        closing tag.
        """
        terms = [f"~({_ANY} {self._literal(self._tags.never)} {_ANY})"]
        for keyword in schema.keys() - _STRING:
            self._fault(
                UnenforcedKeyword(f"{path}.{keyword}", "not supported in calls of this form")
            )
        terms += _limits(schema)
        for part in schema.get("allOf", ()):
            choices = part.get("anyOf", [part]) if isinstance(part, dict) else [part]
            if all(map(_is_plain, choices)) and (choices == [part] or part.keys() == {"anyOf"}):
                either = (" & ".join(_limits(choice)) or _ANY for choice in choices)
                terms.append(" | ".join(f"({one})" for one in either))
                continue
            self._fault(UnenforcedKeyword(f"{path}.allOf", "not supported in calls of this form"))
        if "format" in schema:
            terms.append(f"/{_whole(RAW_FORMATS[schema['format']])}/")
        return [f"({term})" for term in terms]

    def _resolved(self, schema: Any) -> dict[str, Any]:
        for _ in range(20):
            if not isinstance(schema, dict) or schema.keys() - {"$defs"} != {"$ref"}:
                break
            schema = self._defined.get(schema["$ref"].rpartition("/")[2])
        return schema if isinstance(schema, dict) else {}

    def _fault(self, fault: UnenforcedKeyword) -> None:
        if not self._grammar.lenient:
            raise RequestError(f"{self._grammar.field}: {fault}", self._grammar.field)
        self._out.left.append(f"{self._grammar.field}.{fault.path}")


def _is_plain(schema: Any) -> bool:
    known = {"type", "pattern", "minLength", "maxLength"}
    if not isinstance(schema, dict) or schema.keys() - known:
        return False
    return "string" in (types(schema) or TYPES)


def _limits(schema: dict[str, Any]) -> list[str]:
    """Return the terminals for the pattern and the lengths of a schema, for a raw string."""
    terms = []
    if isinstance(schema.get("pattern"), str):
        terms.append(f"/{_whole(schema['pattern'])}/")
    if "minLength" in schema or "maxLength" in schema:
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        terms.append(f"/(.|\\n){{{least},{most}}}/")
    return terms


def _whole(pattern: str) -> str:
    """Return a pattern for the whole text, without anchors, between Lark's slashes."""
    branches, depth, at, inside = [list[str]()], 0, 0, False
    while at < len(pattern):
        size = 2 if pattern[at] == "\\" else 1
        unit = pattern[at : at + size]
        inside = (inside or unit == "[") and unit != "]"
        depth += {"(": 1, ")": -1}.get(unit, 0) if not inside else 0
        if unit == "|" and not depth and not inside:
            branches.append([])
        else:
            branches[-1].append("\\/" if unit == "/" else unit)
        at += size
    return "|".join(_anchored("".join(branch)) for branch in branches)


def _anchored(branch: str) -> str:
    begin = branch.startswith("^")
    end = branch.endswith("$") and not branch.endswith("\\$")
    inner = branch[begin : len(branch) - end]
    before, behind = ("" if there else _SOME for there in (begin, end))
    return f"{before}({inner}){behind}"


_SOME = r"(.|\n)*"
