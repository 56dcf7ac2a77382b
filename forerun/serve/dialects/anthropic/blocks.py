"""An answer's content blocks while they grow, and their events."""

import secrets
from typing import Any

from forerun.text.tool_bodies import NOTHING, ParsedDelta, loads_or

Event = dict[str, Any]


class Blocks:
    """Converts parsed text to events of blocks, one after the other.

    hidden  thinking is counted, but not shown
    """

    def __init__(self, hidden: bool) -> None:
        self._hidden = hidden
        self._blocks: list[dict[str, Any]] = []
        self._arguments: dict[int, str] = {}
        self._open: str | None = None

    def push(self, parsed: ParsedDelta) -> list[Event]:
        """Return the events, in order, of a parsed delta; blocks begin and end where the kind of
        text changes.
        """
        events: list[Event] = []
        if parsed.reasoning:
            events += self._enter("thinking", {"thinking": "", "signature": ""})
            if not self._hidden:
                self._blocks[-1]["thinking"] += parsed.reasoning
                events.append(self._delta("thinking_delta", "thinking", parsed.reasoning))
        if parsed.content:
            events += self._enter("text", {"text": ""})
            self._blocks[-1]["text"] += parsed.content
            events.append(self._delta("text_delta", "text", parsed.content))
        for piece in parsed.calls:
            if piece.name is not None:
                events += self.close()
                begun = {"id": f"toolu_{secrets.token_hex(12)}", "name": piece.name, "input": {}}
                events += self._enter("tool_use", begun)
            if piece.arguments:
                at = len(self._blocks) - 1
                self._arguments[at] = self._arguments.get(at, "") + piece.arguments
                events.append(self._delta("input_json_delta", "partial_json", piece.arguments))
        return events

    def close(self) -> list[Event]:
        """Return the event that ends the open block; none if no block is open."""
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def content_blocks(self, cut: bool) -> list[dict[str, Any]]:
        """Return all blocks.

        cut  as ChoiceReader.cut; then a last call with an incomplete input is left out
        """
        found = []
        for at, block in enumerate(self._blocks):
            called, last = block["type"] == "tool_use", at == len(self._blocks) - 1
            if called and (at in self._arguments or (cut and last)):
                given = loads_or(self._arguments.get(at, ""), NOTHING)
                if given is not NOTHING:
                    block["input"] = given
                elif cut and last:
                    continue
            found.append(block)
        return found

    def _enter(self, kind: str, begun: dict[str, Any]) -> list[Event]:
        if self._open == kind:
            return []
        events = self.close()
        self._open = kind
        self._blocks.append({"type": kind, **begun})
        start = {"type": kind, **begun}
        at = len(self._blocks) - 1
        return [*events, {"type": "content_block_start", "index": at, "content_block": start}]

    def _delta(self, kind: str, name: str, piece: str) -> Event:
        at = len(self._blocks) - 1
        return {"type": "content_block_delta", "index": at, "delta": {"type": kind, name: piece}}
