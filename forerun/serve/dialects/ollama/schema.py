"""The request bodies of /api/chat and /api/generate."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote

from forerun.constrain.grammar.calls import Rules
from forerun.errors import RequestError
from forerun.options.sampling_params import RANGES
from forerun.serve.bodies.fields import (
    Declaration,
    Unused,
    accept,
    body_schema,
    boolean,
    declared,
    integer,
    items,
    mapping,
    mend_object,
    need,
    number,
    only,
    part,
    plain_text,
    read,
    shown,
    takes,
    text,
)
from forerun.serve.bodies.messages import MAX_MESSAGES, NO_MEDIA, history, is_assistant, of_tools
from forerun.serve.bodies.schema import (
    MAX_TOKENS,
    PenaltyFields,
    RequestBody,
    SpeculativeOptions,
    untraced,
)
from forerun.serve.bodies.structure import json_object_rules, json_rules
from forerun.serve.bodies.tools import (
    MAX_TOOLS,
    Tool,
    ToolFunction,
    argument_object,
    function_name,
    plain_tool,
)

_ANY = integer(-(2**31), 2**31 - 1)
_NUMBER = number(-1e9, 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(PenaltyFields):
    """`options`: sampling parameters, and settings of the machine, which the server chooses itself.
    Some have no effect here (`unused`, `without_effect`).
    """

    seed: int | None = accept(integer(-(2**63), 2**63 - 1))
    num_predict: int | None = accept(integer(-2, MAX_TOKENS))
    repeat_penalty: float | None = accept(number(*RANGES["repetition_penalty"]))
    repeat_last_n: int | None = accept(_ANY)
    unused: ClassVar[dict[str, Unused]] = {
        "typical_p": Unused(_NUMBER),
        "tfs_z": Unused(_NUMBER),
        "mirostat": Unused(_ANY),
        "mirostat_tau": Unused(_NUMBER),
        "mirostat_eta": Unused(_NUMBER),
        "penalize_newline": Unused(boolean),
        "num_ctx": Unused(_ANY),
        "num_keep": Unused(_ANY),
        "num_batch": Unused(_ANY),
        "num_gpu": Unused(_ANY),
        "num_gqa": Unused(_ANY),
        "main_gpu": Unused(_ANY),
        "num_thread": Unused(_ANY),
        "numa": Unused(boolean),
        "low_vram": Unused(boolean),
        "f16_kv": Unused(boolean),
        "use_mmap": Unused(boolean),
        "use_mlock": Unused(boolean),
        "logits_all": Unused(boolean),
        "vocab_only": Unused(boolean),
        "embedding_only": Unused(boolean),
        "rope_frequency_base": Unused(_NUMBER),
        "rope_frequency_scale": Unused(_NUMBER),
    }

    def without_effect(self, given: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the paths of the options in `given`, the JSON it was read from, that have no
        effect, besides the unused fields; unknown names are quoted as in a URL.
        """
        window = () if self.repeat_last_n in (None, 0, -1) else ("repeat_last_n",)
        unknown = sorted(
            quote(name, safe="", errors="replace") for name in given.keys() - declared(Options)
        )
        return tuple(f"options.{name}" for name in (*window, *unknown))


@takes({**body_schema(Options), "additionalProperties": True})
def _options(value: Any, where: str) -> Options:
    """Read `options`. Unknown names are skipped, as in Ollama. Raises RequestError for an invalid
    value of a known one.
    """
    known = {
        name: item for name, item in mapping(value, where).items() if name in declared(Options)
    }
    return read(Options, known, where)


@takes({"type": ["object", "string", "boolean"]})
def _format(value: Any, where: str) -> Rules | None:
    """Read `format`: `json`, or a JSON schema; "" counts as absent."""
    if value == "":
        return None
    if isinstance(value, str) and value != "json" and not value.lstrip().startswith("{"):
        raise RequestError(f"{where} must be json or a JSON schema, not {shown(value)}.", where)
    return json_object_rules(where) if value == "json" else json_rules(value, where)


_LEVELS = only("low", "medium", "high", why="it is one of these, or true or false")


@takes({"anyOf": [{"type": "boolean"}, _LEVELS.schema]})
def _think(value: Any, where: str) -> str:
    """Read `think`, as a value of reasoning_effort."""
    if isinstance(value, bool):
        return "medium" if value else "none"
    return _LEVELS(value, where)


_seconds, _duration = number(-1e12, 1e12), text(32, 1)


@takes({"anyOf": [_seconds.schema, _duration.schema]})
def alive(value: Any, where: str) -> Any:
    """Read `keep_alive`: seconds, or a duration such as 5m."""
    return _duration(value, where) if isinstance(value, str) else _seconds(value, where)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaBody(RequestBody):
    """The common part of both routes. speculative is Forerun's own field."""

    stream: bool = accept(boolean, True)
    options: Options = accept(_options, Options())
    format: Rules | None = accept(_format)
    think: str | None = accept(_think)
    logprobs: bool = accept(boolean, False)
    top_logprobs: int | None = accept(integer(0, MAX_TOKENS))
    speculative: SpeculativeOptions = accept(untraced, SpeculativeOptions())
    unused: ClassVar[dict[str, Unused]] = {
        "keep_alive": Unused(alive),
        "truncate": Unused(boolean),
        "shift": Unused(boolean),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Called(Declaration):
    name: str = need(function_name)
    arguments: dict[str, Any] = need(argument_object)
    index: int | None = accept(integer(0, MAX_TOKENS))

    blank: ClassVar[dict[str, Any]] = {"arguments": {}}
    unused: ClassVar[dict[str, Unused]] = {"description": Unused(plain_text)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call(Declaration):
    function: _Called = need(part(_Called))
    id: str | None = accept(text(256))
    type: str | None = accept(only("function", why="tools are functions"))


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaMessage(Declaration):
    """One turn of a conversation."""

    role: str = need(only("system", "user", "assistant", "tool", why="these roles exist"))
    content: str = accept(plain_text, "")
    thinking: str | None = accept(plain_text)
    images: list[Any] | None = accept(only([], why=NO_MEDIA))
    tool_calls: tuple[_Call, ...] = accept(items(part(_Call), MAX_TOOLS), ())
    tool_name: str | None = accept(text(256))
    tool_call_id: str | None = accept(text(256))


@takes(body_schema(OllamaMessage), mend_object(OllamaMessage))
def _message(value: Any, where: str) -> dict[str, Any]:
    """Read a message in the form of chat templates."""
    message = read(OllamaMessage, value, where)
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    if message.tool_name is not None:
        plain["name"] = message.tool_name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
        plain["content"] = message.content or None
    return plain


def _plain_call(call: _Call) -> dict[str, Any]:
    arguments = json.dumps(call.function.arguments, ensure_ascii=False)
    function = {"name": call.function.name, "arguments": arguments}
    named = {} if call.id is None else {"id": call.id}
    return {**named, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tool(Declaration):
    type: str | None = accept(only("function", why="tools are functions"))
    function: ToolFunction = need(part(ToolFunction))


@takes(body_schema(_Tool))
def _tool(value: Any, where: str) -> Tool:
    found = read(_Tool, value, where).function
    place = f"{where}.function.parameters"
    return plain_tool(found.name, found.description, found.parameters, found.strict, place)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaChatBody(OllamaBody):
    """POST /api/chat. Without messages it only checks that the model is loaded."""

    messages: tuple[dict[str, Any], ...] = accept(
        history(_message, MAX_MESSAGES, assistant=is_assistant, fresh=of_tools(_message)), ()
    )
    tools: tuple[Tool, ...] = accept(items(_tool, MAX_TOOLS), ())


@takes({"type": "array", "maxItems": 0})
def _no_context(value: Any, where: str) -> Any:
    if value != []:
        raise RequestError(
            f"{where}: {shown(value)} is not supported: send the messages to /api/chat.", where
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaGenerateBody(OllamaBody):
    """POST /api/generate. Without a prompt or suffix it only checks that the model is loaded.

    suffix  the text after the answer, which is filled in between
    """

    prompt: str = accept(plain_text, "")
    system: str | None = accept(plain_text)
    raw: bool = accept(boolean, False)
    images: list[Any] | None = accept(only([], why=NO_MEDIA))
    context: list[Any] | None = accept(_no_context)
    suffix: str = accept(plain_text, "")
    template: str | None = accept(only("", why="the template is the model's own"))

    refused: ClassVar[dict[str, str]] = dict.fromkeys(("width", "height", "steps"), NO_MEDIA)
