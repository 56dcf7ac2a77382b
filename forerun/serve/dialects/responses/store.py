"""Stores answers that a later request may refer to, in memory; the oldest are dropped first."""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from forerun.serve.bodies.wire import dump_json
from forerun.serve.dialects.responses.conversation import Messages

MAX_BYTES = 1 << 26
"""Most bytes of stored answers, as JSON."""
MAX_ANSWERS = 4096


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """One stored answer.

    response  its JSON
    input     the items of its request
    messages  the conversation so far, including this answer
    """

    response: dict[str, Any]
    input: list[dict[str, Any]]
    messages: Messages


class _Written(NamedTuple):
    """An answer as JSON, and the ids of its items."""

    data: bytes
    items: list[str]


@dataclass(slots=True)
class _StoredAnswers:
    """The answers of all tenants, by tenant and id. Guarded by the lock.

    items  tenant and id of an item -> id of the last answer that has it
    size   bytes of all answers
    """

    max_bytes: int
    max_answers: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: OrderedDict[tuple[str, str], _Written] = field(default_factory=OrderedDict)
    items: dict[tuple[str, str], str] = field(default_factory=dict)
    size: int = 0

    def put(self, tenant: str, id: str, written: _Written) -> None:
        """Store an answer, and drop the oldest ones if there is no room."""
        self.answers[tenant, id] = written
        self.size += len(written.data)
        self.items |= {(tenant, item): id for item in written.items}
        while self.size > self.max_bytes or len(self.answers) > self.max_answers:
            self.forget(*next(iter(self.answers)))

    def forget(self, tenant: str, id: str) -> bool:
        """Drop an answer. Returns False if there is none with this id."""
        written = self.answers.pop((tenant, id), None)
        if written is None:
            return False
        self.size -= len(written.data)
        for item in written.items:
            if self.items.get((tenant, item)) == id:
                del self.items[tenant, item]
        return True


class ResponseStore:
    """Stores answers up to a number and a size; each tenant sees only its own. Safe to share
    between threads. Answers are stored as bytes of JSON: Python objects would take four times as
    much memory.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, max_answers: int = MAX_ANSWERS) -> None:
        self._kept = _StoredAnswers(max_bytes, max_answers)
        self._tenant = ""

    def __len__(self) -> int:
        """Return the number of stored answers of all tenants."""
        return len(self._kept.answers)

    def of(self, tenant: str) -> "ResponseStore":
        """Return a view of the same store for one tenant; ids of items are chosen by clients, so
        tenants may use the same.
        """
        seen = copy(self)
        seen._tenant = tenant
        return seen

    def put(
        self, response: dict[str, Any], input: list[dict[str, Any]], messages: Messages
    ) -> None:
        """Store an answer under its id, and drop the oldest ones if there is no room."""
        data = dump_json([response, input, messages])
        with self._kept.lock:
            written = _Written(data, _ids(response, input))
            self._kept.put(self._tenant, response["id"], written)

    def items(self, ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the stored items with these ids, of inputs and outputs, by id. Each stored answer
        is decoded once.
        """
        ids_of: dict[str, set[str]] = {}
        with self._kept.lock:
            for id in ids:
                answer = self._kept.items.get((self._tenant, id))
                if answer is not None:
                    ids_of.setdefault(answer, set()).add(id)
        items: dict[str, dict[str, Any]] = {}
        for answer, inside in ids_of.items():
            found = self.get(answer)
            for one in [] if found is None else _items(found.response, found.input):
                if one.get("id") in inside:
                    items.setdefault(one["id"], one)
        return items

    def get(self, id: str) -> StoredAnswer | None:
        """Return the answer with this id, if it is still stored; else None."""
        with self._kept.lock:
            written = self._kept.answers.get((self._tenant, id))
        if written is None:
            return None
        response, input, messages = json.loads(written.data)
        return StoredAnswer(response, input, tuple(messages))

    def size(self, answers: Iterable[str], items: Iterable[str]) -> int:
        """Return the bytes of the stored answers with these ids, or with items of these ids."""
        with self._kept.lock:
            having = (self._kept.items.get((self._tenant, id)) for id in items)
            names = {(self._tenant, id) for id in (*answers, *having) if id is not None}
            found = (self._kept.answers.get(name) for name in names)
            return sum(len(written.data) for written in found if written is not None)

    def drop(self, id: str) -> bool:
        """Drop an answer. Returns False if there is none with this id."""
        with self._kept.lock:
            return self._kept.forget(self._tenant, id)


def _items(response: dict[str, Any], input: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*response.get("output", ()), *input]


def _ids(response: dict[str, Any], input: list[dict[str, Any]]) -> list[str]:
    return [one["id"] for one in _items(response, input) if "id" in one]
