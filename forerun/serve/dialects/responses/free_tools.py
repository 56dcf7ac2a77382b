"""Tools of /v1/responses other than functions, presented to the model as functions.

`custom` tools take any text, `local_shell` a command; agents (Codex) run them. The model gets a
function instead, whose call is converted to an item of the tool's own kind.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.constrain.grammar import Grammar
from forerun.serve.bodies.fields import (
    Declaration,
    Typed,
    Unused,
    accept,
    boolean,
    items,
    mapping,
    need,
    only,
    plain_text,
    read,
    tagged,
    takes,
)
from forerun.serve.bodies.tools import Tool, function_name, plain_tool
from forerun.text.tool_bodies import NOTHING, loads_or

SHELL = "local_shell"
KINDS = ("custom", SHELL)
NO_CALLERS = "only the model calls"
NOT_ASYNC = {"async": "calls are answered in the next request"}
"""A field of tools and calls that is rejected unless it is false, and the reason."""
_SHELL_TAKES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer", "minimum": 0},
    },
    "required": ["command"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grammar(Typed):
    syntax: str = need(only("lark", "regex", why="grammars are in one of these"))
    definition: str = need(plain_text)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Custom(Typed):
    name: str = need(function_name)
    description: str | None = accept(plain_text)
    format: Typed | _Grammar | None = accept(tagged({"text": Typed, "grammar": _Grammar}))
    allowed_callers: list[Any] | None = accept(only(["direct"], why=NO_CALLERS))

    refused: ClassVar[dict[str, str]] = NOT_ASYNC
    unused: ClassVar[dict[str, Unused]] = {"defer_loading": Unused(boolean, False)}


def is_free(value: Any) -> bool:
    """Return whether a tool of a request is not a function (KINDS)."""
    return isinstance(value, dict) and value.get("type") in KINDS


def free_tool(value: dict[str, Any], where: str) -> Tool:
    """Return the function for such a tool. A regular expression constrains its text; a Lark grammar
    does not (`unheld`), and is only shown to the model. Raises RequestError if one of them is
    invalid.
    """
    if value["type"] == SHELL:
        read(Typed, value, where)
        description = "Runs a command on the user's machine."
        return plain_tool(SHELL, description, _SHELL_TAKES, False, where)
    given = read(_Custom, value, where)
    text: dict[str, Any] = {"type": "string"}
    description = given.description or ""
    if isinstance(given.format, _Grammar):
        place = f"{where}.format.definition"
        if given.format.syntax == "regex":
            Grammar.regex(given.format.definition, place)
            text["pattern"] = f"^(?:{given.format.definition})$"
        else:
            Grammar.grammar(given.format.definition, place)
        shown = f"The input is a text of this {given.format.syntax}:\n{given.format.definition}"
        description = f"{description}\n\n{shown}" if description else shown
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    return plain_tool(
        given.name, description, schema | {"additionalProperties": False}, False, where
    )


def unheld(tools: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """Return the paths of grammars in checked `tools` that are not enforced."""
    formats = [one.get("format") or {} for one in tools if is_free(one)]
    lark = any(format.get("syntax") == "lark" for format in formats)
    return ("tools.format.definition",) if lark else ()


def free_input(arguments: str) -> str:
    """Return the text of a custom tool's call; if the call was cut off, the part there is."""
    for cut in range(7):  # Of an escape that was cut: \uD83D has six letters.
        for end in ("", '"}', "}"):
            found = loads_or(arguments[: len(arguments) - cut] + end, NOTHING)
            if found is NOTHING:
                continue
            text = found.get("input", "") if isinstance(found, dict) else ""
            return text if isinstance(text, str) else ""
    return ""


def of_input(text: str) -> str:
    """Return the arguments, as JSON, of a call with this free text."""
    return json.dumps({"input": text}, ensure_ascii=False)


def of_action(action: dict[str, Any]) -> str:
    """Return the arguments, as JSON, of a shell call that runs this action."""
    taken = _SHELL_TAKES["properties"]
    given = {key: action[key] for key in taken if action.get(key) is not None}
    return json.dumps(given, ensure_ascii=False)


def shell_action(arguments: str) -> dict[str, Any]:
    """Return the command of a shell call from its arguments; empty if these were cut off."""
    found = loads_or(arguments)
    given = found if isinstance(found, dict) else {}
    more = {key: given[key] for key in ("working_directory", "timeout_ms") if key in given}
    return {"type": "exec", "command": given.get("command", []), "env": {}, **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomCall(Typed):
    """A call of a custom tool in an earlier answer."""

    call_id: str = need(plain_text)
    name: str = need(function_name)
    input: str = need(plain_text)
    id: str | None = accept(plain_text)
    status: str | None = accept(plain_text)
    namespace: str | None = accept(plain_text)

    refused: ClassVar[dict[str, str]] = {"caller": NO_CALLERS, **NOT_ASYNC}

    @property
    def arguments(self) -> str:
        """The JSON that the function was called with."""
        return of_input(self.input)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Action(Declaration):
    type: str = need(only("exec", why="a shell runs commands"))
    command: tuple[str, ...] = need(items(plain_text, 4096))
    env: dict[str, Any] | None = accept(mapping)
    timeout_ms: int | None = accept(lambda value, where: value)
    user: str | None = accept(plain_text)
    working_directory: str | None = accept(plain_text)


@takes({"type": "object", "required": ["type", "command"]})
def _action(value: Any, where: str) -> dict[str, Any]:
    read(_Action, value, where)
    return dict(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellCall(Typed):
    """A call of the shell in an earlier answer."""

    action: dict[str, Any] = need(_action)
    call_id: str | None = accept(plain_text)
    id: str | None = accept(plain_text)
    status: str | None = accept(plain_text)

    @property
    def name(self) -> str:
        """The name of the function."""
        return SHELL

    @property
    def arguments(self) -> str:
        """The JSON that the function was called with."""
        return of_action(self.action)
