"""POST /completion and /infill: llama.cpp's answer, in one piece or as a stream."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, ClassVar

from forerun.client.completion import Completion
from forerun.engine.request import Delta, Finish, Request, choice_seed
from forerun.errors import RequestError
from forerun.interface.plan import TokenLogprobs
from forerun.serve.answers.contract import Dialect, News, ParsedRequest
from forerun.serve.answers.service import Service
from forerun.serve.answers.session import Tally
from forerun.serve.bodies.fields import read
from forerun.serve.bodies.prepare import (
    Cut,
    Generation,
    completion_generation,
    too_long,
    within,
)
from forerun.serve.bodies.schema import CompletionBody, Prompt
from forerun.serve.bodies.wire import event
from forerun.serve.dialects.llama.infill import infill_prompt
from forerun.serve.dialects.llama.limits import LineLimits
from forerun.serve.dialects.llama.schema import InfillBody, NativeBody, Parts
from forerun.serve.dialects.openai.render import LEAST_LOGPROB, text_of, timings, visible
from forerun.serve.http.errors import ApiError, error_body
from forerun.text.tokenizer import Tokenizer

NO_SLOT = -1
"""Value of id_slot that lets the server choose: clients cannot choose a slot here."""


class CompletionsDialect(Dialect):
    """POST /completion: text in llama.cpp's format, whole or as a stream. 400 names a field that
    cannot be accepted.
    """

    _kind: ClassVar[type[NativeBody]] = NativeBody
    _body: NativeBody
    _generation: Generation

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[int, Completion] = {}

    def parse(self, value: Any, service: Service) -> ParsedRequest:
        """Implement Dialect.parse for the body of /completion. Raises RequestError naming the
        field, ApiError.
        """
        body = self._body = read(self._kind, value)
        self._served = service.answering(body.model, body.lora_path, body.lora)
        if body.n_probs > (limit := service.settings.max_logprobs):
            message = f"n_probs is {body.n_probs}, but this server allows {limit}."
            raise RequestError(message, "n_probs")
        loaded = self._served.loaded
        generation = completion_generation(self._plain(body), loaded, service.settings)
        generation = within(generation, loaded.context)
        self._generation = replace(
            generation, cut=_cut(body, len(generation.requests) * generation.n)
        )
        return ParsedRequest(self._generation, self._served, tuple(body.ignored))

    def _plain(self, body: NativeBody) -> CompletionBody:
        """Convert the request to a CompletionBody. Raises RequestError, ApiError."""
        loaded = self._served.loaded
        prompts = tuple(_prompt(parts, loaded.tokenizer) for parts in body.prompt)
        return body.plain(prompts, loaded.sampling)

    def events(self, news: News, tally: Tally, last: bool) -> bytes:
        """Implement Dialect.events: one event per delta that has text or tokens, and one at the
        end of a choice.
        """
        found = []
        for index, delta in news:
            self._written.setdefault(index, Completion()).add(delta)
            if delta.text or delta.tokens or delta.finish is None:
                found.append(self._piece(index, delta, tally))
            if delta.finish is not None:
                found.append(self._end(index, "", [], tally))
        return b"".join(map(event, found))

    def full_response(self, choices: News, tally: Tally) -> Any:
        """Implement Dialect.full_response: an object, or a list of them for several choices."""
        found = []
        for index, delta in choices:
            self._written.setdefault(index, Completion()).add(delta)
            tokens = [*delta.tokens] if self._body.return_tokens else []
            probabilities = self._probabilities(delta)
            found.append(self._end(index, delta.text, tokens, tally, probabilities))
        return found if len(found) > 1 else found[0]

    def end(self, error: ApiError | None) -> bytes:
        """Implement Dialect.end: nothing, or an error event."""
        return b"" if error is None else event(error_body(error))

    def _piece(self, index: int, delta: Delta, tally: Tally) -> dict[str, Any]:
        written = self._written[index]
        found = {
            "index": index,
            "content": delta.text,
            "tokens": [*delta.tokens],
            "stop": False,
            "id_slot": NO_SLOT,
            "tokens_predicted": len(written.tokens),
            "tokens_evaluated": self._prompt_tokens(index),
            **self._probabilities(delta),
        }
        if self._body.timings_per_token:
            found["timings"] = self._timings(index, tally)
        return found

    def _end(
        self,
        index: int,
        text: str,
        tokens: list[int],
        tally: Tally,
        probabilities: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        written, request = self._written[index], self._request(index)
        loaded = self._served.loaded
        kind, word = _stop(written)
        held = len(request.prompt) + len(written.tokens)
        found = {
            "index": index,
            "content": text,
            "tokens": tokens,
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self._served.name,
            "tokens_predicted": len(written.tokens),
            "tokens_evaluated": len(request.prompt),
            "generation_settings": self._settings(index),
            "prompt": loaded.tokenizer.decode(request.prompt.tolist(), skip_special=False),
            "has_new_line": "\n" in written.text,
            "truncated": kind == "limit" and held >= loaded.context,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": written.cached_tokens,
            "timings": self._timings(index, tally),
            **(probabilities or {}),
        }
        if lossy := tally.generation.lossy:
            found["lossy"] = lossy
        fields = self._body.response_fields
        return _chosen(found, fields) if fields else found

    def _request(self, index: int) -> Request:
        return self._generation.requests[index // self._generation.n]

    def _prompt_tokens(self, index: int) -> int:
        return len(self._request(index).prompt)

    def _timings(self, index: int, tally: Tally) -> dict[str, Any]:
        written, now = self._written[index], monotonic()
        first = tally.first or now
        found = timings(
            self._prompt_tokens(index),
            written.cached_tokens,
            first - tally.began,
            len(written.tokens),
            now - first,
        )
        if (stats := written.stats) is not None and stats.draft_tokens:
            found |= {"draft_n": stats.draft_tokens, "draft_n_accepted": stats.accepted}
        return found

    def _settings(self, index: int) -> dict[str, Any]:
        """Return the settings of the generation, under llama.cpp's names."""
        body, request, loaded = self._body, self._request(index), self._served.loaded
        used, limit = request.sampling, request.stopping.max_tokens
        return {
            "n_ctx": loaded.context,
            "model": self._served.name,
            "seed": choice_seed(used.seed, index % self._generation.n),
            "temperature": used.temperature,
            "top_k": used.top_k,
            "top_p": used.top_p,
            "min_p": used.min_p,
            "repeat_penalty": used.repetition_penalty,
            "presence_penalty": used.presence_penalty,
            "frequency_penalty": used.frequency_penalty,
            "logit_bias": [{"token": id, "bias": bias} for id, bias in used.logit_bias],
            "stop": list(body.stop),
            "max_tokens": limit,
            "n_predict": limit,
            "ignore_eos": body.ignore_eos,
            "stream": body.stream,
            "n_probs": body.n_probs,
            "n_indent": body.n_indent,
            "timings_per_token": body.timings_per_token,
            "speculative.n_max": max(loaded.config.speculative_num_steps or 0, 0),
        }

    def _probabilities(self, delta: Delta) -> dict[str, Any]:
        if not delta.logprobs:
            return {}
        tokenizer = self._served.loaded.tokenizer
        shown = [_entry(entry, tokenizer) for entry in visible(delta, self._generation.unseen)]
        return {"completion_probabilities": shown}


class InfillDialect(CompletionsDialect):
    """POST /infill: the text between two texts. 400 if the model has no marks for that."""

    _kind = InfillBody

    def _plain(self, body: NativeBody) -> CompletionBody:
        assert isinstance(body, InfillBody)
        loaded = self._served.loaded
        ids, marks = infill_prompt(body, loaded.tokenizer, loaded.context)
        if len(ids) > loaded.context:
            raise too_long(len(ids), loaded, "input_prefix", "with suffix ")
        plain = body.plain((ids,), loaded.sampling)
        return replace(plain, stop_token_ids=(*body.stop_token_ids, *marks.ends))


def _prompt(parts: Parts, tokenizer: Tokenizer) -> Prompt:
    """Return a text, or the ids of texts and ids in order; the first text may be the beginning of
    the prompt.
    """
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    found: list[int] = []
    for place, part in enumerate(parts):
        one = [part] if isinstance(part, int) else tokenizer.encode(part, True, place == 0).tolist()
        found += one
    return tuple(found)


def _cut(body: NativeBody, texts: int) -> Callable[[], Cut] | None:
    """Return the limit on the text's lines; None without one. Raises RequestError for several
    texts.
    """
    seconds = max(body.t_max_predict_ms, 0) / 1000
    if not (body.n_indent or seconds):
        return None
    if texts > 1:
        name = "n_indent" if body.n_indent else "t_max_predict_ms"
        raise RequestError(f"{name} is for one text, not for {texts}.", name)
    return partial(LineLimits, body.n_indent, seconds)


def _stop(written: Completion) -> tuple[str, str]:
    """Return why a text ended, and the stop string that ended it: "" if none did."""
    if written.finish is None:
        return "none", ""
    if written.finish == Finish.LENGTH:
        return "limit", ""
    if isinstance(written.stop_reason, str):
        return "word", written.stop_reason
    return "eos", ""


def _chosen(answer: dict[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    """Return the parts of an answer at these paths, each under its path; missing ones are left
    out.
    """
    found = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found


def _entry(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.token_bytes(token)
        told = {"id": token, "token": text_of(token, tokenizer), "bytes": list(piece)}
        return told | {"logprob": max(logprob, LEAST_LOGPROB)}

    return {
        **one(entry.token, entry.logprob),
        "top_logprobs": [one(token, logprob) for token, logprob in entry.top],
    }
