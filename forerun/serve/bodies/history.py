"""Reads earlier messages of a conversation as far as possible.

A client cannot mend its history: arguments that a model broke, fields that another server added,
images from a tool. What a reader refuses in such a message is left out, and the answer
names it; new messages of the client are read strictly.
"""

from collections.abc import Callable
from typing import Any

from forerun.errors import RequestError
from forerun.serve.bodies.fields import DescribedReader, Mend, shown, takes


class MessageHistory(tuple[Any, ...]):
    """The messages of a request. left_out: places of what could not be read."""

    left_out: tuple[str, ...] = ()


def left_out(messages: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the places of what was left out of messages; empty if they were not read as a
    history.
    """
    return messages.left_out if isinstance(messages, MessageHistory) else ()


def history(
    each: DescribedReader,
    longest: int,
    shortest: int = 0,
    *,
    assistant: Callable[[dict[str, Any]], bool],
    fresh: Mend = lambda value, where, left: value,
    drops: bool = False,
) -> DescribedReader:
    """Make a reader of a conversation, which gives a MessageHistory. Entries up to the last one of
    the model's (`assistant`) are mended; it raises RequestError for others that `each` refuses.

    fresh  mends a later entry: what tools brought is nothing that a client could mend, either
    drops  earlier entries that cannot be mended are left out, instead of refused
    """
    bounds = {"minItems": shortest, "maxItems": longest}

    @takes({"type": "array", "items": each.schema, **bounds})
    def reader(value: Any, where: str) -> MessageHistory:
        if not isinstance(value, list):
            raise RequestError(f"{where} must be a list, not {shown(value)}.", where)
        if not shortest <= len(value) <= longest:
            raise RequestError(
                f"{where} has {len(value)} entries, but must have {shortest} to {longest}.", where
            )
        past = [
            index for index, one in enumerate(value) if isinstance(one, dict) and assistant(one)
        ]
        found, left, last = [], list[str](), max(past, default=-1)
        for index, one in enumerate(value):
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
