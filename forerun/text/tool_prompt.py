"""Tools for models whose chat template has none: all of it as text, in the Hermes format."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.text.tool_bodies import Tools
from forerun.text.tools import HERMES

_OFFER = """You can call functions. Their signatures, as JSON, one per line:
<tools>
{tools}
</tools>
For each call, write a JSON object with the function's name and arguments within tags:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def with_tools_in_text(messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    """A copy of the conversation with the tools' signatures in its system message, which may be a
    new one.
    """
    offer = _OFFER.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{offer}"}
        return [first, *map(dict, messages[1:])]
    return [{"role": "system", "content": offer}, *map(dict, messages)]


def call_in_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an assistant's message with its `tool_calls` written out in its content, in the
    Hermes format.
    """
    written = [_written(call["function"]) for call in message["tool_calls"]]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    content = message.get("content") or ""
    return {**rest, "content": "\n".join(part for part in (content, *written) if part)}


def result_in_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's message as a user's, within <tool_response> tags."""
    content = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
    return {"role": "user", "content": content}


def _written(function: Mapping[str, Any]) -> str:
    arguments = json.dumps(function.get("arguments") or {})
    call = f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}'
    return f"{HERMES.opener}\n{call}\n{HERMES.closer}"
