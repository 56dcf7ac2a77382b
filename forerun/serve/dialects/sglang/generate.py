"""POST /generate: the text so far and what is known of it, in one piece or as it grows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from forerun.engine.request import Delta, Finish
from forerun.errors import RequestError
from forerun.interface.plan import TokenLogprobs
from forerun.serve.dialects.contract import Dialect, News
from forerun.serve.dialects.openai.errors import error_body
from forerun.serve.dialects.openai.render import LEAST_LOGPROB, token_text
from forerun.serve.dialects.sglang.schema import GenerateBody, Prompts
from forerun.serve.errors import ApiError
from forerun.serve.fields import ignored_in, read
from forerun.serve.prepare import Generation, completion_generation
from forerun.serve.schema import CompletionBody
from forerun.serve.service import Service
from forerun.serve.session import Tally
from forerun.serve.wire import event

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Answer:
    """One text as far as it has come."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached: int = 0
    last: Delta | None = None

    def add(self, news: Delta) -> None:
        """Take in one delta."""
        self.text += news.text
        self.tokens += news.tokens
        self.logprobs += news.logprobs
        self.prompt_logprobs += news.prompt_logprobs
        self.cached += news.cached_tokens
        self.last = news


class GenerateDialect(Dialect):
    """Every event says the whole text so far, as SGLang's do."""

    _body: GenerateBody
    _generation: Generation
    _several: bool

    def __init__(self) -> None:
        super().__init__()
        self._answers: dict[int, Answer] = {}

    def parse(self, value: Any, service: Service) -> Generation:
        """See Dialect."""
        body = self._body = read(GenerateBody, value)
        self.served = service.named(body.model)
        asked = body.text if body.text is not None else body.input_ids
        if asked is None or (body.text is not None and body.input_ids is not None):
            raise RequestError("Give either text or input_ids.", "text")
        self.ignored = ignored_in(body)
        self._several = asked.several or body.sampling_params.n > 1
        plain = _plain(body, asked)
        self._generation = completion_generation(plain, self.served.loaded, service.settings)
        return self._generation

    def events(self, news: News, tally: Tally, last: bool) -> bytes:
        """See Dialect."""
        found = []
        for index, delta in news:
            self._answers.setdefault(index, Answer()).add(delta)
            told = self._told(index, tally)
            found.append({**told, "index": index} if self._several else told)
        return b"".join(map(event, found))

    def whole(self, choices: News, tally: Tally) -> Any:
        """See Dialect."""
        for index, delta in choices:
            self._answers.setdefault(index, Answer()).add(delta)
        found = [self._told(index, tally) for index in sorted(self._answers)]
        return found if self._several else found[0]

    def end(self, error: ApiError | None) -> bytes:
        """See Dialect."""
        return DONE if error is None else event(error_body(error)) + DONE

    @staticmethod
    def error(error: ApiError) -> dict[str, Any]:
        """See Dialect."""
        return error_body(error)

    def _told(self, index: int, tally: Tally) -> dict[str, Any]:
        answer, generation = self._answers[index], self._generation
        request = generation.requests[index // generation.n]
        meta: dict[str, Any] = {
            "id": f"{generation.id}-{index}",
            "finish_reason": _finish(answer),
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(answer.tokens),
            "cached_tokens": answer.cached,
            "e2e_latency": monotonic() - tally.began,
        }
        if self._body.return_logprob:
            meta |= self._logprobs(answer, request.prompt.tolist())
        stats = answer.last.stats if answer.last is not None else None
        if stats is not None and stats.steps:
            meta["spec_verify_ct"] = stats.steps
            meta["spec_accept_length"] = 1 + stats.accepted / stats.steps
        if self.lossy:
            meta["lossy"] = self.lossy
        return {"text": answer.text, "output_ids": [*answer.tokens], "meta_info": meta}

    def _logprobs(self, answer: Answer, prompt: list[int]) -> dict[str, Any]:
        """[log-probability, id, text or null], of the answer and of the prompt from where it was
        asked for; the first token of a prompt has none.
        """
        found: dict[str, Any] = {
            "output_token_logprobs": [self._entry(e.token, e.logprob) for e in answer.logprobs],
            "input_token_logprobs": [],
        }
        top = self._body.top_logprobs_num > 0
        if top:
            found["output_top_logprobs"] = self._tops(answer.logprobs)
            found["input_top_logprobs"] = []
        start = self._body.logprob_start_len
        if start >= 0:
            first = [self._entry(prompt[0], None)]
            entries = answer.prompt_logprobs
            told = first + [self._entry(e.token, e.logprob) for e in entries]
            found["input_token_logprobs"] = told[start:]
            if top:
                found["input_top_logprobs"] = [None, *self._tops(entries)][start:]
        return found

    def _tops(self, entries: Sequence[TokenLogprobs]) -> list[Any]:
        return [[self._entry(token, logprob) for token, logprob in e.top] for e in entries]

    def _entry(self, token: int, logprob: float | None) -> list[Any]:
        tokenizer = self.served.loaded.tokenizer
        shown = self._body.return_text_in_logprobs
        text = token_text(tokenizer.token_bytes(token)) if shown else None
        return [None if logprob is None else max(logprob, LEAST_LOGPROB), token, text]


def _finish(answer: Answer) -> dict[str, Any] | None:
    """Why the text ended; null while it grows."""
    last = answer.last
    if last is None or last.finish is None:
        return None
    if last.finish == Finish.LENGTH:
        return {"type": "length", "length": len(answer.tokens)}
    matched = last.stop_reason if last.stop_reason is not None else answer.tokens[-1]
    return {"type": "stop", "matched": matched}


def _plain(body: GenerateBody, asked: Prompts) -> CompletionBody:
    """The same request in the server's own words."""
    given = body.sampling_params
    if body.top_logprobs_num and not body.return_logprob:
        message = "top_logprobs_num needs return_logprob to be true."
        raise RequestError(message, "top_logprobs_num")
    return CompletionBody(
        prompt=asked.prompts,
        n=given.n,
        stream=body.stream,
        max_tokens=given.max_new_tokens,
        min_tokens=given.min_new_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        seed=given.sampling_seed,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        repetition_penalty=given.repetition_penalty,
        logit_bias=given.logit_bias,
        stop=given.stop,
        stop_token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
        include_stop_str_in_output=given.no_stop_trim,
        skip_special_tokens=given.skip_special_tokens,
        regex=given.rules,
        logprobs=body.top_logprobs_num if body.return_logprob else None,
        echo=body.return_logprob and body.logprob_start_len >= 0,
        speculative=body.speculative,
    )
