"""Converts conversations of content blocks to the form of chat templates."""

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.constrain.grammar.calls import Rules
from forerun.errors import RequestError
from forerun.serve.bodies.messages import goes_on, left_out
from forerun.serve.bodies.schema import ChatBody
from forerun.serve.bodies.tools import ToolChoice, different
from forerun.serve.dialects.anthropic.schema import (
    AnthropicMessage,
    CountBody,
    MessagesBody,
    Thinking,
    ToolResult,
    ToolUse,
    Written,
    is_hosted,
)

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversation(ChatBody):
    """Anthropic's budgets are targets: clients also send them to models that do not reason."""

    budget_is_target: ClassVar[bool] = True


def chat_body(body: CountBody) -> ChatBody:
    """Convert the request to a ChatBody. Raises RequestError, by the field, for what has no
    equivalent there.
    """
    messages = [] if body.system is None else [{"role": "system", "content": body.system}]
    for message in body.messages:
        messages += _plain(message)
    if len(messages) > 1 and _is_blank(messages[-1]):
        messages.pop()  # An empty beginning of an answer.
    choice = body.tool_choice
    options: dict[str, Any] = {}
    if isinstance(body, MessagesBody):
        options = {
            "max_tokens": body.max_tokens,
            "stream": body.stream,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "min_p": body.min_p,
            "seed": body.seed,
            "speculative": body.speculative,
        }
    return _Conversation(
        model=body.model,
        messages=tuple(messages),
        tools=different(body.tools, "name"),
        tool_choice=None if choice is None else _choice(body),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        continue_final_message=goes_on(messages[-1]) or _is_blank(messages[-1]),
        reasoning_effort=_effort(body),
        thinking_token_budget=None if body.thinking is None else body.thinking.budget_tokens,
        json_schema=_schema(body),
        **options,
    )


def ignored(body: CountBody, value: dict[str, Any]) -> tuple[str, ...]:
    """Return the fields of the request that have no effect; nested ones by their paths.

    value  the request's JSON
    """
    hosted = {f"tools.{tool['type']}" for tool in value.get("tools") or () if is_hosted(tool)}
    return *body.ignored, *sorted(hosted), *left_out(body.messages)


def _plain(message: AnthropicMessage) -> list[dict[str, Any]]:
    """Convert a message to messages of a template: results of tools become messages of their own,
    and come first, since they answer the calls before.
    """
    texts = [block.text for block in message.content if isinstance(block, Written)]
    found: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.content}
        for block in message.content
        if isinstance(block, ToolResult)
    ]
    calls = [_call(block) for block in message.content if isinstance(block, ToolUse)]
    thoughts = [block.thinking for block in message.content if isinstance(block, Thinking)]
    plain: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    if thoughts:
        plain["reasoning_content"] = "\n".join(thoughts)
    if calls:
        plain["tool_calls"] = calls
    return [*found, plain] if texts or calls or thoughts or not found else found


def _is_blank(message: dict[str, Any]) -> bool:
    """Return whether the assistant's message has no text, reasoning or calls."""
    speaks = goes_on(message) or "tool_calls" in message
    return message["role"] == "assistant" and not speaks


def _call(block: ToolUse) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _choice(body: CountBody) -> ToolChoice:
    choice = body.tool_choice
    assert choice is not None
    if choice.type != "tool":
        if choice.type == "any" and not body.tools:
            raise RequestError(
                "tool_choice asks for a call, but there are no tools.", "tool_choice"
            )
        return ToolChoice(_CHOICES[choice.type])
    if choice.name not in [tool.signature.name for tool in body.tools]:
        name = "tool_choice.name"
        raise RequestError(f"{name}: there is no tool {choice.name!r} in tools.", name)
    return ToolChoice("named", (choice.name,))


def _effort(body: CountBody) -> str | None:
    """Return the reasoning effort; None = the template's default."""
    effort = body.output_config.effort if body.output_config is not None else None
    if body.thinking is None:
        return effort
    return "none" if body.thinking.type == "disabled" else effort or "medium"


def _schema(body: CountBody) -> Rules | None:
    newer = body.output_config.format if body.output_config is not None else None
    if newer is not None and body.output_format is not None:
        message = "output_format and output_config.format say the same; send one of them."
        raise RequestError(message, "output_format")
    found = newer or body.output_format
    return found.schema if found is not None else None
