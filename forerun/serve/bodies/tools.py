"""The fields about tools: which functions may be called, and whether the model may, must or must
not.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from forerun.constrain.grammar import Grammar
from forerun.constrain.grammar.calls import Signature
from forerun.errors import RequestError
from forerun.serve.bodies.closing import closed_grammar
from forerun.serve.bodies.fields import (
    Declaration,
    accept,
    boolean,
    items,
    mapping,
    mend_object,
    need,
    only,
    part,
    plain_text,
    read,
    shown,
    takes,
)
from forerun.text.escape import check_json
from forerun.text.json_text import JsonFault, read_first, read_json

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    signature  its name and the grammar of its arguments
    plain      in the form of chat templates, the same for every dialect
    """

    signature: Signature
    plain: dict[str, Any]

    def called(self, name: str) -> "Tool":
        """Return the same tool under another name."""
        if name == self.signature.name:
            return self
        plain = {**self.plain, "function": {**self.plain["function"], "name": name}}
        return Tool(replace(self.signature, name=name), plain)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """kind: none, auto, required, or named; names: the only functions that may be called, one for
    named; () = all.
    """

    kind: str
    names: tuple[str, ...] = ()


@takes({"type": "object", "required": ["type", "function"]})
def tool(value: Any, where: str) -> Tool:
    """Read a function with its parameters; without parameters it takes none. Raises RequestError
    naming the field.
    """
    given = read(_Tool, value, where).function
    place = f"{where}.function.parameters"
    return plain_tool(given.name, given.description, given.parameters, given.strict, place)


def plain_tool(
    name: str,
    description: str | None,
    parameters: dict[str, Any] | None,
    strict: bool,
    place: str,
) -> Tool:
    """Return a tool from the parts of a function in any dialect. Its `plain` has OpenAI's format,
    without `strict`, which the model need not see.

    place  path of the parameters, for messages
    """
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False}
    if parameters:
        schema = {"type": "object", **parameters}
    found = Grammar.json_schema(schema, not strict, place)
    signature = Signature(name, closed_grammar(found) if strict else found)
    return Tool(signature, {"type": "function", "function": function})


def different(tools: tuple[Tool, ...], name_field: str, where: str = "tools") -> tuple[Tool, ...]:
    """Return `tools` unchanged. Raises RequestError, naming `where` and `name_field`, if two have
    the same name.
    """
    names = [item.signature.name for item in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            place = f"{where}[{index}].{name_field}"
            raise RequestError(f"{place}: {shown(name)} appears twice.", place)
    return tools


@takes(items(tool, MAX_TOOLS).schema)
def tools(value: Any, where: str) -> tuple[Tool, ...]:
    """Read functions with different names, MAX_TOOLS at most. Raises RequestError naming the
    field.
    """
    return different(items(tool, MAX_TOOLS)(value, where), "function.name", where)


@takes({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]})
def tool_choice(value: Any, where: str) -> ToolChoice:
    """Read none, auto, required, {"type": "function", "function": {"name": ...}}, or allowed_tools,
    which has a mode and such functions.
    """
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        allowed = read(_Allowed, value, where).allowed_tools
        return ToolChoice(allowed.mode, tuple(one.function.name for one in allowed.tools))
    if isinstance(value, dict):
        return ToolChoice("named", (read(_Choice, value, where).function.name,))
    if value not in ("none", "auto", "required"):
        raise RequestError(
            f"{where} must be none, auto, required or a function, not {shown(value)}.", where
        )
    return ToolChoice(value)


@takes({"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,256}$"})
def function_name(value: Any, where: str) -> str:
    """Read a function's name, which must be valid in every format of calls. Raises RequestError,
    naming `where`, for anything else.
    """
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        message = f"{where} must be 1 to 256 letters, digits, '_', '.' or '-', not {shown(value)}."
        raise RequestError(message, where)
    return value


_FUNCTIONS = only("function", why="tools are functions")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFunction(Declaration):
    """The fields of a function in all dialects but Anthropic's."""

    name: str = need(function_name)
    description: str | None = accept(plain_text)
    parameters: dict[str, Any] | None = accept(mapping)
    strict: bool = accept(boolean, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tool(Declaration):
    type: str = need(_FUNCTIONS)
    function: ToolFunction = need(part(ToolFunction))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named(Declaration):
    name: str = need(function_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice(Declaration):
    type: str = need(_FUNCTIONS)
    function: _Named = need(part(_Named))


MODES = only("auto", "required", why="the mode of allowed tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class _AllowedTools(Declaration):
    mode: str = need(MODES)
    tools: tuple[_Choice, ...] = need(items(part(_Choice), MAX_TOOLS, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allowed(Declaration):
    type: str = need(only("allowed_tools", why="it is a fixed value"))
    allowed_tools: _AllowedTools = need(part(_AllowedTools))


def _first_object(value: Any, where: str, left: list[str]) -> dict[str, Any]:
    """Return the first complete object in arguments that a model wrote; {} if there is none."""
    found, complete = value, True
    try:
        if isinstance(value, str):
            written = value.strip()
            found, end = read_first(written)
            complete = end == len(written)
        check_json(found, where)
    except (JsonFault, RequestError):
        found = None
    if not (complete and isinstance(found, dict)):
        left.append(where)
    return found if isinstance(found, dict) else {}


def _mend_text(value: Any, where: str, left: list[str]) -> str:
    try:
        return argument_text(value, where)
    except RequestError:
        return json.dumps(_first_object(value, where, left), ensure_ascii=False)


@takes(plain_text.schema, _mend_text)
def argument_text(value: Any, where: str) -> str:
    """Read a call's arguments as JSON text; no arguments may be an empty text. Raises RequestError,
    naming `where`, for anything else.
    """
    written = plain_text(value, where)
    if written.strip():
        try:
            found = read_json(written, repeated=True)
        except JsonFault as error:
            raise RequestError(f"{where} is not JSON: {error}", where) from error
        check_json(found, where)
    return written


@takes({"type": "object"}, _first_object)
def argument_object(value: Any, where: str) -> dict[str, Any]:
    """Read a call's arguments as a JSON object. Raises RequestError, naming `where`, for anything
    else.
    """
    check_json(value, where)
    return dict(mapping(value, where))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Called(Declaration):
    """A function that was called. OpenAI's `parse` adds its arguments a second time."""

    name: str = need(function_name)
    arguments: str = need(argument_text)
    parsed_arguments: Any = accept(lambda value, where: value)

    blank: ClassVar[dict[str, Any]] = {"arguments": "{}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call(Declaration):
    """A call of an earlier answer. Streams add an index."""

    id: str | None = accept(plain_text)
    type: str = accept(_FUNCTIONS, "function")
    function: _Called = need(part(_Called))
    index: Any = accept(lambda value, where: value)


@takes({"type": "object", "required": ["function"]}, mend_object(_Call))
def call(value: Any, where: str) -> dict[str, Any]:
    """Read a call of an earlier answer, in the form of chat templates. Raises RequestError naming
    the field.
    """
    given = read(_Call, value, where)
    function = {"name": given.function.name, "arguments": given.function.arguments}
    plain = {"type": "function", "function": function}
    return plain if given.id is None else {"id": given.id, **plain}


calls = items(call, MAX_TOOLS)
