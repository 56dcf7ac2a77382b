"""Splits one choice's text into reasoning, content and tool calls."""

import secrets
from typing import Any

from forerun.engine.request import Finish
from forerun.text.harmony import HarmonyReader
from forerun.text.reasoning import ReasoningReader
from forerun.text.tool_bodies import NOTHING, CallPiece, ParsedDelta, loads_or
from forerun.text.tools import ToolReader


class OutputParser:
    """Parses the text of one choice. A part is None if the model or the request has none.

    channels  parses a text that consists of messages, instead of the other two
    """

    def __init__(
        self,
        reasoning: ReasoningReader | None,
        tools: ToolReader | None,
        channels: HarmonyReader | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._channels = channels
        self._caller = channels or tools
        self._arguments = ""  # Of the last call, as far as they have come.

    def called(self, finish: Finish | None, stop_reason: str | int | None) -> bool:
        """Return whether a choice with this ending ended with tool calls: not if a limit or a stop
        string cut off the last call.
        """
        if self._caller is None or not self._caller.called or finish != Finish.STOP:
            return False
        return not self.stopped_inside(stop_reason)

    def stopped_inside(self, stop_reason: str | int | None) -> bool:
        """Return whether a stop string came before the arguments of a call were complete."""
        called = self._caller is not None and self._caller.called
        if not called or not isinstance(stop_reason, str):
            return False
        return loads_or(self._arguments, NOTHING) is NOTHING

    def push(self, text: str, last: bool, cut: bool = False) -> ParsedDelta:
        """Parse the next text, and return what is certain now; with `last`, all that remains; with
        `cut`, the text was cut off.
        """
        parsed = self._in_channels(text, last, cut) or self._marked(text, last, cut)
        for piece in parsed.calls:
            before = self._arguments if piece.name is None else ""
            self._arguments = before + piece.arguments
        return parsed

    def _in_channels(self, text: str, last: bool, cut: bool) -> ParsedDelta | None:
        if self._channels is None:
            return None
        news = self._channels.push(text)
        return news + self._channels.finish(cut) if last else news

    def _marked(self, text: str, last: bool, cut: bool) -> ParsedDelta:
        thought, answer = self._reasoning.push(text) if self._reasoning else ("", text)
        if last and self._reasoning:
            rest = self._reasoning.finish(cut)
            thought, answer = thought + rest[0], answer + rest[1]
        if self._tools is None:
            return ParsedDelta(thought, answer)
        news = ParsedDelta(thought) + self._tools.push(answer)
        return news + self._tools.finish(cut) if last else news


def whole_calls(pieces: tuple[CallPiece, ...]) -> list[dict[str, Any]]:
    """Return the `tool_calls` of a message, from all pieces of its calls in order."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.name is not None:
            calls.append(_begun(piece))
        else:
            calls[piece.index]["function"]["arguments"] += piece.arguments
    return calls


def streamed_calls(pieces: tuple[CallPiece, ...]) -> list[dict[str, Any]]:
    """Return the `tool_calls` of a chunk: id and name first, then arguments in pieces."""
    return [
        {"index": piece.index, **_begun(piece)}
        if piece.name is not None
        else {"index": piece.index, "function": {"arguments": piece.arguments}}
        for piece in pieces
    ]


def _begun(piece: CallPiece) -> dict[str, Any]:
    function = {"name": piece.name, "arguments": piece.arguments}
    # Mistral's template takes only ids of nine letters and digits.
    return {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}
