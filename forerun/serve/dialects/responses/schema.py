"""The request body of /v1/responses: a list of items, functions, a format of the answer."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.constrain.grammar.calls import Rules
from forerun.serve.bodies.fields import (
    Declaration,
    Typed,
    Unused,
    accept,
    body_schema,
    boolean,
    integer,
    items,
    listed,
    mapping,
    mend_object,
    need,
    only,
    part,
    plain_text,
    read,
    schema_of,
    tagged,
    takes,
    text,
    whatever,
)
from forerun.serve.bodies.messages import MAX_MESSAGES, NO_MEDIA, history, joined
from forerun.serve.bodies.reasoning import EFFORTS, thinking_budget
from forerun.serve.bodies.schema import (
    MAX_TOKENS,
    NO_MODERATION,
    RequestBody,
    SamplingFields,
    SpeculativeOptions,
    cache_salt,
    untraced,
)
from forerun.serve.bodies.structure import json_object_rules, named_rules
from forerun.serve.bodies.tools import (
    MAX_TOOLS,
    MODES,
    Tool,
    ToolChoice,
    ToolFunction,
    argument_text,
    function_name,
    plain_tool,
    tool_choice,
)
from forerun.serve.bodies.unused import TIERS
from forerun.serve.dialects.responses.free_tools import (
    NO_CALLERS,
    NOT_ASYNC,
    SHELL,
    CustomCall,
    ShellCall,
    free_tool,
    is_free,
)
from forerun.serve.dialects.responses.offers import known_names

OWN_TOOLS = "the server runs no tools of its own; offer functions"
_STATUS = only("in_progress", "completed", "incomplete", why="these exist")
_NOT_HERE = {"caller": NO_CALLERS, **NOT_ASYNC}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart(Typed):
    """A part of a message."""

    text: str = need(plain_text)
    annotations: list[Any] | None = accept(only([], why="texts have no sources here"))
    unused: ClassVar[dict[str, Unused]] = {
        "logprobs": Unused(lambda value, where: value),
        "prompt_cache_breakpoint": Unused(mapping),
    }


_MEDIA = dict.fromkeys(("input_image", "input_file", "input_audio"), NO_MEDIA)
_KINDS = dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"))
joined_text = joined(
    tagged(
        dict.fromkeys(_KINDS, TextPart),
        {**_MEDIA, "refusal": "the template has no place for it"},
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputMessage(Declaration):
    """A message of the conversation."""

    type: str = accept(plain_text, "message")
    role: str = need(only("user", "assistant", "system", "developer", why="these exist"))
    content: str = need(joined_text)
    id: str | None = accept(text(256))
    status: str | None = accept(_STATUS)

    blank: ClassVar[dict[str, Any]] = {"content": ""}
    unused: ClassVar[dict[str, Unused]] = {"phase": Unused(text(64))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Typed):
    """A call of an earlier answer."""

    call_id: str = need(text(256))
    name: str = need(function_name)
    namespace: str | None = accept(text(256))
    arguments: str = need(argument_text)
    id: str | None = accept(text(256))
    status: str | None = accept(_STATUS)

    refused: ClassVar[dict[str, str]] = _NOT_HERE
    blank: ClassVar[dict[str, Any]] = {"arguments": "{}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutput(Typed):
    """The result of a call."""

    call_id: str = need(text(256))
    output: str = need(joined_text)
    id: str | None = accept(text(256))
    name: str | None = accept(text(256))
    status: str | None = accept(_STATUS)

    refused: ClassVar[dict[str, str]] = _NOT_HERE
    blank: ClassVar[dict[str, Any]] = {"output": ""}
    unused: ClassVar[dict[str, Unused]] = {"namespace": Unused(text(256))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning(Typed):
    """Earlier reasoning of the model, or its summary if there is nothing else."""

    summary: str = accept(joined_text, "")
    content: str = accept(joined_text, "")
    id: str | None = accept(text(256))
    status: str | None = accept(_STATUS)
    unused: ClassVar[dict[str, Unused]] = {"encrypted_content": Unused(plain_text)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellOutput(Typed):
    """The output of a command."""

    output: str = need(joined_text)
    id: str | None = accept(text(256))
    call_id: str | None = accept(text(256))
    status: str | None = accept(_STATUS)

    blank: ClassVar[dict[str, Any]] = {"output": ""}


Item = InputMessage | Call | CallOutput | Reasoning | CustomCall | ShellCall | ShellOutput
_KNOWN: dict[str, type[Any]] = {
    "message": InputMessage,
    "function_call": Call,
    "function_call_output": CallOutput,
    "reasoning": Reasoning,
    "custom_tool_call": CustomCall,
    "custom_tool_call_output": CallOutput,
    "local_shell_call": ShellCall,
    "local_shell_call_output": ShellOutput,
}
_item = tagged(_KNOWN)


def _untyped(value: Any) -> bool:
    """Return whether an item is a message without `type`."""
    return isinstance(value, dict) and value.get("type") is None and "role" in value


def _mend(value: Any, where: str, left: list[str]) -> Any:
    mend = mend_object(InputMessage) if _untyped(value) else _item.mend
    return mend(value, where, left)


@takes({"anyOf": [body_schema(InputMessage), _item.schema]}, _mend)
def _one(value: Any, where: str) -> Item:
    return read(InputMessage, value, where) if _untyped(value) else _item(value, where)


def _is_assistants(item: dict[str, Any]) -> bool:
    """Return whether a sent item is the model's own: reasoning, a call, or a message."""
    kind = str(item.get("type"))
    return item.get("role") == "assistant" or kind == "reasoning" or kind.endswith("_call")


def _mend_output(value: Any, where: str, left: list[str]) -> Any:
    brought = isinstance(value, dict) and str(value.get("type")).endswith("_output")
    return _mend(value, where, left) if brought else value


_items = history(_one, MAX_MESSAGES, assistant=_is_assistants, fresh=_mend_output, drops=True)


@takes({"anyOf": [plain_text.schema, _items.schema]})
def _input(value: Any, where: str) -> tuple[Item, ...]:
    """Read `input`: a text of the user, or items."""
    if isinstance(value, str):
        return (InputMessage(role="user", content=plain_text(value, where)),)
    return _items(value, where)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Function(ToolFunction):
    type: str = need(only("function", why=OWN_TOOLS))
    allowed_callers: list[Any] | None = accept(only(["direct"], why=NO_CALLERS))

    refused: ClassVar[dict[str, str]] = NOT_ASYNC
    unused: ClassVar[dict[str, Unused]] = {
        "output_schema": Unused(mapping),
        "defer_loading": Unused(boolean, False),
    }


@takes(body_schema(_Function))
def _tool(value: Any, where: str) -> Tool:
    if is_free(value):
        return free_tool(value, where)
    # Check for tools that the service itself would run first, whatever other fields they have.
    kind = value.get("type") if isinstance(value, dict) else None
    only("function", why=OWN_TOOLS)(kind, f"{where}.type")
    given = read(_Function, value, where)
    place = f"{where}.parameters"
    return plain_tool(given.name, given.description, given.parameters, given.strict, place)


HOSTED = re.compile(
    "(web_search|web_search_preview|file_search|code_interpreter|image_generation|tool_search)"
    "(_20[0-9_]+)?"
)
"""Types of tools that OpenAI's service runs itself. Agents send them together with their
functions.
"""


def is_hosted(value: Any) -> bool:
    """Return whether a tool of a request is one that OpenAI's service would run itself."""
    kind = value.get("type") if isinstance(value, dict) else None
    return isinstance(kind, str) and HOSTED.fullmatch(kind) is not None


@takes({"type": "array", "maxItems": MAX_TOOLS})
def _tools(value: Any, where: str) -> tuple[Tool, ...]:
    """Read functions. Tools that OpenAI's service would run are left out if there are also
    functions, and rejected otherwise.
    """
    each = items(_tool, MAX_TOOLS)
    if not isinstance(value, list) or all(map(is_hosted, value)):
        return tuple(each(value, where))
    found: list[tuple[str | None, Tool]] = []
    for at, one in enumerate(value):
        place = f"{where}[{at}]"
        if isinstance(one, dict) and one.get("type") == "namespace":
            group = read(_Namespace, one, place)
            found += ((group.name, tool) for tool in each(group.tools, f"{place}.tools"))
        elif not is_hosted(one):
            found.append((None, _tool(one, place)))
        if len(found) > MAX_TOOLS:
            break
    names = known_names((space, tool.signature.name) for space, tool in found)
    named = [tool.called(name) for name, (_, tool) in zip(names, found, strict=True)]
    return tuple(listed(named, where, MAX_TOOLS))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Namespace(Typed):
    """Functions that Codex groups under one name, which their calls repeat."""

    name: str = need(function_name)
    description: str | None = accept(plain_text)
    tools: list[Any] = need(lambda value, where: value)


def each_tool(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the checked tools of a request, without those that are left out; each tool of a
    namespace has its name.
    """
    found: list[dict[str, Any]] = []
    for one in tools or []:
        if one.get("type") == "namespace":
            found += ({**tool, "namespace": one["name"]} for tool in one["tools"])
        elif not is_hosted(one):
            found.append(one)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named(Declaration):
    type: str = need(
        only("function", "custom", why="tool_choice is none, auto, required or a tool of these")
    )
    name: str = need(function_name)


@takes({"anyOf": [{"const": {"type": SHELL}}, body_schema(_Named)]})
def _one_tool(value: Any, where: str) -> str:
    """Read a tool by its name. Raises RequestError naming the field."""
    return SHELL if value == {"type": SHELL} else read(_Named, value, where).name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allowed(Declaration):
    type: str = need(only("allowed_tools", why="it is a fixed value"))
    mode: str = need(MODES)
    tools: tuple[str, ...] = need(items(_one_tool, MAX_TOOLS, 1))


@takes(
    {
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            schema_of(_one_tool),
            body_schema(_Allowed),
        ]
    }
)
def _tool_choice(value: Any, where: str) -> ToolChoice:
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        allowed = read(_Allowed, value, where)
        return ToolChoice(allowed.mode, allowed.tools)
    if isinstance(value, dict):
        return ToolChoice("named", (_one_tool(value, where),))
    return tool_choice(value, where)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Schema(Typed):
    schema: dict[str, Any] = need(mapping)
    name: str | None = accept(text(64, 1))
    description: str | None = accept(plain_text)
    strict: bool = accept(boolean, False)


_formats = tagged({"text": Typed, "json_object": Typed, "json_schema": _Schema})


@takes({"type": "object", "required": ["type"]})
def _format(value: Any, where: str) -> Rules | None:
    found = _formats(value, where)
    if isinstance(found, _Schema):
        return named_rules(found.schema, found.strict, f"{where}.schema")
    return json_object_rules(where) if found.type == "json_object" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig(Declaration):
    """`text`: the format of the answer."""

    format: Rules | None = accept(_format)
    unused: ClassVar[dict[str, Unused]] = {
        "verbosity": Unused(only("low", "medium", "high", why="it is one of these"))
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningConfig(Declaration):
    """`reasoning`: the effort. The reasoning itself is returned, so there is no summary."""

    effort: str | None = accept(only(*EFFORTS, why="these are the efforts"))
    max_tokens: int | None = accept(thinking_budget)
    mode: str | None = accept(only("standard", why="there is one mode"))
    unused: ClassVar[dict[str, Unused]] = {
        "summary": Unused(text(64)),
        "generate_summary": Unused(text(64)),
        "context": Unused(text(64)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _StreamOptions(Declaration):
    include_obfuscation: bool = accept(only(False, why="events are not padded"), False)


LOGPROBS = "message.output_text.logprobs"

INCLUDED = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
"""OpenAI's values of `include`; those about tools and media that this server lacks have no
effect.
"""

_INCLUDED = only(*INCLUDED, why="OpenAI knows no such part")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesBody(SamplingFields, RequestBody):
    """POST /v1/responses. top_k, min_p, seed and speculative are Forerun's own fields."""

    input: tuple[Item, ...] = accept(_input, ())
    instructions: str | None = accept(plain_text)
    previous_response_id: str | None = accept(text(256, 1))
    store: bool = accept(boolean, True)
    stream: bool = accept(boolean, False)
    stream_options: _StreamOptions | None = accept(part(_StreamOptions))
    max_output_tokens: int | None = accept(integer(1, MAX_TOKENS))
    seed: int | None = accept(integer(-(2**63), 2**63 - 1))
    top_logprobs: int | None = accept(integer(0, MAX_TOKENS))
    include: tuple[str, ...] = accept(items(_INCLUDED, 64), ())
    tools: tuple[Tool, ...] = accept(_tools, ())
    tool_choice: ToolChoice | None = accept(_tool_choice)
    parallel_tool_calls: bool = accept(boolean, True)
    reasoning: ReasoningConfig | None = accept(part(ReasoningConfig))
    metadata: dict[str, Any] | None = accept(mapping)
    user: str | None = accept(plain_text)
    safety_identifier: str | None = accept(plain_text)
    prompt_cache_key: str | None = accept(plain_text)
    cache_salt: str | None = accept(cache_salt)
    background: bool = accept(only(False, why="ask for a stream"), False)
    truncation: str | None = accept(only("auto", "disabled", why="it is one of these"))
    speculative: SpeculativeOptions = accept(untraced, SpeculativeOptions())

    refused: ClassVar[dict[str, str]] = {
        "conversation": "use previous_response_id",
        "prompt": "prompts are not stored here; send instructions and input",
        "moderation": NO_MODERATION,
    }
    unused: ClassVar[dict[str, Unused]] = {
        "prompt_cache_retention": Unused(text(64)),
        "prompt_cache_options": Unused(mapping),
        "context_management": Unused(whatever),
        "max_tool_calls": Unused(integer(0, MAX_TOKENS)),
        "service_tier": Unused(only(*TIERS, why="it is one of these")),
        "client_metadata": Unused(mapping),
        "access_programs": Unused(mapping),
        "image": Unused(mapping),
    }
    # Last, because it hides the reader of this name.
    text: TextConfig | None = accept(part(TextConfig))
