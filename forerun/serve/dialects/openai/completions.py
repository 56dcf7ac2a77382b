"""/v1/chat/completions and /v1/completions: their bodies, chunks, and `[DONE]` at the end."""

from abc import abstractmethod
from time import monotonic
from typing import Any, ClassVar

from forerun.engine.request import Delta
from forerun.serve.answers.contract import Dialect, News, ParsedRequest
from forerun.serve.answers.service import Service
from forerun.serve.answers.session import Tally
from forerun.serve.bodies.dialogue import ignored_fields
from forerun.serve.bodies.fields import read
from forerun.serve.bodies.infill import filling
from forerun.serve.bodies.prepare import Generation, chat_generation, completion_generation
from forerun.serve.bodies.schema import ChatBody, CompletionBody, SampledBody, StreamOptions
from forerun.serve.bodies.wire import dump_json, event
from forerun.serve.dialects.openai.render import (
    ChatFormat,
    CompletionFormat,
    Echo,
    Shown,
    predicted,
    prompt_entries,
    speculation_metrics,
    timings,
    usage,
)
from forerun.serve.http.errors import ApiError, error_body
from forerun.text.tokenizer import Tokenizer
from forerun.types import Ints

DONE = b"data: [DONE]\n\n"


class OpenAIDialect(Dialect):
    """The common part of both routes.

    response_kind, chunk_kind  the `object` of an answer in one piece, and of a chunk
    """

    response_kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    _format: ChatFormat | CompletionFormat
    _options: StreamOptions
    _stats: bool
    _predicts: bool
    _begun = False
    _timed: bool
    _prompt_ids: list[list[int]]
    _prompt_top: int | None
    _envelope: dict[str, Any]

    def parse(self, value: Any, service: Service) -> ParsedRequest:
        """Implement Dialect.parse for a body of /v1/completions or /v1/chat/completions. Raises
        RequestError naming the field, ApiError.
        """
        body, generation = self._parsed(value, service)
        self._prompt_top = body.prompt_logprobs
        ignored = ignored_fields(body, self._served.loaded)
        self._options = body.stream_options or StreamOptions()
        self._stats, self._timed = body.speculative.stats, body.timings_per_token
        self._predicts = body.prediction is not None
        self._prompt_ids = [
            request.prompt.tolist() for request in generation.requests if body.return_token_ids
        ]
        self._steady = not (
            (self._timed or self._options.continuous_usage_stats or body.return_token_ids)
            or (generation.parser or generation.rules or generation.lossy)
        )
        self._around: dict[int, list[bytes]] = {}
        self._envelope = {
            "id": generation.id,
            "object": self.chunk_kind if generation.stream else self.response_kind,
            "created": generation.created,
            "model": self._served.name,
            "system_fingerprint": self._served.fingerprint,
        }
        return ParsedRequest(generation, self._served, ignored)

    @abstractmethod
    def _parsed(self, value: Any, service: Service) -> tuple[SampledBody, Generation]:
        """Return the checked body and its generation; sets `_served` and `_format`."""

    def events(self, news: News, tally: Tally, last: bool) -> bytes:
        """Implement Dialect.events: one chunk per choice and kind of content; the last one has the
        usage and other extras. All chunks of a choice that only have text are equal around it, so
        these bytes are kept.
        """
        if not self._steady or last or len(news) != 1 or not _is_text(news[0][1]):
            return self._chunks(news, tally, last)
        ((index, delta),) = news
        text = b":" + dump_json(delta.text)  # Within a string it would have a backslash.
        if index in self._around:
            return text.join(self._around[index])
        chunk = self._chunks(news, tally, last)
        if chunk.count(b"data: ") == chunk.count(text) == 1:
            self._around[index] = chunk.split(text)
        return chunk

    def _chunks(self, news: News, tally: Tally, last: bool) -> bytes:
        chunks = [
            {**self._envelope, "choices": [choice]}
            for index, delta in news
            for choice in self._format.chunks(index, delta)
        ]
        if self._options.include_usage:
            chunks = [{**chunk, "usage": self._running(chunk, tally)} for chunk in chunks]
        if last and self._options.include_usage:
            chunks.append({**self._envelope, "choices": [], "usage": self._usage(tally)})
        if chunks and not self._begun:
            self._begun = True
            chunks[0] |= _metadata(tally.generation) | self._prompts()
        if last and self._stats:
            chunks[-1]["metrics"] = speculation_metrics(tally.stats)
        if chunks and self._timed:
            chunks[-1]["timings"] = _timings(tally)
        return b"".join(event(chunk) for chunk in chunks)

    def full_response(self, choices: News, tally: Tally) -> dict[str, Any]:
        """Implement Dialect.full_response: all choices, the usage and other extras."""
        worded = [self._format.choice(index, delta) for index, delta in choices]
        answer = {**self._envelope, "choices": worded, "usage": self._usage(tally)}
        if self._prompt_top is not None and self.response_kind == ChatDialect.response_kind:
            answer["prompt_logprobs"] = prompt_entries(
                choices[0][1], self._prompt_top, self._served.loaded.tokenizer
            )
        answer |= _metadata(tally.generation) | self._prompts()
        if self._stats:
            answer["metrics"] = speculation_metrics(tally.stats)
        if self._timed:
            answer["timings"] = _timings(tally)
        return answer

    def _usage(self, tally: Tally) -> dict[str, Any]:
        reasoning = min(self._format.reasoning_tokens, tally.output_tokens)
        counts = usage(tally.prompt_tokens, tally.output_tokens, tally.cached_tokens, reasoning)
        if self._predicts:
            counts["completion_tokens_details"] |= predicted(tally.stats)
        return counts

    def _running(self, chunk: dict[str, Any], tally: Tally) -> dict[str, Any] | None:
        """Return the token counts of a chunk; None for a chunk that only has the role."""
        if not self._options.continuous_usage_stats:
            return None
        begins = "role" in chunk["choices"][0].get("delta", ())
        return usage(tally.prompt_tokens, 0 if begins else tally.output_tokens, tally.cached_tokens)

    def _prompts(self) -> dict[str, Any]:
        """Return vLLM's prompt_token_ids if requested: a list for one prompt, a list of lists for
        several.
        """
        ids = self._prompt_ids
        return {"prompt_token_ids": ids[0] if len(ids) == 1 else ids} if ids else {}

    def end(self, error: ApiError | None) -> bytes:
        """Implement Dialect.end: [DONE], after an event with the error if there is one."""
        return DONE if error is None else event(error_body(error)) + DONE


class ChatDialect(OpenAIDialect):
    """POST /v1/chat/completions: the next message, whole or as a stream. 400 names a field that
    cannot be accepted.
    """

    response_kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def _parsed(self, value: Any, service: Service) -> tuple[SampledBody, Generation]:
        body = read(ChatBody, value)
        self._served = service.answering(body.model, body.lora_path, body.lora)
        loaded = self._served.loaded
        generation = chat_generation(body, loaded, service.settings)
        budget = None if generation.rules is None else generation.rules.grammar.budget
        self._format = ChatFormat(
            loaded.tokenizer,
            generation.unseen,
            generation.parser,
            _shown(body),
            budget=budget,
        )
        return body, generation


class CompletionDialect(OpenAIDialect):
    """POST /v1/completions: text after a prompt, whole or as a stream. 400 names a field that
    cannot be accepted.
    """

    response_kind = chunk_kind = "text_completion"

    def _parsed(self, value: Any, service: Service) -> tuple[SampledBody, Generation]:
        body = read(CompletionBody, value)
        self._served = service.answering(body.model, body.lora_path, body.lora)
        loaded, tokenizer = self._served.loaded, self._served.loaded.tokenizer
        generation = completion_generation(filling(body, loaded), loaded, service.settings)
        silent = tokenizer.special_ids if body.skip_special_tokens else frozenset()
        echoes = _echoes(body, [request.prompt for request in generation.requests], tokenizer)
        self._format = CompletionFormat(
            tokenizer, generation.unseen, silent, echoes, body.n, _shown(body, body.logprobs)
        )
        return body, generation


def _shown(body: SampledBody, top: int | None = None) -> Shown:
    return Shown(body.return_token_ids, body.return_tokens_as_token_ids, top, body.prompt_logprobs)


def _metadata(generation: Generation) -> dict[str, Any]:
    """Return `metadata`: the accept thresholds if the answer may be lossy, and the keywords that
    were not enforced. {} if there is neither.
    """
    facts = {"unenforced": list(generation.unenforced), "lossy": generation.lossy}
    found = {name: value for name, value in facts.items() if value}
    return {"metadata": found} if found else {}


def _is_text(delta: Delta) -> bool:
    """Return whether a delta adds text to a choice, and nothing else."""
    return bool(delta.text) and not (
        delta.finish or delta.logprobs or delta.prompt_logprobs or delta.trace
    )


def _echoes(body: CompletionBody, prompts: list[Ints], tokenizer: Tokenizer) -> tuple[Echo, ...]:
    """Return the prompts to put before the answers, if requested."""
    if not body.echo:
        return ()
    found = []
    for given, ids in zip(body.prompt, prompts, strict=True):
        plain = isinstance(given, str) and body.truncate_prompt_tokens is None
        text = given if plain else tokenizer.decode(ids.tolist(), body.skip_special_tokens)
        found.append(Echo(str(text), () if body.logprobs is None else tuple(ids.tolist())))
    return tuple(found)


def _timings(tally: Tally) -> dict[str, Any]:
    now = monotonic()
    first = tally.first or now
    return timings(
        tally.prompt_tokens,
        tally.cached_tokens,
        first - tally.began,
        tally.output_tokens,
        now - first,
    )
