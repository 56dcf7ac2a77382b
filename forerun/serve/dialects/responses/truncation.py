"""Inserts stored items into conversations, and shortens conversations to the context."""

from bisect import bisect_left
from dataclasses import replace
from typing import Any

from forerun.build.engine import Frontend
from forerun.errors import ContextError
from forerun.options.config import ServeSettings
from forerun.serve.bodies.prepare import Generation, chat_generation
from forerun.serve.bodies.schema import ChatBody
from forerun.serve.dialects.responses.store import ResponseStore
from forerun.serve.http.errors import ApiError


def with_items(value: Any, store: ResponseStore) -> Any:
    """Return a request's JSON with the stored items in place of every `item_reference`. Raises
    ApiError if one is not stored, or is referred to twice: a small body could become huge.
    """
    items = value.get("input") if isinstance(value, dict) else None
    if not isinstance(items, list) or not any(map(_refers, items)):
        return value
    ids = {one["id"] for one in items if _refers(one) and isinstance(one.get("id"), str)}
    stored = store.items(ids)
    found = [_item(one, f"input[{at}]", stored) for at, one in enumerate(items)]
    return {**value, "input": found}


def stored_bytes(value: Any, store: ResponseStore) -> int:
    """Return the bytes of the stored answers that a request's JSON refers to."""
    if not isinstance(value, dict):
        return 0
    before, items = value.get("previous_response_id"), value.get("input")
    refers = [one.get("id") for one in items if _refers(one)] if isinstance(items, list) else []
    ids = [id for id in refers if isinstance(id, str)]
    return store.size([before] if isinstance(before, str) else [], ids)


def _refers(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "item_reference"


def _item(value: Any, where: str, stored: dict[str, dict[str, Any]]) -> Any:
    """Return an item, or the stored one that it refers to, which is removed from `stored`."""
    if not _refers(value):
        return value
    id = value.get("id")
    found = stored.pop(id, None) if isinstance(id, str) else None
    if found is None:
        message = (
            f"{where}.id: there is no item with this id, it is no longer stored, or an earlier "
            "entry refers to it."
        )
        raise ApiError(400, message, "item_not_found", f"{where}.id")
    return found


def fitting(body: ChatBody, loaded: Frontend, settings: ServeSettings) -> tuple[Generation, int]:
    """Return the generation for as much of the end of a conversation as the context has room for,
    and how many of its messages are left out. System messages at its beginning stay; the rest
    begins with a user's message. Raises what `chat_generation` raises, also if not even the last
    such message fits.
    """
    messages = body.messages
    head = next((at for at, one in enumerate(messages) if one["role"] != "system"), len(messages))
    starts = [head, *(at for at in range(head + 1, len(messages)) if _begins(messages, at))]

    generations: dict[int, Generation] = {}

    def fits(place: int) -> bool:
        shortened = replace(body, messages=(*messages[:head], *messages[starts[place] :]))
        try:
            generations[place] = chat_generation(shortened, loaded, settings)
        except ContextError:
            return False
        (request,) = generations[place].requests
        return len(request.prompt) + request.stopping.max_tokens <= loaded.context

    # What begins later than what fits, fits too.
    place = 0 if fits(0) else bisect_left(range(len(starts)), True, lo=1, key=fits)
    if place == len(starts):
        last = replace(body, messages=(*messages[:head], *messages[starts[-1] :]))
        return chat_generation(last, loaded, settings), starts[-1] - head
    return generations[place], starts[place] - head


def _begins(messages: tuple[dict[str, Any], ...], at: int) -> bool:
    return bool(messages[at]["role"] == "user")
