"""An answer's items while they grow: their events, and what they come to."""

import uuid
from collections.abc import Mapping
from typing import Any

from forerun.serve.output_parser import Heard

Event = dict[str, Any]
Logprobs = list[dict[str, Any]]


class Output:
    """Turns what is heard into events of items, one after the other.

    namespaces  of functions that have one, by name: calls of these say so
    """

    def __init__(self, namespaces: Mapping[str, str]) -> None:
        self._namespaces = namespaces
        self.items: list[dict[str, Any]] = []
        self._open: str | None = None
        self._waiting: Logprobs = []

    def push(self, heard: Heard, logprobs: Logprobs) -> list[Event]:
        """Events of what is new. Log-probabilities go with the next piece of text."""
        events: list[Event] = []
        self._waiting += logprobs
        if heard.reasoning:
            events += self._enter("reasoning")
            self._part["text"] += heard.reasoning
            events.append(self._of_part("response.reasoning_text.delta", delta=heard.reasoning))
        if heard.content:
            events += self._enter("message")
            told, self._waiting = self._waiting, []
            self._part["text"] += heard.content
            self._part["logprobs"] += told
            delta = {"delta": heard.content, "logprobs": told}
            events.append(self._of_part("response.output_text.delta", **delta))
        for piece in heard.calls:
            if piece.name is not None:
                events += [*self.close("completed"), *self._enter("function_call", piece.name)]
            if piece.arguments:
                self.items[-1]["arguments"] += piece.arguments
                kind = "response.function_call_arguments.delta"
                events.append(self._of_item(kind, delta=piece.arguments))
        return events

    def close(self, status: str) -> list[Event]:
        """End the item that is open; status: completed, or incomplete where it was cut off."""
        if self._open is None:
            return []
        events, item = [], self.items[-1]
        item["status"] = status
        if self._open == "function_call":
            told = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._of_item("response.function_call_arguments.done", **told))
        else:
            part = self._part
            done = {"text": part["text"]}
            kind = "response.reasoning_text.done"
            if self._open == "message":
                part["logprobs"] += self._waiting
                self._waiting = []
                kind, done = "response.output_text.done", {**done, "logprobs": part["logprobs"]}
            events.append(self._of_part(kind, **done))
            events.append(self._of_part("response.content_part.done", part=part))
        at = len(self.items) - 1
        events.append({"type": "response.output_item.done", "output_index": at, "item": item})
        self._open = None
        return events

    @property
    def thought(self) -> str:
        """All reasoning."""
        kinds = [item for item in self.items if item["type"] == "reasoning"]
        return "".join(item["content"][0]["text"] for item in kinds)

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self.items[-1]["content"][0]
        return part

    def _enter(self, kind: str, name: str = "") -> list[Event]:
        """Begin an item, unless one of its kind is open."""
        if self._open == kind:
            return []
        events = self.close("completed")
        self._open = kind
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        part: dict[str, Any] | None = None
        if kind == "function_call":
            call = {"call_id": f"call_{uuid.uuid4().hex[:24]}", "name": name, "arguments": ""}
            item |= {"id": f"fc_{uuid.uuid4().hex}", **call}
            item |= {"namespace": space} if (space := self._namespaces.get(name)) else {}
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            item |= {"id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": []}
        else:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item |= {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": []}
        self.items.append(item)
        # Events are worded at once, so what grows later is copied.
        begun = {**item, "content": []} if "content" in item else {**item}
        at = len(self.items) - 1
        events.append({"type": "response.output_item.added", "output_index": at, "item": begun})
        if part is not None:
            item["content"] = [part]
            shown = {**part, "logprobs": []} if "logprobs" in part else {**part}
            events.append(self._of_part("response.content_part.added", part=shown))
        return events

    def _of_item(self, kind: str, **told: Any) -> Event:
        at = len(self.items) - 1
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": at, **told}

    def _of_part(self, kind: str, **told: Any) -> Event:
        return self._of_item(kind, content_index=0, **told)
