"""POST /v1/messages and /v1/messages/count_tokens."""

import uuid
from dataclasses import replace
from typing import Any

from forerun.engine.request import Finish
from forerun.serve.answers.contract import Dialect, News, ParsedRequest
from forerun.serve.answers.service import Service
from forerun.serve.answers.session import Tally
from forerun.serve.bodies.dialogue import dialogue, ignored_fields
from forerun.serve.bodies.fields import read
from forerun.serve.bodies.prepare import chat_generation
from forerun.serve.bodies.wire import event
from forerun.serve.dialects.anthropic.blocks import Blocks, Event
from forerun.serve.dialects.anthropic.conversation import chat_body, ignored
from forerun.serve.dialects.anthropic.errors import error_body
from forerun.serve.dialects.anthropic.schema import CountBody, MessagesBody
from forerun.serve.dialects.conversation import ChoiceReader
from forerun.serve.dialects.openai.render import speculation_metrics
from forerun.serve.http.errors import ApiError


class MessagesDialect(Dialect):
    """POST /v1/messages: the next message, whole or as a stream, in Anthropic's format. 400 names a
    field that cannot be accepted.
    """

    _reader: ChoiceReader
    _blocks: Blocks
    _id: str
    _stats: bool

    def __init__(self) -> None:
        super().__init__()
        self._started = False

    def parse(self, value: Any, service: Service) -> ParsedRequest:
        """Implement Dialect.parse for the body of /v1/messages. Raises RequestError naming the
        field, ApiError.
        """
        body = read(MessagesBody, value)
        self._served = service.named(body.model)
        chat, loaded = chat_body(body), self._served.loaded
        generation = chat_generation(chat, loaded, service.settings)
        ignored_names = ignored_fields(chat, loaded)
        enforces_budget = (
            generation.rules is not None and generation.rules.grammar.budget is not None
        )
        left = (
            *ignored(body, value),
            *(
                ("thinking.budget_tokens",)
                if chat.thinking_token_budget and not enforces_budget
                else ()
            ),
            *("thinking" for name in ignored_names if name == "reasoning_effort"),
        )
        thinking = body.thinking
        self._reader = ChoiceReader(generation)
        self._blocks = Blocks(thinking is not None and thinking.display == "omitted")
        self._stats = body.speculative.stats
        self._id = f"msg_{uuid.uuid4().hex}"
        return ParsedRequest(replace(generation, id=self._id), self._served, left)

    def ping(self) -> bytes:
        """Implement Dialect.ping."""
        return event({"type": "ping"}, "ping")

    def events(self, news: News, tally: Tally, last: bool) -> bytes:
        """Implement Dialect.events: message_start first, content blocks, and with `last` the
        message_delta.
        """
        events: list[Event] = []
        if not self._started:
            self._started = True
            usage = {**_input(tally), "output_tokens": 0}
            events.append({"type": "message_start", "message": self._message([], usage)})
        for _, delta in news:
            events += self._blocks.push(self._reader.push(delta))
        if last:
            usage = {**_input(tally), "output_tokens": tally.output_tokens}
            stop = {**self._stop(), "stop_details": None}
            ended: Event = {"type": "message_delta", "delta": stop, "usage": usage}
            if self._stats:
                ended["metrics"] = speculation_metrics(tally.stats)
            events += [*self._blocks.close(), ended]
        return b"".join(event(one, one["type"]) for one in events)

    def full_response(self, choices: News, tally: Tally) -> dict[str, Any]:
        """Implement Dialect.full_response: one message with all content blocks, why it ended, and
        its usage.
        """
        for _, delta in choices:
            self._blocks.push(self._reader.push(delta))
        usage = {**_input(tally), "output_tokens": tally.output_tokens}
        blocks = self._blocks.content_blocks(self._reader.cut)
        answer = self._message(blocks, usage) | self._stop()
        if self._stats:
            answer["metrics"] = speculation_metrics(tally.stats)
        return answer

    def end(self, error: ApiError | None) -> bytes:
        """Implement Dialect.end: message_stop, or an error event."""
        if error is None:
            return event({"type": "message_stop"}, "message_stop")
        return event(error_body(error), "error")

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._served.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _stop(self) -> dict[str, Any]:
        """Return the reason for which the answer ended."""
        reader = self._reader
        if reader.finish == Finish.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if reader.called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        stop = reader.stop_reason if isinstance(reader.stop_reason, str) else None
        return {"stop_reason": "stop_sequence" if stop else "end_turn", "stop_sequence": stop}


def counted(value: Any, service: Service) -> dict[str, int]:
    """POST /v1/messages/count_tokens: the number of tokens in the prompt of such a /v1/messages
    request.
    """
    body = read(CountBody, value)
    loaded = service.named(body.model).loaded
    return {"input_tokens": len(dialogue(chat_body(body), loaded, service.settings).prompt)}


def _input(tally: Tally) -> dict[str, int]:
    """Return the usage of the prompt. Tokens from the prefix cache are counted separately."""
    return {
        "input_tokens": tally.prompt_tokens - tally.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": tally.cached_tokens,
    }
