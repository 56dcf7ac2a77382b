"""An answer's items while they grow, and their events."""

import uuid
from collections.abc import Mapping
from typing import Any

from forerun.serve.bodies.tools import argument_text
from forerun.serve.dialects.responses.free_tools import (
    SHELL,
    free_input,
    of_action,
    of_input,
    shell_action,
)
from forerun.serve.dialects.responses.offers import Offer
from forerun.text.tool_bodies import ParsedDelta

Event = dict[str, Any]
Logprobs = list[dict[str, Any]]


class Output:
    """Converts parsed text to events of items, one after the other.

    offers  the client's tools, by the model's names of them
    calls  the model's calls, in Chat Completions' format
    """

    def __init__(self, offers: Mapping[str, Offer]) -> None:
        self._offers = offers
        self.calls: list[dict[str, Any]] = []
        self.items: list[dict[str, Any]] = []
        self._open: str | None = None
        self._waiting: Logprobs = []

    def push(self, parsed: ParsedDelta, logprobs: Logprobs) -> list[Event]:
        """Return the events of a parsed delta. Log-probabilities go with the next piece of text."""
        events: list[Event] = []
        self._waiting += logprobs
        if parsed.reasoning:
            events += self._enter("reasoning")
            self._part["text"] += parsed.reasoning
            events.append(self._of_part("response.reasoning_text.delta", delta=parsed.reasoning))
        if parsed.content:
            events += self._enter("message")
            waiting, self._waiting = self._waiting, []
            self._part["text"] += parsed.content
            self._part["logprobs"] += waiting
            delta = {"delta": parsed.content, "logprobs": waiting}
            events.append(self._of_part("response.output_text.delta", **delta))
        for piece in parsed.calls:
            if piece.name is not None:
                events += [*self.close("completed"), *self._enter("function_call", piece.name)]
            if piece.arguments:
                self.calls[-1]["function"]["arguments"] += piece.arguments
            if piece.arguments and self.items[-1]["type"] == "function_call":
                self.items[-1]["arguments"] += piece.arguments
                kind = "response.function_call_arguments.delta"
                events.append(self._of_item(kind, delta=piece.arguments))
        return events

    def close(self, status: str) -> list[Event]:
        """Return the events that end the open item. status: completed, or incomplete if it was cut
        off.
        """
        if self._open is None:
            return []
        events, item = [], self.items[-1]
        item["status"] = status
        if self._open == "function_call":
            events += self._called(item)
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

    def _called(self, item: dict[str, Any]) -> list[Event]:
        """Return the events that end a call. Its arguments are stored as JSON for later requests,
        even if they were cut off. A custom tool's text is sent in one piece, because it is JSON
        until then.
        """
        function = self.calls[-1]["function"]
        arguments = function["arguments"]
        if item["type"] == "function_call":
            function["arguments"] = argument_text.mend(arguments, "arguments", [])
            fields = {"arguments": arguments, "name": item["name"]}
            return [self._of_item("response.function_call_arguments.done", **fields)]
        if item["type"] == "local_shell_call":
            item["action"] = shell_action(arguments)
            function["arguments"] = of_action(item["action"])
            return []
        item["input"] = free_input(arguments)
        function["arguments"] = of_input(item["input"])
        kind = "response.custom_tool_call_input"
        return [
            self._of_item(f"{kind}.delta", delta=item["input"]),
            self._of_item(f"{kind}.done", input=item["input"]),
        ]

    @property
    def thought(self) -> str:
        """The text of all reasoning so far, of all items."""
        kinds = [item for item in self.items if item["type"] == "reasoning"]
        return "".join(item["content"][0]["text"] for item in kinds)

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self.items[-1]["content"][0]
        return part

    def _enter(self, kind: str, name: str = "") -> list[Event]:
        """Return the events that begin an item, unless one of its kind is open."""
        if self._open == kind:
            return []
        events = self.close("completed")
        self._open = kind
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        part: dict[str, Any] | None = None
        if kind == "function_call":
            item |= self._begun(name)
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

    def _begun(self, name: str) -> dict[str, Any]:
        """Return the fields of a call's item besides its status."""
        id, own = f"call_{uuid.uuid4().hex[:24]}", uuid.uuid4().hex
        function = {"name": name, "arguments": ""}
        self.calls.append({"id": id, "type": "function", "function": function})
        offer = self._offers.get(name, Offer(name, None, "function"))
        grouped = {"namespace": offer.namespace} if offer.namespace else {}
        named = {"name": offer.name, **grouped}
        item: dict[str, Any]
        if offer.kind == "custom":
            item = {"type": "custom_tool_call", "input": "", **named}
            return {**item, "id": f"ctc_{own}", "call_id": id}
        if offer.kind == SHELL:
            item = {"type": "local_shell_call", "action": shell_action("")}
            return {**item, "id": f"lsh_{own}", "call_id": id}
        return {"id": f"fc_{own}", "call_id": id, **function, **named}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        at = len(self.items) - 1
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": at, **fields}

    def _of_part(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, content_index=0, **fields)
