"""POST /v1/responses: its events, its answers, and what is stored of them."""

import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from forerun.engine.request import Finish
from forerun.serve.answers.contract import Dialect, News, ParsedRequest
from forerun.serve.answers.service import Service
from forerun.serve.answers.session import Tally
from forerun.serve.bodies.dialogue import dialogue, ignored_fields
from forerun.serve.bodies.fields import read
from forerun.serve.bodies.prepare import Generation, chat_generation
from forerun.serve.bodies.wire import event
from forerun.serve.dialects.conversation import ChoiceReader
from forerun.serve.dialects.openai.render import (
    logprob_entries,
    reasoning_tokens,
    speculation_metrics,
)
from forerun.serve.dialects.responses.conversation import (
    Messages,
    chat_body,
    ignored,
    input_item,
    messages_of,
)
from forerun.serve.dialects.responses.offers import Offer, offers
from forerun.serve.dialects.responses.output import Event, Logprobs, Output
from forerun.serve.dialects.responses.schema import ResponsesBody, each_tool
from forerun.serve.dialects.responses.store import ResponseStore
from forerun.serve.dialects.responses.truncation import fitting, stored_bytes, with_items
from forerun.serve.http.errors import ApiError


class ResponsesDialect(Dialect):
    """Numbered events of items between response.created and response.completed."""

    _body: ResponsesBody
    _generation: Generation
    _reader: ChoiceReader
    _messages: Messages
    _base: dict[str, Any]

    def __init__(self, store: ResponseStore) -> None:
        super().__init__()
        self._store = store
        self._output = Output({})
        self._number = 0

    def stored(self, value: Any) -> int:
        """Implement Dialect.stored: a small body may continue a long conversation."""
        return stored_bytes(value, self._store)

    def parse(self, value: Any, service: Service) -> ParsedRequest:
        """Implement Dialect.parse for the body of /v1/responses, together with the stored answer
        that it names. Raises RequestError naming the field, ApiError.
        """
        value = with_items(value, self._store)
        body = read(ResponsesBody, value)
        self._served = service.named(body.model)
        known = offers(each_tool(value.get("tools")))
        self._messages = _conversation(body, known, self._store)
        chat, loaded = chat_body(body, self._messages), self._served.loaded
        if body.truncation == "auto":
            generation, left = fitting(chat, loaded, service.settings)
        else:
            generation, left = chat_generation(chat, loaded, service.settings), 0
        ignored_names = ignored_fields(chat, loaded)
        unknown = ("reasoning.effort" for name in ignored_names if name == "reasoning_effort")
        truncated = (f"input ({left} earliest messages)",) if left else ()
        unused = (*ignored(body, value), *unknown, *truncated)
        self._body = body
        self._output = Output(known)
        self._reader = ChoiceReader(generation)
        self._generation = replace(generation, id=f"resp_{uuid.uuid4().hex}")
        self._base = self._described(value)
        return ParsedRequest(self._generation, self._served, unused)

    def ping(self) -> bytes:
        """Implement Dialect.ping with an event: clients that wait for events (Codex, 300 s) ignore
        comments.
        """
        return b"".join(map(self._worded, self._progress()))

    def events(self, news: News, tally: Tally, last: bool) -> bytes:
        """Implement Dialect.events: response.created first, the items' events, and with `last` the
        whole answer, which is stored.
        """
        events = [] if self._number else self._progress()
        events += self._push(news)
        if last:
            events += self._output.close("completed" if self._complete else "incomplete")
            answer = self._answer(tally)
            events.append({"type": f"response.{answer['status']}", "response": answer})
        return b"".join(map(self._worded, events))

    def full_response(self, choices: News, tally: Tally) -> dict[str, Any]:
        """Implement Dialect.full_response: the response with all items; stores it if requested."""
        self._push(choices)
        self._output.close("completed" if self._complete else "incomplete")
        return self._answer(tally)

    def end(self, error: ApiError | None) -> bytes:
        """Implement Dialect.end: nothing, or the event response.failed."""
        if error is None:
            return b""
        code = "rate_limit_exceeded" if error.status == 429 else error.code or "server_error"
        details = {"code": code, "message": str(error)}
        failed = {**self._base, "status": "failed", "error": details, "output": self._output.items}
        return self._worded({"type": "response.failed", "response": failed})

    def _progress(self) -> list[Event]:
        """Return response.in_progress, after response.created if nothing was written before."""
        begun = {**self._base, "status": "in_progress", "output": []}
        kinds = (
            ("response.in_progress",)
            if self._number
            else ("response.created", "response.in_progress")
        )
        return [{"type": kind, "response": begun} for kind in kinds]

    def _push(self, news: News) -> list[Event]:
        events: list[Event] = []
        for _, delta in news:
            entries: Logprobs = []
            if delta.logprobs:
                tokenizer = self._served.loaded.tokenizer
                entries = logprob_entries(delta, self._generation.unseen, tokenizer)
            events += self._output.push(self._reader.push(delta), entries)
        return events

    @property
    def _complete(self) -> bool:
        return self._reader.finish != Finish.LENGTH

    def _worded(self, one: Event) -> bytes:
        data = {**one, "sequence_number": self._number}
        self._number += 1
        return event(data, one["type"])

    def _answer(self, tally: Tally) -> dict[str, Any]:
        """Return the whole answer; stores it if requested."""
        answer = {**self._base, "output": self._output.items, "usage": self._usage(tally)}
        answer["completed_at"] = int(time.time())
        answer["status"] = "completed" if self._complete else "incomplete"
        if not self._complete:
            answer["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._body.speculative.stats:
            answer["metrics"] = speculation_metrics(tally.stats)
        if self._body.store:
            input_items = [
                input_item(item, item.id or f"item_{index}_{self._generation.id}")
                for index, item in enumerate(self._body.input)
            ]
            messages = (*self._messages, *self._as_message())
            self._store.put(answer, input_items, messages)
        return answer

    def _as_message(self) -> Messages:
        """Return the answer as a message, for the next request."""
        items = self._output.items
        texts = [item["content"][0]["text"] for item in items if item["type"] == "message"]
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
        if self._output.calls:
            calls = [dict(call) for call in self._output.calls]
            message |= {"tool_calls": calls, "content": message["content"] or None}
        if self._output.thought:
            message["reasoning_content"] = self._output.thought
        return (message,)

    def _usage(self, tally: Tally) -> dict[str, Any]:
        """Return token counts."""
        tokens = reasoning_tokens(self._output.thought, self._served.loaded.tokenizer)
        tokens = min(tokens, tally.output_tokens)
        return {
            "input_tokens": tally.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": tally.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": tally.output_tokens,
            "output_tokens_details": {"reasoning_tokens": tokens},
            "total_tokens": tally.prompt_tokens + tally.output_tokens,
        }

    def _described(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return the answer's envelope: the request with its defaults filled in."""
        body, sampling = self._body, self._generation.requests[0].sampling
        text, reasoning = value.get("text") or {}, value.get("reasoning") or {}
        return {
            "id": self._generation.id,
            "object": "response",
            "created_at": self._generation.created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._served.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store,
            "temperature": sampling.temperature,
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": value.get("tool_choice") or "auto",
            "tools": [_tool(tool) for tool in value.get("tools") or []],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
        }


def input_tokens(value: Any, service: Service, store: ResponseStore) -> dict[str, Any]:
    """POST /v1/responses/input_tokens: the number of tokens in the prompt of such a /v1/responses
    request.
    """
    value = with_items(value, store)
    body = read(ResponsesBody, value)
    loaded = service.named(body.model).loaded
    known = offers(each_tool(value.get("tools")))
    chat = chat_body(body, _conversation(body, known, store))
    count = len(dialogue(chat, loaded, service.settings).prompt)
    return {"object": "response.input_tokens", "input_tokens": count}


def _conversation(
    body: ResponsesBody, known: Mapping[str, Offer], store: ResponseStore
) -> Messages:
    """Return the messages so far, in stored answers and in the request itself. known: its tools.
    Raises ApiError if a stored answer is not there.
    """
    names = {(one.namespace, one.name): name for name, one in known.items()}
    return (*_earlier(body.previous_response_id, store), *messages_of(body.input, names))


def _earlier(id: str | None, store: ResponseStore) -> Messages:
    """Return the conversation up to an answer. Raises ApiError if that is no longer stored."""
    if id is None:
        return ()
    found = store.get(id)
    if found is None:
        message = f"previous_response_id: {id!r} was not stored, or is no longer stored."
        code, field = "previous_response_not_found", "previous_response_id"
        raise ApiError(400, message, code, field)
    return found.messages


def _tool(value: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": None, "strict": False, "description": None, **value}
