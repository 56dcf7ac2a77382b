"""Anthropic's tools that have a type instead of a schema and are run by clients: a shell and an
editor. Other models get functions of the same names and arguments.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.serve.bodies.fields import (
    Declaration,
    Unused,
    accept,
    boolean,
    integer,
    mapping,
    need,
    plain_text,
    read,
)
from forerun.serve.bodies.tools import Tool, function_name, plain_tool

_STRING, _WHOLE = {"type": "string"}, {"type": "integer"}
_BASH = {
    "type": "object",
    "properties": {"command": _STRING, "restart": {"type": "boolean"}},
    "additionalProperties": False,
}
_EDITOR = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
        "path": _STRING,
        "view_range": {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 2},
        "file_text": _STRING,
        "old_str": _STRING,
        "new_str": _STRING,
        "insert_line": _WHOLE,
        "insert_text": _STRING,
    },
    "required": ["command", "path"],
    "additionalProperties": False,
}
_KNOWN = {
    "bash_": ("Runs a command in a shell that keeps its state; restart begins a new one.", _BASH),
    "text_editor_": (
        "Shows and changes files: view (view_range: first and last line, -1 is the end), create "
        "(file_text), str_replace (old_str, which is there once, becomes new_str) and insert "
        "(insert_text behind line insert_line; 0 is the beginning).",
        _EDITOR,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClientTool(Declaration):
    type: str = need(plain_text)
    name: str = need(function_name)
    strict: bool = accept(boolean, False)
    unused: ClassVar[dict[str, Unused]] = {
        "max_characters": Unused(integer(1, 2**31 - 1)),
        "cache_control": Unused(mapping),
        "defer_loading": Unused(boolean, False),
        "allowed_callers": Unused(lambda value, where: value),
        "input_examples": Unused(lambda value, where: value),
    }


def known_tool(value: Any, where: str) -> Tool | None:
    """Return the function for a tool of such a type; None for other tools. Raises RequestError
    naming the field.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    found = next((one for name, one in _KNOWN.items() if str(kind).startswith(name)), None)
    if found is None:
        return None
    description, schema = found
    given = read(_ClientTool, value, where)
    return plain_tool(given.name, description, schema, given.strict, f"{where}.type")
