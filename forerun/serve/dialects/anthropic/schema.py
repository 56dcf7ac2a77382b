"""The request body of /v1/messages: a conversation of content blocks, tools, thinking."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.constrain.grammar.calls import Rules
from forerun.errors import RequestError
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
    tagged,
    takes,
    text,
)
from forerun.serve.bodies.messages import (
    MAX_MESSAGES,
    NO_MEDIA,
    history,
    is_assistant,
    joined,
    of_parts,
)
from forerun.serve.bodies.schema import (
    MAX_STOP_TEXT,
    MAX_STOP_TOKENS,
    MAX_TOKENS,
    RequestBody,
    SamplingFields,
    SpeculativeOptions,
    untraced,
)
from forerun.serve.bodies.structure import json_rules
from forerun.serve.bodies.tools import MAX_TOOLS, Tool, argument_object, function_name, plain_tool
from forerun.serve.bodies.unused import TIERS
from forerun.serve.dialects.anthropic.client_tools import known_tool

OWN_TOOLS = "the server runs no tools of its own; offer functions with an input_schema"
_OURS = "no model here can read it; leave it out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Typed):
    """A block of text."""

    text: str = need(plain_text)
    citations: list[Any] | None = accept(only([], why="texts have no sources here"))
    unused: ClassVar[dict[str, Unused]] = {"cache_control": Unused(mapping)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking(Typed):
    """Earlier reasoning of the model; the signature is ignored."""

    thinking: str = need(plain_text)
    signature: str = accept(plain_text, "")
    unused: ClassVar[dict[str, Unused]] = {"cache_control": Unused(mapping)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse(Typed):
    """A call of an earlier answer."""

    id: str = need(text(256))
    name: str = need(function_name)
    input: dict[str, Any] = need(argument_object)

    blank: ClassVar[dict[str, Any]] = {"input": {}}
    unused: ClassVar[dict[str, Unused]] = {
        "cache_control": Unused(mapping),
        "caller": Unused(mapping),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextSource(Typed):
    data: str = need(plain_text)
    media_type: str | None = accept(only("text/plain", why=NO_MEDIA))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Citations(Declaration):
    enabled: bool = accept(only(False, why="texts have no sources here"), False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document(Typed):
    """A block of plain text with a title."""

    source: _TextSource = need(
        tagged({"text": _TextSource}, dict.fromkeys(("base64", "url", "file", "content"), NO_MEDIA))
    )
    title: str | None = accept(plain_text)
    context: str | None = accept(plain_text)
    citations: _Citations | None = accept(part(_Citations))
    unused: ClassVar[dict[str, Unused]] = {"cache_control": Unused(mapping)}

    @property
    def text(self) -> str:
        """Title, context and text in one string, for the prompt."""
        head = [one for one in (self.title, self.context) if one]
        return "\n\n".join([*head, self.source.data])


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult(Typed):
    """A block of texts that were found, with their source."""

    source: str = need(plain_text)
    title: str = need(plain_text)
    content: tuple[Text, ...] = need(items(part(Text), MAX_MESSAGES))
    citations: _Citations | None = accept(part(_Citations))
    unused: ClassVar[dict[str, Unused]] = {"cache_control": Unused(mapping)}

    @property
    def text(self) -> str:
        """Title, source and texts in one string, for the prompt."""
        return "\n\n".join([self.title, self.source, *(one.text for one in self.content)])


_MEDIA = {"image": NO_MEDIA}
_TEXTS = {"text": Text, "document": Document, "search_result": SearchResult}
joined_text = joined(tagged(_TEXTS, _MEDIA))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult(Typed):
    """The result of a call."""

    tool_use_id: str = need(text(256))
    content: str = accept(joined_text, "")
    unused: ClassVar[dict[str, Unused]] = {
        "is_error": Unused(boolean, False),
        "cache_control": Unused(mapping),
    }


Written = Text | Document | SearchResult
Block = Written | Thinking | ToolUse | ToolResult
_block = tagged(
    {**_TEXTS, "thinking": Thinking, "tool_use": ToolUse, "tool_result": ToolResult},
    {**_MEDIA, "redacted_thinking": _OURS, "server_tool_use": OWN_TOOLS},
)
_blocks = items(_block, MAX_MESSAGES)


@takes({"anyOf": [plain_text.schema, _blocks.schema]}, of_parts(_blocks))
def _content(value: Any, where: str) -> tuple[Block, ...]:
    if isinstance(value, str):
        return (Text(type="text", text=plain_text(value, where)),)
    return _blocks(value, where)


_ROLES = only("user", "assistant", "system", why="roles are user, assistant and system")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnthropicMessage(Declaration):
    """One turn of a conversation."""

    role: str = need(_ROLES)
    content: tuple[Block, ...] = need(_content)

    blank: ClassVar[dict[str, Any]] = {"content": []}


_OTHERS: dict[Any, tuple[str, ...]] = {
    "assistant": ("tool_result",),
    "user": ("thinking", "tool_use"),
    "system": ("thinking", "tool_use", "tool_result"),
}
"""Types of blocks that messages of a role cannot have."""


def _mend(value: Any, where: str, left: list[str]) -> Any:
    found = mend_object(AnthropicMessage)(value, where, left)
    others, content = _OTHERS.get(found.get("role"), ()), found["content"]
    if isinstance(content, list) and any(block["type"] in others for block in content):
        left.append(f"{where}.content")
        found["content"] = [block for block in content if block["type"] not in others]
    return found


def _mend_results(value: Any, where: str, left: list[str]) -> Any:
    """Mend the results of tools in a message, and no other block."""
    content = mapping(value, where).get("content")
    if not isinstance(content, list):
        return value
    found = []
    for index, block in enumerate(content):
        brought = isinstance(block, dict) and block.get("type") == "tool_result"
        mended = _block.mend(block, f"{where}.content[{index}]", left) if brought else block
        found.append(mended)
    return {**value, "content": found}


@takes(body_schema(AnthropicMessage), _mend)
def _message(value: Any, where: str) -> AnthropicMessage:
    """Read a message; its role limits the types of blocks."""
    found = read(AnthropicMessage, value, where)
    for index, block in enumerate(found.content):
        if block.type in _OTHERS[found.role]:
            place = f"{where}.content[{index}]"
            raise RequestError(f"{place}: a {found.role} message has no {block.type}.", place)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Function(Declaration):
    name: str = need(function_name)
    type: str | None = accept(only("custom", why=OWN_TOOLS))
    description: str | None = accept(plain_text)
    input_schema: dict[str, Any] = need(mapping)
    strict: bool = accept(boolean, False)
    input_examples: list[Any] | None = accept(only([], why="put examples into the description"))
    allowed_callers: list[Any] | None = accept(only(["direct"], why="only the model calls"))
    unused: ClassVar[dict[str, Unused]] = {
        "cache_control": Unused(mapping),
        "eager_input_streaming": Unused(boolean),
        "defer_loading": Unused(boolean, False),
    }


_SEARCH = "tool_search_tool_"
"""Beginning of the types of tools that find other tools: here the model has all tools from the
start.
"""
_HOSTED = re.compile(r"(web_search|web_fetch|code_execution)_\d{8}|mcp_toolset")


@takes({"type": "array", "maxItems": MAX_TOOLS})
def _tools(value: Any, where: str) -> tuple[Tool, ...]:
    """Read functions. Tools that only search for deferred ones are left out, and so are tools that
    Anthropic's service would run if there are also functions.
    """
    usable = [(at, one) for at, one in enumerate(listed(value, where)) if not _finds_others(one)]
    usable = [(at, one) for at, one in usable if not is_hosted(one)] or usable
    found = [_tool(one, f"{where}[{at}]") for at, one in usable]
    return tuple(listed(found, where, MAX_TOOLS))


def _finds_others(value: Any) -> bool:
    return isinstance(value, dict) and str(value.get("type")).startswith(_SEARCH)


def is_hosted(value: Any) -> bool:
    """Return whether a tool of a request is one that Anthropic's service would run itself."""
    kind = value.get("type") if isinstance(value, dict) else None
    return isinstance(kind, str) and _HOSTED.fullmatch(kind) is not None


@takes({"type": "object", "required": ["name"]})
def _tool(value: Any, where: str) -> Tool:
    if known := known_tool(value, where):
        return known
    # Check for tools that the service itself would run first, whatever other fields they have.
    kind = value.get("type") if isinstance(value, dict) else None
    if kind is not None:
        only("custom", why=OWN_TOOLS)(kind, f"{where}.type")
    given = read(_Function, value, where)
    place = f"{where}.input_schema"
    return plain_tool(given.name, given.description, given.input_schema, given.strict, place)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnthropicToolChoice(Declaration):
    """`tool_choice`: auto, any, none, or tool with a name."""

    type: str = need(only("auto", "any", "none", "tool", why="it is one of these"))
    name: str | None = accept(function_name)
    disable_parallel_tool_use: bool = accept(boolean, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingConfig(Declaration):
    """`thinking`: whether to reason, and in at most how many tokens."""

    type: str = need(only("enabled", "adaptive", "between_tools", "disabled", why="these exist"))
    budget_tokens: int | None = accept(integer(1, MAX_TOKENS))
    display: str | None = accept(only("summarized", "omitted", why="it is one of these"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format(Declaration):
    type: str = need(only("json_schema", why="the format is a JSON schema"))
    schema: Rules = need(json_rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig(Declaration):
    """`output_config`: the reasoning effort, and the schema of the answer."""

    effort: str | None = accept(only("low", "medium", "high", "xhigh", "max", why="these exist"))
    format: _Format | None = accept(part(_Format))
    unused: ClassVar[dict[str, Unused]] = {"task_budget": Unused(mapping)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CountBody(RequestBody):
    """POST /v1/messages/count_tokens: the parts of a request that make up its prompt."""

    messages: tuple[AnthropicMessage, ...] = need(
        history(_message, MAX_MESSAGES, 1, assistant=is_assistant, fresh=_mend_results)
    )
    system: str | None = accept(joined_text)
    tools: tuple[Tool, ...] = accept(_tools, ())
    tool_choice: AnthropicToolChoice | None = accept(part(AnthropicToolChoice))
    thinking: ThinkingConfig | None = accept(part(ThinkingConfig))
    output_config: OutputConfig | None = accept(part(OutputConfig))
    output_format: _Format | None = accept(part(_Format))

    refused: ClassVar[dict[str, str]] = {
        "mcp_servers": OWN_TOOLS,
        "container": OWN_TOOLS,
        "thread": "conversations are not kept here; send all messages",
    }
    unused: ClassVar[dict[str, Unused]] = {
        "cache_control": Unused(mapping),
        "context_management": Unused(mapping),
        "speed": Unused(only("standard", "fast", why="it is one of these"), "standard"),
        "user_profile_id": Unused(plain_text),
        "workspace_id": Unused(plain_text),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesBody(CountBody, SamplingFields):
    """POST /v1/messages. seed, min_p and speculative are Forerun's own fields."""

    max_tokens: int = need(integer(1, MAX_TOKENS))
    stream: bool = accept(boolean, False)
    stop_sequences: tuple[str, ...] = accept(items(text(MAX_STOP_TEXT, 1), MAX_STOP_TOKENS), ())
    seed: int | None = accept(integer(-(2**63), 2**63 - 1))
    speculative: SpeculativeOptions = accept(untraced, SpeculativeOptions())
    unused: ClassVar[dict[str, Unused]] = {
        **CountBody.unused,
        "service_tier": Unused(only(*TIERS, why="it is one of these")),
        "metadata": Unused(mapping),
        "inference_geo": Unused(plain_text),
        "diagnostics": Unused(mapping),
    }
