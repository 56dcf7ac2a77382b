"""POST /api/chat and /api/generate: lines of JSON, the last with counts and durations."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from forerun.engine.request import Finish
from forerun.errors import RequestError
from forerun.serve.answers.contract import Dialect, News, ParsedRequest, Ready
from forerun.serve.answers.service import Service
from forerun.serve.answers.session import Tally
from forerun.serve.bodies.dialogue import ignored_fields
from forerun.serve.bodies.fields import read
from forerun.serve.bodies.infill import filling
from forerun.serve.bodies.messages import goes_on, left_out
from forerun.serve.bodies.prepare import Generation, chat_generation, completion_generation, within
from forerun.serve.bodies.schema import UNLIMITED, ChatBody, CompletionBody
from forerun.serve.bodies.wire import line
from forerun.serve.dialects.conversation import ChoiceReader
from forerun.serve.dialects.ollama.errors import error_body
from forerun.serve.dialects.ollama.schema import OllamaBody, OllamaChatBody, OllamaGenerateBody
from forerun.serve.dialects.openai.render import logprob_entries, speculation_metrics
from forerun.serve.http.errors import ApiError
from forerun.text.tool_bodies import NOTHING, CallPiece, ParsedDelta, loads_or

NANO = 1e9


class OllamaChat(Dialect):
    """POST /api/chat: the next message of a conversation. 400 names a field that cannot be
    accepted.
    """

    media_type = b"application/x-ndjson"
    _body: OllamaBody
    _generation: Generation
    _reader: ChoiceReader
    _ignored: tuple[str, ...]

    def __init__(self) -> None:
        super().__init__()
        self._calls = Calls()

    def parse(self, value: Any, service: Service) -> ParsedRequest | Ready:
        """Implement Dialect.parse; Ready for an empty request, which only loads the model. Raises
        RequestError naming the field, ApiError.
        """
        body = self._read(value)
        self._served = service.named(body.model)
        self._body = body
        idle = body.options.without_effect(value.get("options") or {})
        self._ignored = (*body.ignored, *idle)
        if self._empty(body):
            reason = "unload" if body.ignored.get("keep_alive") in (0, "0") else "load"
            return Ready(
                {**self._line(ParsedDelta(), []), "done": True, "done_reason": reason},
                self._ignored,
            )
        self._generation = within(self._prepare(body, service), self._served.loaded.context)
        self._reader = ChoiceReader(self._generation)
        return ParsedRequest(self._generation, self._served, self._ignored)

    def ping(self) -> bytes:
        """Implement Dialect.ping: nothing, because a line of JSON has no comment."""
        return b""

    def _read(self, value: Any) -> OllamaBody:
        """Return the checked body."""
        return read(OllamaChatBody, value)

    def _empty(self, body: OllamaBody) -> bool:
        """Return whether the request is empty, which only checks that the model is loaded."""
        assert isinstance(body, OllamaChatBody)
        return not body.messages

    def _prepare(self, body: OllamaBody, service: Service) -> Generation:
        """Return the generation for the engine."""
        assert isinstance(body, OllamaChatBody)
        chat = conversation(body, body.messages)
        self._ignored += left_out(body.messages)
        return self._chat(replace(chat, tools=body.tools), service)

    def _chat(self, chat: ChatBody, service: Service) -> Generation:
        ignored_names = ignored_fields(chat, self._served.loaded)
        self._ignored += tuple("think" for name in ignored_names if name == "reasoning_effort")
        return chat_generation(chat, self._served.loaded, service.settings)

    def _text_fields(self, parsed: ParsedDelta, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the part of a line that has the text."""
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["thinking"] = parsed.reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def events(self, news: News, tally: Tally, last: bool) -> bytes:
        """Implement Dialect.events: a line of JSON per delta with content; with `last` one with
        counts and times.
        """
        lines = []
        for _, delta in news:
            parsed = self._reader.push(delta)
            calls = self._calls.push(parsed.calls, delta.finish, self._reader.cut)
            logprobs = self._logprobs([(0, delta)])
            if parsed.reasoning or parsed.content or calls or logprobs:
                lines.append(self._line(parsed, calls, logprobs) | {"done": False})
        if last:
            lines.append(self._line(ParsedDelta(), []) | self._done(tally))
        return b"".join(map(line, lines))

    def full_response(self, choices: News, tally: Tally) -> dict[str, Any]:
        """Implement Dialect.full_response: the one choice as one object, with counts and times."""
        ((_, delta),) = choices
        parsed = self._reader.push(delta)
        calls = self._calls.push(parsed.calls, delta.finish, self._reader.cut)
        return self._line(parsed, calls, self._logprobs(choices)) | self._done(tally)

    def end(self, error: ApiError | None) -> bytes:
        """Implement Dialect.end: nothing, or a line with the error."""
        return b"" if error is None else line(error_body(error))

    def _line(
        self, parsed: ParsedDelta, calls: list[dict[str, Any]], logprobs: Sequence[Any] = ()
    ) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        name = self._body.model or self._served.name
        found = {"model": name, "created_at": now, **self._text_fields(parsed, calls)}
        return found | ({"logprobs": [*logprobs]} if logprobs else {})

    def _logprobs(self, news: News) -> list[dict[str, Any]]:
        tokenizer, unseen = self._served.loaded.tokenizer, self._generation.unseen
        return [entry for _, delta in news if delta.logprobs
                for entry in logprob_entries(delta, unseen, tokenizer)]  # fmt: skip

    def _done(self, tally: Tally) -> dict[str, Any]:
        """Return the end: the reason, and counts and durations in nanoseconds."""
        now = monotonic()
        first = tally.first or now
        found: dict[str, Any] = {
            "done": True,
            "done_reason": self._reader.finish,
            "total_duration": int((now - tally.began) * NANO),
            "load_duration": 0,
            "prompt_eval_count": tally.prompt_tokens,
            "prompt_eval_duration": int((first - tally.began) * NANO),
            "eval_count": tally.output_tokens,
            "eval_duration": int((now - first) * NANO),
        }
        if self._body.speculative.stats:
            found["metrics"] = speculation_metrics(tally.stats)
        return found


class OllamaGenerate(OllamaChat):
    """POST /api/generate: the answer to a prompt; or its continuation, for a raw prompt, one with a
    suffix, and a model without a template. 400 names a field that cannot be accepted.
    """

    def _read(self, value: Any) -> OllamaGenerateBody:
        body = read(OllamaGenerateBody, value)
        for name in ("system", "suffix"):
            if body.raw and getattr(body, name):
                message = f"{name} needs raw to be false: a raw prompt is all there is."
                raise RequestError(message, name)
        return body

    def _empty(self, body: OllamaBody) -> bool:
        assert isinstance(body, OllamaGenerateBody)
        return not (body.prompt or body.suffix)

    def _prepare(self, body: OllamaBody, service: Service) -> Generation:
        assert isinstance(body, OllamaGenerateBody)
        loaded = self._served.loaded
        if body.raw or body.suffix or loaded.chat is None:
            idle = {"system": body.system, "think": body.think not in (None, "none")}
            self._ignored += tuple(name for name, given in idle.items() if given)
            return completion_generation(filling(plain(body), loaded), loaded, service.settings)
        messages = [{"role": "user", "content": body.prompt}]
        if body.system is not None:
            messages.insert(0, {"role": "system", "content": body.system})
        return self._chat(conversation(body, tuple(messages)), service)

    def _text_fields(self, parsed: ParsedDelta, calls: list[dict[str, Any]]) -> dict[str, Any]:
        thought = {"thinking": parsed.reasoning} if parsed.reasoning else {}
        return {"response": parsed.content, **thought}


class Calls:
    """Collects the pieces of calls until they are complete: Ollama's clients accept no pieces."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._arguments = ""

    def push(
        self, pieces: Sequence[CallPiece], finish: Finish | None, cut: bool
    ) -> list[dict[str, Any]]:
        """Return the calls that are complete now; at the end of the answer all.

        cut  as ChoiceReader.cut; then an incomplete last call is left out
        """
        found = []
        for piece in pieces:
            if piece.name is not None:
                found += self._ended()
                self._name = piece.name
            self._arguments += piece.arguments
        return found if finish is None else [*found, *self._ended(cut)]

    def _ended(self, cut: bool = False) -> list[dict[str, Any]]:
        if self._name is None:
            return []
        name, written = self._name, self._arguments
        self._name, self._arguments = None, ""
        arguments = loads_or(written, NOTHING)
        if arguments is NOTHING:
            if cut:
                return []
            arguments = {}
        function = {"name": name, "arguments": arguments}
        return [{"id": f"call_{secrets.token_hex(4)}", "function": function}]


def conversation(body: OllamaBody, messages: tuple[dict[str, Any], ...]) -> ChatBody:
    """Convert a request with messages, at least one, to a ChatBody. A last message of the assistant
    that has text or reasoning is continued.
    """
    return ChatBody(
        messages=messages,
        continue_final_message=goes_on(messages[-1]),
        reasoning_effort=body.think,
        max_tokens=_limit(body),
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        **_sampled(body),
    )


def plain(body: OllamaGenerateBody) -> CompletionBody:
    """Convert a request whose prompt is continued to a CompletionBody. Raises RequestError for
    top_logprobs without logprobs.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limit = _limit(body)
    return CompletionBody(
        prompt=(body.prompt,),
        suffix=body.suffix,
        max_tokens=UNLIMITED if limit is None else limit,
        logprobs=logprobs,
        **_sampled(body),
    )


def _limit(body: OllamaBody) -> int | None:
    """Return the most tokens; absent, 0 and negative values mean as many as the context has room
    for: Ollama's runner compares tokens with positive limits only (ollamarunner/runner.go).
    """
    limit = body.options.num_predict
    return None if limit is None or limit <= 0 else limit


def _sampled(body: OllamaBody) -> dict[str, Any]:
    options = body.options
    if options.repeat_last_n == 0:  # Of no token is a repetition seen.
        options = replace(options, repeat_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
    return {
        "stream": body.stream,
        "json_schema": body.format,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "seed": options.seed,
        "repetition_penalty": options.repeat_penalty,
        "frequency_penalty": options.frequency_penalty,
        "presence_penalty": options.presence_penalty,
        "stop": options.stop,
        "speculative": body.speculative,
    }
