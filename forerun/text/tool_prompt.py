"""Tools for models whose chat template knows none: all of it as text, in the Hermes format."""

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


def told_in_text(messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    """A conversation for a template that takes no tools: signatures in the system message,
    calls and their results as text, in the Hermes format.
    """
    told = [_in_text(message) for message in messages]
    if not tools:
        return told
    offer = _OFFER.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if told and told[0]["role"] == "system":
        told[0]["content"] = f"{told[0]['content']}\n\n{offer}"
        return told
    return [{"role": "system", "content": offer}, *told]


def _in_text(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message["role"], message.get("content") or ""
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls") or ()
    written = [_written(call["function"]) for call in calls]
    if not written:
        return dict(message)
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(part for part in (content, *written) if part)}


def _written(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}'
    return f"{HERMES.opener}\n{call}\n{HERMES.closer}"
