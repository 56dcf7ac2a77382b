"""Converts conversations to the form that a chat template accepts.

Templates agree on user and assistant messages and on little else: some fail at a call whose content
is null, some at one whose content is empty, some need arguments as JSON text, some reject a system
message, two calls at once, two user messages in a row, or silently leave calls out. The behaviour
of a template is detected by rendering small conversations with it (`TemplateTraits`), once, when a
conversation needs it; `adapted` then changes messages as little as that template needs.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from forerun.errors import RequestError
from forerun.text.reasoning import Marks
from forerun.text.tool_prompt import WRITTEN, call_in_text, result_in_text, with_tools_in_text
from forerun.text.tools import HERMES, ToolFormat, format_of, takes_tools

Message = dict[str, Any]
Render = Callable[[Sequence[Message], Sequence[Message] | None], str]
"""(messages, tools) -> the template's text. Raises RequestError if the template rejects them."""

_SYSTEM, _CITY, _RESULT, _ANSWER = "Be-Brief", "Oslo-City", "Cold-Rain", "Wet-Day"
_AGAIN, _LATE = "Then-What", "Be-Brisk"
_NAME = "probe_weather"
_LONG_ID, _SHORT_ID = "call_0123456789abcdef", "call12345"
_EMPTY_WORDS = re.compile("None|none|null")
_THINKING = re.compile(r"""message(\.thinking\b|\[['"]thinking['"]\])""")
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "c"}}}


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The form in which a template accepts an assistant's tool calls.

    content    of a message with calls and no text: None or ""
    arguments  object: as JSON data; text: as JSON text
    short_ids  call ids must be nine letters or digits
    written    None: as `tool_calls`; a format: the template leaves those out, so they are text of
               the message, in this format
    """

    content: Literal[""] | None
    arguments: Literal["object", "text"]
    short_ids: bool = False
    written: ToolFormat | None = None


_STYLES = tuple(
    CallStyle(content, arguments, short_ids)
    for arguments in ("object", "text")
    for content in (None, "")
    for short_ids in (False, True)
)


class TemplateTraits:
    """Properties of a chat template. Each is detected on first use, and never changes. Raises
    ModelError if the template does not terminate.
    """

    def __init__(self, source: str, render: Render) -> None:
        self._source, self._render = source, render

    @cached_property
    def tool_format(self) -> ToolFormat:
        """The format of calls in the template."""
        return format_of(self._source)

    @cached_property
    def marks(self) -> Marks | None:
        """The texts around reasoning; None if the template has none."""
        return Marks.found_in(self._source)

    @cached_property
    def tools(self) -> bool:
        """Whether the template lists the tools for the model."""
        return takes_tools(self._source) and _holds(self._try([_user()], [_tool()]), [_NAME])

    @cached_property
    def bare_tools(self) -> bool:
        """Whether it accepts a tool without description and parameters."""
        bare = {"type": "function", "function": {"name": _NAME}}
        return _holds(self._try([_user()], [bare]), [_NAME])

    @cached_property
    def calls(self) -> CallStyle:
        """The form of an assistant's tool calls: the first style in which calls reach the prompt;
        written as text if none does.
        """
        empty = self._try(_tool_turns(CallStyle("", "object", True)), [_tool()]) or ""
        in_empty = len(_EMPTY_WORDS.findall(empty))
        for style in _STYLES:
            text = self._try(_tool_turns(style), [_tool()])
            if text is None or not _holds(text, [_NAME, _CITY, _ANSWER, _AGAIN]):
                continue
            spelled = (
                empty and len(_EMPTY_WORDS.findall(text)) > in_empty
            )  # Content None, as a word.
            if not spelled and '{\\"city' not in text:  # JSON text, encoded once more.
                return style
        own = self.tool_format
        return CallStyle("", "object", written=own if own in WRITTEN else HERMES)

    @cached_property
    def results(self) -> bool:
        """Whether results of tools reach the prompt as `tool` messages."""
        style = self.calls
        if style.written is HERMES:  # What calls are then, results are.
            return False
        turns = _tool_turns(style)
        turns = [_styled(turn, style) if "tool_calls" in turn else turn for turn in turns]
        return _holds(self._try(turns, [_tool()]), [_RESULT, _AGAIN])

    @cached_property
    def parallel_calls(self) -> bool:
        """Whether the template accepts a message with several calls, and all of them reach the
        prompt.
        """
        text = self._try(_tool_turns(self.calls, calls=2), [_tool()])
        return _holds(text, [f"{_CITY}-0", f"{_CITY}-1"])

    @cached_property
    def user_after_results(self) -> bool:
        """Whether it accepts a user's message directly after a tool's result."""
        turns = _tool_turns(self.calls)
        return _holds(self._try([*turns[:3], turns[-1]], [_tool()]), [_RESULT, _AGAIN])

    @cached_property
    def system(self) -> bool:
        """Whether the template accepts a system message first, and it reaches the prompt."""
        return _holds(self._try([_system(), _user()], None), [_SYSTEM])

    @cached_property
    def late_system(self) -> bool:
        """Whether it accepts a system message between others, and it reaches the prompt."""
        turns = [_user(), {"role": "assistant", "content": _ANSWER}, _system(_LATE), _user(_AGAIN)]
        head = [_system()] if self.system else []
        words = [_LATE, _ANSWER, _AGAIN, *(each["content"] for each in head)]
        return _holds(self._try([*head, *turns], None), words)

    @cached_property
    def thinking(self) -> bool:
        """Whether the template reads reasoning from a field `thinking` (gpt-oss, LFM2.5)."""
        return _THINKING.search(self._source) is not None

    @cached_property
    def thought_alone(self) -> bool:
        """Whether a message with a call may have only one of reasoning in `thinking` and content
        (gpt-oss).
        """
        asked, call, result = _tool_turns(self.calls)[:3]
        call = _styled({**call, "content": _ANSWER, "thinking": _SYSTEM}, self.calls)
        return not _holds(self._try([asked, call, result], [_tool()]), [_SYSTEM, _ANSWER])

    @cached_property
    def adjacent_users(self) -> bool:
        """Whether it accepts two user messages in a row."""
        return _holds(self._try([_user(_CITY), _user(_AGAIN)], None), [_CITY, _AGAIN])

    def _try(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> str | None:
        """Return the rendered text; None if the template rejects the messages."""
        try:
            return self._render(messages, tools)
        except RequestError:
            return None


def adapted(
    messages: Sequence[Message], tools: Sequence[Message] | None, traits: TemplateTraits
) -> tuple[list[Message], list[Message] | None]:
    """Return the conversation and the tools in the form that a template with these traits accepts,
    with as few changes as possible.

    messages  as returned by `chat.clean_message`; they are not changed. Tool arguments are objects
    tools     as in OpenAI's API; None or empty = none

    The returned tools are None if there are none, or if they are now part of the text. Raises
    ModelError if the template does not terminate.
    """
    result = list(messages)
    offered = [dict(tool) for tool in tools] if tools else None
    if offered and not traits.tools:
        result, offered = with_tools_in_text(result, offered), None
    elif offered and not traits.bare_tools:
        offered = [_complete(tool) for tool in offered]
    if traits.thinking:
        result = [_with_thinking(message, traits) for message in result]
    if any(message.get("tool_calls") or message["role"] == "tool" for message in result):
        result = _with_calls(result, traits)
    if any(message["role"] == "system" for message in result):
        result = _with_system(result, traits)
    if any(a["role"] == "tool" and b["role"] == "user" for a, b in pairwise(result)):
        result = result if traits.user_after_results else _merged(result, "tool", "user")
    if any(a["role"] == b["role"] == "user" for a, b in pairwise(result)):
        result = result if traits.adjacent_users else _merged(result, "user", "user")
    return result, offered


def _with_thinking(message: Message, traits: TemplateTraits) -> Message:
    """Return a message with its reasoning in `thinking`; the text before a call is added to it if
    the template accepts only one of them.
    """
    thought = message.get("reasoning_content")
    if not thought:
        return message
    left = {name: value for name, value in message.items() if name != "reasoning_content"}
    if left.get("tool_calls") and left.get("content") and traits.thought_alone:
        return {**left, "thinking": f"{thought}\n\n{left['content']}", "content": ""}
    return {**left, "thinking": thought}


def _with_calls(messages: list[Message], traits: TemplateTraits) -> list[Message]:
    style = traits.calls if traits.tools else CallStyle("", "object", written=HERMES)
    several = any(len(message.get("tool_calls") or ()) > 1 for message in messages)
    if several and not style.written and not traits.parallel_calls:
        messages = _one_call_each(messages)
    result = list[Message]()
    for message in messages:
        if message.get("tool_calls"):
            result.append(_styled(message, style))
        elif message["role"] == "tool" and (style.written is HERMES or not traits.results):
            result.append(result_in_text(message))
        elif message["role"] == "tool" and style.short_ids and "tool_call_id" in message:
            result.append({**message, "tool_call_id": _short(message["tool_call_id"])})
        else:
            result.append(message)
    return result


def _styled(message: Message, style: CallStyle) -> Message:
    """Return a message with calls, in this style."""
    if style.written:
        return call_in_text(message, style.written)
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call, style)}}
        for call in message["tool_calls"]
    ]
    if style.short_ids:
        calls = [{**call, "id": _short(call["id"])} if "id" in call else call for call in calls]
    return {**message, "content": message.get("content") or style.content, "tool_calls": calls}


def _arguments(call: Message, style: CallStyle) -> Any:
    arguments = call["function"].get("arguments")
    arguments = {} if arguments is None else arguments
    return arguments if style.arguments == "object" else json.dumps(arguments, ensure_ascii=False)


def _one_call_each(messages: Iterable[Message]) -> list[Message]:
    """Split messages with several calls into one message per call, each before its own results."""
    result, waiting = list[Message](), list[Message]()
    for message in messages:
        if message["role"] == "tool" and waiting:
            id = message.get("tool_call_id")
            matching = [each for each in waiting if each["tool_calls"][0].get("id") == id]
            for each in matching[:1] or waiting[:1]:
                waiting.remove(each)
                result.append(each)
            result.append(message)
            continue
        result += waiting
        waiting = []
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            result.append(message)
            continue
        waiting = [
            {**message, "content": "" if index else message.get("content"), "tool_calls": [call]}
            for index, call in enumerate(calls)
        ]
    return [*result, *waiting]


def _with_system(messages: list[Message], traits: TemplateTraits) -> list[Message]:
    """Put system messages where the template accepts them: the first at the beginning of the first
    user message, later ones as user messages.
    """
    count = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    head, rest = messages[:count], messages[count:]
    if len(head) > 1:
        head = [{**head[0], "content": "\n\n".join(m["content"] for m in head)}]
    if any(message["role"] == "system" for message in rest) and not traits.late_system:
        rest = [{**m, "role": "user"} if m["role"] == "system" else m for m in rest]
    if head and not traits.system:
        text = head[0]["content"]
        if rest and rest[0]["role"] == "user":
            rest = [{**rest[0], "content": f"{text}\n\n{rest[0]['content']}"}, *rest[1:]]
        else:
            rest = [{"role": "user", "content": text}, *rest]
        head = []
    return [*head, *rest]


def _merged(messages: Iterable[Message], before: str, behind: str) -> list[Message]:
    """Return the messages, merging each of role `behind` into one of role `before` directly before
    it.
    """
    result = list[Message]()
    for message in messages:
        if result and (result[-1]["role"], message["role"]) == (before, behind):
            both = (result[-1]["content"], message["content"])
            result[-1] = {**result[-1], "content": "\n\n".join(both)}
        else:
            result.append(message)
    return result


def _complete(tool: Mapping[str, Any]) -> Message:
    """Return a tool with a description and parameters; missing ones are set to empty values."""
    function = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return {**tool, "function": function | tool["function"]}


def _short(id: object) -> str:
    """Return nine letters or digits for a call's id, always the same for the same id: the id itself
    if it has that form, as the model's own have.
    """
    text = str(id)
    own = re.fullmatch("[a-zA-Z0-9]{9}", text)
    return text if own else hashlib.sha256(text.encode()).hexdigest()[:9]


def _holds(text: str | None, words: Iterable[str]) -> bool:
    return text is not None and all(word in text for word in words)


def _user(text: str = "Hello-There") -> Message:
    return {"role": "user", "content": text}


def _system(text: str = _SYSTEM) -> Message:
    return {"role": "system", "content": text}


def _tool() -> Message:
    function = {"name": _NAME, "description": "The weather.", "parameters": _PARAMETERS}
    return {"type": "function", "function": function}


def _tool_turns(style: CallStyle, calls: int = 1) -> list[Message]:
    """Return two turns of a user; in the first the assistant calls a tool `calls` times at once."""
    ids = [f"{n}{_SHORT_ID[1:]}" if style.short_ids else f"{_LONG_ID}{n}" for n in range(calls)]
    turns = list[Message]()
    for n, id in enumerate(ids):
        given: Any = {"city": f"{_CITY}-{n}"}
        given = given if style.arguments == "object" else json.dumps(given)
        function = {"name": _NAME, "arguments": given}
        turns.append({"id": id, "type": "function", "function": function})
    return [
        _user(),
        {"role": "assistant", "content": style.content, "tool_calls": turns},
        *({"role": "tool", "tool_call_id": id, "name": _NAME, "content": _RESULT} for id in ids),
        {"role": "assistant", "content": _ANSWER},
        _user(_AGAIN),
    ]
