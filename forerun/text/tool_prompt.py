"""Writes tools and calls as text, for models whose chat template does not support them: in the
Hermes format; calls in LFM2's and Granite's own format if their templates leave these out.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.text.tool_bodies import Tools
from forerun.text.tools import GRANITE, HERMES, LFM2, ToolFormat

WRITTEN = (HERMES, LFM2, GRANITE)
"""The formats that calls can be written in."""
_OFFER = """You can call functions. Their signatures, as JSON, one per line:
<tools>
{tools}
</tools>
For each call, write a JSON object with the function's name and arguments within tags:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def with_tools_in_text(messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    """Return a copy of the conversation with the tools' signatures in its system message, which may
    be a new one.
    """
    offer = _OFFER.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{offer}"}
        return [first, *map(dict, messages[1:])]
    return [{"role": "system", "content": offer}, *map(dict, messages)]


def call_in_text(message: Mapping[str, Any], format: ToolFormat = HERMES) -> dict[str, Any]:
    """Return a copy of an assistant's message with its `tool_calls` written in its content, in a
    format of WRITTEN.
    """
    functions = [call["function"] for call in message["tool_calls"]]
    written = [f"{HERMES.opener}\n{_as_json(one)}\n{HERMES.closer}" for one in functions]
    if format is LFM2:
        written = [f"{LFM2.opener}[{', '.join(map(_as_python, functions))}]{LFM2.closer}"]
    elif format is GRANITE:
        written = [f"{GRANITE.opener}[{', '.join(map(_as_json, functions))}]"]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    content = message.get("content") or ""
    return {**rest, "content": "\n".join(part for part in (content, *written) if part)}


def result_in_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's message as a user's, within <tool_response> tags."""
    content = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
    return {"role": "user", "content": content}


def _as_json(function: Mapping[str, Any]) -> str:
    arguments = json.dumps(function.get("arguments") or {})
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}'


def _as_python(function: Mapping[str, Any]) -> str:
    """Return a call in Python's syntax; JSON's strings are valid there, its three words are
    replaced.
    """
    arguments = (function.get("arguments") or {}).items()
    return (
        f"{function['name']}({', '.join(f'{key}={_literal(value)}' for key, value in arguments)})"
    )


def _literal(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    return json.dumps(value, ensure_ascii=False)
