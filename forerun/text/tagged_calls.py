"""Parses calls whose arguments are in tags, key by key, with strings without quotes (GLM, Qwen)."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.text.tool_bodies import NOTHING, Body, Openings, Tools, loads_or

_TYPES: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    type(None): ("null",),
    list: ("array",),
    dict: ("object",),
}
"""Python's types of JSON values -> their names in a schema."""
_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's words, which models write sometimes -> JSON's."""


class DeclaredTypes:
    """The types that tools declare for their arguments."""

    def __init__(self, tools: Tools) -> None:
        self._types = {
            tool["function"]["name"]: _properties(tool["function"].get("parameters"))
            for tool in tools
        }

    def names(self, function: str) -> list[str]:
        """Return the names of a function's declared arguments."""
        return [*self._types.get(function, {})]

    def type_of(self, function: str, key: str) -> Any:
        """Return the declared type of an argument, in the form of the schema; None without one."""
        return self._types.get(function, {}).get(key)

    def json_of(self, function: str, key: str, text: str) -> str:
        """Return an argument's value as JSON: unchanged, unless its type is string or it is not
        valid JSON.
        """
        declared = self.type_of(function, key)
        if declared == "string":
            return json.dumps(text, ensure_ascii=False)
        value = loads_or(text, NOTHING)
        if value is NOTHING and (word := _WORDS.get(text.strip())):
            return word
        listed = declared if isinstance(declared, list) else []
        string = "string" in listed and not set(_TYPES.get(type(value), ())) & set(listed)
        if value is NOTHING or string:
            return json.dumps(text, ensure_ascii=False)
        return text.strip()


class KeyedCalls(Body):
    """Parses arguments that come key by key, each of which becomes a member of a JSON object when
    it is complete.

    tools  that declare types of arguments
    """

    def __init__(self, tools: Tools, closer: str) -> None:
        super().__init__(closer)
        self._declared = DeclaredTypes(tools)
        self._name: str | None = None
        self._pairs = 0

    def _begin(self, name: str) -> None:
        self._name, self._pairs = name, 0
        super()._begin(name)

    def _member(self, key: str, value: str) -> None:
        """Add an argument, its value in JSON."""
        self._argue(f"{', ' if self._pairs else '{'}{json.dumps(key)}: {value}")
        self._pairs += 1

    def _end(self) -> None:
        """End the call's arguments."""
        self._argue("}" if self._pairs else "{}")
        self._name = None


class GlmCalls(KeyedCalls):
    """Parses a name, then pairs of key and value in tags; strings have no quotes."""

    def _read(self, text: str) -> tuple[str, bool]:
        """Parse pairs of key and value; strings are recognised by the tools' declared types."""
        if self._name is None:
            end = _NAME_END.search(text)
            if end is None:
                return text, True
            self._begin(text[: end.start()].strip())
            text = text[end.start() :]
        at = 0
        while text.find("</arg_value>", at) >= 0 and (pair := _PAIR.match(text, at)):
            self._member(pair[1], self._declared.json_of(self._name or "", pair[1], pair[2]))
            at = pair.end()
        text = text[at:]
        if text.lstrip().startswith(self._closer):
            self._end()
            return text.lstrip()[len(self._closer) :], False
        return text, True


@dataclass(frozen=True, slots=True)
class FunctionTags:
    """The tags around functions and, within these, around parameters.

    function       before a function's parameters; {} is its name
    function_end   after them
    parameter      before a value; {} is its key, {string} is true or false
    parameter_end  after it
    on_lines       one line break on each side of a value belongs to the tags
    quotes         may be around a value
    """

    function: str
    function_end: str
    parameter: str
    parameter_end: str
    on_lines: bool = False
    quotes: tuple[str, str] = ("", "")

    @property
    def opens(self) -> re.Pattern[str]:
        """Pattern of the beginning of a function."""
        return re.compile(_tag(self.function))

    @property
    def begins(self) -> re.Pattern[str]:
        """Pattern of the beginning of a parameter; group `string` is whether it is a string."""
        before, given, behind = self.parameter.partition("{string}")
        typed = f"(?P<string>true|false){re.escape(behind)}" if given else ""
        return re.compile(_tag(before) + typed)


def _tag(text: str) -> str:
    """Return the pattern of a tag with a name in it, which is group 1."""
    before, _, behind = text.partition("{}")
    return rf"{re.escape(before)}([^\n]{{1,256}}?){re.escape(behind)}"


QWEN_TAGS = FunctionTags(
    "<function={}>", "</function>", "<parameter={}>", "</parameter>", on_lines=True
)
MINIMAX_TAGS = FunctionTags(
    '<invoke name="{}">', "</invoke>", '<parameter name="{}">', "</parameter>"
)
MINICPM_TAGS = FunctionTags(
    '<function name="{}">',
    "</function>",
    '<param name="{}">',
    "</param>",
    quotes=("<![CDATA[", "]]>"),
)


def _marked(mark: str) -> FunctionTags:
    """Return tags that begin with a mark and say of each value whether it is a string."""
    return FunctionTags(
        f'<{mark}invoke name="{{}}">',
        f"</{mark}invoke>",
        f'<{mark}parameter name="{{}}" string="{{string}}">',
        f"</{mark}parameter>",
    )


DSML_TAGS, GCML_TAGS = _marked("\uff5cDSML\uff5c"), _marked("\uff5cGCML\uff5c")


class FunctionCalls(KeyedCalls):
    """Parses functions in tags, and in these parameters.

    A value ends at the first closing tag after which another parameter or the function's end
    follows, so that it may contain such a tag.

    closer  ends the functions; without it, or if it is "", the last function's end does
    """

    def __init__(self, tools: Tools, closer: str, tags: FunctionTags) -> None:
        super().__init__(tools, closer)
        self._tags, self._opens, self._begins = tags, tags.opens, tags.begins
        self._function_mark = tags.function.partition("{}")[0]
        self._behind = tags.parameter.partition("{}")[0], tags.function_end
        self._closers = (closer,) if closer else ()
        # By how a declared parameter begins: its key, and whether it is marked as a string.
        self._declared_as: dict[str, tuple[str, bool]] = {}
        self._heads = Openings(())
        # Place in a parameter that is not whole before which it does not end.
        self._open_until = 0

    def _read(self, text: str) -> tuple[str, bool]:
        """Parse a function's name when it is complete, then its parameters. Ends after the closer,
        or where no call can follow.
        """
        while True:
            begun = text.lstrip()
            if self._name is None:
                if begun.startswith(self._closers):
                    return begun[len(self._closer) :], False
                opened = self._opens.match(begun)
                if opened is None:
                    waits = _may_become(begun, (self._function_mark, self._closer))
                    return text, waits
                self._begin(opened[1].strip())
                self._declared_as = self._declared_heads(opened[1].strip())
                self._heads = Openings(self._declared_as)
                text = begun[opened.end() :]
            elif begun.startswith((self._tags.function_end, *self._closers)):
                self._end()
                text = begun.removeprefix(self._tags.function_end)
            elif (found := self._parameter(begun)) is None:
                waits = _may_become(begun, (*self._behind, self._closer))
                if not waits:  # What was begun is a call.
                    self._end()
                return text, waits
            else:
                text = found

    def _parameter(self, text: str) -> str | None:
        """Parse a parameter and return the rest; None: it is not complete."""
        head, closing = self._head(text), self._tags.parameter_end
        if head is None:
            return None
        key, is_string, begin = head
        marks = (*self._behind, *self._closers)
        end = text.find(closing, max(begin, self._open_until))
        while end >= 0:
            behind = end + len(closing)
            following = _SPACE.match(text, behind).end()  # type: ignore[union-attr]
            if text.startswith(marks, following):
                self._open_until = 0
                self._member(key, self._argument(key, is_string, text[begin:end]))
                return text[behind:]
            self._open_until = end
            if _may_become(text[following : following + max(map(len, marks))], marks):
                return None
            end = text.find(closing, behind)
        self._open_until = max(self._open_until, len(text) - len(closing) + 1)
        return None

    def _declared_heads(self, function: str) -> dict[str, tuple[str, bool]]:
        tag = self._tags.parameter
        kinds = ("true", "false") if "{string}" in tag else ("false",)
        return {
            tag.format(key, string=kind): (key, kind == "true")
            for key in self._declared.names(function)
            for kind in kinds
        }

    def _head(self, text: str) -> tuple[str, bool, int] | None:
        """Return (key, whether it is marked as a string, index of the value) of a parameter: of the
        declared one with the longest beginning, else of any. None if later text may change it.
        """
        if self._heads.begun(text):
            return None
        if known := next(self._heads.at(text), ""):
            return (*self._declared_as[known], len(known))
        found = self._begins.match(text)
        if found is None:
            return None
        return found[1].strip(), found.groupdict().get("string") == "true", found.end()

    def _argument(self, key: str, is_string: bool, value: str) -> str:
        """Return a parameter's value as JSON."""
        if self._tags.on_lines:
            value = value.removeprefix("\n").removesuffix("\n")
        before, behind = self._tags.quotes
        if before and value.startswith(before) and value.endswith(behind):
            value = value[len(before) : -len(behind)]
        if is_string:
            return json.dumps(value, ensure_ascii=False)
        return self._declared.json_of(self._name or "", key, value)


_NAME_END = re.compile(r"\n|<arg_key>|</tool_call>")
_SPACE = re.compile(r"\s*+")
_PAIR = re.compile(
    r"\s*+<arg_key>((?>.*?(?=</arg_key>)))</arg_key>\s*+<arg_value>((?>.*?(?=</arg_value>)))</arg_value>",
    re.DOTALL,
)


def _may_become(text: str, marks: Sequence[str]) -> bool:
    """Return whether the beginning of a text is, or may become, one of the marks."""
    return any(mark.startswith(text) or text.startswith(mark) for mark in marks if mark)


def _properties(schema: Any) -> Mapping[str, Any]:
    """Name -> declared type of an object's properties."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: item.get("type") for name, item in properties.items() if isinstance(item, dict)}
