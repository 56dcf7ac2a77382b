"""Converts items to the messages of chat templates."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from forerun.errors import RequestError
from forerun.serve.bodies.messages import left_out
from forerun.serve.bodies.schema import ChatBody
from forerun.serve.bodies.tools import different
from forerun.serve.dialects.responses.free_tools import CustomCall, ShellCall, unheld
from forerun.serve.dialects.responses.offers import Names
from forerun.serve.dialects.responses.schema import (
    LOGPROBS,
    Call,
    CallOutput,
    InputMessage,
    Item,
    Reasoning,
    ResponsesBody,
    ShellOutput,
    TextConfig,
    each_tool,
    is_hosted,
)

Messages = tuple[dict[str, Any], ...]


def chat_body(body: ResponsesBody, messages: Messages) -> ChatBody:
    """Convert the request to a ChatBody. Raises RequestError if it has no input, or `top_logprobs`
    that `include` does not announce.

    messages  the conversation, without instructions
    """
    if not messages:
        raise RequestError("input is missing.", "input")
    if body.instructions is not None:
        messages = ({"role": "system", "content": body.instructions}, *messages)
    # The format applies to messages, and an answer that must call a tool has none.
    forced = body.tool_choice is not None and body.tool_choice.kind in ("required", "named")
    logprobs = LOGPROBS in body.include
    if body.top_logprobs is not None and not logprobs:
        message = f"top_logprobs needs {LOGPROBS!r} in include."
        raise RequestError(message, "top_logprobs")
    return ChatBody(
        model=body.model,
        messages=messages,
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs,
        tools=different(body.tools, "name"),
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        thinking_token_budget=None if body.reasoning is None else body.reasoning.max_tokens,
        response_format=None if forced else (body.text or TextConfig()).format,
        speculative=body.speculative,
        cache_salt=body.cache_salt,
    )


def messages_of(items: Iterable[Item], names: Names) -> Messages:
    """Convert items to messages. The model's reasoning, text and calls in one turn become one
    message.

    names  of the tools in the prompt
    """
    found: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, CallOutput | ShellOutput):
            id = item.call_id or item.id or ""
            found.append({"role": "tool", "tool_call_id": id, "content": item.output})
            continue
        if isinstance(item, InputMessage) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            found.append({"role": role, "content": item.content})
            continue
        if not found or found[-1]["role"] != "assistant" or _begins_turn(found[-1], item):
            found.append({"role": "assistant", "content": None})
        _add(found[-1], item, names)
    return tuple({**one, "content": one["content"] or ""} if not one.get("tool_calls") else one
                 for one in found)  # fmt: skip


def ignored(body: ResponsesBody, value: dict[str, Any]) -> tuple[str, ...]:
    """Return the fields of the request that have no effect; nested ones by their paths.

    value  the request's JSON
    """
    found = list(body.ignored)
    if body.tools:
        found += unheld(each_tool(value["tools"]))
        found += sorted({f"tools.{tool['type']}" for tool in value["tools"] if is_hosted(tool)})
    found += [f"include.{name}" for name in body.include if name != LOGPROBS]
    return *found, *left_out(body.input)


def _begins_turn(message: dict[str, Any], item: Item) -> bool:
    """Return whether an item begins another turn of the assistant: reasoning comes first, then
    text.
    """
    begun = message["content"] is not None or "tool_calls" in message
    if isinstance(item, Reasoning):
        return begun
    return isinstance(item, InputMessage) and begun


def _add(message: dict[str, Any], item: Item, names: Names) -> None:
    if isinstance(item, Reasoning):
        thought = item.content or item.summary
        before = message.get("reasoning_content")
        message["reasoning_content"] = thought if before is None else f"{before}\n{thought}"
    elif isinstance(item, Call | CustomCall | ShellCall):
        space = getattr(item, "namespace", None)
        name = names.get((space, item.name), item.name)
        function = {"name": name, "arguments": item.arguments}
        id = item.call_id or item.id or ""
        call = {"id": id, "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
    elif isinstance(item, InputMessage):
        message["content"] = item.content


def input_item(item: Item, id: str) -> dict[str, Any]:
    """Return the JSON of an item for /v1/responses/{id}/input_items."""
    given = {field.name: getattr(item, field.name) for field in fields(item)}
    given |= given.pop("ignored")
    plain = {name: value for name, value in given.items() if value is not None}
    if isinstance(item, InputMessage):
        kind = "output_text" if item.role == "assistant" else "input_text"
        plain["content"] = [{"type": kind, "text": item.content}]
    if isinstance(item, Reasoning):
        plain["summary"] = [{"type": "summary_text", "text": item.summary}] if item.summary else []
        plain["content"] = [{"type": "reasoning_text", "text": item.content}]
    return {"id": id, **plain}
