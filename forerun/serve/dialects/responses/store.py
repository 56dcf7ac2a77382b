"""Answers that a later request may refer to, in memory, the oldest forgotten first."""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from forerun.serve.bodies.wire import dump_json
from forerun.serve.dialects.responses.conversation import Messages

MAX_BYTES = 1 << 26
"""Most bytes of stored answers, as JSON."""
MAX_ANSWERS = 4096


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """One answer.

    response  as it was sent
    input     the items of its request
    messages  the conversation so far, this answer included
    """

    response: dict[str, Any]
    input: list[dict[str, Any]]
    messages: Messages


class ResponseStore:
    """Keeps answers within bounds of number and size. Safe to share between threads.

    They are kept as bytes of JSON: as Python objects they would take four times as much memory.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, max_answers: int = MAX_ANSWERS) -> None:
        self._max_bytes = max_bytes
        self._max_answers = max_answers
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        self._items: dict[str, str] = {}  # Id of an item -> of the last answer that has it.
        self._bytes = 0

    def __len__(self) -> int:
        """Count the stored answers."""
        return len(self._answers)

    def put(
        self, response: dict[str, Any], input: list[dict[str, Any]], messages: Messages
    ) -> None:
        """Keep an answer under its id, and forget the oldest where there is no room."""
        data = dump_json([response, input, messages])
        with self._lock:
            self._answers[response["id"]] = data
            self._bytes += len(data)
            self._items |= dict.fromkeys(_ids(response, input), response["id"])
            while self._bytes > self._max_bytes or len(self._answers) > self._max_answers:
                self._forget(next(iter(self._answers)))

    def items(self, ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the stored items with these ids, of inputs and outputs, by id. Reads each stored
        answer once.
        """
        wanted: dict[str, set[str]] = {}
        with self._lock:
            for id in ids:
                if id in self._items:
                    wanted.setdefault(self._items[id], set()).add(id)
        items: dict[str, dict[str, Any]] = {}
        for answer, inside in wanted.items():
            found = self.get(answer)
            for one in [] if found is None else _items(found.response, found.input):
                if one.get("id") in inside:
                    items.setdefault(one["id"], one)
        return items

    def get(self, id: str) -> StoredAnswer | None:
        """Return the answer with this id, if it is still stored; else None."""
        with self._lock:
            data = self._answers.get(id)
        if data is None:
            return None
        response, input, messages = json.loads(data)
        return StoredAnswer(response, input, tuple(messages))

    def drop(self, id: str) -> bool:
        """Forget an answer. False if there is none with this id."""
        with self._lock:
            return self._forget(id)

    def _forget(self, id: str) -> bool:
        """Forget an answer, under the lock. False if there is none with this id."""
        data = self._answers.pop(id, None)
        if data is None:
            return False
        self._bytes -= len(data)
        response, input, _ = json.loads(data)
        for item in _ids(response, input):
            if self._items.get(item) == id:
                del self._items[item]
        return True


def _items(response: dict[str, Any], input: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*response.get("output", ()), *input]


def _ids(response: dict[str, Any], input: list[dict[str, Any]]) -> list[str]:
    return [one["id"] for one in _items(response, input) if "id" in one]
