"""The messages of a conversation in OpenAI's format, and those of earlier turns."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from forerun.errors import RequestError
from forerun.serve.bodies.fields import (
    Declaration,
    DescribedReader,
    Mend,
    Typed,
    Unused,
    accept,
    body_schema,
    items,
    listed,
    mapping,
    mend_object,
    need,
    only,
    plain_text,
    read,
    shown,
    tagged,
    takes,
    text,
    whatever,
)
from forerun.serve.bodies.tools import calls

MAX_MESSAGES = 4096
NO_MEDIA = "this server reads and writes text only"
USE_TOOLS = "use tools and tool_choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextPart(Typed):
    text: str = need(plain_text)
    unused: ClassVar[dict[str, Unused]] = {"cache_control": Unused(mapping)}


_MEDIA = "image_url image input_audio audio audio_url video video_url file input_file".split()  # noqa: SIM905


def of_parts(parts: DescribedReader[Any]) -> Mend:
    """Return the function that mends a message's text: it leaves out parts of a list that cannot be
    read.
    """

    def mend(value: Any, where: str, left: list[str]) -> Any:
        return (parts if isinstance(value, list) else plain_text).mend(value, where, left)

    return mend


def joined(part: DescribedReader[Any]) -> DescribedReader[str]:
    """Return a reader of a text: a string, or parts, each with a `text`, which are joined by line
    breaks. It raises RequestError, naming `where`, for anything else.
    """
    parts = items(part, MAX_MESSAGES)

    @takes({"anyOf": [plain_text.schema, parts.schema]}, of_parts(parts))
    def reader(value: Any, where: str) -> str:
        if isinstance(value, list):
            return "\n".join(part.text for part in parts(value, where))
        return plain_text(value, where)

    return reader


content = joined(tagged({"text": _TextPart}, dict.fromkeys(_MEDIA, NO_MEDIA)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(Declaration):
    """One turn of a conversation. Fields that clients copy from earlier answers may be null or
    empty.
    """

    role: str = need(text(64))
    content: str | None = accept(content)
    name: str | None = accept(text(256, 1))
    tool_calls: tuple[dict[str, Any], ...] = accept(calls, ())
    tool_call_id: str | None = accept(text(256))
    reasoning_content: str | None = accept(plain_text)
    reasoning: str | None = accept(plain_text)
    annotations: list[Any] | None = accept(only([], why=NO_MEDIA))

    refused: ClassVar[dict[str, str]] = {
        "audio": NO_MEDIA,
        "refusal": "the template has no place for it",
        "function_call": USE_TOOLS,
    }
    blank: ClassVar[dict[str, Any]] = {"content": ""}
    unused: ClassVar[dict[str, Unused]] = {
        "cache_control": Unused(mapping),
        "reasoning_details": Unused(whatever),
        "thinking_blocks": Unused(whatever),
        "provider_specific_fields": Unused(whatever),
        "parsed": Unused(whatever),
    }


ROLES = ("system", "developer", "user", "assistant", "tool")


@takes(body_schema(Message), mend_object(Message))
def _message(value: Any, where: str) -> dict[str, Any]:
    """Read a message in the form of chat templates. OpenAI's `developer` becomes the older
    `system`.
    """
    message = read(Message, value, where)
    if message.reasoning is not None and message.reasoning_content is None:
        message = replace(message, reasoning_content=message.reasoning)
    place = f"{where}.role"
    if message.role not in ROLES:
        known = ", ".join(ROLES)
        raise RequestError(f"{place} must be one of {known}, not {shown(message.role)}.", place)
    if message.content is None and not (message.tool_calls or message.reasoning_content):
        raise RequestError(f"{where}.content is missing.", f"{where}.content")
    role = "system" if message.role == "developer" else message.role
    rest = ("name", "tool_call_id", "reasoning_content")
    given = {name: getattr(message, name) for name in rest if getattr(message, name) is not None}
    if message.tool_calls:
        given["tool_calls"] = list(message.tool_calls)
    return {"role": role, "content": message.content, **given}


def is_assistant(message: dict[str, Any]) -> bool:
    """Return whether a message, in the client's form, is from the model."""
    return message.get("role") == "assistant"


def of_tools(reader: DescribedReader[Any]) -> Mend:
    """Return the function that mends new messages, but only those from tools."""

    def mend(value: Any, where: str, left: list[str]) -> Any:
        brought = isinstance(value, dict) and value.get("role") == "tool"
        return reader.mend(value, where, left) if brought else value

    return mend


class MessageHistory(tuple[Any, ...]):
    """The messages of a request; earlier ones are read as far as possible.

    A client cannot correct its history: arguments that a model wrote wrongly, fields that another
    server added, images from a tool. What a reader rejects in such a message is left out, and the
    answer names it; new messages of the client are read strictly.

    left_out  paths of what could not be read
    """

    left_out: tuple[str, ...] = ()


def left_out(messages: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the paths of what was left out of messages; empty if they were not read as a
    history.
    """
    return messages.left_out if isinstance(messages, MessageHistory) else ()


def history(
    each: DescribedReader[Any],
    longest: int,
    shortest: int = 0,
    *,
    assistant: Callable[[dict[str, Any]], bool],
    fresh: Mend = lambda value, where, left: value,
    drops: bool = False,
) -> DescribedReader[MessageHistory]:
    """Return a reader of a conversation, as a MessageHistory. Entries up to the last one of the
    model (`assistant`) are mended; it raises RequestError for later ones that `each` rejects.

    fresh  mends a later entry: a client cannot correct results of tools either
    drops  earlier entries that cannot be mended are left out, instead of rejected
    """
    bounds = {"minItems": shortest, "maxItems": longest}

    @takes({"type": "array", "items": each.schema, **bounds})
    def reader(value: Any, where: str) -> MessageHistory:
        sent = listed(value, where, longest, shortest)
        past = [index for index, one in enumerate(sent) if isinstance(one, dict) and assistant(one)]
        found, left, last = [], list[str](), max(past, default=-1)
        for index, one in enumerate(sent):
            place, earlier = f"{where}[{index}]", index <= last
            try:
                found.append(each(one, place))
                continue
            except RequestError as error:
                refusal, places = error, list[str]()
            try:
                mended = (each.mend if earlier else fresh)(one, place, places)
                found.append(each(mended, place))
                left += places
            except RequestError:
                if not (earlier and drops):
                    raise refusal from None
                left.append(place)
        conversation = MessageHistory(found)
        conversation.left_out = tuple(left)
        return conversation

    return reader


messages = history(_message, MAX_MESSAGES, 1, assistant=is_assistant, fresh=of_tools(_message))


def goes_on(message: dict[str, Any]) -> bool:
    """Return whether the answer continues this message, in the form of templates: it is the
    assistant's and has text or reasoning. For dialects in which the last message is continued.
    """
    texts = (str(message.get(name) or "") for name in ("content", "reasoning_content"))
    return bool(message["role"] == "assistant" and "".join(texts).strip())
