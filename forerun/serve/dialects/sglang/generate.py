"""POST /generate: the text so far and its statistics, in one piece or as a stream."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from forerun.client.completion import Completion
from forerun.engine.request import Delta, Finish
from forerun.errors import RequestError
from forerun.interface.plan import TokenLogprobs
from forerun.serve.answers.contract import Dialect, News, ParsedRequest
from forerun.serve.answers.service import Service
from forerun.serve.answers.session import Tally
from forerun.serve.bodies.fields import read
from forerun.serve.bodies.prepare import Generation
from forerun.serve.bodies.wire import event
from forerun.serve.dialects.openai.render import LEAST_LOGPROB, token_text
from forerun.serve.dialects.sglang.schema import GenerateBody
from forerun.serve.dialects.sglang.text_requests import (
    TextRequest,
    generation_of,
    text_requests,
    together,
    unused_reports,
)
from forerun.serve.http.errors import ApiError, error_body

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Answer(Completion):
    """One text so far.

    worded  its formatted log-probabilities, by field
    """

    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    worded: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        """Implement Completion.add, including log-probabilities of the prompt."""
        Completion.add(self, delta)
        self.prompt_logprobs += delta.prompt_logprobs

    def field(
        self, name: str, entries: list[TokenLogprobs], word: Callable[[TokenLogprobs], Any]
    ) -> list[Any]:
        """Return a field's formatted entries so far. Each is formatted once, because every event
        repeats all.
        """
        found = self.worded.setdefault(name, [])
        found += map(word, entries[len(found) :])
        return found


class GenerateDialect(Dialect):
    """POST /generate: text in SGLang's format, whole or as a stream. 400 names a field that cannot
    be accepted.
    """

    _body: GenerateBody
    _texts: tuple[TextRequest, ...]
    _generation: Generation
    _several: bool

    def __init__(self) -> None:
        super().__init__()
        self._answers: dict[int, Answer] = {}

    def parse(self, value: Any, service: Service) -> ParsedRequest:
        """Implement Dialect.parse for the body of /generate. Raises RequestError naming the field,
        ApiError.
        """
        body = self._body = read(GenerateBody, value)
        self._served = service.answering(body.model, body.adapter())
        prompts = body.text if body.text is not None else body.input_ids
        if prompts is None or (body.text is not None and body.input_ids is not None):
            raise RequestError("Give either text or input_ids.", "text")
        self._texts = text_requests(body, prompts)
        ignored = (*body.ignored, *unused_reports(body, self._texts))
        found = [
            generation_of(one, body, self._served.loaded, service.settings) for one in self._texts
        ]
        self._generation = together(found, tuple(one.rid for one in self._texts if one.rid))
        self._several = prompts.several or self._generation.n > 1
        return ParsedRequest(self._generation, self._served, ignored)

    def events(self, news: News, tally: Tally, last: bool) -> bytes:
        """Implement Dialect.events: one event per delta, with the whole text so far."""
        found = []
        for index, delta in news:
            self._answers.setdefault(index, Answer()).add(delta)
            one = self._output(index, tally)
            found.append({**one, "index": index} if self._several else one)
        return b"".join(map(event, found))

    def full_response(self, choices: News, tally: Tally) -> Any:
        """Implement Dialect.full_response: an object, or a list of them for several texts."""
        for index, delta in choices:
            self._answers.setdefault(index, Answer()).add(delta)
        found = [self._output(index, tally) for index in sorted(self._answers)]
        return found if self._several else found[0]

    def end(self, error: ApiError | None) -> bytes:
        """Implement Dialect.end: [DONE], after an event with the error if there is one."""
        return DONE if error is None else event(error_body(error)) + DONE

    def _output(self, index: int, tally: Tally) -> dict[str, Any]:
        answer, generation = self._answers[index], self._generation
        place = index // generation.n
        request, text = generation.requests[place], self._texts[place]
        id = text.rid or f"{generation.id}-{place}"
        meta: dict[str, Any] = {
            "id": id if generation.n == 1 else f"{id}-{index % generation.n}",
            "finish_reason": _finish(answer),
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(answer.tokens),
            "cached_tokens": answer.cached_tokens,
            "e2e_latency": monotonic() - tally.began,
        }
        if text.logprobs:
            meta |= self._logprobs(answer, int(request.prompt[0]), text)
        if (stats := answer.stats) is not None and stats.steps:
            meta["spec_verify_ct"] = stats.steps
            meta["spec_accept_length"] = 1 + stats.accepted / stats.steps
        if lossy := tally.generation.lossy:
            meta["lossy"] = lossy
        return {"text": answer.text, "output_ids": answer.tokens, "meta_info": meta}

    def _logprobs(self, answer: Answer, first: int, text: TextRequest) -> dict[str, Any]:
        """Return [log-probability, id, text or null] of each token of the answer, and of the prompt
        from the requested start; the `first` token of a prompt has none.
        """
        kinds: dict[str, Callable[[TokenLogprobs], list[Any]]] = {
            "token_logprobs": lambda e: self._entry(e.token, e.logprob)
        }
        if text.top:
            kinds["top_logprobs"] = lambda e: self._top(e, text.top)
        if text.ids:
            kinds["token_ids_logprobs"] = lambda e: self._chosen(e, text.ids)
        found: dict[str, Any] = {}
        for kind, entry in kinds.items():
            output, given = f"output_{kind}", f"input_{kind}"
            found[output] = answer.field(output, answer.logprobs, entry)
            found[given] = []
            if text.start >= 0:
                unknown = self._entry(first, None) if kind == "token_logprobs" else None
                known = answer.field(given, answer.prompt_logprobs, entry)
                found[given] = [unknown, *known][text.start :]
        return found

    def _top(self, entry: TokenLogprobs, count: int) -> list[Any]:
        return [self._entry(token, logprob) for token, logprob in entry.top[:count]]

    def _chosen(self, entry: TokenLogprobs, ids: tuple[int, ...]) -> list[Any]:
        known = {entry.token: entry.logprob, **dict(entry.top)}
        return [self._entry(id, known.get(id)) for id in ids]

    def _entry(self, token: int, logprob: float | None) -> list[Any]:
        tokenizer = self._served.loaded.tokenizer
        shown = self._body.return_text_in_logprobs
        text = token_text(tokenizer.token_bytes(token)) if shown else None
        return [None if logprob is None else max(logprob, LEAST_LOGPROB), token, text]


def _finish(answer: Answer) -> dict[str, Any] | None:
    """Return the reason for which the text ended; None while it grows."""
    if answer.finish is None:
        return None
    if answer.finish == Finish.LENGTH:
        return {"type": "length", "length": len(answer.tokens)}
    matched = answer.stop_reason if answer.stop_reason is not None else answer.tokens[-1]
    return {"type": "stop", "matched": matched}
